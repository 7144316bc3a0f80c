// MPI_THREAD_MULTIPLE: four threads per rank, each with its own communicator, exchange at the same time.
#include "mpicheck.h"
#define T 4
static MPI_Comm comm[T];
static void *work(void *arg) {
    long t = (long)arg;
    int right = (rank + 1) % size, left = (rank + size - 1) % size, go = 1;
    for (uint64_t k = 0; go; k++) {
        uint64_t out[64], in[64];
        fill(out, sizeof out, k * 100 + (uint64_t)(rank * 10 + t));
        MPI(MPI_Sendrecv(out, 64, MPI_UINT64_T, right, (int)t, in, 64, MPI_UINT64_T, left, (int)t, comm[t], MPI_STATUS_IGNORE));
        verify(in, sizeof in, k * 100 + (uint64_t)(left * 10 + t), "a thread's message");
        if (t == 0) {
            if (rank == 0) go = running();
        } else if (rank == 0) {
            go = !told_to_end();
        }
        MPI(MPI_Bcast(&go, 1, MPI_INT, 0, comm[t]));
        sched_yield();
    }
    return NULL;
}
int main(int argc, char **argv) {
    begin("mpi_threads");
    int have;
    MPI(MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &have));
    MPI(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI(MPI_Comm_size(MPI_COMM_WORLD, &size));
    EQ(have, MPI_THREAD_MULTIPLE);
    if (rank) check_beat[0] = 0;
    pthread_t t[T];
    for (int i = 0; i < T; i++) MPI(MPI_Comm_dup(MPI_COMM_WORLD, &comm[i]));
    for (long i = 0; i < T; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < T; i++) pthread_join(t[i], NULL);
    return mpi_finish();
}
