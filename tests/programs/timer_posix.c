// POSIX timers: ids with gaps, signal and thread targets, values, intervals, SIGEV_NONE remaining time, overruns readable.
#include "check.h"
static _Atomic int hit[3], bad_value;
static pid_t target;
static void on(int s, siginfo_t *si, void *u) {
    (void)u;
    int i = s - SIGRTMIN;
    if (si->si_code != SI_TIMER || si->si_value.sival_int != 1000 + i) bad_value = si->si_value.sival_int + 1;
    if (i == 1 && gettid() != target) bad_value = -1;
    hit[i]++;
}
static _Atomic int ending;
static void *other(void *a) {
    (void)a;
    target = gettid();
    while (!ending) { struct timespec t = {0, 2000000}; nanosleep(&t, NULL); }
    return NULL;
}
int main(void) {
    begin("timer_posix");
    pthread_t t;
    pthread_create(&t, NULL, other, NULL);
    while (!target) nap_us(500);
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
    for (int i = 0; i < 3; i++) sigaction(SIGRTMIN + i, &sa, NULL);
    // Raw calls, so that the kernel's ids are seen.
    int id[4], gap;
    clockid_t clk[] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_MONOTONIC};
    for (int i = 0; i < 4; i++) {
        struct sigevent ev = {.sigev_notify = i == 3 ? SIGEV_NONE : i == 1 ? SIGEV_THREAD_ID : SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + i, .sigev_value.sival_int = 1000 + i};
        if (i == 1) ev._sigev_un._tid = target;
        OK(syscall(SYS_timer_create, clk[i], &ev, &gap));
        OK(syscall(SYS_timer_create, clk[i], &ev, &id[i]));
        OK(syscall(SYS_timer_delete, gap));
    }
    struct itimerspec it[4] = {{{0, 6000000}, {0, 6000000}}, {{0, 9000000}, {0, 9000000}}, {{0, 11000000}, {0, 11000000}}, {{0, 0}, {900, 0}}};
    for (int i = 0; i < 4; i++) OK(syscall(SYS_timer_settime, id[i], 0, &it[i], NULL));
    int last[3] = {0};
    double left = 901;
    while (running()) {
        int64_t t0 = now_ns();
        for (int i = 0; i < 3; i++) {
            while (hit[i] == last[i]) {
                struct timespec ts = {0, 1000000};
                nanosleep(&ts, NULL);
                if (now_ns() - t0 > 20000000000LL) fail("timer %d stopped", i);
            }
            last[i] = hit[i];
        }
        EQ(bad_value, 0);
        struct itimerspec now;
        for (int i = 0; i < 4; i++) {
            OK(syscall(SYS_timer_gettime, id[i], &now));
            EQ(now.it_interval.tv_nsec, it[i].it_interval.tv_nsec);
        }
        double l = (double)now.it_value.tv_sec + (double)now.it_value.tv_nsec / 1e9;
        if (l > left + 0.5 || l < 400) fail("a far timer has %f s left, had %f", l, left);
        left = l;
        OK(syscall(SYS_timer_getoverrun, id[0]));
    }
    ending = 1;
    for (int i = 0; i < 4; i++) OK(syscall(SYS_timer_delete, id[i]));
    pthread_join(t, NULL);
    return finish();
}
