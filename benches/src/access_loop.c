// access_loop: for each line of its input, a line of four numbers. Nanoseconds of processor time of belay_enter and
// belay_leave with four uses of whole datasets, then with four of parts in three dimensions; and of a loop that computes for
// about 10 microseconds, without and with the first of these around it.
#include <belay_access.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SIDE = 64, USES = 4, COUNT = 200000, LOOPS = 1000, PIECES = 10 };

static belay_site site;
static volatile uint64_t sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void compute(long steps) {
    uint64_t x = sink;
    for (long i = 0; i < steps; i++) x = x * 6364136223846793005u + 1442695040888963407u;
    sink = x;
}

static double of_computing(long steps, const belay_use *uses) {
    double begin = now();
    for (long i = 0; i < LOOPS; i++) {
        if (uses) belay_enter(site, uses, USES);
        compute(steps);
        if (uses) belay_leave(site);
    }
    return (now() - begin) / LOOPS;
}

static double of_telling(const belay_use *uses) {
    double begin = now();
    for (long i = 0; i < COUNT; i++) {
        belay_enter(site, uses, USES);
        belay_leave(site);
    }
    return (now() - begin) / COUNT;
}

int main(void) {
    static const size_t extent[] = {SIDE, SIDE, SIDE};
    static const int64_t lo[] = {1, 1, 1}, hi[] = {SIDE - 1, SIDE - 1, SIDE - 1};
    static const int modes[USES] = {BELAY_R, BELAY_R, BELAY_W, BELAY_RW};
    static const char *const names[USES] = {"a", "b", "c", "d"};
    belay_use whole[USES] = {{0}}, parts[USES] = {{0}};
    for (int i = 0; i < USES; i++) {
        void *at = calloc(SIDE * SIDE * SIDE, sizeof(double));
        belay_ds dataset = at ? belay_dataset(names[i], at, sizeof(double), 3, extent, NULL) : 0;
        if (!dataset) return 1;
        whole[i] = (belay_use){dataset, modes[i], NULL, NULL};
        parts[i] = (belay_use){dataset, modes[i], lo, hi};
    }
    site = belay_site_id("loop");
    if (!site) return 1;
    long steps = 10000;
    for (int i = 0; i < 5; i++) steps = (long)((double)steps * 10000 / of_computing(steps, NULL));
    while (getchar() == '\n') {
        double without = 0, with = 0;
        for (int i = 0; i < PIECES; i++) {
            without += of_computing(steps, NULL);
            with += of_computing(steps, whole);
        }
        printf("%.3f %.3f %.3f %.3f\n", of_telling(whole), of_telling(parts), without / PIECES, with / PIECES);
        fflush(stdout);
    }
    return 0;
}
