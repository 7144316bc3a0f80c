// Memory with special fork behaviour and locks: contents and flags of MADV_DONTFORK, MADV_WIPEONFORK and MADV_DONTDUMP
// ranges survive; locked memory keeps its contents. Shared memory that is kept from children stays writable. Mappings
// of many sizes are kept from children: a copy of the process has holes there, in which the kernel puts what the copy
// maps.
#include "check.h"
#define LEN 65536
static const size_t hole[] = {1, 1, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048};
#define HOLES (sizeof hole / sizeof *hole)
static void flags(void *p, char *out, size_t n) {
    FILE *s = fopen("/proc/self/smaps", "r");
    CHECK(s);
    char l[1024];
    int in = 0;
    out[0] = 0;
    while (fgets(l, sizeof l, s)) {
        unsigned long a, b;
        if (sscanf(l, "%lx-%lx ", &a, &b) == 2 && strchr(l, '-') - l < 17) in = a <= (unsigned long)p && (unsigned long)p < b;
        if (in && !strncmp(l, "VmFlags:", 8)) {
            for (const char *f = "dc\0wf\0dd\0"; *f; f += 3) {
                char t[5] = {' ', f[0], f[1], 0};
                if (strstr(l, t)) strncat(out, t, n - strlen(out) - 1);
            }
        }
    }
    fclose(s);
}
int main(void) {
    begin("mem_advice");
    int adv[] = {MADV_DONTFORK, MADV_WIPEONFORK, MADV_DONTDUMP, MADV_NORMAL};
    char *m[4], want[4][64], now[64];
    for (int i = 0; i < 4; i++) {
        char *raw = mmap(NULL, LEN + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        m[i] = raw + 4096;
        OK(mprotect(m[i], LEN, PROT_READ | PROT_WRITE));
        OK(madvise(m[i], LEN, adv[i]));
        fill(m[i], LEN, (uint64_t)i);
    }
    char *kept[HOLES];
    for (size_t i = 0; i < HOLES; i++) {
        char *raw = mmap(NULL, (hole[i] + 2) * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        kept[i] = raw + 4096;
        OK(mprotect(kept[i], hole[i] * 4096, PROT_READ | PROT_WRITE));
        OK(madvise(kept[i], hole[i] * 4096, MADV_DONTFORK));
        fill(kept[i], 4096, i);
    }
    int fd = (int)OK(memfd_create("kept from children", 0));
    OK(ftruncate(fd, LEN));
    char *shared = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(shared != MAP_FAILED);
    OK(madvise(shared, LEN, MADV_DONTFORK));
    close(fd);
    OK(mlock(m[3], LEN / 4));
    for (int i = 0; i < 4; i++) flags(m[i], want[i], sizeof want[i]);
    CHECK(strstr(want[0], "dc") && strstr(want[1], "wf") && strstr(want[2], "dd") );
    uint64_t seed[4] = {0, 1, 2, 3};
    fill(shared, LEN, 0);
    while (running()) {
        nap_us(2000);
        verify(shared, LEN, seed[0], "shared memory");
        fill(shared, LEN, seed[0] + 1);
        for (size_t i = 0; i < HOLES; i++) {
            verify(kept[i], 4096, i, "memory kept from children");
            flags(kept[i], now, sizeof now);
            for (int k = 0; k < 3 && strcmp(now, " dc"); k++) flags(kept[i], now, sizeof now);
            if (strcmp(now, " dc")) fail("mapping of %zu pages that is kept from children has flags%s", hole[i], now);
        }
        for (int i = 0; i < 4; i++) {
            verify(m[i], LEN, seed[i], i == 0 ? "MADV_DONTFORK memory" : i == 1 ? "MADV_WIPEONFORK memory" : "memory");
            fill(m[i], LEN, ++seed[i]);
            flags(m[i], now, sizeof now);
            // A restart between two reads of the file shifts its text.
            for (int k = 0; k < 3 && strcmp(now, want[i]); k++) flags(m[i], now, sizeof now);
            if (strcmp(now, want[i])) fail("mapping %d has flags%s, had%s", i, now, want[i]);
        }
    }
    pid_t c = fork();
    if (c == 0) _exit(m[1][0] == 0 && m[1][LEN - 1] == 0 ? 6 : 1);
    reap(c, 6 << 8);
    return finish();
}
