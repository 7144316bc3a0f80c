// A large array of which little changes: 2 MiB of 96 in each round. The rest is looked at piece by piece, and as a whole
// at the end.
#include "mpicheck.h"
enum { PIECE = 1 << 20, PIECES = 96, CHANGING = 2 };
static char *field;
static void whole(int piece) {
    verify(field + (size_t)piece * PIECE, PIECE, (uint64_t)(rank * PIECES + piece + 1), "what does not change");
}
int main(int argc, char **argv) {
    mpi_begin("mpi_field", &argc, &argv);
    field = malloc((size_t)PIECE * PIECES);
    CHECK(field != NULL);
    for (int i = CHANGING; i < PIECES; i++) fill(field + (size_t)i * PIECE, PIECE, (uint64_t)(rank * PIECES + i + 1));
    for (uint64_t k = 1; mpi_running(); k++) {
        fill(field, (size_t)CHANGING * PIECE, k * 1000 + (uint64_t)rank);
        long mine = rank + 1, sum = 0;
        MPI(MPI_Allreduce(&mine, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD));
        EQ(sum, size * (size + 1) / 2);
        verify(field, (size_t)CHANGING * PIECE, k * 1000 + (uint64_t)rank, "what changes");
        whole(CHANGING + (int)(k % (PIECES - CHANGING)));
    }
    for (int i = CHANGING; i < PIECES; i++) whole(i);
    return mpi_finish();
}
