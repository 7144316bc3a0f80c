// Protections: PROT_NONE, read-only data behind mprotect, guard pages; each wrong access faults at the right address, each time.
#include "check.h"
#include <setjmp.h>
static sigjmp_buf jb;
static void *volatile fault_at;
static volatile int fault_code;
static void on(int s, siginfo_t *si, void *u) {
    (void)s; (void)u;
    fault_at = si->si_addr;
    fault_code = si->si_code;
    siglongjmp(jb, 1);
}
static void must_fault(volatile char *p, int write, int code) {
    fault_at = NULL;
    if (sigsetjmp(jb, 1) == 0) {
        if (write) *p = 1; else (void)*p;
        fail("no fault at %p", (void *)p);
    }
    CHECK(fault_at == (void *)p);
    EQ(fault_code, code);
}
int main(void) {
    begin("mem_guard");
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &sa, NULL);
    char *m = mmap(NULL, 16 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(m, 16 * 4096, 1);
    OK(mprotect(m + 2 * 4096, 4096, PROT_NONE));       // with contents behind it
    OK(mprotect(m + 4 * 4096, 2 * 4096, PROT_READ));
    OK(munmap(m + 8 * 4096, 4096));                      // a hole
    OK(mprotect(m + 10 * 4096, 4096, PROT_READ | PROT_EXEC));
    while (running()) {
        nap_us(2000);
        must_fault(m + 2 * 4096 + 8, 0, SEGV_ACCERR);
        must_fault(m + 4 * 4096 + 16, 1, SEGV_ACCERR);
        must_fault(m + 8 * 4096, 0, SEGV_MAPERR);
        must_fault(m + 10 * 4096, 1, SEGV_ACCERR);
        OK(mprotect(m + 2 * 4096, 4096, PROT_READ));
        verify(m, 8 * 4096, 1, "protected memory");
        OK(mprotect(m + 2 * 4096, 4096, PROT_NONE));
    }
    return finish();
}
