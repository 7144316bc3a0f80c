// Heat in a plate whose conductivity depends on its temperature, with explicit steps. The plate is divided among the
// ranks of MPI by rows; each has a row of its neighbours above and below its own.
//
//     heat [POINTS [STEPS]]
//
// At the end it prints a checksum of the temperatures, which is the same to the last bit in every run, with any number of
// ranks. What its loops read and overwrite is declared (belay_access.h): between two steps only the temperature is alive,
// of five arrays. So is which rows each rank has of it: another number of ranks can go on from them.
#include <belay_access.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A dataset that belay knows, and its memory.
typedef struct field {
    double *at;
    belay_ds dataset;
} field;

static int rank, ranks;
// Points in each direction, rows of this rank, and the first of them.
static int points = 1000, rows, first;
static field temperature, next, conductivity, across, along;

// Row 0 is the neighbour's below, rows 1 to `rows` are our own, the last one is the neighbour's above.
static size_t at(int row, int column) { return (size_t)row * points + column; }

static field make(const char *name) {
    const size_t extent[] = {points, rows + 2};
    field f = {calloc(extent[0] * extent[1], sizeof(double)), 0};
    if (!f.at) {
        fprintf(stderr, "heat: no memory for %s\n", name);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    f.dataset = belay_dataset(name, f.at, sizeof(double), 2, extent, NULL);
    return f;
}

// Which part of the plate this rank has: its own rows, and those of its neighbours around them.
static void divide(void) {
    const size_t plate[] = {points, points};
    const int64_t lower[] = {0, first - 1}, lo[] = {0, 1}, hi[] = {points, rows + 1};
    if (belay_dataset_part(temperature.dataset, plate, lower, lo, hi)) {
        fprintf(stderr, "heat: the plate cannot be divided so\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

// A hot spot on a cold plate.
static void begin(void) {
    for (int row = 1; row <= rows; row++)
        for (int column = 0; column < points; column++) {
            double y = (first + row - 1.0) / points - 0.3, x = (double)column / points - 0.4;
            temperature.at[at(row, column)] = x * x + y * y < 0.04 ? 100 : 0;
        }
}

// Gets the neighbours' rows. Beyond the ends of the plate it is as hot as at them.
static void exchange(void) {
    static belay_site site;
    if (!site) site = belay_site_id("exchange");
    const int64_t ghosts[2][2][2] = {{{0, 0}, {points, 1}}, {{0, rows + 1}, {points, rows + 2}}};
    const int64_t edges[2][2][2] = {{{0, 1}, {points, 2}}, {{0, rows}, {points, rows + 1}}};
    belay_use uses[] = {
        {temperature.dataset, BELAY_R, edges[0][0], edges[0][1]},
        {temperature.dataset, BELAY_R, edges[1][0], edges[1][1]},
        {temperature.dataset, BELAY_W, ghosts[0][0], ghosts[0][1]},
        {temperature.dataset, BELAY_W, ghosts[1][0], ghosts[1][1]},
    };
    belay_enter(site, uses, 4);
    double *t = temperature.at;
    int below = rank > 0 ? rank - 1 : MPI_PROC_NULL, above = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    MPI_Sendrecv(t + at(rows, 0), points, MPI_DOUBLE, above, 0, t + at(0, 0), points, MPI_DOUBLE, below, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(t + at(1, 0), points, MPI_DOUBLE, below, 1, t + at(rows + 1, 0), points, MPI_DOUBLE, above, 1, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    size_t bytes = points * sizeof(double);
    if (below == MPI_PROC_NULL) memcpy(t + at(0, 0), t + at(1, 0), bytes);
    if (above == MPI_PROC_NULL) memcpy(t + at(rows + 1, 0), t + at(rows, 0), bytes);
    belay_leave(site);
}

static void conduct(void) {
    static belay_site site;
    if (!site) site = belay_site_id("conductivity");
    belay_use uses[] = {{temperature.dataset, BELAY_R, NULL, NULL}, {conductivity.dataset, BELAY_W, NULL, NULL}};
    belay_enter(site, uses, 2);
    for (int row = 0; row < rows + 2; row++)
        for (int column = 0; column < points; column++)
            conductivity.at[at(row, column)] = 0.5 + temperature.at[at(row, column)] / 200;
    belay_leave(site);
}

// What flows from the left into each point, and from below; into the row above our own too, since that flows out of ours.
static void flow(void) {
    static belay_site site;
    if (!site) site = belay_site_id("flow");
    const int64_t lo[] = {0, 1}, hi[] = {points, rows + 1}, end[] = {points, rows + 2};
    belay_use uses[] = {
        {temperature.dataset, BELAY_R, NULL, NULL},
        {conductivity.dataset, BELAY_R, NULL, NULL},
        {across.dataset, BELAY_W, lo, hi},
        {along.dataset, BELAY_W, lo, end},
    };
    belay_enter(site, uses, 4);
    const double *t = temperature.at, *k = conductivity.at;
    for (int row = 1; row <= rows; row++)
        for (int column = 0; column < points; column++) {
            size_t here = at(row, column), left = column ? here - 1 : here;
            across.at[here] = (k[left] + k[here]) / 2 * (t[left] - t[here]);
        }
    for (int row = 1; row <= rows + 1; row++)
        for (int column = 0; column < points; column++) {
            size_t here = at(row, column), below = here - points;
            along.at[here] = (k[below] + k[here]) / 2 * (t[below] - t[here]);
        }
    belay_leave(site);
}

// One step of time; the sum of the squares of what changes.
static double advance(void) {
    static belay_site site;
    if (!site) site = belay_site_id("advance");
    const int64_t lo[] = {0, 1}, hi[] = {points, rows + 1}, end[] = {points, rows + 2};
    belay_use uses[] = {
        {temperature.dataset, BELAY_R, NULL, NULL},
        {across.dataset, BELAY_R, lo, hi},
        {along.dataset, BELAY_R, lo, end},
        {next.dataset, BELAY_W, lo, hi},
    };
    double sum = 0;
    belay_enter(site, uses, 4);
    for (int row = 1; row <= rows; row++)
        for (int column = 0; column < points; column++) {
            size_t here = at(row, column);
            double out = column + 1 < points ? across.at[here + 1] : 0;
            double change = 0.2 * (across.at[here] - out + along.at[here] - along.at[here + points]);
            next.at[here] = temperature.at[here] + change;
            sum += change * change;
        }
    belay_leave(site);
    return sum;
}

// The new temperature becomes the old one.
static void turn(void) {
    double *old = temperature.at;
    temperature.at = next.at;
    next.at = old;
    belay_dataset_move(temperature.dataset, temperature.at);
    belay_dataset_move(next.dataset, next.at);
}

// Of each point's bits and place, added up: in whatever order, it is the same.
static uint64_t checksum(void) {
    static belay_site site;
    if (!site) site = belay_site_id("checksum");
    belay_use uses[] = {{temperature.dataset, BELAY_R, NULL, NULL}};
    uint64_t own = 0, all;
    belay_enter(site, uses, 1);
    for (int row = 1; row <= rows; row++)
        for (int column = 0; column < points; column++) {
            uint64_t bits, place = (uint64_t)(first + row - 1) * points + column;
            memcpy(&bits, &temperature.at[at(row, column)], sizeof bits);
            bits = (bits ^ (place + 1) * 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
            own += bits ^ bits >> 31;
        }
    belay_leave(site);
    MPI_Allreduce(&own, &all, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc > 1) points = atoi(argv[1]);
    int steps = argc > 2 ? atoi(argv[2]) : 5000;
    if (points < ranks || steps < 1) {
        if (rank == 0) fprintf(stderr, "usage: heat [POINTS [STEPS]], with at least as many points as ranks\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    first = (int)((int64_t)points * rank / ranks);
    rows = (int)((int64_t)points * (rank + 1) / ranks) - first;
    temperature = make("temperature"), next = make("next"), conductivity = make("conductivity");
    across = make("across"), along = make("along");
    divide();
    int step = 0;
    // From what another run has left, with another number of ranks perhaps; where there is nothing, from the beginning.
    int found = belay_fastforward(&step, sizeof step);
    if (found < 0) MPI_Abort(MPI_COMM_WORLD, 1);
    if (!found) begin();
    while (step < steps) {
        belay_point(sizeof step, &step);
        exchange();
        conduct();
        flow();
        double change = advance();
        turn();
        step++;
        if (step % 10 == 0) {
            double all;
            MPI_Allreduce(&change, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
            if (rank == 0) printf("step %d, change %.6e\n", step, all), fflush(stdout);
        }
    }
    uint64_t sum = checksum();
    if (rank == 0) printf("checksum %016llx\n", (unsigned long long)sum);
    MPI_Finalize();
    return 0;
}
