// Declarations that are not true, one kind at a time; "right" has none.
#define _GNU_SOURCE
#include <belay_access.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { N = 4096, MANY = 65 };
static const char *kind;
static double *a, *b, *c;
static belay_ds d_a, d_b, d_c;
static belay_site first, second;

static int is(const char *name) { return !strcmp(kind, name); }

static double *memory(void) {
    double *at = mmap(NULL, N * sizeof *at, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(2);
    return at;
}

static void *other(void *unused) {
    belay_use use = {d_c, BELAY_R, NULL, NULL};
    belay_enter(second, &use, 1);
    return unused;
}

static void in_first(void) {
    const int64_t lo[] = {0}, hi[] = {N + 1}, below[] = {-1}, few[] = {9}, half[] = {N / 2}, all[] = {N};
    belay_use uses[MANY] = {{d_a, BELAY_R, NULL, NULL}, {d_b, BELAY_W, NULL, NULL}};
    int n = 2;
    if (is("outside")) uses[1].lo = lo, uses[1].hi = hi;
    if (is("one bound")) uses[1].lo = lo;
    if (is("inverted")) uses[0].lo = lo, uses[0].hi = below;
    if (is("inverted write")) uses[1].lo = lo, uses[1].hi = below;
    if (is("below")) uses[1].lo = below, uses[1].hi = hi;
    if (is("reads more") || is("writes more")) uses[n++] = (belay_use){d_c, BELAY_R, lo, few};
    if (is("reads half")) uses[0].hi = half, uses[0].lo = lo, uses[n++] = (belay_use){d_a, BELAY_RW, half, all};
    if (is("same page")) uses[n++] = (belay_use){d_c, BELAY_RW, lo, few};
    if (is("empty")) uses[n++] = (belay_use){d_c, BELAY_R, lo, lo};
    if (is("number")) uses[n++] = (belay_use){77, BELAY_R, NULL, NULL};
    if (is("many"))
        while (n < MANY) uses[n++] = uses[0];
    belay_enter(first, uses, n);
    for (int i = 0; i < (is("short") || is("one bound") ? N - 1 : N); i++) b[i] = a[i] + 1;
    if (is("writes what is read") || is("reads half")) a[5] = 7;
    volatile double read;
    if (is("reads more")) read = c[N / 2], (void)read;
    if (is("writes more")) c[N / 2] = 0;
    if (is("same page")) c[9] = 0;
    if (is("nested")) other(NULL);
    pthread_t thread;
    if (is("thread") && (pthread_create(&thread, NULL, other, NULL) || pthread_join(thread, NULL))) exit(2);
    belay_leave(is("left another") ? second : first);
    if (is("left")) belay_leave(first);
}

static void in_second(void) {
    // The first half is read before it is overwritten: both may be said.
    const int64_t lo[] = {0}, hi[] = {N / 2};
    belay_use uses[] = {{d_b, BELAY_R, NULL, NULL}, {d_a, BELAY_W, NULL, NULL}, {d_a, BELAY_R, lo, hi}};
    belay_enter(second, uses, 3);
    for (int i = 0; i < N; i++) a[i] = b[i] * 2 + (i < N / 2 ? a[i] : 0);
    volatile double read;
    if (is("reads another")) read = c[9], (void)read;
    if (is("writes another")) c[9] = 1;
    belay_leave(second);
}

static void *sleeper(void *unused) {
    for (;;) pause();
    return unused;
}

// Memory of a dataset is given back, and then touched by the allocator, which holds a lock where there are threads.
static void freed(void) {
    enum { BYTES = 96000 };
    pthread_t thread;
    if (pthread_create(&thread, NULL, sleeper, NULL)) exit(2);
    const size_t extent[] = {BYTES};
    char *at = malloc(BYTES), *volatile behind = malloc(64);
    belay_ds d = belay_dataset("freed", at, 1, 1, extent, NULL);
    belay_use use = {d_c, BELAY_R, NULL, NULL};
    belay_enter(first, &use, 1);
    free(at);
    char *volatile again = malloc(BYTES / 4);
    belay_leave(first);
    belay_dataset_forget(d);
    free(again), free(behind);
}

// A part that lies on very many pages, with others between: these may be touched, too.
static void scattered(void) {
    enum { ROWS = 10000, ROW = 8192 };
    const size_t extent[] = {ROW, ROWS};
    const int64_t lo[] = {0, 0}, hi[] = {1, ROWS};
    char *at = mmap(NULL, (size_t)ROW * ROWS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(2);
    belay_use use = {belay_dataset("scattered", at, 1, 2, extent, NULL), BELAY_RW, lo, hi};
    belay_enter(first, &use, 1);
    at[ROW - 1] = 1;
    belay_leave(first);
    belay_dataset_forget(use.dataset);
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    kind = argv[1];
    a = memory(), b = memory(), c = memory();
    const size_t extent[] = {N};
    d_a = belay_dataset("a", a, sizeof *a, 1, extent, NULL);
    d_b = belay_dataset("b", b, sizeof *b, 1, extent, NULL);
    d_c = belay_dataset("c", c, sizeof *c, 1, extent, NULL);
    first = belay_site_id("first"), second = belay_site_id("second");
    if (is("small moved")) {  // less than a page, in one that is gone
        const size_t few[] = {7};
        double *at = memory();
        belay_use use = {belay_dataset("small", at, sizeof *at, 1, few, NULL), BELAY_W, NULL, NULL};
        munmap(at, N * sizeof *at);
        belay_enter(second, &use, 1);
        belay_leave(second);
    }
    if (is("freed")) freed();
    if (is("scattered")) scattered();
    // Before the first loop, and where a loop then reads it, everything may be touched.
    for (int i = 0; i < N; i++) a[i] = i;
    double sum = 0;
    for (int step = 0; step < 3; step++) {
        in_first();
        in_second();
        sum += a[N - 1] + c[1];
        if (is("read between")) sum += b[N / 2];
        if (is("written between")) b[N / 2] = 1;
        double *old = b;
        if (is("moved")) b = memory(), munmap(old, N * sizeof *old);
        if (is("given up")) belay_dataset_forget(d_b);
    }
    printf("%.17g\n", sum);
    return 0;
}
