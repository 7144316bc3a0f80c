// What goes wrong on one rank, with VELOC's interface. heat_veloc_edges CONFIGURATION retry|again|fewer|damaged
//
// retry: each rank tries checkpoints again that the other does not. again: goes on from the last one, beside files that
// others have put into its directory. fewer: there are more or fewer ranks than have written it. damaged: one rank cannot
// read it.
#include "heat.h"
#include <fcntl.h>
#include <sys/stat.h>
#include "include/veloc.h"

enum { LAST = 5, GIVEN_UP = 6 };

// Checkpoints that are tried once more by one rank, up to three times; all ranks have each of them.
static void retry(void) {
    for (step = 1; step <= LAST; step++) {
        one_step(MPI_COMM_WORLD);
        want(VELOC_Checkpoint_begin("edges", step) == VELOC_SUCCESS, "VELOC_Checkpoint_begin");
        want(VELOC_Checkpoint_mem() == VELOC_SUCCESS, "VELOC_Checkpoint_mem");
        for (int more = step % 4; more > 0 && step % 2 == rank; more--)
            want(VELOC_Checkpoint_mem() == VELOC_SUCCESS, "VELOC_Checkpoint_mem, again");
        want(VELOC_Checkpoint_end(1) == VELOC_SUCCESS, "VELOC_Checkpoint_end");
        want(VELOC_Restart_test("edges", 0) == step, "a checkpoint that one rank has tried again");
    }
    // The first try is whole, and the second one of one rank fails.
    want(VELOC_Checkpoint_begin("edges", GIVEN_UP) == VELOC_SUCCESS, "VELOC_Checkpoint_begin");
    want(VELOC_Checkpoint_mem() == VELOC_SUCCESS, "VELOC_Checkpoint_mem");
    int none[] = {9};
    if (rank == 0) want(VELOC_Checkpoint_selective(VELOC_CKPT_SOME, none, 1) == VELOC_FAILURE, "a checkpoint of nothing");
    want(VELOC_Checkpoint_end(1) == VELOC_FAILURE, "VELOC_Checkpoint_end of what one rank has not");
    want(VELOC_Restart_test("edges", 0) == LAST, "a checkpoint that was given up");
    want(VELOC_Checkpoint_wait() == VELOC_SUCCESS, "VELOC_Checkpoint_wait");
}

// Files in the scratch directory that are not this program's.
static void strange(void) {
    char path[8192], other[8192];
    want(VELOC_Checkpoint_begin("strange", 1) == VELOC_SUCCESS, "VELOC_Checkpoint_begin");
    want(VELOC_Route_file("x", path) == VELOC_SUCCESS && mkdir(path, 0700) == 0, "VELOC_Route_file");
    want(VELOC_Route_file("x", other) == VELOC_FAILURE, "a file in the place of something that cannot be removed");
    want(rmdir(path) == 0 && VELOC_Route_file("x", path) == VELOC_SUCCESS, "VELOC_Route_file, again");
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666), is_strange = geteuid() == 0 && rank == 0;
    want(fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0, "write a file");
    if (is_strange) want(chown(path, 65534, 65534) == 0, "give the file away");
    want(VELOC_Checkpoint_end(1) == (geteuid() == 0 ? VELOC_FAILURE : VELOC_SUCCESS), "VELOC_Checkpoint_end with another's file");
}

static void again(void) {
    static double right[LINES + 2][COLUMNS];
    for (step = 1; step <= LAST; step++) one_step(MPI_COMM_WORLD);
    memcpy(right, now, sizeof now);
    memset(now, 0, sizeof now);
    want(VELOC_Restart_test("edges", 0) == LAST, "VELOC_Restart_test in the next run");
    want(VELOC_Restart("edges", LAST) == VELOC_SUCCESS, "VELOC_Restart");
    want(step == LAST && !memcmp(now, right, sizeof now), "other bytes");
    strange();
}

static void fewer(void) {
    want(VELOC_Restart_test("edges", 0) == VELOC_FAILURE, "a checkpoint of another number of ranks");
    want(VELOC_Restart_begin("edges", LAST) == VELOC_FAILURE, "the same");
}

static void damaged(void) {
    want(VELOC_Restart_test("edges", 0) == LAST, "VELOC_Restart_test");
    want(VELOC_Restart("edges", LAST) == VELOC_FAILURE, "VELOC_Restart where one rank cannot read it");
    want(VELOC_Restart_begin("edges", LAST) == VELOC_SUCCESS, "VELOC_Restart_begin");
    want(VELOC_Restart_end(rank != 0) == VELOC_FAILURE, "VELOC_Restart_end where one rank has failed");
}

// A configuration that names a directory which cannot be.
static void nowhere(const char *configuration) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", configuration, rank);
    FILE *f = fopen(path, "w");
    want(f && fprintf(f, "scratch = /dev/null/scratch\n") > 0 && fclose(f) == 0, "write a configuration");
    want(VELOC_Init(MPI_COMM_WORLD, path) == VELOC_FAILURE, "VELOC_Init with a directory that cannot be");
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    want(argc > 2, "arguments");
    want(VELOC_Checkpoint("edges", 1) == VELOC_FAILURE, "VELOC_Checkpoint before VELOC_Init");
    nowhere(argv[1]);
    want(VELOC_Init(MPI_COMM_WORLD, argv[1]) == VELOC_SUCCESS, "VELOC_Init");
    start_heat();
    want(VELOC_Mem_protect(0, &step, 1, sizeof step) == VELOC_SUCCESS, "VELOC_Mem_protect");
    want(VELOC_Mem_protect(1, now, sizeof now / sizeof(double), sizeof(double)) == VELOC_SUCCESS, "VELOC_Mem_protect");
    switch (argv[2][0]) {
    case 'r': retry(); break;
    case 'a': again(); break;
    case 'f': fewer(); break;
    case 'd': damaged(); break;
    default: want(0, "another word");
    }
    say_heat(MPI_COMM_WORLD);
    want(VELOC_Mem_protect(2, NULL, 0, sizeof(double)) == VELOC_SUCCESS, "VELOC_Mem_protect of nothing");
    want(VELOC_Finalize(1) == VELOC_SUCCESS, "VELOC_Finalize");
    want(VELOC_Checkpoint("edges", 1) == VELOC_FAILURE, "VELOC_Checkpoint after VELOC_Finalize");
    MPI_Finalize();
    return 0;
}
