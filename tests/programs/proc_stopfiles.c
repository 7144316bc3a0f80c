// Two processes that share one descriptor table, not memory, stand stopped, and one of them has much of it: whoever of them
// comes back first takes nothing from the other. proc_stopfiles one: only the one with little is stopped.
#include "check.h"
enum { BYTES = 96 << 20 };
struct shared { _Atomic uint64_t turn, small, large; _Atomic int fd; };
static struct shared *s;
static char stack[65536] __attribute__((aligned(16)));
static pid_t small, large;
// Answers each turn with what can be read from the descriptor that the other one has opened.
static int answer(void *arg) {
    (void)arg;
    begin_child();
    for (uint64_t seen = 0;; seen = s->turn) {
        while (s->turn == seen || s->large != s->turn) nap_us(300);
        char b = 0;
        full_read(s->fd, &b, 1);
        EQ(b, (char)s->turn);
        CHECK(close(s->fd) == 0);
        s->small = s->turn;
    }
}
static void work(void) {
    begin_child();
    uint64_t *all = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    fill(all, BYTES, 7);
    small = (pid_t)OK(clone(answer, stack + sizeof stack, CLONE_FILES | CLONE_PARENT | SIGCHLD, NULL));
    s->small = (uint64_t)small;
    for (uint64_t seen = 0;; seen = s->turn) {
        while (s->turn == seen) nap_us(300);
        int pp[2];
        OK(pipe(pp));
        s->fd = pp[0];
        char b = (char)s->turn;
        full_write(pp[1], &b, 1);
        OK(close(pp[1]));
        verify(all, 1 << 20, 7, "memory");
        s->large = s->turn;
    }
}
static void stop(pid_t p) {
    int st;
    OK(kill(p, SIGSTOP));
    EQ(waitpid(p, &st, WUNTRACED), p);
    CHECK(WIFSTOPPED(st));
}
int main(int argc, char **argv) {
    begin("proc_stopfiles");
    int both = argc < 2;
    (void)argv;
    s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    large = (pid_t)OK(fork());
    if (large == 0) work();
    while (s->small == 0) nap_us(300);
    small = (pid_t)s->small;
    while (running()) {
        stop(small);
        if (both) stop(large);
        for (int i = 0; i < 40 && running(); i++) nap_us(4000);
        OK(kill(small, SIGCONT));
        OK(kill(large, SIGCONT));
        s->turn++;
        int64_t t0 = now_ns();
        while (s->small != s->turn) {
            if (now_ns() - t0 > 20000000000LL) fail("no answer");
            nap_us(300);
            running();
        }
    }
    OK(kill(small, SIGKILL));
    OK(kill(large, SIGKILL));
    reap(small, SIGKILL);
    reap(large, SIGKILL);
    return finish();
}
