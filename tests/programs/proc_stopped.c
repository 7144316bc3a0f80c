// A stopped child stays stopped across a checkpoint, is seen by WUNTRACED once, whenever its parent asks, and continues on
// SIGCONT. proc_stopped SIGNAL: one that the terminal's signal of this number has stopped, as the kernel does in process
// groups of a shell, but not where a restart without a terminal may put them.
#include "check.h"
static char state(pid_t p) {
    char path[64], b[512];
    snprintf(path, sizeof path, "/proc/%d/stat", p);
    int fd = (int)OK(open(path, O_RDONLY));
    ssize_t n = read(fd, b, sizeof b - 1);
    close(fd);
    CHECK(n > 0);
    b[n] = 0;
    return strrchr(b, ')')[2];
}
static void goes_on(pid_t p, _Atomic uint64_t *c, uint64_t v) {
    int st;
    OK(kill(p, SIGCONT));
    EQ(waitpid(p, &st, WCONTINUED), p);
    CHECK(WIFCONTINUED(st));
    int64_t t0 = now_ns();
    while (*c == v) {
        if (now_ns() - t0 > 10000000000LL) fail("the child does not continue");
        nap_us(500);
    }
}
static int once(pid_t p, _Atomic uint64_t *c, int signal) {
    int st;
    OK(kill(p, signal));
    EQ(waitpid(p, &st, WUNTRACED), p);
    CHECK(WIFSTOPPED(st) && WSTOPSIG(st) == signal);
    uint64_t v = *c;
    while (running()) {
        nap_us(4000);
        EQ(*c, v);
        EQ(state(p), 'T');
        EQ(waitpid(p, &st, WUNTRACED | WCONTINUED | WNOHANG), 0);
    }
    goes_on(p, c, v);
    kill(p, SIGKILL);
    reap(p, SIGKILL);
    return finish();
}
int main(int argc, char **argv) {
    begin("proc_stopped");
    _Atomic uint64_t *c = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t p = fork();
    if (p == 0) for (;;) { (*c)++; nap_us(500); }
    if (argc > 1) return once(p, c, atoi(argv[1]));
    int odd = 0;
    while (running()) {
        OK(kill(p, SIGSTOP));
        int st;
        // Every other stop is looked at, but not taken notice of for a while.
        siginfo_t info;
        for (int i = 0; odd && i < 20; i++) {
            memset(&info, 0, sizeof info);
            OK(waitid(P_PID, (id_t)p, &info, WSTOPPED | WNOWAIT));
            EQ(info.si_pid, p);
            EQ(info.si_status, SIGSTOP);
            nap_us(4000);
            running();
        }
        odd = !odd;
        EQ(waitpid(p, &st, WUNTRACED), p);
        CHECK(WIFSTOPPED(st) && WSTOPSIG(st) == SIGSTOP);
        uint64_t v = *c;
        for (int i = 0; i < 20; i++) {
            nap_us(4000);
            EQ(*c, v);
            EQ(state(p), 'T');
            EQ(waitpid(p, &st, WUNTRACED | WCONTINUED | WNOHANG), 0);
            running();
        }
        goes_on(p, c, v);
    }
    kill(p, SIGKILL);
    reap(p, SIGKILL);
    return finish();
}
