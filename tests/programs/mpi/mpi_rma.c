// One-sided communication: put, get, accumulate, fetch-and-op with fences, locks and a shared-memory window.
#include "mpicheck.h"
int main(int argc, char **argv) {
    mpi_begin("mpi_rma", &argc, &argv);
    MPI_Win w, sh, cnt;
    long *base, *mem, *c;
    MPI(MPI_Win_allocate(64 * sizeof(long), sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &base, &w));
    MPI(MPI_Win_allocate_shared(4096, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &mem, &sh));
    MPI(MPI_Win_allocate(sizeof(long), sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &c, &cnt));
    memset(base, 0, 64 * sizeof(long));
    *c = 0;
    MPI(MPI_Barrier(MPI_COMM_WORLD));
    int right = (rank + 1) % size, left = (rank + size - 1) % size;
    long total = 0;
    for (long k = 1; mpi_running(); k++) {
        long v[16], g[16];
        for (int i = 0; i < 16; i++) v[i] = (long)(mix((uint64_t)(k * 100 + rank * 16 + i)) >> 8);
        MPI(MPI_Win_fence(0, w));
        MPI(MPI_Put(v, 16, MPI_LONG, right, 0, 16, MPI_LONG, w));
        MPI(MPI_Win_fence(0, w));
        for (int i = 0; i < 16; i++) EQ(base[i], (long)(mix((uint64_t)(k * 100 + left * 16 + i)) >> 8));
        MPI(MPI_Win_fence(0, w));
        MPI(MPI_Get(g, 16, MPI_LONG, right, 0, 16, MPI_LONG, w));
        MPI(MPI_Win_fence(0, w));
        for (int i = 0; i < 16; i++) EQ(g[i], v[i]);
        long one = 1, old = -1;
        for (int i = 0; i < 4; i++) {
            MPI(MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, cnt));
            MPI(MPI_Fetch_and_op(&one, &old, MPI_LONG, 0, 0, MPI_SUM, cnt));
            MPI(MPI_Win_unlock(0, cnt));
            CHECK(old >= total && old < total + 4 * size);
        }
        MPI(MPI_Barrier(MPI_COMM_WORLD));
        total += 4 * size;
        MPI(MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, cnt));
        MPI(MPI_Get(&old, 1, MPI_LONG, 0, 0, 1, MPI_LONG, cnt));
        MPI(MPI_Win_unlock(0, cnt));
        EQ(old, total);
        MPI(MPI_Win_lock_all(0, sh));
        fill(mem, 4096, (uint64_t)k * 10 + (uint64_t)rank);
        MPI(MPI_Win_sync(sh));
        MPI(MPI_Barrier(MPI_COMM_WORLD));
        MPI(MPI_Win_sync(sh));
        MPI_Aint n;
        int disp;
        long *theirs;
        MPI(MPI_Win_shared_query(sh, right, &n, &disp, &theirs));
        verify(theirs, 4096, (uint64_t)k * 10 + (uint64_t)right, "a neighbour's shared window");
        MPI(MPI_Win_unlock_all(sh));
        MPI(MPI_Barrier(MPI_COMM_WORLD));
    }
    MPI(MPI_Win_free(&cnt));
    MPI(MPI_Win_free(&sh));
    MPI(MPI_Win_free(&w));
    return mpi_finish();
}
