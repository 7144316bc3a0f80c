// What a differential checkpoint must not get wrong: few, some or all pages written between checkpoints, pages
// rewritten with what they held, pages swapped with each other, zeroed, given back, moved and grown by mremap and
// realloc, copied by fork, mapped anew; a private page of a file that holds only zeros. `mem_diff pieces` also moves
// memory that it has mapped in pieces, which needs --differential hash (docs/limits.md). `mem_diff alone` has no file,
// so that a copy of it may run beside it.
#include "check.h"
#define N 1024
#define P 4096
static char *m;
static uint64_t *seed; // of each page; 0 is a page of zeros
static uint64_t rnd;
static size_t pick(size_t n) { return (rnd = mix(rnd)) % n; }
static void put(size_t i, uint64_t s) {
    if (s) fill(m + i * P, P, s);
    else memset(m + i * P, 0, P);
    seed[i] = s;
}
static void zeros(const char *p, const char *what) {
    for (size_t k = 0; k < P; k++)
        if (p[k]) fail("%s: byte %zu is %d, not 0", what, k, p[k]);
}
static void check(size_t i, const char *what) {
    if (seed[i]) verify(m + i * P, P, seed[i], what);
    else zeros(m + i * P, what);
}
static void check_all(const char *what) {
    for (size_t i = 0; i < N; i++) check(i, what);
}
static void dirty(size_t pages) {
    for (size_t k = 0; k < pages; k++) {
        size_t i = pick(N);
        check(i, "a page about to be written");
        put(i, rnd | 1);
    }
}
// What lies at pages first..first + n has gone; new memory comes in its place.
static void renew(char *base, uint64_t *seeds, size_t first, size_t n) {
    OK(munmap(base + first * P, n * P));
    char *p = mmap(base + first * P, n * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(p == base + first * P);
    for (size_t k = first; k < first + n; k++) {
        zeros(base + k * P, "new memory");
        seeds[k] = k % 3 ? rnd + k : 0;
        if (seeds[k]) fill(base + k * P, P, seeds[k]);
    }
}
#define H 256
int main(int argc, char **argv) {
    begin("mem_diff");
    int pieces = argc > 1 && !strcmp(argv[1], "pieces"), alone = argc > 1 && !strcmp(argv[1], "alone");
    static uint64_t hole_seed[H];
    char *holes = mmap(NULL, H * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(holes != MAP_FAILED);
    m = mmap(NULL, N * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    seed = calloc(N, 8);
    CHECK(m != MAP_FAILED && seed);
    for (size_t i = 0; i < N; i++) put(i, i % 5 ? i : 0);
    char name[] = "diff.XXXXXX", page[P];
    int fd = alone ? -1 : (int)OK(mkstemp(name));
    fill(page, P, 7);
    for (int i = 0; i < 4 && !alone; i++) CHECK(write(fd, page, P) == P);
    char *f = mmap(NULL, 4 * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | (alone ? MAP_ANONYMOUS : 0), fd, 0);
    CHECK(f != MAP_FAILED);
    for (int i = 0; i < 4 && alone; i++) memcpy(f + i * P, page, P);
    memset(f + P, 0, P);
    size_t grown = 300000;
    char *heap = malloc(grown);
    fill(heap, grown, 3);
    uint64_t tick = 1;
    while (running()) {
        switch (pick(12)) {
        case 0: dirty(N / 100); break;
        case 1: dirty(N / 10); break;
        case 2: // now and then everything
            if (pick(4) == 0)
                for (size_t i = 0; i < N; i++) put(i, mix(i + rnd) | 1);
            break;
        case 3: // the same contents again
            for (size_t k = 0; k < 100; k++) { size_t i = pick(N); put(i, seed[i]); }
            break;
        case 4: // contents change places
            for (size_t k = 0; k < 50; k++) {
                size_t i = pick(N), j = pick(N);
                uint64_t s = seed[i];
                put(i, seed[j]);
                put(j, s);
            }
            break;
        case 5: { // moved by a page and back: what was at i is at i + 1
            char *q = mmap(NULL, (N + 1) * P, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(q != MAP_FAILED);
            char *moved = mremap(m, N * P, N * P, MREMAP_MAYMOVE | MREMAP_FIXED, q + P);
            // Pieces may not have become one mapping again (before Linux 6.17 they are not moved together).
            CHECK(moved == q + P || (pieces && errno == EFAULT));
            for (size_t k = 0; k < N && moved == MAP_FAILED; k++) CHECK(mremap(m + k * P, P, P, MREMAP_MAYMOVE | MREMAP_FIXED, q + (k + 1) * P) == q + (k + 1) * P);
            OK(munmap(q, P));
            m = q + P;
            break;
        }
        case 6: { // a hole, and a new mapping in it
            size_t n = 1 + pick(16);
            if (pieces) renew(m, seed, pick(N - 16), n);
            size_t i = pick(H - 16);
            renew(holes, hole_seed, i, n);
            if (i > 0 && hole_seed[i - 1]) verify(holes + (i - 1) * P, P, hole_seed[i - 1], "the page before new memory");
            break;
        }
        case 7: { // given back, read only
            size_t i = pick(N - 16), n = 1 + pick(16);
            OK(madvise(m + i * P, n * P, MADV_DONTNEED));
            for (size_t k = i; k < i + n; k++) { seed[k] = 0; if (k % 2) check(k, "a page given back"); }
            break;
        }
        case 8: { // moved away and back through mremap, a part only
            char *base = pieces ? m : holes;
            size_t i = pick(H - 64), n = 1 + pick(64);
            char *there = mmap(NULL, n * P, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(there != MAP_FAILED);
            // Page by page: the part may have been mapped in pieces.
            for (size_t k = 0; k < n; k++) CHECK(mremap(base + (i + k) * P, P, P, MREMAP_MAYMOVE | MREMAP_FIXED, there + k * P) == there + k * P);
            for (size_t k = 0; k < n; k++) CHECK(mremap(there + k * P, P, P, MREMAP_MAYMOVE | MREMAP_FIXED, base + (i + k) * P) == base + (i + k) * P);
            break;
        }
        case 9: { // the child sees all, and what it writes is its own
            pid_t c = fork();
            if (c == 0) {
                begin_child();
                check_all("a page in a child");
                dirty(20);
                check_all("a page in a child that wrote");
                _exit(9);
            }
            dirty(20);
            reap(c, 9 << 8);
            break;
        }
        case 10: { // realloc
            verify(heap, grown / 8 * 8, 3, "memory of malloc");
            size_t n = 200000 + pick(2000000);
            heap = realloc(heap, n);
            CHECK(heap);
            verify(heap, (n < grown ? n : grown) / 8 * 8, 3, "memory of realloc");
            fill(heap, grown = n, 3);
            break;
        }
        default: OK(mprotect(m, N / 2 * P, PROT_READ)); check(pick(N), "a page"); OK(mprotect(m, N / 2 * P, PROT_READ | PROT_WRITE));
        }
        zeros(f + P, "a private page of a file, zeroed");
        verify(f, P, 7, "a private page of a file");
        fill(f + 2 * P, P, ++tick);
        verify(f + 3 * P, P, 7, "the last page of a file");
        if (tick % 16 == 0) check_all("a page");
        nap_us(2000);
    }
    check_all("a page at the end");
    for (size_t i = 0; i < H; i++) {
        if (hole_seed[i]) verify(holes + i * P, P, hole_seed[i], "memory among new memory");
        else zeros(holes + i * P, "memory among new memory");
    }
    verify(heap, grown / 8 * 8, 3, "memory of malloc at the end");
    if (!alone) OK(unlink(name));
    return finish();
}
