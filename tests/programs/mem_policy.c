// On which nodes memory shall lie: the policy of the process (numactl), and those of pieces of its memory (mbind), also
// of memory that nobody has touched yet.
#include "check.h"
#include <linux/mempolicy.h>
#define PAGE 4096UL
static void expect(const char *what, const void *at, int policy, unsigned long nodes) {
    unsigned long mask[16] = {0};
    int is;
    OK(syscall(SYS_get_mempolicy, &is, mask, 1024, at, at ? MPOL_F_ADDR : 0));
    if (is != policy || mask[0] != nodes) fail("%s: policy %x on nodes %lx, was %x on %lx", what, is, mask[0], policy, nodes);
}
int main(void) {
    begin("mem_policy");
    unsigned long first = 1;
    char *m = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    fill(m, 32 * PAGE, 1);
    OK(syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, &first, 1024));
    OK(syscall(SYS_mbind, m + 4 * PAGE, 4 * PAGE, MPOL_BIND, &first, 1024, 0));
    OK(syscall(SYS_mbind, m + 12 * PAGE, 4 * PAGE, MPOL_PREFERRED | MPOL_F_STATIC_NODES, &first, 1024, 0));
    OK(syscall(SYS_mbind, m + 40 * PAGE, 8 * PAGE, MPOL_INTERLEAVE, &first, 1024, 0));
    OK(mprotect(m + 50 * PAGE, PAGE, PROT_NONE));
    OK(syscall(SYS_mbind, m + 50 * PAGE, PAGE, MPOL_LOCAL, NULL, 0, 0));
    // So much that a restart reads it once for both, and of which each has its own idea.
    char *both = mmap(NULL, 1024 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(both != MAP_FAILED);
    fill(both, 1024 * PAGE, 2);
    OK(syscall(SYS_mbind, both, 512 * PAGE, MPOL_BIND, &first, 1024, 0));
    pid_t child = fork();
    if (child == 0) {
        begin_child();
        OK(syscall(SYS_mbind, both, 256 * PAGE, MPOL_DEFAULT, NULL, 0, 0));
        OK(syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0));
    }
    while (running()) {
        nap_us(3000);
        if (child) expect("the process", NULL, MPOL_INTERLEAVE, 1);
        else expect("the child", NULL, MPOL_DEFAULT, 0);
        expect("memory without one", m, MPOL_DEFAULT, 0);
        expect("bound", m + 5 * PAGE, MPOL_BIND, 1);
        expect("behind it", m + 8 * PAGE, MPOL_DEFAULT, 0);
        expect("preferred", m + 15 * PAGE, MPOL_PREFERRED | MPOL_F_STATIC_NODES, 1);
        expect("untouched", m + 41 * PAGE, MPOL_INTERLEAVE, 1);
        expect("not readable", m + 50 * PAGE, MPOL_LOCAL, 0);
        expect("the last", m + 51 * PAGE, MPOL_DEFAULT, 0);
        expect("common, the first quarter", both, child ? MPOL_BIND : MPOL_DEFAULT, child ? 1 : 0);
        expect("common, the second", both + 300 * PAGE, MPOL_BIND, 1);
        expect("common, the third", both + 512 * PAGE, MPOL_DEFAULT, 0);
        verify(both, 1024 * PAGE, 2, "common memory");
        verify(m, 32 * PAGE, 1, "memory");
    }
    if (child == 0) _exit(0);
    reap(child, 0);
    return finish();
}
