// A handler interrupts a computation; registers, mask and errno come back after a checkpoint inside the handler.
#include "check.h"
#include <sys/time.h>
static _Atomic int hits;
static void on(int s, siginfo_t *si, void *u) {
    (void)u;
    EQ(s, SIGALRM);
    EQ(si->si_code, SI_KERNEL);
    sigset_t m;
    sigprocmask(SIG_SETMASK, NULL, &m);
    CHECK(sigismember(&m, SIGALRM) == 1 && sigismember(&m, SIGUSR2) == 1 && sigismember(&m, SIGTERM) == 0);
    volatile double x = 3;
    for (int i = 0; i < 200000; i++) x = x * 1.0000001 + 1e-9;
    errno = 12345;
    hits++;
}
int main(void) {
    begin("sig_handler");
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigemptyset(&sa.sa_mask);
    sigaddset(&sa.sa_mask, SIGUSR2);
    sigaction(SIGALRM, &sa, NULL);
    struct itimerval it = {{0, 5000}, {0, 5000}};
    OK(setitimer(ITIMER_REAL, &it, NULL));
    double want = 0;
    int last = -1;
    int64_t quiet = now_ns();
    for (int first = 1; running(); first = 0) {
        double a = 1, b = 2, c = 3;
        for (int i = 1; i < 300000; i++) {
            a = a * 0.999 + b / i;
            b = b * 1.0001 - c / (i + 1);
            c = c + a * 1e-7;
        }
        double r = a + b + c;
        if (first) want = r;
        if (memcmp(&r, &want, 8)) fail("the interrupted computation gave %a, expected %a", r, want);
        sigset_t m;
        sigprocmask(SIG_SETMASK, NULL, &m);
        CHECK(!sigismember(&m, SIGALRM) && !sigismember(&m, SIGUSR2));
        if (hits != last) quiet = now_ns();
        last = hits;
        if (now_ns() - quiet > 10000000000LL) fail("the interval timer stopped");
    }
    return finish();
}
