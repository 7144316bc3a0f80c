// Heat with VELOC's interface. heat_veloc CONFIGURATION memory|file|parts|same [STEP]
//
// same: every checkpoint is of one version. At STEP rank 1 is killed before its checkpoint, and the others have theirs.
#include "heat.h"
#include <veloc.h>

enum { SAME = 7 };
static char how;
static int last_step = -1;

static void checkpoint(void) {
    char path[VELOC_MAX_NAME];
    int some[] = {2, 3}, version = how == 's' ? SAME : step;
    if (how == 'm') {
        want(VELOC_Checkpoint("heat", step) == VELOC_SUCCESS, "VELOC_Checkpoint");
        return;
    }
    want(VELOC_Checkpoint_wait() == VELOC_SUCCESS, "VELOC_Checkpoint_wait");
    want(VELOC_Checkpoint_begin("heat", version) == VELOC_SUCCESS, "VELOC_Checkpoint_begin");
    want(VELOC_Checkpoint_begin("heat", version) == VELOC_FAILURE, "a checkpoint in a checkpoint");
    if (step == last_step && rank == 1) usleep(500000), raise(SIGKILL);
    if (how == 's') {
        want(VELOC_Checkpoint_mem() == VELOC_SUCCESS, "VELOC_Checkpoint_mem");
    } else if (how == 'p') {
        want(VELOC_Checkpoint_selective(VELOC_CKPT_REST, some, 2) == VELOC_SUCCESS, "VELOC_Checkpoint_selective");
    } else {
        want(VELOC_Route_file("heat.dat", path) == VELOC_SUCCESS, "VELOC_Route_file");
        FILE *f = fopen(path, "wb");
        want(f && fwrite(&step, sizeof step, 1, f) == 1 && fwrite(now, sizeof now, 1, f) == 1 && fclose(f) == 0, "write");
    }
    want(VELOC_Checkpoint_end(1) == VELOC_SUCCESS, "VELOC_Checkpoint_end");
    if (how == 'f') want(access(path, F_OK) < 0, "the file of a checkpoint stays");
}

static void restart(int version) {
    char path[VELOC_MAX_NAME];
    int some[] = {0};
    if (how == 'm' || how == 's') {
        want(VELOC_Restart("heat", version) == VELOC_SUCCESS, "VELOC_Restart");
        return;
    }
    want(VELOC_Restart_begin("heat", version + 1) == VELOC_FAILURE, "a version that nobody has");
    want(VELOC_Restart_begin("heat", version) == VELOC_SUCCESS, "VELOC_Restart_begin");
    if (how == 'p') {
        want(VELOC_Recover_size(1) == (int)sizeof now && VELOC_Recover_size(3) == -1, "VELOC_Recover_size");
        want(VELOC_Recover_selective(VELOC_RECOVER_SOME, some, 1) == VELOC_SUCCESS, "VELOC_Recover_selective");
        want(step == version && now[1][COLUMNS / 2] == 0, "one region alone");
        int gone[] = {1};
        want(VELOC_Mem_unprotect(1) == VELOC_SUCCESS, "VELOC_Mem_unprotect");
        want(VELOC_Recover_selective(VELOC_RECOVER_SOME, gone, 1) == VELOC_FAILURE, "a region without memory");
        want(VELOC_Recover_selective(VELOC_RECOVER_REST, some, 1) == VELOC_FAILURE, "the rest without memory");
        want(VELOC_Recover_mem() == VELOC_FAILURE, "all, and one has no memory");
        want(VELOC_Mem_protect(1, now, sizeof now / sizeof(double), sizeof(double)) == VELOC_SUCCESS, "VELOC_Mem_protect");
        want(VELOC_Recover_selective(VELOC_RECOVER_REST, some, 1) == VELOC_SUCCESS, "VELOC_Recover_selective");
    } else {
        want(VELOC_Route_file("heat.dat", path) == VELOC_SUCCESS, "VELOC_Route_file");
        FILE *f = fopen(path, "rb");
        want(f && fread(&step, sizeof step, 1, f) == 1 && fread(now, sizeof now, 1, f) == 1 && fclose(f) == 0, "read");
    }
    want(VELOC_Restart_end(1) == VELOC_SUCCESS, "VELOC_Restart_end");
}

// One that is given up is none, and nobody waits for it.
static void give_up(void) {
    want(VELOC_Checkpoint_begin("other", 1) == VELOC_SUCCESS, "VELOC_Checkpoint_begin");
    want(VELOC_Checkpoint_mem() == VELOC_SUCCESS, "VELOC_Checkpoint_mem");
    want(VELOC_Checkpoint_end(0) == VELOC_SUCCESS, "VELOC_Checkpoint_end");
    want(VELOC_Restart_test("other", 0) == VELOC_FAILURE, "a version that was given up");
}

int main(int argc, char **argv) {
    double unsaved[3] = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    want(argc > 2, "arguments");
    how = argv[2][0];
    if (argc > 3) last_step = atoi(argv[3]);
    want(VELOC_Init(MPI_COMM_WORLD, "/nowhere/veloc.cfg") == VELOC_FAILURE, "a configuration that is not there");
    want(VELOC_Init(MPI_COMM_WORLD, argv[1]) == VELOC_SUCCESS, "VELOC_Init");
    start_heat();
    if (how != 'f') {
        want(VELOC_Mem_protect(0, &step, 1, sizeof step) == VELOC_SUCCESS, "VELOC_Mem_protect");
        want(VELOC_Mem_protect(1, now, sizeof now / sizeof(double), sizeof(double)) == VELOC_SUCCESS, "VELOC_Mem_protect");
    }
    if (how == 'p') want(VELOC_Mem_protect(3, unsaved, 3, sizeof(double)) == VELOC_SUCCESS, "VELOC_Mem_protect");
    want(VELOC_Restart_test("no name", 0) == VELOC_FAILURE, "a name with a blank");
    int version = VELOC_Restart_test("heat", 0);
    if (version > 0) {
        restart(version);
        want(how == 's' ? version == SAME : step == version, "another version");
        if (rank == 0) printf("from %d\n", step);
    }
    if (rank == 0) printf("begins\n"), fflush(stdout);
    while (step < STEPS) {
        one_step(MPI_COMM_WORLD);
        if (++step % 20 == 0) checkpoint();
    }
    say_heat(MPI_COMM_WORLD);
    if (how != 'f') give_up();
    want(VELOC_Checkpoint_wait() == VELOC_SUCCESS && VELOC_Checkpoint_finished() == 1, "VELOC_Checkpoint_wait");
    if (how == 's') want(VELOC_Restart_test("heat", 0) == SAME && VELOC_Restart_test("heat", SAME) < 0, "one version");
    else want(VELOC_Restart_test("heat", STEPS) == STEPS - 20, "the one before the last");
    want(VELOC_Cleanup("heat") == VELOC_SUCCESS, "VELOC_Cleanup");
    want(VELOC_Finalize(1) == VELOC_SUCCESS && VELOC_Finalize(1) == VELOC_FAILURE, "VELOC_Finalize");
    MPI_Finalize();
    return 0;
}
