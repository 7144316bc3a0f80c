// Two processes and two threads send each other real-time signals; every one arrives, with its value, in order.
#include "check.h"
static _Atomic uint64_t expect, got_bad;
static void on(int s, siginfo_t *si, void *u) {
    (void)s; (void)u;
    uint64_t v = (uint64_t)si->si_value.sival_ptr;
    uint64_t e = expect;
    if (v != e) { got_bad = v + 1; }
    expect = e + 1;
}
int main(void) {
    begin("sig_storm");
    _Atomic uint64_t *acked = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGRTMIN + 1, &sa, NULL);
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        while (!acked[1]) {
            struct timespec t = {0, 300000};
            nanosleep(&t, NULL);
            acked[0] = expect;
            if (got_bad) fail("signal value %llu, expected %llu", (unsigned long long)got_bad - 1, (unsigned long long)expect - 1);
        }
        _exit(0);
    }
    uint64_t sent = 0;
    while (running()) {
        for (int i = 0; i < 20; i++) {
            union sigval v = {.sival_ptr = (void *)sent};
            if (sigqueue(c, SIGRTMIN + 1, v)) {
                if (errno == EAGAIN) break;
                fail("sigqueue: %s", strerror(errno));
            }
            sent++;
        }
        int64_t t0 = now_ns();
        while (acked[0] != sent) {
            if (now_ns() - t0 > 10000000000LL) fail("%llu of %llu signals arrived", (unsigned long long)acked[0], (unsigned long long)sent);
            int st;
            if (waitpid(c, &st, WNOHANG)) fail("the receiver ended: %x", st);
            nap_us(200);
        }
    }
    acked[1] = 1;
    reap(c, 0);
    return finish();
}
