// A process that may write small files only (RLIMIT_FSIZE, `ulimit -f`) is checkpointed as any other, and keeps its limit.
#include "check.h"
#include <sys/resource.h>
#define BYTES (24 << 20)
static void keeps(struct rlimit want) {
    struct rlimit now;
    OK(getrlimit(RLIMIT_FSIZE, &now));
    EQ(now.rlim_cur, want.rlim_cur);
    EQ(now.rlim_max, want.rlim_max);
}
int main(void) {
    begin("mem_file_limit");
    const struct rlimit small = {1 << 20, 2 << 20};
    OK(setrlimit(RLIMIT_FSIZE, &small));
    char *m = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    uint64_t seed = 1;
    fill(m, BYTES, seed);
    OK(mprotect(m + BYTES / 2, 1 << 20, PROT_NONE));
    while (running()) {
        keeps(small);
        verify(m, BYTES / 2, seed, "the first half");
        fill(m, BYTES / 2, seed = seed % 1000 + 1);
        nap_us(2000);
    }
    OK(mprotect(m + BYTES / 2, 1 << 20, PROT_READ));
    fill(m, BYTES / 2, 1);
    verify(m, BYTES, 1, "all of it");
    return finish();
}
