// A timer that signals a thread which has ended signals nobody, and stays.
#include "check.h"
#include <sys/syscall.h>
static timer_t timer;
static void *make(void *unused) {
    struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN};
    e._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    OK(timer_create(CLOCK_MONOTONIC, &e, &timer));
    struct itimerspec it = {{0, 5000000}, {0, 5000000}};
    OK(timer_settime(timer, 0, &it, NULL));
    return unused;
}
static void on_signal(int signal) { fail("signal %d", signal); }
int main(void) {
    begin("timer_ended");
    signal(SIGRTMIN, SIG_IGN);
    pthread_t t;
    CHECK(!pthread_create(&t, NULL, make, NULL));
    CHECK(!pthread_join(t, NULL));
    signal(SIGRTMIN, on_signal);
    while (running()) {
        struct itimerspec now;
        nap_us(3000);
        OK(timer_gettime(timer, &now));
        EQ(now.it_interval.tv_nsec, 5000000);
    }
    OK(timer_delete(timer));
    return finish();
}
