// Huge pages by madvise: contents, and that the advice is still in force.
#include "check.h"
#define LEN (24UL << 20)
static int flag(void *p, const char *f) {
    FILE *s = fopen("/proc/self/smaps", "r");
    CHECK(s);
    char l[1024];
    int in = 0, found = 0;
    while (fgets(l, sizeof l, s)) {
        unsigned long a, b;
        if (sscanf(l, "%lx-%lx ", &a, &b) == 2 && strchr(l, '-') - l < 17) in = a <= (unsigned long)p && (unsigned long)p < b;
        if (in && !strncmp(l, "VmFlags:", 8) && strstr(l, f)) found = 1;
    }
    fclose(s);
    return found;
}
int main(void) {
    begin("mem_huge");
    char *raw = mmap(NULL, LEN + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *m = (char *)(((uintptr_t)raw + (2 << 20) - 1) & ~((2UL << 20) - 1));
    OK(madvise(m, LEN, MADV_HUGEPAGE));
    char *n = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OK(madvise(n, 1 << 20, MADV_NOHUGEPAGE));
    uint64_t seed[12];
    for (size_t i = 0; i < 12; i++) fill(m + i * (2 << 20), 2 << 20, seed[i] = i);
    while (running()) {
        size_t i = check_round % 12;
        verify(m + i * (2 << 20), 2 << 20, seed[i], "a huge page");
        fill(m + i * (2 << 20), 2 << 20, seed[i] = check_round);
        if (check_round % 16 == 0) {
            // A restart between two reads of the file shifts its text.
            CHECK(flag(m, " hg") || flag(m, " hg"));
            CHECK(flag(n, " nh") || flag(n, " nh"));
        }
        nap_us(1000);
    }
    return finish();
}
