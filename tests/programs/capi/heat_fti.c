// Heat with FTI's interface. heat_fti CONFIGURATION snapshot|checkpoint [STEP]
//
// At STEP rank 1 is killed in its checkpoint, and the others have theirs; rank 0 could not write the one before.
#include "heat.h"
#include <fti.h>
#include <sys/mman.h>

static int last_step = -1;

typedef struct { int id, level; } plan;

static void die_late(int signal) {
    (void)signal;
    usleep(500000);
    raise(SIGKILL);
}

static void checkpoint(plan *p) {
    static double spare;
    int fails = step == last_step - 20;
    int64_t count = fails && rank == 0 ? INT64_MAX / 4 : 1;
    void *at = &spare;
    if (step == last_step && rank == 1) {
        signal(SIGSEGV, die_late);
        at = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    want(FTI_Protect(5, at, count, FTI_DBLE) == FTI_SCES, "FTI_Protect");
    p->level = p->level % 4 + 1;
    p->id++;
    want(FTI_Checkpoint(p->id, p->level) == (fails ? FTI_NSCS : FTI_DONE), "FTI_Checkpoint");
}

int main(int argc, char **argv) {
    plan p = {0, 0};
    fti_id_t type;
    double *grows = malloc(8);
    MPI_Init(&argc, &argv);
    want(argc > 2, "arguments");
    want(FTI_Init("/nowhere/config.fti", MPI_COMM_WORLD) == FTI_NSCS, "a configuration that is not there");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    alarm(60);
    const char *others = rank == 1 ? "/nowhere/config.fti" : argv[1];
    want(FTI_Init(others, MPI_COMM_WORLD) == FTI_NSCS, "a configuration that one rank cannot read");
    want(FTI_Init(argv[1], MPI_COMM_WORLD) == FTI_SCES, "FTI_Init");
    alarm(0);
    MPI_Comm_size(FTI_COMM_WORLD, &ranks);
    int by_hand = argv[2][0] == 'c';
    double spare;
    if (argc > 3) last_step = atoi(argv[3]);
    start_heat();
    want(FTI_InitType(&type, sizeof p) == FTI_SCES, "FTI_InitType");
    want(FTI_Protect(0, &step, 1, FTI_INTG) == FTI_SCES, "FTI_Protect");
    want(FTI_Protect(1, now, sizeof now / sizeof(double), FTI_DBLE) == FTI_SCES, "FTI_Protect");
    want(FTI_Protect(2, &p, 1, type) == FTI_SCES, "FTI_Protect");
    want(FTI_Protect(3, grows, 1, FTI_DBLE) == FTI_SCES, "FTI_Protect");
    want(FTI_Protect(5, &spare, 1, FTI_DBLE) == FTI_SCES, "FTI_Protect");
    want(FTI_Protect(4, grows, 1, 999) == FTI_NSCS, "a type that there is not");
    if (FTI_Status() && by_hand) {
        want(FTI_RecoverVarInit() == FTI_SCES && FTI_RecoverVar(0) == FTI_SCES, "FTI_RecoverVar");
        want(step > 0 && p.id == 0, "one region alone");
        size_t n = (size_t)FTI_GetStoredSize(3) / sizeof(double);
        want(n == (size_t)step / 20 + 1, "FTI_GetStoredSize");
        grows = FTI_Realloc(3, grows);
        // Not where something is protected that the checkpoint does not have, or in another size.
        want(FTI_Protect(5, grows, 0, FTI_DBLE) == FTI_SCES && FTI_Recover() == FTI_NREC, "a smaller region");
        double two[2] = {7, 7};
        want(FTI_Protect(5, two, 2, FTI_DBLE) == FTI_SCES && FTI_Recover() == FTI_NREC, "a larger region");
        want(FTI_Protect(5, &spare, 1, FTI_DBLE) == FTI_SCES, "FTI_Protect");
        want(FTI_Protect(6, two, 2, FTI_DBLE) == FTI_SCES && FTI_Recover() == FTI_NREC, "a region more");
        want(two[0] == 7 && two[1] == 7 && FTI_Status() == 1, "nothing is read");
        want(belay_levels_unprotect(&belay_fti_state.regions, 6, "") == 1, "a region less");
        want(FTI_Recover() == FTI_SCES && FTI_Status() == 0, "FTI_Recover");
        for (size_t i = 0; i < n; i++) want(grows[i] == 20.0 * (double)i, "memory that has grown");
    }
    if (by_hand && step && rank == 0) printf("from %d\n", step);
    if (rank == 0) printf("begins\n"), fflush(stdout);
    grows[0] = 0;
    while (step < STEPS) {
        if (!by_hand) {
            int before = step;
            want(FTI_Snapshot() >= 0, "FTI_Snapshot");
            if (step != before && rank == 0) printf("from %d\n", step);
        }
        one_step(FTI_COMM_WORLD);
        if (++step % 20 || !by_hand) continue;
        size_t n = (size_t)step / 20 + 1;
        grows = realloc(grows, n * sizeof(double));
        grows[n - 1] = step;
        want(FTI_Protect(3, grows, (int64_t)n, FTI_DBLE) == FTI_SCES, "FTI_Protect");
        checkpoint(&p);
    }
    say_heat(FTI_COMM_WORLD);
    want(FTI_Finalize() == FTI_SCES, "FTI_Finalize");
    MPI_Finalize();
    return 0;
}
