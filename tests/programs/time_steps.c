// Threads that are interrupted after the first, second, ... instruction of reading a clock (single steps, the trap
// flag), and wait in the signal handler: whenever a checkpoint comes, somebody stands behind each instruction of the
// kernel's code for that (clock_gettime, time, clock_getres). What they read in the end is not before they began and
// not after they ended. time_steps [threads]
#include "check.h"
#include <ucontext.h>
#define MAX 256
#define TRAP_FLAG 0x100
#define SECOND 1000000000LL
static _Thread_local int target, steps;
static _Atomic unsigned turn;
static _Atomic int waiting, reached, ending;

static int64_t called(clockid_t c) {
    struct timespec t;
    OK(syscall(SYS_clock_gettime, c, &t));
    return t.tv_sec * SECOND + t.tv_nsec;
}
// Whether this is a time namespace: before its first restart a job is in none, and what is behind some instructions of
// time() and clock_getres() then is not looked after (decision 0019).
static int shifted(void) {
    char name[64] = "";
    OK(readlink("/proc/self/ns/time", name, sizeof name - 1));
    return strcmp(name, "time:[4026531834]");
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
        unsigned kind = turn % (shifted() ? 5 : 3);
        clockid_t c = (clockid_t[]){CLOCK_MONOTONIC, CLOCK_MONOTONIC_COARSE, CLOCK_BOOTTIME, CLOCK_REALTIME_COARSE, CLOCK_MONOTONIC}[kind];
        struct timespec t = {-1, -1};
        steps = 0;
        int64_t before = called(c);
        flag(1);
        if (kind == 3) t.tv_sec = time(NULL);
        else if (kind == 4) clock_getres(c, &t);
        else clock_gettime(c, &t);
        flag(0);
        if (kind == 3) t.tv_nsec = 0, before -= before % SECOND;
        int64_t after = called(c);
        nap_us(20000);
        if (kind == 4) {
            struct timespec right;
            OK(syscall(SYS_clock_getres, c, &right));
            if (t.tv_sec != right.tv_sec || t.tv_nsec != right.tv_nsec) fail("%d steps: a resolution of %ld s and %ld ns", target, (long)t.tv_sec, t.tv_nsec);
            continue;
        }
        int64_t read = t.tv_sec * SECOND + t.tv_nsec;
        if (read < before) fail("clock %d, %d steps: %lld ns before the call", c, target, (long long)(before - read));
        if (read > after) fail("clock %d, %d steps: %lld ns after it", c, target, (long long)(read - after));
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
