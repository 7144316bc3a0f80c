// The program of the tests that kill belay itself at every step of a checkpoint: it must not notice anything but the
// death of its own child, which those tests may also kill. Threads block in every way that an interruption could show:
// sleeps, futexes, poll, read, sigwait; signals arrive all the time at one that has an alternate stack; masks,
// attributes and memory are checked. Early returns of epoll_wait are only counted: the kernel has it answer EINTR, and
// a tracer that dies at that moment cannot turn this into a restart (docs/limits.md).
#include "check.h"
#include <sys/epoll.h>
#include <sys/time.h>

static _Atomic uint64_t turns[8];
static _Atomic int over;
static _Atomic uint64_t alarms, early;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static int ends[2];

static sigset_t all_but_alarm(void) {
    sigset_t s;
    sigfillset(&s);
    sigdelset(&s, SIGALRM);
    return s;
}

// Every thread blocks everything except the one that takes the alarms, and looks whether it still does.
static void mask_is(int takes_alarms) {
    sigset_t now;
    OK(pthread_sigmask(SIG_SETMASK, NULL, &now) == 0 ? 0 : -1);
    EQ(sigismember(&now, SIGALRM), !takes_alarms);
    EQ(sigismember(&now, SIGUSR1), 1);
    EQ(sigismember(&now, SIGTERM), 1);
    sigset_t pending;
    OK(sigpending(&pending));
    CHECK(!sigismember(&pending, SIGUSR2) && !sigismember(&pending, SIGTERM));
}

static void *sleeper(void *a) {
    (void)a;
    for (struct timespec t = {0, 700000}; !over; turns[0]++) {
        EQ(clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL), 0);
        mask_is(0);
    }
    return NULL;
}

static void *long_sleeper(void *a) {
    (void)a;
    struct timespec t = {0, 40000000};
    for (; !over; turns[1]++) EQ(nanosleep(&t, NULL), 0);
    return NULL;
}

static void *waiter(void *a) {
    (void)a;
    for (; !over; turns[2]++) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        t.tv_nsec += 30000000;
        if (t.tv_nsec >= 1000000000) t.tv_nsec -= 1000000000, t.tv_sec++;
        pthread_mutex_lock(&lock);
        int r = pthread_cond_timedwait(&cond, &lock, &t);
        CHECK(r == 0 || r == ETIMEDOUT);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void *poller(void *a) {
    (void)a;
    struct pollfd p = {.fd = -1};
    for (; !over; turns[3]++) EQ(poll(&p, 1, 20), 0);
    return NULL;
}

static void *epoller(void *a) {
    (void)a;
    int e = (int)OK(epoll_create1(0));
    for (struct epoll_event v; !over; turns[7]++) {
        int r = epoll_wait(e, &v, 1, 20);
        CHECK(r == 0 || (r == -1 && errno == EINTR));
        early += r == -1;
    }
    return NULL;
}

static void *reader(void *a) {
    (void)a;
    uint64_t v, n = 0;
    while (read(ends[0], &v, 8) == 8) {
        EQ(v, n);
        n++;
        turns[4]++;
    }
    EQ(errno, 0);
    return NULL;
}

static void *signalled(void *a) {
    (void)a;
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    while (!over) {
        int s;
        EQ(sigwait(&usr1, &s), 0);
        EQ(s, SIGUSR1);
        turns[5]++;
    }
    return NULL;
}

static void on_alarm(int s) {
    char on_stack[64];
    stack_t now;
    if (s != SIGALRM || sigaltstack(NULL, &now) == -1 || !(now.ss_flags & SS_ONSTACK)) fail("the handler is not on its stack");
    on_stack[0] = (char)alarms;
    alarms += on_stack[0] == (char)alarms;
}

static void *alarmed(void *a) {
    (void)a;
    stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
    OK(sigaltstack(&stack, NULL));
    sigset_t s = all_but_alarm();
    EQ(pthread_sigmask(SIG_SETMASK, &s, NULL), 0);
    uint64_t x = 1;
    for (; !over; turns[6]++) {
        // Registers in use all the time.
        uint64_t y = x;
        for (int i = 0; i < 20000; i++) x = mix(x + (uint64_t)i);
        for (int i = 0; i < 20000; i++) y = mix(y + (uint64_t)i);
        EQ(x, y);
        mask_is(1);
        struct timespec t = {0, 100000};
        CHECK(nanosleep(&t, NULL) == 0 || errno == EINTR);
    }
    return NULL;
}

static void *idler(void *arg) {
    for (;;) pause();
    return arg;
}

int main(void) {
    begin("kill_target");
    sigset_t all;
    sigfillset(&all);
    EQ(pthread_sigmask(SIG_SETMASK, &all, NULL), 0);
    OK(prctl(PR_SET_CHILD_SUBREAPER, 1));
    pid_t victim = (pid_t)OK(fork());
    if (!victim) {
        begin_child();
        // A main thread that is killed is not seen to have ended before its threads are.
        pthread_t idle;
        EQ(pthread_create(&idle, NULL, idler, NULL), 0);
        for (;;) nap_us(1000);
    }
    FILE *f = fopen("victim", "w");
    fprintf(f, "%d\n", victim);
    fclose(f);
    OK(pipe(ends));
    struct sigaction act = {.sa_handler = on_alarm, .sa_flags = SA_ONSTACK | SA_RESTART};
    sigemptyset(&act.sa_mask);
    OK(sigaction(SIGALRM, &act, NULL));
    void *(*const bodies[])(void *) = {sleeper, long_sleeper, waiter, poller, reader, signalled, alarmed, epoller};
    enum { N = sizeof bodies / sizeof *bodies };
    pthread_t threads[N];
    for (int i = 0; i < N; i++) EQ(pthread_create(&threads[i], NULL, bodies[i], NULL), 0);
    struct itimerval every = {{0, 1500}, {0, 1500}};
    OK(setitimer(ITIMER_REAL, &every, NULL));
    enum { WORDS = 1 << 16 };
    static uint64_t words[WORDS];
    fill(words, sizeof words, 1);
    uint64_t sent = 0, seen[8] = {0}, before = 0;
    int64_t since = now_ns();
    int dead = 0;
    for (uint64_t r = 2; running(); r++) {
        verify(words, sizeof words, r - 1, "memory");
        fill(words, sizeof words, r);
        nap_us(500);
        EQ(write(ends[1], &sent, 8), 8);
        sent++;
        OK(kill(getpid(), SIGUSR1));
        mask_is(0);
        int on = 0;
        OK(prctl(PR_GET_CHILD_SUBREAPER, &on));
        EQ(on, 1);
        int s;
        pid_t p = waitpid(-1, &s, WNOHANG | __WALL);
        if (p > 0) {
            // Its own child may be killed by the test, once; nobody else's.
            EQ(p, victim);
            CHECK(WIFSIGNALED(s) && WTERMSIG(s) == SIGKILL && !dead);
            dead = 1;
        } else if (p == -1) {
            CHECK(dead && errno == ECHILD);
        }
        // Every thread goes on, and alarms arrive.
        int moving = alarms != before;
        for (int i = 0; i < N; i++) moving &= turns[i] != seen[i];
        if (moving) {
            for (int i = 0; i < N; i++) seen[i] = turns[i];
            before = alarms;
            since = now_ns();
        } else if (now_ns() - since > 10000000000LL) {
            for (int i = 0; i < N; i++) CHECK(turns[i] != seen[i]);
            fail("no alarm arrives");
        }
    }
    over = 1;
    close(ends[1]);
    OK(kill(getpid(), SIGUSR1));
    for (int i = 0; i < N; i++) EQ(pthread_join(threads[i], NULL), 0);
    if (!dead) {
        OK(kill(victim, SIGKILL));
        int s;
        EQ(waitpid(victim, &s, 0), victim);
    }
    no_children();
    if (early) printf("epoll_wait returned early %llu times\n", (unsigned long long)early);
    return finish();
}
