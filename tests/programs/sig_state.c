// Dispositions with flags and masks of all signals, the blocked mask, and that no unexpected handler ever runs.
#include "check.h"
static _Atomic int ran;
static void h1(int s) { (void)s; ran++; }
static void h3(int s, siginfo_t *i, void *u) { (void)s; (void)i; (void)u; ran++; }
int main(void) {
    begin("sig_state");
    struct sigaction want[65];
    for (int s = 1; s < 65; s++) {
        if (s == SIGKILL || s == SIGSTOP || s == 32 || s == 33) continue;
        struct sigaction sa;
        memset(&sa, 0, sizeof sa);
        sigemptyset(&sa.sa_mask);
        switch (s % 5) {
        case 0: sa.sa_handler = h1; sa.sa_flags = SA_RESTART; break;
        case 1: sa.sa_sigaction = h3; sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER; sigaddset(&sa.sa_mask, SIGTERM); break;
        case 2: sa.sa_handler = SIG_IGN; break;
        case 3: sa.sa_handler = SIG_DFL; break;
        default: sa.sa_handler = h1; sa.sa_flags = (int)(SA_RESETHAND | SA_NOCLDSTOP); for (int k = 1; k < 30; k += 3) sigaddset(&sa.sa_mask, k);
        }
        OK(sigaction(s, &sa, NULL));
        OK(sigaction(s, NULL, &want[s]));
    }
    sigset_t mask, have;
    sigemptyset(&mask);
    for (int s = 1; s < 65; s += 7) sigaddset(&mask, s);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    sigprocmask(SIG_SETMASK, NULL, &mask);
    while (running()) {
        nap_us(3000);
        for (int s = 1; s < 65; s++) {
            if (s == SIGKILL || s == SIGSTOP || s == 32 || s == 33) continue;
            struct sigaction sa;
            OK(sigaction(s, NULL, &sa));
            CHECK(sa.sa_handler == want[s].sa_handler);
            EQ(sa.sa_flags, want[s].sa_flags);
            if (memcmp(&sa.sa_mask, &want[s].sa_mask, 8)) fail("the handler mask of signal %d changed", s);
        }
        sigprocmask(SIG_SETMASK, NULL, &have);
        if (memcmp(&have, &mask, 8)) fail("the signal mask changed");
        EQ(ran, 0);
    }
    return finish();
}
