// Processes that differ in how much a restart has to know of each, by less than it can say of one piece of memory, over
// more than a page of that; and with memory that they have in common where a restart looks for room first.
#include "check.h"
#define COMMON ((char *)(4UL << 30))
enum { CHILDREN = 64, MIB = 1 << 20, STEP = 8 * 4096 };
static void child(int i) {
    begin_child();
    size_t own = (size_t)(i + 1) * STEP;
    char *m = mmap(NULL, (CHILDREN + 1) * STEP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    fill(m, own, (uint64_t)i + 1000);
    while (running()) {
        nap_us(200000);
        verify(m, 4096, (uint64_t)i + 1000, "own memory");
        verify(COMMON, 4096, 1, "common memory");
    }
    verify(m, own, (uint64_t)i + 1000, "own memory");
    _exit(0);
}
int main(void) {
    begin("mem_tables");
    pid_t pid[CHILDREN];
    char *m = mmap(COMMON, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(m == COMMON);
    fill(m, 4 * MIB, 1);
    for (int i = 0; i < CHILDREN; i++) {
        pid[i] = (pid_t)OK(fork());
        if (pid[i] == 0) child(i);
    }
    while (running()) {
        nap_us(5000);
        verify(m, 4096, 1, "common memory");
        int st;
        if (waitpid(-1, &st, WNOHANG) > 0 && running()) fail("a child has ended with status %x", st);
    }
    for (int i = 0; i < CHILDREN; i++) waitpid(pid[i], NULL, 0);
    return finish();
}
