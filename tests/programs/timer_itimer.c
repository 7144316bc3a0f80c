// Interval timers of all three clocks keep firing with their intervals; an armed alarm keeps its remaining time.
#include "check.h"
#include <sys/time.h>
static _Atomic int real, virt, prof;
static void on(int s) { if (s == SIGALRM) real++; else if (s == SIGVTALRM) virt++; else prof++; }
int main(void) {
    begin("timer_itimer");
    struct sigaction sa = {.sa_handler = on, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &sa, NULL);
    sigaction(SIGVTALRM, &sa, NULL);
    sigaction(SIGPROF, &sa, NULL);
    struct itimerval r = {{0, 7000}, {0, 7000}}, v = {{0, 12000}, {0, 12000}}, p = {{0, 16000}, {0, 16000}}, now;
    OK(setitimer(ITIMER_REAL, &r, NULL));
    OK(setitimer(ITIMER_VIRTUAL, &v, NULL));
    OK(setitimer(ITIMER_PROF, &p, NULL));
    int lr = 0, lv = 0, lp = 0;
    while (running()) {
        int64_t t0 = now_ns();
        volatile uint64_t x = 0;
        while (real == lr || virt == lv || prof == lp) {
            for (int i = 0; i < 20000; i++) x = mix(x);
            if (now_ns() - t0 > 20000000000LL) fail("a timer stopped: real %d virtual %d prof %d in 20 s", real - lr, virt - lv, prof - lp);
        }
        lr = real;
        lv = virt;
        lp = prof;
        OK(getitimer(ITIMER_REAL, &now));
        EQ(now.it_interval.tv_usec, 7000);
        CHECK(now.it_value.tv_sec == 0 && now.it_value.tv_usec <= 7100);
        OK(getitimer(ITIMER_VIRTUAL, &now));
        EQ((now.it_interval.tv_usec + 4000) / 4000, (12000 + 4000) / 4000);
    }
    return finish();
}
