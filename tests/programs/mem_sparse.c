// A 2 TiB NORESERVE reservation and a 1 TiB PROT_NONE one with few pages in use cost nothing and keep their pages.
// shared: so does a shared one, also those pages that no living process has ever had in its own page table.
#include "check.h"
enum { SHARED_PAGES = 32 };
static void k_shared(void) {
    size_t big = 1UL << 30, stride = big / SHARED_PAGES, page = 4096;
    char *m = mmap(NULL, big, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(m != MAP_FAILED);
    madvise(m, big, MADV_NOHUGEPAGE);
    pid_t p = (pid_t)OK(fork());
    if (p == 0) {
        for (size_t i = 0; i < SHARED_PAGES; i += 2) fill(m + i * stride, page, i);
        _exit(0);
    }
    EQ(waitpid(p, NULL, 0), p);
    for (size_t i = 1; i < SHARED_PAGES; i += 2) fill(m + i * stride, page, i);
    unsigned char *there = malloc(big / page);
    CHECK(there);
    while (running()) {
        nap_us(10000);
        OK(mincore(m, big, there));
        int used = 0;
        for (size_t i = 0; i < big / page; i++) used += there[i] & 1;
        EQ(used, SHARED_PAGES);
    }
    for (size_t i = 0; i < SHARED_PAGES; i++) verify(m + i * stride, page, i, "a page of the shared reservation");
}
int main(int argc, char **argv) {
    begin("mem_sparse");
    if (argc > 1 && !strcmp(argv[1], "shared")) {
        k_shared();
        return finish();
    }
    size_t big = 2ULL << 40, none = 1ULL << 40;
    char *m = mmap(NULL, big, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(m != MAP_FAILED);
    madvise(m, big, MADV_NOHUGEPAGE);
    char *g = mmap(NULL, none, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(g != MAP_FAILED);
    size_t at[64];
    for (size_t i = 0; i < 64; i++) {
        at[i] = (mix(i) % (big / 4096)) * 4096;
        fill(m + at[i], 4096, i);
    }
    OK(mprotect(g + (none / 2), 8192, PROT_READ | PROT_WRITE));
    fill(g + none / 2, 8192, 99);
    while (running()) {
        nap_us(2000);
        for (size_t i = 0; i < 64; i++) verify(m + at[i], 4096, i, "a page of the reservation");
        verify(g + none / 2, 8192, 99, "a page of the PROT_NONE reservation");
        size_t o = (mix(check_round * 77) % (big / 4096)) * 4096;
        int used = 0;
        for (size_t i = 0; i < 64; i++) used |= at[i] == o;
        if (!used) {
            EQ(m[o], 0);
            OK(madvise(m + o, 4096, MADV_DONTNEED));
        }
    }
    return finish();
}
