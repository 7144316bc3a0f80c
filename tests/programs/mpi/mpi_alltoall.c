// A storm of all-to-all, reductions and scans; every element checked.
#include "mpicheck.h"
#define B 700
int main(int argc, char **argv) {
    mpi_begin("mpi_alltoall", &argc, &argv);
    uint64_t *out = malloc((size_t)size * B * 8), *in = malloc((size_t)size * B * 8);
    MPI_Comm half;
    MPI(MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half));
    for (uint64_t k = 1; mpi_running(); k++) {
        for (int rep = 0; rep < 8; rep++) {
            for (int d = 0; d < size; d++) fill(out + d * B, B * 8, k * 10000 + (uint64_t)(rep * 400 + rank * 20 + d));
            MPI(MPI_Alltoall(out, B, MPI_UINT64_T, in, B, MPI_UINT64_T, MPI_COMM_WORLD));
            for (int s = 0; s < size; s++) verify(in + s * B, B * 8, k * 10000 + (uint64_t)(rep * 400 + s * 20 + rank), "an all-to-all block");
            long v = rank + (long)k, s = 0, m = 0;
            MPI(MPI_Allreduce(&v, &m, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD));
            EQ(m, size - 1 + (long)k);
            MPI(MPI_Scan(&v, &s, 1, MPI_LONG, MPI_SUM, half));
            long want = 0;
            for (int i = rank % 2; i <= rank; i += 2) want += i + (long)k;
            EQ(s, want);
        }
    }
    MPI(MPI_Comm_free(&half));
    return mpi_finish();
}
