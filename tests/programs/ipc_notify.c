// Registrations with mq_notify that outlive checkpoints. ipc_notify signal: a realtime signal with a value, and one of
// standard kind, whose queue held messages when it was registered. ipc_notify full: signals with a value cannot be
// queued for the time of the checkpoints (RLIMIT_SIGPENDING). ipc_notify thread: SIGEV_THREAD, two queues. ipc_notify
// none: SIGEV_NONE, which keeps others from registering. A child sends; the registering process has its queues open for
// reading only.
#include "check.h"
#include <mqueue.h>
#include <sys/resource.h>
#define QUEUES 2
static mqd_t q[QUEUES];
static int to_child[2];
static pid_t child;
static atomic_int called[QUEUES];
static char name_of[QUEUES][64];
static void make(void) {
    OK(pipe(to_child));
    // A job that was killed leaves its names behind, and there is room for 256.
    for (int p = 2; p < 65536; p++)
        if (kill(p, 0) && errno == ESRCH)
            for (int i = 0; i < QUEUES; i++) {
                snprintf(name_of[i], sizeof name_of[i], "/belay-n%d-%d-%d", getuid(), p, i);
                mq_unlink(name_of[i]);
            }
    mqd_t w[QUEUES];
    struct mq_attr a = {.mq_maxmsg = 4, .mq_msgsize = 64};
    for (int i = 0; i < QUEUES; i++) {
        snprintf(name_of[i], sizeof name_of[i], "/belay-n%d-%d-%d", getuid(), getpid(), i);
        w[i] = (mqd_t)OK(mq_open(name_of[i], O_WRONLY | O_CREAT | O_EXCL, 0600, &a));
        q[i] = (mqd_t)OK(mq_open(name_of[i], O_RDONLY | O_NONBLOCK));
        OK(mq_unlink(name_of[i]));
    }
    child = (pid_t)OK(fork());
    if (child == 0) {
        begin_child();
        OK(close(to_child[1]));
        unsigned char c;
        while (read(to_child[0], &c, 1) == 1) {
            char text[8] = {(char)c, 'm', 's', 'g', 0};
            OK(mq_send(w[c & 1], text, 4, c >> 1 & 7));
        }
        _exit(0);
    }
    for (int i = 0; i < QUEUES; i++) OK(mq_close(w[i]));
}
static void ask(int queue, int priority) {
    unsigned char c = (unsigned char)(queue | priority << 1);
    full_write(to_child[1], &c, 1);
}
static void take(int queue, int priority) {
    char b[64];
    unsigned pr;
    await(q[queue], POLLIN, "a message");
    EQ(mq_receive(q[queue], b, sizeof b, &pr), 4);
    EQ(pr, priority);
    EQ((unsigned char)b[0], queue | priority << 1);
}
static void is_empty(int queue) {
    char b[64];
    EQ(mq_receive(q[queue], b, sizeof b, NULL), -1);
    EQ(errno, EAGAIN);
}
static void stand(int queue, struct sigevent *e) { OK(mq_notify(q[queue], e)); }
static void quiet(const sigset_t *s) {
    sigset_t p;
    OK(sigpending(&p));
    for (int i = 1; i < 64; i++)
        if (sigismember(s, i) && sigismember(&p, i)) fail("signal %d is pending, though no message has come", i);
}
static void told(const sigset_t *s, int signo, int value) {
    siginfo_t i;
    struct timespec t = {60, 0};
    int got = sigtimedwait(s, &i, &t);
    if (got != signo) fail("sigtimedwait returned %d, expected %d: %s", got, signo, strerror(errno));
    EQ(i.si_code, SI_MESGQ);
    EQ(i.si_value.sival_int, value);
    EQ(i.si_pid, child);
}
// Blocks the two signals of the notifications.
static sigset_t blocked(void) {
    sigset_t s;
    sigemptyset(&s);
    sigaddset(&s, SIGRTMIN + 3);
    sigaddset(&s, SIGUSR2);
    OK(sigprocmask(SIG_BLOCK, &s, NULL));
    return s;
}
static void k_signal(void) {
    sigset_t s = blocked();
    make();
    struct sigevent rt = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 3}, usr = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2};
    while (running()) {
        rt.sigev_value.sival_int = (int)check_round * 3;
        stand(0, &rt);
        ask(1, 2);
        ask(1, 5);
        ask(1, 3);
        struct mq_attr a;
        do OK(mq_getattr(q[1], &a));
        while (a.mq_curmsgs < 3 && sched_yield() == 0);
        usr.sigev_value.sival_int = (int)check_round * 7;
        stand(1, &usr);
        nap_us(2000);
        quiet(&s);
        take(1, 5);
        take(1, 3);
        take(1, 2);
        is_empty(1);
        is_empty(0);
        nap_us(2000);
        quiet(&s);
        EQ(mq_notify(q[0], &rt), -1);
        EQ(errno, EBUSY);
        ask(1, 1);
        told(&s, SIGUSR2, (int)check_round * 7);
        quiet(&s);
        ask(0, 4);
        told(&s, SIGRTMIN + 3, (int)check_round * 3);
        take(0, 4);
        take(1, 1);
        ask(0, 1);
        take(0, 1);
        quiet(&s);
    }
}
static void k_full(void) {
    sigset_t s = blocked();
    make();
    struct sigevent rt = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 3, .sigev_value.sival_int = 77}, usr = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2, .sigev_value.sival_int = 78};
    stand(0, &rt);
    stand(1, &usr);
    struct rlimit limit;
    OK(getrlimit(RLIMIT_SIGPENDING, &limit));
    struct rlimit none = {0, limit.rlim_max};
    OK(setrlimit(RLIMIT_SIGPENDING, &none));
    while (running()) {
        nap_us(2000);
        quiet(&s);
    }
    OK(setrlimit(RLIMIT_SIGPENDING, &limit));
    ask(0, 1);
    told(&s, SIGRTMIN + 3, 77);
    take(0, 1);
    ask(1, 1);
    told(&s, SIGUSR2, 78);
    take(1, 1);
    quiet(&s);
}
static void call(union sigval v) { atomic_fetch_add(&called[v.sival_int & 1], v.sival_int >> 1); }
static void k_thread(void) {
    make();
    int want[QUEUES] = {0};
    while (running()) {
        for (int i = 0; i < QUEUES; i++) {
            struct sigevent e = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = call, .sigev_value.sival_int = i | (int)(check_round % 1000) << 1};
            stand(i, &e);
        }
        nap_us(3000);
        for (int i = 0; i < QUEUES; i++) EQ(atomic_load(&called[i]), want[i]);
        for (int i = 0; i < QUEUES; i++) {
            want[i] += (int)(check_round % 1000);
            ask(i, 6 - i);
            int64_t since = now_ns();
            while (atomic_load(&called[i]) != want[i]) {
                if (now_ns() - since > 60000000000LL) fail("queue %d: its function was not called", i);
                nap_us(100);
            }
            take(i, 6 - i);
        }
    }
}
static void k_none(void) {
    make();
    struct sigevent e = {.sigev_notify = SIGEV_NONE}, sig = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    while (running()) {
        stand(0, &e);
        nap_us(2000);
        EQ(mq_notify(q[0], &sig), -1);
        EQ(errno, EBUSY);
        ask(0, 0);
        take(0, 0);
        stand(0, &sig);
        OK(mq_notify(q[0], NULL));
        ask(0, 1);
        nap_us(2000);
        take(0, 1);
    }
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "signal";
    char name[64];
    snprintf(name, sizeof name, "ipc_notify-%s", kind);
    begin(name);
    if (!strcmp(kind, "signal")) k_signal();
    else if (!strcmp(kind, "full")) k_full();
    else if (!strcmp(kind, "thread")) k_thread();
    else if (!strcmp(kind, "none")) k_none();
    else fail("unknown kind");
    OK(close(to_child[1]));
    reap(child, 0);
    return finish();
}
