// Two processes (not threads) that share one descriptor table and one working directory (CLONE_FILES | CLONE_FS).
#include "check.h"
struct shared { _Atomic int fd, ack, ending; _Atomic uint64_t turn; };
static struct shared *s;
static char stack[65536] __attribute__((aligned(16)));
static int peer(void *arg) {
    (void)arg;
    begin_child();
    uint64_t seen = 0;
    while (!s->ending) {
        if (s->turn == seen) { usleep(300); continue; }
        seen = s->turn;
        char b = 0;
        full_read(s->fd, &b, 1);  // a descriptor that the other process opened after the clone
        EQ(b, (char)seen);
        CHECK(close(s->fd) == 0);
        s->ack = 1;
    }
    _exit(0);
}
int main(void) {
    begin("proc_clonefiles");
    s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t p = (pid_t)OK(clone(peer, stack + sizeof stack, CLONE_FILES | CLONE_FS | SIGCHLD, NULL));
    while (running()) {
        int pp[2];
        OK(pipe(pp));
        s->fd = pp[0];
        s->ack = 0;
        char b = (char)(s->turn + 1);
        full_write(pp[1], &b, 1);
        s->turn++;
        int64_t t0 = now_ns();
        while (!s->ack) {
            if (now_ns() - t0 > 10000000000LL) fail("the peer does not answer");
            nap_us(300);
        }
        CHECK(fcntl(pp[0], F_GETFD) == -1 && errno == EBADF);  // closed by the peer, so closed here
        close(pp[1]);
    }
    s->ending = 1;
    reap(p, 0);
    return finish();
}
