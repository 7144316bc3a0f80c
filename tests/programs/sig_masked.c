// Calls that block a signal only while they wait: it comes when the call has returned because of its own wakeup, never
// before, and the thread's own mask is in force again. sig_masked [aio]
#include "check.h"
#include <linux/aio_abi.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/select.h>

enum { EPOLL_PWAIT, EPOLL_PWAIT2, PPOLL, PSELECT, SIGSUSPEND, PGETEVENTS };
static const char *const names[] = {"epoll_pwait", "epoll_pwait2", "ppoll", "pselect", "sigsuspend", "io_pgetevents"};
static const long numbers[] = {281, 441, 271, 270, 130, 333};

struct slot {
    pthread_t t;
    pid_t tid;
    int call, fd, ep;
    aio_context_t aio;
    _Atomic unsigned asked, done, came;
    _Atomic int woken;
} s[6];
static int first, last;
static _Thread_local struct slot *me;

// Async-signal-safe: fail() writes and ends the process.
static void usr1(int sig) {
    (void)sig;
    if (!me || !me->woken) fail("%s: the signal came while the call blocked it", me ? names[me->call] : "main");
    me->came++;
}
static void usr2(int sig) { (void)sig; }

static long waits(struct slot *x) {
    sigset_t mask;
    struct epoll_event e;
    struct pollfd p = {.fd = x->fd, .events = POLLIN};
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    switch (x->call) {
    case EPOLL_PWAIT: return epoll_pwait(x->ep, &e, 1, -1, &mask);
    case EPOLL_PWAIT2: return syscall(441, x->ep, &e, 1, NULL, &mask, 8);
    case PPOLL: return ppoll(&p, 1, NULL, &mask);
    case PSELECT: {
        fd_set r;
        FD_ZERO(&r);
        FD_SET(x->fd, &r);
        return pselect(x->fd + 1, &r, NULL, NULL, NULL, &mask);
    }
    case SIGSUSPEND: return sigsuspend(&mask) == -1 && errno == EINTR ? 1 : -2;
    default: {
        struct iocb cb = {.aio_fildes = (unsigned)x->fd, .aio_lio_opcode = IOCB_CMD_POLL, .aio_buf = POLLIN}, *list = &cb;
        struct io_event ev;
        struct { const sigset_t *set; size_t bytes; } arg = {&mask, 8};
        EQ(syscall(SYS_io_submit, x->aio, 1, &list), 1);
        return syscall(333, x->aio, 1L, 1L, &ev, NULL, &arg);
    }
    }
}

static void *worker(void *v) {
    struct slot *x = me = v;
    sigset_t own, now;
    sigemptyset(&own);
    sigaddset(&own, SIGUSR2);
    sigaddset(&own, SIGTERM);
    EQ(pthread_sigmask(SIG_SETMASK, &own, NULL), 0);
    x->tid = (pid_t)syscall(SYS_gettid);
    for (;;) {
        unsigned n = x->done + 1;
        uint64_t word;
        while (x->asked < n) nap_us(500);
        if (x->asked == UINT_MAX) return NULL;
        long r = waits(x);
        if (r != 1) fail("%s returned %ld: %s", names[x->call], r, strerror(errno));
        EQ(x->came, n);
        EQ(pthread_sigmask(SIG_BLOCK, NULL, &now), 0);
        for (int sig = 1; sig < 32; sig++)
            if (sigismember(&now, sig) != sigismember(&own, sig)) fail("%s: signal %d: blocked is %d now", names[x->call], sig, sigismember(&now, sig));
        if (x->call != SIGSUSPEND) EQ(read(x->fd, &word, 8), 8);
        x->woken = 0;
        x->done = n;
    }
}

// Whether the thread sleeps in its call.
static int sleeps(struct slot *x) {
    char path[64], text[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", x->tid);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text - 1) < 0) text[0] = 0;
    if (fd >= 0) close(fd);
    return text[0] && strtol(text, NULL, 10) == numbers[x->call];
}

// The main thread waits for a moment, and a child ends meanwhile.
static void timed(void) {
    sigset_t mask;
    struct timespec ts = {0, 5000000};
    pid_t c = fork();
    if (c == 0) _exit(0);
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    int r = ppoll(NULL, 0, &ts, &mask);
    if (r) fail("ppoll for a moment returned %d: %s", r, strerror(errno));
    reap(c, 0);
}

int main(int argc, char **argv) {
    int aio = argc > 1 && !strcmp(argv[1], "aio");
    first = aio ? PGETEVENTS : EPOLL_PWAIT;
    last = aio ? PGETEVENTS : SIGSUSPEND;
    begin(aio ? "sig_masked aio" : "sig_masked");
    struct sigaction a = {.sa_handler = usr1}, b = {.sa_handler = usr2};
    OK(sigaction(SIGUSR1, &a, NULL));
    OK(sigaction(SIGUSR2, &b, NULL));
    for (int i = first; i <= last; i++) {
        struct slot *x = &s[i];
        struct epoll_event e = {.events = EPOLLIN};
        x->call = i;
        x->fd = (int)OK(eventfd(0, 0));
        x->ep = (int)OK(epoll_create1(0));
        OK(epoll_ctl(x->ep, EPOLL_CTL_ADD, x->fd, &e));
        if (i == PGETEVENTS) OK(syscall(SYS_io_setup, 4, &x->aio));
        EQ(pthread_create(&x->t, NULL, worker, x), 0);
    }
    while (running()) {
        for (int i = first; i <= last; i++) s[i].asked++;
        for (int i = first; i <= last; i++)
            while (!sleeps(&s[i])) nap_us(500);
        for (int i = first; i <= last; i++) OK(syscall(SYS_tgkill, getpid(), s[i].tid, SIGUSR1));
        for (int i = 0; i < 25 && running(); i++) timed();
        for (int i = first; i <= last; i++) {
            uint64_t one = 1;
            s[i].woken = 1;
            if (i == SIGSUSPEND) OK(syscall(SYS_tgkill, getpid(), s[i].tid, SIGUSR2));
            else EQ(write(s[i].fd, &one, 8), 8);
        }
        for (int i = first; i <= last; i++)
            while (s[i].done != s[i].asked) nap_us(500);
    }
    for (int i = first; i <= last; i++) {
        s[i].asked = UINT_MAX;
        EQ(pthread_join(s[i].t, NULL), 0);
    }
    return finish();
}
