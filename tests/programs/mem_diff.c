// What a differential checkpoint must not get wrong: few, some or all pages written between checkpoints, pages rewritten with what they held, pages swapped
// with each other, zeroed, given back, moved and grown by mremap and realloc, copied by fork; a private page of a file that holds only zeros.
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
int main(void) {
    begin("mem_diff");
    m = mmap(NULL, N * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    seed = calloc(N, 8);
    CHECK(m != MAP_FAILED && seed);
    for (size_t i = 0; i < N; i++) put(i, i % 5 ? i : 0);
    char name[] = "diff.XXXXXX", page[P];
    int fd = (int)OK(mkstemp(name));
    fill(page, P, 7);
    for (int i = 0; i < 4; i++) CHECK(write(fd, page, P) == P);
    char *f = mmap(NULL, 4 * P, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(f != MAP_FAILED);
    memset(f + P, 0, P);
    size_t grown = 300000;
    char *heap = malloc(grown);
    fill(heap, grown, 3);
    uint64_t tick = 1;
    while (running()) {
        switch (pick(12)) {
        case 0: dirty(N / 100); break;
        case 1: dirty(N / 10); break;
        case 2: for (size_t i = 0; i < N; i++) put(i, rnd + i * 2 + 1); break;
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
            CHECK(mremap(m, N * P, N * P, MREMAP_MAYMOVE | MREMAP_FIXED, q + P) == q + P);
            OK(munmap(q, P));
            m = q + P;
            break;
        }
        case 6: { // a hole, and a new mapping in it
            size_t i = pick(N - 16), n = 1 + pick(16);
            OK(munmap(m + i * P, n * P));
            CHECK(mmap(m + i * P, n * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == m + i * P);
            for (size_t k = i; k < i + n; k++) put(k, k % 3 ? rnd + k : 0);
            break;
        }
        case 7: { // given back, read only
            size_t i = pick(N - 16), n = 1 + pick(16);
            OK(madvise(m + i * P, n * P, MADV_DONTNEED));
            for (size_t k = i; k < i + n; k++) { seed[k] = 0; if (k % 2) check(k, "a page given back"); }
            break;
        }
        case 8: { // moved away and back through mremap, a part only
            size_t i = pick(N - 64), n = 1 + pick(64);
            char *q = mremap(m + i * P, n * P, n * P, MREMAP_MAYMOVE);
            CHECK(q == m + i * P);
            char *there = mmap(NULL, n * P, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(there != MAP_FAILED);
            CHECK(mremap(m + i * P, n * P, n * P, MREMAP_MAYMOVE | MREMAP_FIXED, there) == there);
            CHECK(mremap(there, n * P, n * P, MREMAP_MAYMOVE | MREMAP_FIXED, m + i * P) == m + i * P);
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
        nap_us(300);
    }
    check_all("a page at the end");
    verify(heap, grown / 8 * 8, 3, "memory of malloc at the end");
    OK(unlink(name));
    return finish();
}
