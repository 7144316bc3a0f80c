// Large memory of which little changes: with --differential written a copy of the process goes without the rest. Whatever the
// program itself keeps from its children stays kept from them, also where it has said so between checkpoints, and nothing
// else is; the mappings stay what they are.
#include "check.h"
#include <setjmp.h>
#define P 4096L
#define MIB (1L << 20)
#define BIG (48 * MIB)
#define SMALL (12 * MIB)
#define WORD(base, page) (*(volatile uint64_t *)((base) + (page) * P + 8))
static char *changing, *secret, *wiped;
static uint64_t rnd = 1;
static char *region(long bytes, uint64_t seed) {
    // With room around it, so that it is a mapping of its own.
    char *p = mmap(NULL, (size_t)bytes + 2 * P, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    p += P;
    OK(mprotect(p, (size_t)bytes, PROT_READ | PROT_WRITE));
    OK(madvise(p, (size_t)bytes, MADV_NOHUGEPAGE));
    for (long i = 0; i < bytes / P; i++) WORD(p, i) = mix(seed + (uint64_t)i);
    return p;
}
static void compare(const char *what, char *p, long first, long pages, uint64_t seed) {
    for (long i = first; i < first + pages; i++)
        if (WORD(p, i) != mix(seed + (uint64_t)i)) fail("page %ld of %s has changed", i, what);
}
// What is wrong with the flags and the number of the mappings from `p` on; empty if nothing is.
static void look(char wrong[640], char *p, long bytes, const char *flag, int has) {
    FILE *f = fopen("/proc/self/smaps", "re");
    CHECK(f);
    char line[512];
    unsigned long start = 0, end = 0;
    int found = 0;
    *wrong = 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long a, b;
        if (sscanf(line, "%lx-%lx ", &a, &b) == 2) start = a, end = b;
        if (strncmp(line, "VmFlags:", 8) || end <= (unsigned long)p || start >= (unsigned long)(p + bytes)) continue;
        if (start != (unsigned long)p || end != (unsigned long)(p + bytes)) sprintf(wrong, "is in pieces: %lx-%lx", start, end);
        else if ((strstr(line, flag) != NULL) != has) sprintf(wrong, "has the flags %s", line + 8);
        found++;
    }
    OK(fclose(f));
    if (!*wrong && found != 1) sprintf(wrong, "is shown %d times", found);
}
static void shows(const char *what, char *p, long bytes, const char *flag, int has) {
    char wrong[640] = "never";
    // A restart between two reads of the file shifts its text.
    for (int k = 0; *wrong && k < 3; k++) look(wrong, p, bytes, flag, has);
    if (*wrong) fail("%s %s", what, wrong);
}
static sigjmp_buf back;
static void caught(int sig) { siglongjmp(back, sig); }
// Whether a forked child has the memory at `p`, with what is in it.
static int in_child(char *p) {
    pid_t child = (pid_t)OK(fork());
    if (!child) {
        signal(SIGSEGV, caught);
        if (sigsetjmp(back, 1)) _exit(2);
        _exit(WORD(p, 5) ? 0 : 1);
    }
    int status;
    while (waitpid(child, &status, 0) < 0) CHECK(errno == EINTR);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}
int main(void) {
    begin("mem_unchanged");
    changing = region(BIG, 1);
    secret = region(SMALL, 1000000);
    wiped = region(SMALL, 2000000);
    // The first hundredth changes, and one page in the middle.
    long few = BIG / P / 100, middle = BIG / P / 2;
    uint64_t tick = 0, seed = 1, at_middle = mix(1 + (uint64_t)middle);
    int kept = 0;
    while (running()) {
        for (long i = 0; i < few; i++) WORD(changing, i) = mix(seed + tick + 1 + (uint64_t)i);
        tick++;
        compare("what changes", changing, 0, few, seed + tick);
        EQ(WORD(changing, middle), at_middle);
        WORD(changing, middle) = at_middle = mix(at_middle);
        long some = (long)((rnd = mix(rnd)) % (uint64_t)(BIG / P - few - 64)) + few;
        if (some > middle || some + 64 <= middle) compare("what does not", changing, some, 64, 1);
        compare("what is kept from children", secret, some % (SMALL / P - 64), 64, 1000000);
        compare("what children have empty", wiped, some % (SMALL / P - 64), 64, 2000000);
        if (tick % 4 == 0) {
            EQ(in_child(changing), 0);
            EQ(in_child(secret), kept ? 2 : 0);
            EQ(in_child(wiped), kept ? 1 : 0);
            shows("what changes", changing, BIG, " dc", 0);
            shows("what is kept from children", secret, SMALL, " dc", kept);
            shows("what children have empty", wiped, SMALL, " wf", kept);
            // About every second checkpoint finds it otherwise than the one before.
            kept = !kept;
            OK(madvise(secret, SMALL, kept ? MADV_DONTFORK : MADV_DOFORK));
            OK(madvise(wiped, SMALL, kept ? MADV_WIPEONFORK : MADV_KEEPONFORK));
        }
    }
    compare("what changes", changing, 0, few, seed + tick);
    compare("what does not", changing, few, middle - few, 1);
    compare("what does not", changing, middle + 1, BIG / P - middle - 1, 1);
    compare("what is kept from children", secret, 0, SMALL / P, 1000000);
    compare("what children have empty", wiped, 0, SMALL / P, 2000000);
    return finish();
}
