// A timer that measures the processor time of the thread that made it, and signals that thread, as profilers have them:
// the first thread sleeps, and uses next to none.
#include "check.h"
#include <pthread.h>
#include <sys/syscall.h>
static _Atomic long hits, work;
static _Atomic int ends;
static pthread_t worker;

static void hit(int unused) {
    (void)unused;
    CHECK(pthread_equal(pthread_self(), worker));
    hits++;
}

static void *spin(void *unused) {
    worker = pthread_self();
    struct sigevent e = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    e._sigev_un._tid = (int)syscall(SYS_gettid);
    timer_t timer;
    OK(timer_create(CLOCK_THREAD_CPUTIME_ID, &e, &timer));
    struct itimerspec each = {{0, 5000000}, {0, 5000000}};
    OK(timer_settime(timer, 0, &each, NULL));
    while (!ends) work++;
    OK(timer_delete(timer));
    return unused;
}

int main(void) {
    begin("thr_cputimer");
    signal(SIGUSR1, hit);
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, spin, NULL), 0);
    while (running()) {
        long before = hits;
        int64_t t0 = now_ns();
        while (hits < before + 2) {
            nap_us(100000);
            if (now_ns() - t0 > 8000000000LL) fail("the timer stands still");
        }
    }
    ends = 1;
    EQ(pthread_join(thread, NULL), 0);
    return finish();
}
