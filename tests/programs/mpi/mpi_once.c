// One short MPI job: init, an all-to-all, finalize. mpi_loop starts it again and again so that checkpoints fall inside
// init and finalize. Each rank prints a `+` when all messages have been right.
#include "mpicheck.h"
int main(int argc, char **argv) {
    snprintf(check_name, sizeof check_name, "mpi_once");
    MPI(MPI_Init(&argc, &argv));
    MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
    long out[64], in[64];
    for (int k = 0; k < 5; k++) {
        for (int d = 0; d < size; d++) out[d] = k * 1000 + rank * 30 + d;
        MPI(MPI_Alltoall(out, 1, MPI_LONG, in, 1, MPI_LONG, MPI_COMM_WORLD));
        for (int s = 0; s < size; s++) EQ(in[s], k * 1000 + s * 30 + rank);
    }
    printf("+\n");
    fflush(stdout);
    MPI(MPI_Finalize());
    return 0;
}
