// Rounds and verdict for MPI programs: rank 0 looks for BELAY_TEST_GO and writes the heartbeat; all ranks agree on the end.
#ifndef MPICHECK_H
#define MPICHECK_H
#include "../check.h"
#include <mpi.h>
static int rank, size;
#define MPI(c) do { int r_ = (c); if (r_ != MPI_SUCCESS) fail("line " STR(__LINE__) ": %s returned %d", #c, r_); } while (0)
static void mpi_begin(const char *name, int *argc, char ***argv) {
    begin(name);
    MPI(MPI_Init(argc, argv));
    MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
    if (rank) check_beat[0] = 0;
}
// The same answer on every rank.
static int mpi_running(void) {
    int go = running();
    MPI(MPI_Bcast(&go, 1, MPI_INT, 0, MPI_COMM_WORLD));
    return go;
}
static int mpi_finish(void) {
    MPI(MPI_Barrier(MPI_COMM_WORLD));
    // MPICH 4.0 over several hosts hangs in MPI_Finalize in every second or third run without any checkpointer (openucx/ucx#8738), so its verdict comes first.
    if (getenv("BELAY_TEST_EARLY") && rank == 0) finish();
    MPI(MPI_Finalize());
    no_children();
    return rank ? 0 : finish();
}
#endif
