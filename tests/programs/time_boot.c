// The clock that goes on while the machine sleeps is as far from the monotonic one as before, and neither jumps, also where
// the restart is in a time namespace with other clocks (in which `time_boot under COMMAND...` runs it).
#include "check.h"
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif
#define SECOND 1000000000LL
static int64_t now(clockid_t c) {
    struct timespec t;
    OK(clock_gettime(c, &t));
    return t.tv_sec * SECOND + t.tv_nsec;
}
// By how much the one is ahead of the other; the two are not read at the same time.
static int64_t ahead(void) {
    int64_t before = now(CLOCK_MONOTONIC), boot = now(CLOCK_BOOTTIME), after = now(CLOCK_MONOTONIC);
    return after - before < SECOND / 10 ? boot - before : ahead();
}
static void run_under(char **command) {
    OK(unshare(CLONE_NEWTIME));
    int fd = (int)OK(open("/proc/self/timens_offsets", O_WRONLY));
    static const char offsets[] = "monotonic 7000 0\nboottime 50000 5\n";
    full_write(fd, offsets, strlen(offsets));
    close(fd);
    fd = (int)OK(open("/proc/self/ns/time_for_children", O_RDONLY | O_CLOEXEC));
    OK(setns(fd, CLONE_NEWTIME));
    execv(command[0], command);
    fail("execute %s", command[0]);
}
int main(int argc, char **argv) {
    begin("time_boot");
    if (argc > 2 && !strcmp(argv[1], "under")) run_under(argv + 2);
    int64_t want = ahead(), last = now(CLOCK_MONOTONIC);
    while (running()) {
        nap_us(3000);
        int64_t is = ahead(), time = now(CLOCK_MONOTONIC);
        if (is - want > SECOND || want - is > SECOND) fail("CLOCK_BOOTTIME is %lld ms ahead, was %lld", (long long)is / 1000000, (long long)want / 1000000);
        if (time < last || time - last > 100 * SECOND) fail("CLOCK_MONOTONIC has come from %lld to %lld", (long long)last, (long long)time);
        last = time;
    }
    return finish();
}
