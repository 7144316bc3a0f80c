// timer_create with SIGEV_THREAD: libc's helper thread and its callbacks go on.
#include "check.h"
static _Atomic int hits;
static void call(union sigval v) {
    if (v.sival_int != 77) fail("callback value %d", v.sival_int);
    hits++;
}
int main(void) {
    begin("timer_thread");
    timer_t t;
    struct sigevent ev = {.sigev_notify = SIGEV_THREAD, .sigev_value.sival_int = 77};
    ev.sigev_notify_function = call;
    OK(timer_create(CLOCK_MONOTONIC, &ev, &t));
    struct itimerspec it = {{0, 8000000}, {0, 8000000}};
    OK(timer_settime(t, 0, &it, NULL));
    int last = 0;
    while (running()) {
        int64_t t0 = now_ns();
        while (hits == last) {
            nap_us(1000);
            if (now_ns() - t0 > 20000000000LL) fail("callbacks stopped");
        }
        last = hits;
    }
    OK(timer_delete(t));
    return finish();
}
