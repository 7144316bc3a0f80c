// Ticks by a system call that the program issues itself: the compiler keeps the address of the time-out in a register
// from one to the next. None is shorter than it should be.
#include "check.h"
enum { TICKS = 8, TICK_MS = 300 };
static long wait_once(const sigset_t *set, const struct timespec *t) {
    long r;
    register long size __asm__("r10") = 8;
    __asm__ volatile("syscall" : "=a"(r) : "a"(SYS_rt_sigtimedwait), "D"(set), "S"(0L), "d"(t), "r"(size) : "rcx", "r11", "memory");
    return r;
}
int main(void) {
    begin("timer_ticks");
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    OK(sigprocmask(SIG_BLOCK, &set, NULL));
    const struct timespec tick = {0, TICK_MS * 1000000};
    int64_t begin = now_ns();
    int n = 0;
    while (n < TICKS && wait_once(&set, &tick) == -EAGAIN) n++;
    int64_t took = (now_ns() - begin) / 1000000;
    EQ(n, TICKS);
    if (took < TICKS * TICK_MS) fail("%d ticks of %d ms took %lld ms", TICKS, TICK_MS, (long long)took);
    return finish();
}
