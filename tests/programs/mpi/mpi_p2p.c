// Persistent requests, non-blocking collectives, any-source receives, probes and large messages, several in flight at a time.
#include "mpicheck.h"
#define BIG 60000
int main(int argc, char **argv) {
    mpi_begin("mpi_p2p", &argc, &argv);
    static uint64_t out[512], in[512], big[BIG], got[BIG];
    int right = (rank + 1) % size, left = (rank + size - 1) % size;
    MPI_Request per[2];
    MPI(MPI_Send_init(out, 512, MPI_UINT64_T, right, 5, MPI_COMM_WORLD, &per[0]));
    MPI(MPI_Recv_init(in, 512, MPI_UINT64_T, left, 5, MPI_COMM_WORLD, &per[1]));
    for (uint64_t k = 1; mpi_running(); k++) {
        fill(out, sizeof out, k * 100 + (uint64_t)rank);
        MPI(MPI_Startall(2, per));
        fill(big, sizeof big, k * 1000 + (uint64_t)rank);
        MPI_Request r[4];
        MPI(MPI_Irecv(got, BIG, MPI_UINT64_T, right, 9, MPI_COMM_WORLD, &r[0]));
        MPI(MPI_Isend(big, BIG, MPI_UINT64_T, left, 9, MPI_COMM_WORLD, &r[1]));
        long mine = rank + 1, sum = 0;
        MPI(MPI_Iallreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD, &r[2]));
        MPI(MPI_Ibarrier(MPI_COMM_WORLD, &r[3]));
        MPI(MPI_Waitall(4, r, MPI_STATUSES_IGNORE));
        MPI(MPI_Waitall(2, per, MPI_STATUSES_IGNORE));
        EQ(sum, size * (size + 1) / 2);
        verify(in, sizeof in, k * 100 + (uint64_t)left, "a persistent message");
        verify(got, sizeof got, k * 1000 + (uint64_t)right, "a large message");
        if (rank) MPI(MPI_Send(&k, 1, MPI_UINT64_T, 0, 77, MPI_COMM_WORLD));
        for (int i = 1; rank == 0 && i < size; i++) {
            MPI_Status st;
            MPI(MPI_Probe(MPI_ANY_SOURCE, 77, MPI_COMM_WORLD, &st));
            uint64_t v;
            MPI(MPI_Recv(&v, 1, MPI_UINT64_T, st.MPI_SOURCE, 77, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            EQ(v, k);
        }
    }
    MPI(MPI_Request_free(&per[0]));
    MPI(MPI_Request_free(&per[1]));
    return mpi_finish();
}
