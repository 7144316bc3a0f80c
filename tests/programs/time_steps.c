// Threads that are interrupted after the first, second, ... instruction of reading a clock (single steps, the trap flag), and wait in the signal handler: whenever a checkpoint comes, somebody stands
// behind each instruction of the kernel's code for that. What they read in the end is not before they began and not after they ended. time_steps [threads]
#include "check.h"
#include <ucontext.h>
#define MAX 256
#define TRAP_FLAG 0x100
static _Thread_local int target, steps;
static _Atomic unsigned turn;
static _Atomic int waiting, reached, ending;

static int64_t called(clockid_t c) {
    struct timespec t;
    OK(syscall(SYS_clock_gettime, c, &t));
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static void on(int s, siginfo_t *info, void *context) {
    (void)s, (void)info;
    ucontext_t *u = context;
    if (++steps < target) return;
    u->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    int e = errno;
    unsigned mine = turn;
    waiting++;
    while (turn == mine && !ending) nap_us(5000);
    waiting--;
    reached++;
    errno = e;
}
static void flag(int set) {
    if (set) __asm__ volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
    else __asm__ volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc");
}
static void *work(void *arg) {
    target = (int)(long)arg;
    while (!ending) {
        clockid_t c = turn % 3 == 1 ? CLOCK_MONOTONIC_COARSE : turn % 3 == 2 ? CLOCK_BOOTTIME : CLOCK_MONOTONIC;
        struct timespec t = {-1, -1};
        steps = 0;
        int64_t before = called(c);
        flag(1);
        clock_gettime(c, &t);
        flag(0);
        int64_t read = t.tv_sec * 1000000000LL + t.tv_nsec, after = called(c);
        if (read < before) fail("clock %d, %d steps: %lld ns before the call", c, target, (long long)(before - read));
        if (read > after) fail("clock %d, %d steps: %lld ns after it", c, target, (long long)(read - after));
        nap_us(1000);
    }
    return NULL;
}
int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 160;
    begin("time_steps");
    CHECK(n > 0 && n <= MAX);
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGTRAP, &sa, NULL);
    static pthread_t t[MAX];
    pthread_attr_t a;
    pthread_attr_init(&a);
    pthread_attr_setstacksize(&a, 64 << 10);
    for (long i = 0; i < n; i++) CHECK(pthread_create(&t[i], &a, work, (void *)(i + 1)) == 0);
    for (int i = 0; running(); i++) {
        nap_us(1000);
        if (i % 200 == 199) turn++;
    }
    ending = 1;
    for (int i = 0; i < n; i++) CHECK(pthread_join(t[i], NULL) == 0);
    CHECK(reached > 0 && waiting == 0);
    return finish();
}
