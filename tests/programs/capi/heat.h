// Heat that spreads over a plate, whose lines are divided among the ranks: what programs for other interfaces compute.
#include <math.h>
#include <mpi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COLUMNS = 400, LINES = 150, STEPS = 600 };

static double now[LINES + 2][COLUMNS], next[LINES + 2][COLUMNS];
static int step, rank, ranks;

static void start_heat(void) {
    memset(now, 0, sizeof now);
    if (rank == 0)
        for (int j = COLUMNS / 10; j < COLUMNS * 9 / 10; j++) now[0][j] = 100 + j % 7;
}

static void one_step(MPI_Comm comm) {
    int up = rank > 0 ? rank - 1 : MPI_PROC_NULL, down = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    MPI_Sendrecv(now[1], COLUMNS, MPI_DOUBLE, up, 1, now[LINES + 1], COLUMNS, MPI_DOUBLE, down, 1, comm, MPI_STATUS_IGNORE);
    MPI_Sendrecv(now[LINES], COLUMNS, MPI_DOUBLE, down, 2, now[0], COLUMNS, MPI_DOUBLE, up, 2, comm, MPI_STATUS_IGNORE);
    for (int i = 1; i <= LINES; i++)
        for (int j = 1; j < COLUMNS - 1; j++)
            next[i][j] = 0.25 * (now[i - 1][j] + now[i + 1][j] + now[i][j - 1] + now[i][j + 1]) + 1e-3 * step;
    for (int i = 1; i <= LINES; i++) memcpy(now[i], next[i], sizeof now[i]);
    usleep(1000);
}

// Says every bit of the result in one number.
static void say_heat(MPI_Comm comm) {
    uint64_t sum = 0, all = 0;
    for (int i = 1; i <= LINES; i++)
        for (int j = 0; j < COLUMNS; j++) {
            uint64_t bits;
            memcpy(&bits, &now[i][j], sizeof bits);
            sum += bits * (2 * (uint64_t)((rank * LINES + i) * COLUMNS + j) + 1);
        }
    MPI_Allreduce(&sum, &all, 1, MPI_UINT64_T, MPI_SUM, comm);
    if (rank == 0) printf("heat %016llx\n", (unsigned long long)all);
}

static void want(int yes, const char *what) {
    if (yes) return;
    fprintf(stderr, "FAIL rank %d step %d: %s\n", rank, step, what);
    MPI_Abort(MPI_COMM_WORLD, 3);
}
