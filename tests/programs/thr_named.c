// Threads that something leads to: files in their directories in /proc, pidfds, signal owners, working directories;
// also one with a descriptor table of its own, one that shares that, and from another process. Only a thread that
// exists can be opened.
#include "check.h"
#include <sys/syscall.h>
#ifndef PIDFD_THREAD
#define PIDFD_THREAD O_EXCL
#endif
enum { PLAIN, OWN, SHARES, THREADS };
static pid_t tids[THREADS];
static atomic_int ready, ending;
static _Atomic pid_t signalled;
static void on_io(int sig) {
    (void)sig;
    signalled = gettid();
}
static void stay(int i) {
    tids[i] = gettid();
    char name[16];
    snprintf(name, sizeof name, "named.%d", i);
    OK(prctl(PR_SET_NAME, name));
    ready++;
    while (!ending) usleep(300);
}
static void *shares(void *arg) {
    stay(SHARES);
    return arg;
}
static void *run(void *arg) {
    int i = (int)(intptr_t)arg;
    pthread_t other;
    if (i == OWN) {
        OK(unshare(CLONE_FILES));
        CHECK(!pthread_create(&other, NULL, shares, NULL));
    }
    stay(i);
    if (i == OWN) CHECK(!pthread_join(other, NULL));
    return NULL;
}
static int in_proc(const char *fmt, int i, int flags) {
    char path[64];
    snprintf(path, sizeof path, fmt, getpid(), tids[i]);
    return (int)OK(open(path, flags));
}
struct leads { int stat, comm, dir, bare, pidfd, pipe[2]; };
static struct leads open_all(int i) {
    struct leads l = {.stat = in_proc("/proc/%d/task/%d/stat", i, O_RDONLY), .comm = in_proc("/proc/%d/task/%d/comm", i, O_RDWR),
                      .dir = in_proc("/proc/%d/task/%d", i, O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", tids[i]);
    l.bare = (int)OK(open(path, O_RDONLY));
    l.pidfd = (int)syscall(SYS_pidfd_open, tids[i], PIDFD_THREAD);  // since Linux 6.9
    OK(pipe2(l.pipe, O_NONBLOCK));
    struct f_owner_ex who = {F_OWNER_TID, tids[i]};
    OK(fcntl(l.pipe[0], F_SETOWN_EX, &who));
    OK(fcntl(l.pipe[0], F_SETFL, O_NONBLOCK | O_ASYNC));
    return l;
}
static void is_of(int fd, int i, const char *after) {
    char b[64] = {0}, want[64];
    CHECK(pread(fd, b, sizeof b - 1, 0) > 0);
    snprintf(want, sizeof want, "%.*d%snamed.%d%s", *after ? 1 : 0, *after ? tids[i] : 0, *after ? " (" : "", i, after);
    if (strncmp(b, want, strlen(want))) fail("thread %d: %s, expected %s", i, b, want);
}
static void check(const struct leads *l, int i) {
    is_of(l->stat, i, ")");
    is_of(l->bare, i, ")");
    is_of(l->comm, i, "");
    struct stat st;
    OK(fstatat(l->dir, "fdinfo", &st, 0));
    if (l->pidfd >= 0) {
        OK(syscall(SYS_pidfd_send_signal, l->pidfd, 0, NULL, 0));
        struct pollfd p = {l->pidfd, POLLIN, 0};
        EQ(poll(&p, 1, 0), 0);
    }
    signalled = 0;
    char c = 1;
    full_write(l->pipe[1], &c, 1);
    for (int64_t t0 = now_ns(); !signalled;)
        if (now_ns() - t0 > 20000000000LL) fail("no signal says that the pipe of thread %d can be read", i);
    EQ(signalled, tids[i]);
    full_read(l->pipe[0], &c, 1);
}
// Another process, in the directory of one thread, with files of all.
static void beside(int end) {
    begin_child();
    for (char c; read(end, &c, 1) == 1;) {
        char path[64], want[64];
        CHECK(getcwd(path, sizeof path));
        snprintf(want, sizeof want, "/proc/%d/task/%d", getppid(), tids[OWN]);
        CHECK(!strcmp(path, want));
        int fd = (int)OK(open("comm", O_RDONLY));
        is_of(fd, OWN, "");
        OK(close(fd));
    }
    _exit(0);
}
int main(void) {
    begin("thr_named");
    CHECK(signal(SIGIO, on_io) != SIG_ERR);
    pthread_t t[OWN + 1];
    for (int i = 0; i <= OWN; i++) CHECK(!pthread_create(&t[i], NULL, run, (void *)(intptr_t)i));
    while (ready < THREADS) usleep(300);
    struct leads l[THREADS];
    for (int i = 0; i < THREADS; i++) l[i] = open_all(i);
    int end[2];
    OK(pipe2(end, O_CLOEXEC));
    pid_t p = (pid_t)OK(fork());
    if (!p) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/task/%d", getppid(), tids[OWN]);
        OK(chdir(path));
        OK(close(end[1]));
        beside(end[0]);
    }
    OK(close(end[0]));
    while (running()) {
        for (int i = 0; i < THREADS; i++) check(&l[i], i);
        full_write(end[1], "", 1);
        nap_us(1000);
    }
    OK(close(end[1]));
    reap(p, 0);
    ending = 1;
    for (int i = 0; i <= OWN; i++) CHECK(!pthread_join(t[i], NULL));
    return finish();
}
