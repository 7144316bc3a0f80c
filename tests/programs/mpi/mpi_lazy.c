// Until the end only a tree of ranks talks (MPI_Bcast); then every rank talks to every other: most of these connections
// are opened only then.
#include "mpicheck.h"
int main(int argc, char **argv) {
    mpi_begin("mpi_lazy", &argc, &argv);
    static uint64_t out[512], in[512];
    while (mpi_running()) nap_us(2000);
    for (int d = 1; d < size; d++) {
        int to = (rank + d) % size, from = (rank + size - d) % size;
        fill(out, sizeof out, (uint64_t)(rank * 100 + to));
        MPI(MPI_Sendrecv(out, 512, MPI_UINT64_T, to, d, in, 512, MPI_UINT64_T, from, d, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        verify(in, sizeof in, (uint64_t)(from * 100 + rank), "a first message");
    }
    return mpi_finish();
}
