// Memory in pages of the usual size, where the program wants no others: of the whole process (PR_SET_THP_DISABLE), or of
// a mapping (MADV_NOHUGEPAGE); also what it has in common with a child.
#include "check.h"
#define LEN (24UL << 20)
static char *m, *n, *alone;
static void look(const char *who) {
    long kib = told_kib("/proc/self/smaps_rollup", "AnonHugePages");
    if (kib != 0) fail("%s has %ld KiB of huge pages", who, kib);
    size_t i = (size_t)check_round % (LEN >> 12);
    verify(m + (i << 12), 4096, i, "memory of who wants none");
    verify(n + (i << 12), 4096, i, "memory that shall have none");
    if (alone) verify(alone + (i << 12), 4096, i, "memory of its own");
}
static char *map(int advise) {
    // Apart from its neighbours.
    char *p = mmap(NULL, LEN + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    OK(mprotect(p += 4096, LEN, PROT_READ | PROT_WRITE));
    // Not of every kernel.
    if (advise) madvise(p, LEN, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < LEN >> 12; i++) fill(p + (i << 12), 4096, i);
    return p;
}
int main(void) {
    begin("mem_small");
    OK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0));
    n = map(1);
    m = map(0);
    pid_t child = (pid_t)OK(fork());
    if (child == 0) {
        begin_child();
        while (running()) {
            nap_us(5000);
            look("the child");
        }
        _exit(0);
    }
    alone = map(0);
    while (running()) {
        nap_us(5000);
        look("the process");
        EQ(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
    }
    reap(child, 0);
    return finish();
}
