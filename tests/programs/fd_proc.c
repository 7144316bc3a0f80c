// Files of the kernel's that are kept open. fd_proc KIND: shared (duplicates have one offset), moved (an epoll entry
// whose number is another's by now), unchanged (a file of sysfs that has been read), log (the kernel's log, read to its
// end), named (a pseudo-terminal whose name is kept for later).
#include "check.h"
#include <sys/epoll.h>
#include <sys/ioctl.h>
static void k_shared(void) {
    int a = (int)OK(open("/proc/self/stat", O_RDONLY)), b = (int)OK(dup(a)), p = (int)OK(syscall(SYS_pidfd_open, getpid(), 0)), q = (int)OK(dup(p));
    for (int i = 0; running(); i = (i + 1) % 9) {
        OK(lseek(i & 1 ? a : b, i, SEEK_SET));
        OK(fcntl(i & 1 ? p : q, F_SETFL, i & 2 ? O_NONBLOCK : 0));
        nap_us(2000);
        EQ(lseek(i & 1 ? b : a, 0, SEEK_CUR), i);
        EQ(fcntl(i & 1 ? q : p, F_GETFL) & O_NONBLOCK, i & 2 ? O_NONBLOCK : 0);
    }
}
static void k_moved(void) {
    int e = (int)OK(epoll_create1(0)), child[2], fds[2];
    // One number is free since, and one a file's.
    for (int i = 0; i < 2; i++) {
        child[i] = (int)OK(fork());
        if (!child[i])
            for (;;) pause();
    }
    for (int i = 0; i < 2; i++) {
        int f = (int)OK(syscall(SYS_pidfd_open, child[i], 0));
        struct epoll_event ev = {EPOLLIN, {.u64 = (uint64_t)i + 70}};
        OK(epoll_ctl(e, EPOLL_CTL_ADD, f, &ev));
        fds[i] = (int)OK(fcntl(f, F_DUPFD_CLOEXEC, 50));
        int other = (int)OK(open("/dev/null", O_RDONLY));
        if (i) OK(dup3(other, f, O_CLOEXEC));
        else OK(close(f));
        OK(close(other));
    }
    struct epoll_event got[3];
    while (running()) {
        nap_us(2000);
        EQ(epoll_wait(e, got, 3, 0), 0);
    }
    for (int i = 0; i < 2; i++) {
        OK(kill(child[i], SIGKILL));
        EQ(epoll_wait(e, got, 3, 10000), 1);
        EQ(got[0].data.u64, i + 70);
        reap(child[i], SIGKILL);
        OK(close(fds[i]));
    }
}
static void k_unchanged(void) {
    int f = (int)OK(open("/sys/class/net/lo/mtu", O_RDONLY));
    char b[64];
    EQ(read(f, b, 2), 2);
    struct pollfd p = {f, POLLPRI, 0};
    while (running()) {
        nap_us(2000);
        EQ(poll(&p, 1, 0), 0);
        EQ(lseek(f, 0, SEEK_CUR), 2);
    }
}
static void k_log(void) {
    int f = (int)OK(open("/dev/kmsg", O_RDONLY | O_NONBLOCK));
    static char b[8192];
    for (unsigned long last = 0; running(); nap_us(2000))
        for (ssize_t n; (n = read(f, b, sizeof b - 1)) > 0 || errno == EPIPE;) {
            unsigned long number = 0;
            if (n <= 0) continue;
            b[n] = 0;
            EQ(sscanf(b, "%*u,%lu", &number), 1);
            if (number <= last && last) fail("record %lu comes after %lu", number, last);
            last = number;
        }
}
static void k_named(void) {
    int m = (int)OK(open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC)), off = 0;
    OK(unlockpt(m));
    char name[64];
    snprintf(name, sizeof name, "%s", ptsname(m));
    OK(ioctl(m, TIOCSPTLCK, &off));
    while (running()) {
        nap_us(2000);
        int s = open(name, O_RDWR | O_NOCTTY);
        if (s < 0) fail("%s cannot be opened: %s", name, strerror(errno));
        struct winsize one = {.ws_row = (unsigned short)(check_round & 0x7fff)}, other;
        OK(ioctl(m, TIOCSWINSZ, &one));
        OK(ioctl(s, TIOCGWINSZ, &other));
        EQ(one.ws_row, other.ws_row);
        OK(close(s));
    }
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "shared";
    char name[64];
    snprintf(name, sizeof name, "fd_proc-%s", kind);
    begin(name);
    struct { const char *k; void (*f)(void); } t[] = {{"shared", k_shared}, {"moved", k_moved}, {"unchanged", k_unchanged}, {"log", k_log}, {"named", k_named}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        if (!strcmp(kind, t[i].k)) {
            t[i].f();
            return finish();
        }
    fail("unknown kind %s", kind);
}
