// Threads that read clocks all the time, through the code that the kernel gives to every process (vDSO): none goes
// back, none is frozen, all agree. Signals arrive in the middle of such calls, and their handlers take long. time_vdso
// [threads]
#include "check.h"
#include <sys/time.h>
#define MAX 64
#define SECOND 1000000000LL
#define SLACK_NS (10 * SECOND)
static _Atomic uint64_t rounds[MAX], handled;
static _Atomic int ending;
static int64_t began_at, boot_to_monotonic;
static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_MONOTONIC_COARSE, CLOCK_REALTIME_COARSE, CLOCK_BOOTTIME, CLOCK_MONOTONIC_RAW, CLOCK_TAI};
#define CLOCKS (int)(sizeof clocks / sizeof *clocks)

static int64_t ns(clockid_t c) {
    struct timespec t = {-1, -1};
    if (clock_gettime(c, &t)) fail("clock_gettime(%d): %s", c, strerror(errno));
    if (t.tv_nsec < 0 || t.tv_nsec >= SECOND) fail("clock %d: %ld nanoseconds", c, t.tv_nsec);
    return t.tv_sec * SECOND + t.tv_nsec;
}
// The clock of another machine may be a little off; no clock is off by years.
static void plausible(const char *what, int64_t seconds) {
    int64_t early = began_at - 10, late = began_at + CHECK_CAP_S;
    if (seconds < early || seconds > late) fail("%s says %lld, the program began at %lld", what, (long long)seconds, (long long)began_at);
}
static void look(void) {
    int64_t a = ns(CLOCK_MONOTONIC), coarse = ns(CLOCK_MONOTONIC_COARSE), b = ns(CLOCK_MONOTONIC);
    if (b < a) fail("the monotonic clock went back by %lld ns", (long long)(a - b));
    if (coarse > b) fail("the coarse clock is %lld ns ahead", (long long)(coarse - b));
    for (int i = 0; i < CLOCKS; i++) {
        int64_t t = ns(clocks[i]);
        if (t <= 0) fail("clock %d says %lld", clocks[i], (long long)t);
    }
    int64_t gap = ns(CLOCK_BOOTTIME) - ns(CLOCK_MONOTONIC) - boot_to_monotonic;
    if (gap > SLACK_NS || gap < -SLACK_NS) fail("boot time and monotonic clock are %lld ns further apart", (long long)gap);
    plausible("clock_gettime", ns(CLOCK_REALTIME) / SECOND);
    plausible("coarse clock", ns(CLOCK_REALTIME_COARSE) / SECOND);
    struct timeval tv = {-1, -1};
    if (gettimeofday(&tv, NULL)) fail("gettimeofday: %s", strerror(errno));
    plausible("gettimeofday", tv.tv_sec);
    time_t kept, t = time(&kept);
    plausible("time", t);
    EQ(t, kept);
    struct timespec res = {-1, -1};
    if (clock_getres(CLOCK_MONOTONIC_COARSE, &res)) fail("clock_getres: %s", strerror(errno));
    if (res.tv_sec || res.tv_nsec < 100000 || res.tv_nsec > 20000000) fail("a tick of %ld ns", res.tv_nsec);
    unsigned cpu = ~0u, node = ~0u;
    if (getcpu(&cpu, &node)) fail("getcpu: %s", strerror(errno));
    if (cpu > 4096 || node > 1024) fail("processor %u, node %u", cpu, node);
}
// Long, so that a checkpoint falls into it often: what it has interrupted is finished after a restart only.
static void on(int s) {
    (void)s;
    int e = errno;
    int64_t until = ns(CLOCK_MONOTONIC) + 2000000;
    while (ns(CLOCK_MONOTONIC) < until) look();
    handled++;
    errno = e;
}
static void *work(void *arg) {
    long i = (long)arg;
    int64_t last = ns(CLOCK_MONOTONIC);
    while (!ending) {
        for (int k = 0; k < 100; k++) {
            int64_t now = ns(CLOCK_MONOTONIC);
            if (now < last) fail("thread %ld: the monotonic clock went back by %lld ns", i, (long long)(last - now));
            last = now;
            look();
        }
        rounds[i]++;
    }
    return NULL;
}
int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 4;
    begin("time_vdso");
    CHECK(n > 0 && n <= MAX);
    began_at = ns(CLOCK_REALTIME) / SECOND;
    boot_to_monotonic = ns(CLOCK_BOOTTIME) - ns(CLOCK_MONOTONIC);
    struct sigaction sa = {.sa_handler = on, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &sa, NULL);
    static pthread_t t[MAX];
    for (long i = 0; i < n; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)i) == 0);
    while (running()) {
        uint64_t before[MAX], signals = handled;
        for (int i = 0; i < n; i++) before[i] = rounds[i];
        for (int i = 0; i < n / 2; i++) CHECK(pthread_kill(t[i], SIGUSR1) == 0);
        int64_t t0 = now_ns();
        for (int i = 0; i < n; i++)
            while (rounds[i] == before[i] || (n > 1 && handled == signals)) {
                if (now_ns() - t0 > 20 * SECOND) fail("thread %d stopped running", i);
                nap_us(1000);
            }
    }
    ending = 1;
    for (int i = 0; i < n; i++) CHECK(pthread_join(t[i], NULL) == 0);
    return finish();
}
