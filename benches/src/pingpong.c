// Two ranks send a message to and fro, in pieces; rank 0 prints the milliseconds that the median piece took: what takes
// a processor away for a moment hits a few of them only.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
enum { ROUNDS = 500 };
static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, pieces = argc > 1 ? atoi(argv[1]) : 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    static char m[4096];
    double *took = malloc(pieces * sizeof *took);
    if (!took) return 1;
    MPI_Barrier(MPI_COMM_WORLD);
    for (int piece = 0; piece < pieces; piece++) {
        double t = MPI_Wtime();
        for (int i = 0; i < ROUNDS; i++) {
            if (rank == 0) {
                MPI_Send(m, sizeof m, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
                MPI_Recv(m, sizeof m, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            } else {
                MPI_Recv(m, sizeof m, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                MPI_Send(m, sizeof m, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
            }
        }
        took[piece] = (MPI_Wtime() - t) * 1000;
    }
    MPI_Finalize();
    qsort(took, pieces, sizeof *took, by_value);
    if (rank == 0) printf("%.4f\n", took[pieces / 2]);
    return 0;
}
