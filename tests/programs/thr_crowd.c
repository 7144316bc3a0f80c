// More threads than one tracer is meant for, in motion: thr_crowd churn | exec | alone | gone
// churn: 100 threads sleep or compute while others are created and joined, and others again fork children and wait for them.
// exec: with such a crowd around it, a thread that is not the main thread executes the program anew, again and again.
// alone: the same without a crowd; gone: the main thread has exited then.
#include "check.h"
#define CROWD 100
#define MAKERS 4
#define PARENTS 2
// As nap_us, but by a number that the code in front of the instruction does not show, as in the C library since glibc 2.41.
static void nap(long us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000}, rem = {0, 0};
    if (syscall(SYS_nanosleep, &t, &rem)) fail("nanosleep: %s", strerror(errno));
}

static _Atomic int ending, up;
static _Atomic long made, born;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t end = PTHREAD_COND_INITIALIZER;

static void *member(void *arg) {
    uint64_t v = (uint64_t)arg, local[32];
    fill(local, sizeof local, v);
    pid_t t = gettid();
    up++;
    pthread_mutex_lock(&lock);
    while (!ending) {
        if (v % 10) pthread_cond_wait(&end, &lock);
        else {
            pthread_mutex_unlock(&lock);
            nap(3000);
            pthread_mutex_lock(&lock);
        }
    }
    pthread_mutex_unlock(&lock);
    verify(local, sizeof local, v, "a thread's stack");
    EQ(gettid(), t);
    return (void *)mix(v);
}
static void *brief(void *arg) { return (void *)mix((uint64_t)arg); }
static void *maker(void *arg) {
    for (uint64_t v = (uint64_t)arg; !ending; v += MAKERS) {
        pthread_t t;
        void *r;
        CHECK(pthread_create(&t, NULL, brief, (void *)v) == 0);
        CHECK(pthread_join(t, &r) == 0);
        EQ((uint64_t)r, mix(v));
        made++;
        nap(1000);
    }
    return NULL;
}
static void *parent(void *arg) {
    for (int i = (int)(long)arg; !ending; i++) {
        pid_t c = (pid_t)OK(fork());
        if (c == 0) _exit(i & 63);
        reap(c, (i & 63) << 8);
        born++;
        nap(2000);
    }
    return NULL;
}
// Executes the program anew from this thread; the process stays the one it was.
static void *again(void *arg) {
    char **argv = arg, number[24], pid[24];
    // Without a crowd it gets there sooner.
    long wait = (long)(now_ns() % 1000000) / 1000;
    nap(strcmp(argv[1], "exec") ? wait : 5000 + 20 * wait);
    const char *n = getenv("THR_CROWD_N");
    snprintf(number, sizeof number, "%ld", (n ? atol(n) : 0) + 1);
    snprintf(pid, sizeof pid, "%d", getpid());
    setenv("THR_CROWD_N", number, 1);
    setenv("THR_CROWD_PID", pid, 1);
    CHECK(gettid() != getpid());
    execv(argv[0], argv);
    fail("execv: %s", strerror(errno));
}
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "churn", *was = getenv("THR_CROWD_PID");
    char name[32];
    snprintf(name, sizeof name, "thr_crowd-%s", mode);
    begin(name);
    if (was) EQ(getpid(), atoi(was));
    EQ(gettid(), getpid());
    // The rounds go on where the program before has left off.
    if (was) check_round = strtoul(getenv("THR_CROWD_N"), NULL, 10);
    static pthread_t t[CROWD], m[MAKERS], p[PARENTS];
    const long crowd = strcmp(mode, "alone") && strcmp(mode, "gone") ? CROWD : 0;
    pthread_attr_t at;
    pthread_attr_init(&at);
    pthread_attr_setstacksize(&at, 65536);
    for (long i = 0; i < crowd; i++) CHECK(pthread_create(&t[i], &at, member, (void *)i) == 0);
    while (up < crowd) nap(500);
    if (strcmp(mode, "churn")) {
        if (running()) {
            pthread_t x;
            CHECK(pthread_create(&x, &at, again, argv) == 0);
            if (!strcmp(mode, "gone")) pthread_exit(NULL);
            pthread_join(x, NULL);
            fail("exec returned");
        }
    } else {
        for (long i = 0; i < MAKERS; i++) CHECK(pthread_create(&m[i], &at, maker, (void *)i) == 0);
        for (long i = 0; i < PARENTS; i++) CHECK(pthread_create(&p[i], &at, parent, (void *)i) == 0);
        // Left alone it may be told to end before any of them has run.
        while (running() || !made || !born) nap(2000);
    }
    pthread_mutex_lock(&lock);
    ending = 1;
    pthread_cond_broadcast(&end);
    pthread_mutex_unlock(&lock);
    for (long i = 0; i < crowd; i++) {
        void *r;
        CHECK(pthread_join(t[i], &r) == 0);
        EQ((uint64_t)r, mix((uint64_t)i));
    }
    if (!strcmp(mode, "churn")) {
        for (int i = 0; i < MAKERS; i++) CHECK(pthread_join(m[i], NULL) == 0);
        for (int i = 0; i < PARENTS; i++) CHECK(pthread_join(p[i], NULL) == 0);
        CHECK(made > 0 && born > 0);
    }
    no_children();
    return finish();
}
