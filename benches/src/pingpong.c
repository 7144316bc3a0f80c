// Two ranks send a message to and fro; rank 0 prints the milliseconds that the loop took, without the start of MPI.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, rounds = argc > 1 ? atoi(argv[1]) : 1000;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    static char m[4096];
    MPI_Barrier(MPI_COMM_WORLD);
    double t = MPI_Wtime();
    for (int i = 0; i < rounds; i++) {
        if (rank == 0) {
            MPI_Send(m, sizeof m, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(m, sizeof m, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(m, sizeof m, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(m, sizeof m, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
        }
    }
    t = MPI_Wtime() - t;
    MPI_Finalize();
    if (rank == 0) printf("%.3f\n", t * 1000);
    return 0;
}
