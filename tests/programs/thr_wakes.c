// Threads and processes that wait for a futex whose value never changes: whoever has fallen asleep there is found there
// by all who wake, at every moment, and is woken by one wake-up. thr_wakes N
#include "check.h"
#include <linux/futex.h>

#define MAX 64
static struct { _Atomic unsigned word, woken; } *sh;
static int n;

static long futex(int op, unsigned value, unsigned long more, void *other, unsigned third) {
    return syscall(SYS_futex, &sh->word, op, value, more, other, third);
}
static void waits(void) {
    for (;;) {
        long r = futex(FUTEX_WAIT, 0, 0, NULL, 0);
        if (r) fail("FUTEX_WAIT returned %ld: %s", r, strerror(errno));
        sh->woken++;
    }
}
static void *thread(void *v) {
    waits();
    return v;
}
// How many wait there: all of them are moved to the place where they are.
static long waiting(void) { return OK(futex(FUTEX_CMP_REQUEUE, 0, INT_MAX, &sh->word, 0)); }

int main(int argc, char **argv) {
    n = argc > 1 ? atoi(argv[1]) : 8;
    begin("thr_wakes");
    sh = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED && n <= MAX);
    pid_t child[MAX];
    int children = n / 2;
    for (int i = 0; i < children; i++)
        if ((child[i] = (pid_t)OK(fork())) == 0) {
            begin_child();
            waits();
        }
    pthread_t t;
    pthread_attr_t at;
    pthread_attr_init(&at);
    pthread_attr_setstacksize(&at, 65536);
    for (int i = children; i < n; i++) EQ(pthread_create(&t, &at, thread, NULL), 0);
    while (running()) {
        unsigned before = sh->woken;
        while (waiting() != n) nap_us(200);
        for (int64_t until = now_ns() + 20000000; now_ns() < until;) EQ(waiting(), n);
        EQ(futex(FUTEX_WAKE, INT_MAX, 0, NULL, 0), n);
        while (sh->woken != before + (unsigned)n) nap_us(200);
    }
    for (int i = 0; i < children; i++) {
        OK(kill(child[i], SIGKILL));
        reap(child[i], SIGKILL);
    }
    return finish();
}
