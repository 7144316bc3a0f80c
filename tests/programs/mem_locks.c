// Memory locks: mlock, mlock2(MLOCK_ONFAULT) and mlockall(MCL_FUTURE) hold, and a process whose locks have reached
// their limit, where new memory would be locked too, is checkpointed all the same. mem_locks onfault: with MCL_ONFAULT.
// mem_locks first: nothing has been locked yet.
#include "check.h"
#include <sys/resource.h>
#define PAGES (1L << 16)
// Whether the mapping of `p` has the two-letter flag, or has it not.
static int is(void *p, const char *flag, int wanted) {
    char l[1024], t[5] = {' ', flag[0], flag[1], 0};
    for (int k = 0; k < 3; k++) {
        // A restart between two reads of the file shifts its text.
        FILE *s = fopen("/proc/self/smaps", "r");
        CHECK(s);
        int in = 0, found = 0;
        while (fgets(l, sizeof l, s)) {
            unsigned long a, b;
            if (sscanf(l, "%lx-%lx ", &a, &b) == 2 && strchr(l, '-') - l < 17) in = a <= (unsigned long)p && (unsigned long)p < b;
            // Before Linux 6.11 "lf" has no name.
            if (in && !strncmp(l, "VmFlags:", 8) && (strstr(l, t) || (!strcmp(flag, "lf") && strstr(l, " ??")))) found = 1;
        }
        fclose(s);
        if (found == wanted) return 1;
    }
    return 0;
}
static int has(void *p, const char *flag) { return is(p, flag, 1); }
static int lacks(void *p, const char *flag) { return is(p, flag, 0); }
static char *map(size_t n) {
    char *m = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    return m;
}
// What is mapped now is locked, at once or when it is touched.
static void future(int full, int lazily) {
    char *m = mmap(NULL, PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (full ? m != MAP_FAILED : m == MAP_FAILED || !has(m, "lo") || !is(m, "lf", lazily)) fail("mlockall(MCL_FUTURE) is lost");
    if (m != MAP_FAILED) munmap(m, PAGES);
}
static int first(void) {
    begin("mem_locks-first");
    OK(mlockall(MCL_FUTURE));
    while (running()) {
        nap_us(5000);
        future(0, 0);
    }
    return finish();
}
int main(int argc, char **argv) {
    int lazily = argc > 1 && !strcmp(argv[1], "onfault");
    if (argc > 1 && !strcmp(argv[1], "first")) return first();
    begin(lazily ? "mem_locks-onfault" : "mem_locks");
    struct rlimit limit;
    OK(getrlimit(RLIMIT_MEMLOCK, &limit));
    if (limit.rlim_cur > 128 * PAGES) limit.rlim_cur = limit.rlim_max = 128 * PAGES;
    OK(setrlimit(RLIMIT_MEMLOCK, &limit));
    char *locked = map(2 * PAGES), *later = map(2 * PAGES), *plain = map(2 * PAGES), *on_fault;
    fill(locked, PAGES, 1);
    // Below all else, this is what is unlocked for a moment: it can be written to afterwards.
    char *shared = mmap((void *)0x20000000, 8 * PAGES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    OK(mlock(shared, 8 * PAGES));
    OK(mlock(locked, PAGES));
    OK(mlock2(later, PAGES, MLOCK_ONFAULT));
    on_fault = later + PAGES - 4096;
    CHECK(lacks(plain, "lo"));
    // From here on all that is mapped is locked, up to the limit: what is no user's to exceed, root has no limit.
    OK(mlockall(MCL_FUTURE | (lazily ? MCL_ONFAULT : 0)));
    int full = 0;
    char *last = NULL;
    for (int i = 0; i < 256 && !full; i++) {
        char *m = mmap(NULL, PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (m == MAP_FAILED) {
            CHECK(errno == EAGAIN);
            full = 1;
        } else {
            last = m;
        }
    }
    CHECK(last && (full || geteuid() == 0));
    while (running()) {
        nap_us(5000);
        verify(locked, PAGES, 1, "locked memory");
        memset(shared, (int)check_round, 8 * PAGES);
        if (!has(shared, "lo")) fail("the lock of shared memory is lost");
        if (!has(locked, "lo") || !lacks(locked, "lf")) fail("mlock is lost");
        if (!has(on_fault, "lo") || !has(on_fault, "lf")) fail("mlock2(MLOCK_ONFAULT) is lost");
        if (!has(last, "lo")) fail("the lock of what was mapped after mlockall is lost");
        if (!lacks(plain + PAGES, "lo") || !lacks(locked + PAGES, "lo")) fail("memory is locked that was not");
        future(full, lazily);
    }
    return finish();
}
