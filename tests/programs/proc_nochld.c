// SIGCHLD: counted for own children only; with SIG_IGN and SA_NOCLDWAIT no zombies appear.
#include "check.h"
static _Atomic int chld;
static void on(int s, siginfo_t *si, void *u) {
    (void)s; (void)u;
    if (si->si_code != CLD_EXITED || si->si_status != 3) fail("SIGCHLD with code %d status %d pid %d", si->si_code, si->si_status, si->si_pid);
    chld++;
}
int main(void) {
    begin("proc_nochld");
    int made = 0;
    while (running()) {
        struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
        sigaction(SIGCHLD, &sa, NULL);
        for (int i = 0; i < 3; i++) {
            pid_t p = fork();
            if (p == 0) _exit(3);
            made++;
            reap(p, 3 << 8);
        }
        // Each child was reaped before the next was made: its signal has been delivered by now.
        EQ(chld, made);
        struct timespec t = {0, 8000000};
        if (nanosleep(&t, NULL)) fail("nanosleep: %s", strerror(errno));
        EQ(chld, made);
        struct sigaction ign = {.sa_handler = SIG_IGN};
        sigaction(SIGCHLD, &ign, NULL);
        for (int i = 0; i < 3; i++) {
            pid_t p = fork();
            if (p == 0) _exit(3);
            int st;
            if (waitpid(p, &st, 0) != -1 || errno != ECHILD) fail("a child of an ignoring parent became a zombie");
        }
        no_children();
    }
    return finish();
}
