// N threads blocked in one kind of system call. blocked MODE N. Each wait must end because of its own wakeup, never with EINTR,
// never early, and no wakeup may be lost.
#include "check.h"
#include <linux/futex.h>
#include <mqueue.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#define MAXT 512
static int n = 8;
static const char *mode;
struct slot {
    pthread_t t;
    pid_t tid;
    _Atomic unsigned asked, done, relocked;
    pthread_mutex_t m;
    pthread_cond_t c;
    sem_t sem;
    _Atomic unsigned word;
    int fd[2], ep, lockfd;
    char path[64];
} s[MAXT];
static int msgid = -1, semid = -1;

static _Atomic int ending;  // the waits' objects are being removed

static void bad(struct slot *x, const char *call, long r) {
    int e = errno;
    while (ending) pause();
    errno = e;
    fail("thread %d in %s: returned %ld: %s", (int)(x - s), call, r, strerror(errno));
}
static void usr1(int sig) { (void)sig; }

// Waits until the slot's owner has asked once more than before. Timed waits return when their time is over.
static void block(struct slot *x) {
    char b = 0;
    long r;
    struct timespec ts = {0, 30000000};
    int64_t t0 = now_ns();
    int i = (int)(x - s);
    while ((!strcmp(mode, "mutex") || !strcmp(mode, "flock")) && x->relocked != x->done) nap_us(200);
    if (!strcmp(mode, "mutex")) {
        pthread_mutex_lock(&x->m);  // held by main until the wakeup
        pthread_mutex_unlock(&x->m);
    } else if (!strcmp(mode, "condvar")) {
        pthread_mutex_lock(&x->m);
        while (x->asked == x->done) if ((r = pthread_cond_wait(&x->c, &x->m))) bad(x, "pthread_cond_wait", r);
        pthread_mutex_unlock(&x->m);
    } else if (!strcmp(mode, "condtimed")) {
        struct timespec abs;
        clock_gettime(CLOCK_REALTIME, &abs);
        abs.tv_sec += 600;
        pthread_mutex_lock(&x->m);
        while (x->asked == x->done) if ((r = pthread_cond_timedwait(&x->c, &x->m, &abs))) bad(x, "pthread_cond_timedwait", r);
        pthread_mutex_unlock(&x->m);
    } else if (!strcmp(mode, "futex")) {
        while (x->asked == x->done) {
            r = syscall(SYS_futex, &x->word, FUTEX_WAIT, x->done, NULL, NULL, 0);
            if (r && errno != EAGAIN) bad(x, "futex", r);
        }
    } else if (!strcmp(mode, "futextimed")) {
        struct timespec long_ts = {600, 0};
        while (x->asked == x->done) {
            r = syscall(SYS_futex, &x->word, FUTEX_WAIT_PRIVATE, x->done, &long_ts, NULL, 0);
            if (r && errno != EAGAIN) bad(x, "futex", r);
        }
    } else if (!strcmp(mode, "sem")) {
        if ((r = sem_wait(&x->sem))) bad(x, "sem_wait", r);
    } else if (!strcmp(mode, "nanosleep")) {
        if ((r = nanosleep(&ts, NULL))) bad(x, "nanosleep", r);
        if (now_ns() - t0 < 30000000) fail("nanosleep ended early after %lld ns", (long long)(now_ns() - t0));
    } else if (!strcmp(mode, "clock_nanosleep")) {
        int64_t end = t0 + 30000000;
        struct timespec abs = {end / 1000000000, end % 1000000000};
        if ((r = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &abs, NULL))) bad(x, "clock_nanosleep", r);
        if (now_ns() < end) fail("clock_nanosleep ended early");
    } else if (!strcmp(mode, "longsleep")) {
        struct timespec lt = {5, 0};  // sleeps over several checkpoints when those come quickly; ends by itself
        if ((r = nanosleep(&lt, NULL))) bad(x, "nanosleep", r);
        if (now_ns() - t0 < 5000000000LL) fail("nanosleep ended early");
    } else if (!strcmp(mode, "poll")) {
        struct pollfd p = {x->fd[0], POLLIN, 0};
        if ((r = poll(&p, 1, -1)) != 1) bad(x, "poll", r);
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "polltimed")) {
        struct pollfd p = {x->fd[0], POLLIN, 0};
        if ((r = poll(&p, 1, 30)) != 0) bad(x, "poll", r);
        if (now_ns() - t0 < 29000000) fail("poll ended early");
    } else if (!strcmp(mode, "ppoll")) {
        struct pollfd p = {x->fd[0], POLLIN, 0};
        sigset_t none;
        sigemptyset(&none);
        struct timespec lt = {600, 0};
        if ((r = ppoll(&p, 1, &lt, &none)) != 1) bad(x, "ppoll", r);
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "select")) {
        fd_set f;
        FD_ZERO(&f);
        FD_SET(x->fd[0], &f);
        struct timeval tv = {600, 0};
        if ((r = select(x->fd[0] + 1, &f, NULL, NULL, &tv)) != 1) bad(x, "select", r);
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "pselect")) {
        fd_set f;
        FD_ZERO(&f);
        FD_SET(x->fd[0], &f);
        sigset_t none;
        sigemptyset(&none);
        if ((r = pselect(x->fd[0] + 1, &f, NULL, NULL, NULL, &none)) != 1) bad(x, "pselect", r);
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "read") || !strcmp(mode, "sockread")) {
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "recvtimeo")) {  // SO_RCVTIMEO set: the kernel never restarts these after a handler
        if ((r = recv(x->fd[0], &b, 1, 0)) != 1) bad(x, "recv", r);
    } else if (!strcmp(mode, "eventfd")) {
        uint64_t v;
        if ((r = read(x->fd[0], &v, 8)) != 8) bad(x, "read eventfd", r);
    } else if (!strcmp(mode, "epoll")) {
        struct epoll_event e;
        if ((r = epoll_wait(x->ep, &e, 1, -1)) != 1) bad(x, "epoll_wait", r);
        if (e.data.u64 != 0xabc00 + (unsigned)i) fail("epoll data is %llx", (unsigned long long)e.data.u64);
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "epoll_pwait")) {
        struct epoll_event e;
        sigset_t none;
        sigemptyset(&none);
        if ((r = epoll_pwait(x->ep, &e, 1, 600000, &none)) != 1) bad(x, "epoll_pwait", r);
        if ((r = read(x->fd[0], &b, 1)) != 1) bad(x, "read", r);
    } else if (!strcmp(mode, "sigtimedwait")) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        siginfo_t si;
        struct timespec lt = {600, 0};
        if ((r = sigtimedwait(&set, &si, &lt)) != SIGUSR1) bad(x, "sigtimedwait", r);
    } else if (!strcmp(mode, "sigwaitinfo")) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        if ((r = sigwaitinfo(&set, NULL)) != SIGUSR1) bad(x, "sigwaitinfo", r);
    } else if (!strcmp(mode, "sigsuspend")) {
        sigset_t none;
        sigemptyset(&none);
        r = sigsuspend(&none);  // returns EINTR only because our own handler ran
        if (r != -1 || errno != EINTR) bad(x, "sigsuspend", r);
        if (x->asked == x->done) fail("sigsuspend of thread %d ended without a signal", i);
    } else if (!strcmp(mode, "semop")) {
        struct sembuf op = {(unsigned short)i, -1, 0};
        if ((r = semop(semid, &op, 1))) bad(x, "semop", r);
    } else if (!strcmp(mode, "semtimedop")) {
        struct sembuf op = {(unsigned short)i, -1, 0};
        struct timespec lt = {600, 0};
        if ((r = semtimedop(semid, &op, 1, &lt))) bad(x, "semtimedop", r);
    } else if (!strcmp(mode, "msgrcv")) {
        struct { long type; unsigned v; } m;
        if ((r = msgrcv(msgid, &m, sizeof m - sizeof(long), i + 1, 0)) < 0) bad(x, "msgrcv", r);
        if (m.v != x->asked) fail("msgrcv delivered %u, expected %u", m.v, x->asked);
    } else if (!strcmp(mode, "mq")) {
        char mb[64];
        if ((r = mq_receive(x->fd[0], mb, sizeof mb, NULL)) != 1) bad(x, "mq_receive", r);
    } else if (!strcmp(mode, "inotify")) {
        char ib[512];
        if ((r = read(x->fd[0], ib, sizeof ib)) <= 0) bad(x, "read inotify", r);
    } else if (!strcmp(mode, "timerfd")) {
        uint64_t v;
        struct itimerspec it = {{0, 0}, {0, 30000000}};
        OK(timerfd_settime(x->fd[0], 0, &it, NULL));
        if ((r = read(x->fd[0], &v, 8)) != 8) bad(x, "read timerfd", r);
        EQ(v, 1);
    } else if (!strcmp(mode, "flock")) {
        if ((r = flock(x->lockfd, LOCK_EX))) bad(x, "flock", r);
        OK(flock(x->lockfd, LOCK_UN));
    } else if (!strcmp(mode, "accept")) {
        int c = accept(x->fd[0], NULL, NULL);
        if (c < 0) bad(x, "accept", c);
        close(c);
    } else if (!strcmp(mode, "wait")) {
        pid_t p = fork();
        if (p == 0) {
            struct timespec st = {0, 40000000};
            nanosleep(&st, NULL);
            _exit(7);
        }
        int st;
        if ((r = waitpid(p, &st, 0)) != p) bad(x, "waitpid", r);
        EQ(st, 7 << 8);
    } else
        fail("unknown mode %s", mode);
}

static int by_itself(void) {
    return !strcmp(mode, "nanosleep") || !strcmp(mode, "clock_nanosleep") || !strcmp(mode, "polltimed") || !strcmp(mode, "timerfd") || !strcmp(mode, "wait") ||
           !strcmp(mode, "longsleep");
}

static void *worker(void *arg) {
    struct slot *x = arg;
    x->tid = gettid();
    for (;;) {
        block(x);
        if (gettid() != x->tid) fail("thread %d has another TID", (int)(x - s));
        if (by_itself()) {
            x->done++;
            continue;
        }
        while (ending) pause();
        if (x->done + 1 != x->asked) fail("thread %d in %s woke without a wakeup (%u, asked %u)", (int)(x - s), mode, x->done, x->asked);
        x->done++;
    }
    return NULL;
}

static void wake(struct slot *x) {
    int i = (int)(x - s);
    char b = 1;
    uint64_t one = 1;
    pthread_mutex_t *hold = !strcmp(mode, "condvar") || !strcmp(mode, "condtimed") ? &x->m : NULL;
    if (hold) pthread_mutex_lock(hold);
    x->asked++;
    if (hold) {
        pthread_cond_signal(&x->c);
        pthread_mutex_unlock(hold);
    }
    if (!strcmp(mode, "futex")) {
        x->word = x->asked;
        syscall(SYS_futex, &x->word, FUTEX_WAKE, 1, NULL, NULL, 0);
    } else if (!strcmp(mode, "futextimed")) {
        x->word = x->asked;
        syscall(SYS_futex, &x->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    } else if (!strcmp(mode, "sem")) sem_post(&x->sem);
    else if (!strcmp(mode, "eventfd")) full_write(x->fd[0], &one, 8);
    else if (!strncmp(mode, "sig", 3)) CHECK(pthread_kill(x->t, SIGUSR1) == 0);
    else if (!strncmp(mode, "sem", 3)) {
        struct sembuf op = {(unsigned short)i, 1, 0};
        OK(semop(semid, &op, 1));
    } else if (!strcmp(mode, "msgrcv")) {
        struct { long type; unsigned v; } m = {i + 1, x->asked};
        OK(msgsnd(msgid, &m, sizeof m - sizeof(long), 0));
    } else if (!strcmp(mode, "mq")) OK(mq_send(x->fd[0], "x", 1, 0));
    else if (!strcmp(mode, "inotify")) {
        int f = open(x->path, O_WRONLY);
        CHECK(f >= 0);
        full_write(f, "x", 1);
        close(f);
    } else if (!strcmp(mode, "accept")) {
        struct sockaddr_storage a;
        socklen_t l = sizeof a;
        OK(getsockname(x->fd[0], (struct sockaddr *)&a, &l));
        int c = socket(a.ss_family, SOCK_STREAM, 0);
        OK(connect(c, (struct sockaddr *)&a, l));
        close(c);
    } else if (x->fd[1] >= 0 && strcmp(mode, "mutex") && strcmp(mode, "flock"))
        full_write(x->fd[1], &b, 1);
}

int main(int argc, char **argv) {
    mode = argc > 1 ? argv[1] : "condvar";
    if (argc > 2) n = atoi(argv[2]);
    char name[64];
    snprintf(name, sizeof name, "blocked-%s-%d", mode, n);
    begin(name);
    if (!strncmp(mode, "sig", 3)) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &set, NULL);
        struct sigaction sa = {.sa_handler = usr1};
        if (!strcmp(mode, "sigsuspend")) sigaction(SIGUSR1, &sa, NULL);
    }
    if (!strncmp(mode, "semop", 5) || !strncmp(mode, "semtimedop", 10)) semid = (int)OK(semget(IPC_PRIVATE, n, 0600));
    if (!strcmp(mode, "msgrcv")) msgid = (int)OK(msgget(IPC_PRIVATE, 0600));
    pthread_attr_t at;
    pthread_attr_init(&at);
    pthread_attr_setstacksize(&at, 65536);
    for (int i = 0; i < n; i++) {
        struct slot *x = s + i;
        x->fd[0] = x->fd[1] = x->ep = x->lockfd = -1;
        pthread_mutex_init(&x->m, NULL);
        pthread_cond_init(&x->c, NULL);
        sem_init(&x->sem, 0, 0);
        snprintf(x->path, sizeof x->path, "blocked.%d.%d", getpid(), i);
        if (!strcmp(mode, "sockread") || !strcmp(mode, "recvtimeo")) {
            OK(socketpair(AF_UNIX, SOCK_STREAM, 0, x->fd));
            struct timeval tv = {600, 0};
            if (!strcmp(mode, "recvtimeo")) OK(setsockopt(x->fd[0], SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
        } else if (!strcmp(mode, "eventfd"))
            x->fd[0] = (int)OK(eventfd(0, 0));
        else if (!strcmp(mode, "mq")) {
            struct mq_attr a = {.mq_maxmsg = 8, .mq_msgsize = 64};
            char q[64];
            snprintf(q, sizeof q, "/belay-%d-%d", getpid(), i);
            x->fd[0] = (int)OK(mq_open(q, O_RDWR | O_CREAT | O_EXCL, 0600, &a));
            mq_unlink(q);
        } else if (!strcmp(mode, "timerfd"))
            x->fd[0] = (int)OK(timerfd_create(CLOCK_MONOTONIC, 0));
        else if (!strcmp(mode, "inotify")) {
            close((int)OK(open(x->path, O_CREAT | O_WRONLY, 0600)));
            x->fd[0] = (int)OK(inotify_init1(0));
            OK(inotify_add_watch(x->fd[0], x->path, IN_MODIFY));
        } else if (!strcmp(mode, "flock")) {
            x->lockfd = (int)OK(open(x->path, O_CREAT | O_RDWR, 0600));
            x->fd[0] = (int)OK(open(x->path, O_RDWR));
            OK(flock(x->fd[0], LOCK_EX));
        } else if (!strcmp(mode, "accept")) {
            x->fd[0] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            sa_family_t f = AF_UNIX;
            OK(bind(x->fd[0], (struct sockaddr *)&f, sizeof f));
            OK(listen(x->fd[0], 4));
        } else if (!strcmp(mode, "poll") || !strcmp(mode, "polltimed") || !strcmp(mode, "ppoll") || !strcmp(mode, "select") || !strcmp(mode, "pselect") || !strcmp(mode, "read") || !strncmp(mode, "epoll", 5)) {
            OK(pipe(x->fd));
            if (!strncmp(mode, "epoll", 5)) {
                x->ep = (int)OK(epoll_create1(0));
                struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0xabc00 + (unsigned)i};
                OK(epoll_ctl(x->ep, EPOLL_CTL_ADD, x->fd[0], &e));
            }
        }
        if (!strcmp(mode, "mutex")) pthread_mutex_lock(&x->m);
        CHECK(pthread_create(&x->t, &at, worker, x) == 0);
    }
    unsigned seen[MAXT] = {0};
    int first = 0, most = n < 64 ? n : 64;  // a round stays short on a loaded machine: some threads at a time
    while (running()) {
        nap_us(n > 100 ? 60000 : 15000);
        if (by_itself()) {
            for (int i = 0; i < n; i++) seen[i] = s[i].done;
            continue;
        }
        for (int k = 0; k < most; k++) {
            int i = (first + k) % n;
            wake(s + i);
            if (!strcmp(mode, "mutex")) pthread_mutex_unlock(&s[i].m);
            if (!strcmp(mode, "flock")) OK(flock(s[i].fd[0], LOCK_UN));
            int64_t t0 = now_ns();
            for (int turns = 0; s[i].done != s[i].asked; turns++) {
                if (now_ns() - t0 > 60000000000LL) fail("thread %d in %s: lost wakeup", i, mode);
                if (turns < 100) sched_yield();
                else nap_us(100);
            }
            if (!strcmp(mode, "mutex")) pthread_mutex_lock(&s[i].m);
            if (!strcmp(mode, "flock")) OK(flock(s[i].fd[0], LOCK_EX));
            s[i].relocked = s[i].asked;
        }
        first = (first + most) % n;
        if (strcmp(mode, "wait")) no_children();
    }
    for (int i = 0; i < n; i++) CHECK(s[i].done >= seen[i]);
    ending = 1;
    if (semid >= 0) OK(semctl(semid, 0, IPC_RMID));
    if (msgid >= 0) OK(msgctl(msgid, IPC_RMID, NULL));
    if (!strcmp(mode, "flock") || !strcmp(mode, "inotify")) for (int i = 0; i < n; i++) unlink(s[i].path);
    return finish();
}
