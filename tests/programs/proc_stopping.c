// A child that has been sent SIGSTOP, and has not had a processor since, stops when it gets one, and its parent is told so.
// proc_stopping [thread]: it was sent to the process, or to its thread.
#include "check.h"
int main(int argc, char **argv) {
    int to_thread = argc > 1 && !strcmp(argv[1], "thread");
    begin("proc_stopping");
    _Atomic uint64_t *c = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    OK(sched_setaffinity(0, sizeof one, &one));
    pid_t p = (pid_t)OK(fork());
    if (p == 0) {
        // It runs when nobody else wants to.
        OK(sched_setscheduler(0, SCHED_IDLE, &(struct sched_param){0}));
        for (;;) (*c)++;
    }
    nap_us(20000);
    while (running()) {
        int st;
        OK(to_thread ? syscall(SYS_tgkill, p, p, SIGSTOP) : kill(p, SIGSTOP));
        for (int64_t until = now_ns() + 30000000; now_ns() < until;) running();
        EQ(waitpid(p, &st, WUNTRACED), p);
        CHECK(WIFSTOPPED(st) && WSTOPSIG(st) == SIGSTOP);
        uint64_t v = *c;
        nap_us(3000);
        EQ(*c, v);
        EQ(waitpid(p, &st, WUNTRACED | WCONTINUED | WNOHANG), 0);
        OK(kill(p, SIGCONT));
        EQ(waitpid(p, &st, WCONTINUED), p);
        CHECK(WIFCONTINUED(st));
        for (int64_t t0 = now_ns(); *c == v; nap_us(500))
            if (now_ns() - t0 > 10000000000LL) fail("the child does not continue");
    }
    OK(kill(p, SIGKILL));
    reap(p, SIGKILL);
    return finish();
}
