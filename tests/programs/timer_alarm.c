// A far alarm: its remaining time never grows and is not lost.
#include "check.h"
#include <sys/time.h>
int main(void) {
    begin("timer_alarm");
    struct itimerval it = {{0, 0}, {1000, 0}}, now;
    OK(setitimer(ITIMER_REAL, &it, NULL));
    double last = 1001;
    while (running()) {
        nap_us(3000);
        OK(getitimer(ITIMER_REAL, &now));
        double left = (double)now.it_value.tv_sec + (double)now.it_value.tv_usec / 1e6;
        if (left > last + 0.5 || left < 500) fail("the alarm has %f s left, before it had %f", left, last);
        last = left;
    }
    return finish();
}
