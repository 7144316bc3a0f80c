// Descriptor owners and signals: O_ASYNC with F_SETOWN and F_SETSIG, leases aside.
#include "check.h"
static _Atomic int hits, fd_seen;
static void on(int s, siginfo_t *si, void *u) {
    (void)s; (void)u;
    fd_seen = si->si_fd;
    hits++;
}
int main(void) {
    begin("fd_async");
    int p[2];
    OK(pipe(p));
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGRTMIN + 4, &sa, NULL);
    OK(fcntl(p[0], F_SETOWN, getpid()));
    OK(fcntl(p[0], F_SETSIG, SIGRTMIN + 4));
    OK(fcntl(p[0], F_SETFL, O_ASYNC));
    while (running()) {
        EQ(fcntl(p[0], F_GETOWN), getpid());
        EQ(fcntl(p[0], F_GETSIG), SIGRTMIN + 4);
        EQ(fcntl(p[0], F_GETFL) & O_ASYNC, O_ASYNC);
        int before = hits;
        full_write(p[1], "x", 1);
        int64_t t0 = now_ns();
        while (hits == before) if (now_ns() - t0 > 10000000000LL) fail("no signal for arriving data");
        EQ(fd_seen, p[0]);
        char b;
        full_read(p[0], &b, 1);
        struct timespec t = {0, 2000000};
        nanosleep(&t, NULL);
    }
    return finish();
}
