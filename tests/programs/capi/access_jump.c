// A handler of a signal jumps out of the wait for a checkpoint: what the loop would have overwritten next is then read by
// whoever likes to.
#include "../check.h"
#include <belay.h>
#include <belay_access.h>
#include <setjmp.h>
#include <sys/time.h>

enum { N = 1 << 18 };
static sigjmp_buf out;
static volatile sig_atomic_t entering, jumps;

// Goes on for some time, whatever interrupts it.
static void elsewhere(int ms) {
    struct timespec now, end;
    OK(clock_gettime(CLOCK_MONOTONIC, &end));
    end.tv_nsec += ms * 1000000L;
    do OK(clock_gettime(CLOCK_MONOTONIC, &now));
    while ((now.tv_sec - end.tv_sec) * 1000000000L + now.tv_nsec < end.tv_nsec);
}

static void handler(int signal) {
    (void)signal;
    if (!entering) return;
    entering = 0;
    jumps++;
    siglongjmp(out, 1);
}

int main(void) {
    begin("access_jump");
    uint64_t *data = calloc(N, sizeof *data);
    CHECK(data);
    const size_t extent[] = {N};
    belay_use use = {belay_dataset("data", data, sizeof *data, 1, extent, NULL), BELAY_W, NULL, NULL};
    const belay_site site = belay_site_id("loop");
    struct sigaction action = {.sa_handler = handler};
    OK(sigaction(SIGALRM, &action, NULL));
    // It comes while the program waits, or while it is stopped there; a call that does not wait is hardly ever met.
    const struct itimerval often = {{0, 3000}, {0, 3000}};
    OK(setitimer(ITIMER_REAL, &often, NULL));
    uint64_t turn = 0;
    while (running()) {
        if (!sigsetjmp(out, 1)) {
            entering = 1;
            belay_enter(site, &use, 1);
            entering = 0;
            turn++;
            for (size_t i = 0; i < N; i++) data[i] = turn + i;
            belay_leave(site);
        } else {
            // The loop has not begun.
            elsewhere(100);
            for (size_t i = 0; i < N; i++) EQ(data[i], turn + i);
        }
        elsewhere(1);
    }
    printf("jumps: %d\n", (int)jumps);
    return finish();
}
