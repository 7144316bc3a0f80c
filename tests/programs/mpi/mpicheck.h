// Rounds and verdict for MPI programs: rank 0 looks for BELAY_TEST_GO and writes the heartbeat; all ranks agree on the end.
#ifndef MPICHECK_H
#define MPICHECK_H
#include "../check.h"
#include <mpi.h>
static int rank, size;
#define MPI(c) do { int r_ = (c); if (r_ != MPI_SUCCESS) fail("line " STR(__LINE__) ": %s returned %d", #c, r_); } while (0)
// A rank that srun has started, or Belay in its place, is the task that it is told to be, on the node of that task.
// Rank 0 says where all are.
static void be_task(void) {
    enum { MOST = 64, LENGTH = 64 };
    static char all[MOST][LENGTH];
    static int ids[MOST];
    const char *names[] = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"};
    int told[6], expected[6] = {rank, size, size, size, 0, 0};
    if (size > MOST) fail("more than %d ranks", MOST);
    for (int i = 0; i < 6; i++) {
        const char *v = getenv(names[i]);
        if (!v) fail("rank %d has no %s", rank, names[i]);
        told[i] = atoi(v);
    }
    char node[LENGTH] = "";
    gethostname(node, sizeof node - 1);
    const char *slurm = getenv("SLURMD_NODENAME");
    if (!slurm || strcmp(slurm, node)) fail("rank %d is on %s, SLURMD_NODENAME is %s", rank, node, slurm ? slurm : "not there");
    MPI(MPI_Allgather(node, LENGTH, MPI_CHAR, all, LENGTH, MPI_CHAR, MPI_COMM_WORLD));
    MPI(MPI_Allgather(&told[5], 1, MPI_INT, ids, 1, MPI_INT, MPI_COMM_WORLD));
    for (int i = 0; i < size; i++) {
        int here = !strcmp(all[i], node);
        if (here != (ids[i] == told[5])) fail("ranks %d on %s and %d on %s are told of nodes %d and %d", rank, node, i, all[i], told[5], ids[i]);
        expected[4] += here && i < rank;
    }
    for (int i = 0; i < 5; i++)
        if (told[i] != expected[i]) fail("rank %d of %d is told %s=%d, not %d", rank, size, names[i], told[i], expected[i]);
    if (rank) return;
    printf("tasks");
    for (int i = 0; i < size; i++) printf(" %s", all[i]);
    printf("\n");
    fflush(stdout);
}
static void mpi_begin(const char *name, int *argc, char ***argv) {
    begin(name);
    MPI(MPI_Init(argc, argv));
    MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
    if (rank) check_beat[0] = 0;
    if (getenv("BELAY_TEST_TASK")) be_task();
}
static long rest_us(void) {
    static long rest = -1;
    if (rest < 0) {
        const char *asked = getenv("BELAY_TEST_REST_US");
        rest = asked ? atol(asked) : 0;
    }
    return rest;
}
// In place of the C library's: an MPI library that waits for something looks again and again, and yields in between. A
// program that may rest sleeps there, so that many ranks can wait on few processors.
__attribute__((visibility("default"))) int sched_yield(void) {
    struct timespec t = {0, 200000};
    return (int)(rest_us() ? nanosleep(&t, NULL) & 0 : syscall(SYS_sched_yield));
}
// The same answer on every rank; all rest for BELAY_TEST_REST_US before the next round, where that is given.
static int mpi_running(void) {
    int go = running();
    MPI(MPI_Bcast(&go, 1, MPI_INT, 0, MPI_COMM_WORLD));
    if (go && rest_us()) nap_us(rest_us());
    return go;
}
static int mpi_finish(void) {
    MPI(MPI_Barrier(MPI_COMM_WORLD));
    // MPICH 4.0 over several hosts hangs in MPI_Finalize in every second or third run without any checkpointer
    // (openucx/ucx#8738), so its verdict comes first.
    if (getenv("BELAY_TEST_EARLY") && rank == 0) finish();
    MPI(MPI_Finalize());
    no_children();
    return rank ? 0 : finish();
}
#endif
