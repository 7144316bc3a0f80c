// eventfd, signalfd, timerfd, pidfd, inotify, O_PATH, memfd, devices. fd_events KIND
#include "check.h"
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/statfs.h>
#include <sys/timerfd.h>
static void k_eventfd(void) {
    int a = (int)OK(eventfd(5, EFD_NONBLOCK)), s = (int)OK(eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC | EFD_NONBLOCK));
    uint64_t v = 0, want = 5;
    while (running()) {
        v = check_round;
        full_write(a, &v, 8);
        want += v;
        v = 3;
        full_write(s, &v, 8);
        nap_us(3000);
        full_read(a, &v, 8);
        EQ(v, want);
        want = 7;
        full_write(a, &want, 8);
        for (int i = 0; i < 3; i++) {
            full_read(s, &v, 8);
            EQ(v, 1);
        }
        EQ(read(s, &v, 8), -1);
        EQ(errno, EAGAIN);
    }
}
static void k_signalfd(void) {
    sigset_t m;
    sigemptyset(&m);
    sigaddset(&m, SIGUSR1);
    sigaddset(&m, SIGRTMIN + 2);
    sigprocmask(SIG_BLOCK, &m, NULL);
    int s = (int)OK(signalfd(-1, &m, SFD_NONBLOCK));
    struct signalfd_siginfo si;
    while (running()) {
        union sigval v = {.sival_int = (int)check_round};
        OK(sigqueue(getpid(), SIGRTMIN + 2, v));
        OK(kill(getpid(), SIGUSR1));
        nap_us(3000);
        EQ(read(s, &si, sizeof si), sizeof si);
        EQ(si.ssi_signo, SIGUSR1);
        EQ(si.ssi_pid, getpid());
        EQ(read(s, &si, sizeof si), sizeof si);
        EQ(si.ssi_signo, SIGRTMIN + 2);
        EQ(si.ssi_int, (int)check_round);
        EQ(read(s, &si, sizeof si), -1);
        EQ(errno, EAGAIN);
    }
}
static void k_timerfd(void) {
    int p = (int)OK(timerfd_create(CLOCK_MONOTONIC, 0)), far = (int)OK(timerfd_create(CLOCK_REALTIME, TFD_NONBLOCK)), off = (int)OK(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK));
    struct itimerspec it = {{0, 5000000}, {0, 5000000}}, f = {{11, 0}, {700, 0}}, now;
    OK(timerfd_settime(p, 0, &it, NULL));
    OK(timerfd_settime(far, 0, &f, NULL));
    // A clock that wakes the machine: for those who may.
    int alarm = timerfd_create(CLOCK_BOOTTIME_ALARM, TFD_NONBLOCK);
    if (alarm >= 0) OK(timerfd_settime(alarm, 0, &f, NULL));
    double left = 701;
    // One that nobody reads: all of its periods are told in the end, those too that had passed when it was set.
    int64_t begun = now_ns() - 100000000000LL, period = 10000000;
    if (begun < 1) begun = 1;
    int unread = (int)OK(timerfd_create(CLOCK_MONOTONIC, 0));
    struct itimerspec past = {{0, period}, {begun / 1000000000, begun % 1000000000}};
    OK(timerfd_settime(unread, TFD_TIMER_ABSTIME, &past, NULL));
    while (running()) {
        uint64_t v = 0;
        await(unread, POLLIN, "a timerfd that nobody reads");
        await(p, POLLIN, "timerfd");
        full_read(p, &v, 8);
        CHECK(v >= 1);
        OK(timerfd_gettime(p, &now));
        EQ(now.it_interval.tv_nsec, 5000000);
        OK(timerfd_gettime(far, &now));
        EQ(now.it_interval.tv_sec, 11);
        double l = (double)now.it_value.tv_sec + (double)now.it_value.tv_nsec / 1e9;
        if (l > left + 0.5 || l < 200) fail("a far timer has %f s left, had %f", l, left);
        left = l;
        if (alarm >= 0) {
            OK(timerfd_gettime(alarm, &now));
            if (now.it_interval.tv_sec != 11 || now.it_value.tv_sec < 200 || now.it_value.tv_sec > 700) fail("an alarm has %ld s left", (long)now.it_value.tv_sec);
        }
        OK(timerfd_gettime(off, &now));
        EQ(now.it_value.tv_sec | now.it_value.tv_nsec, 0);
        EQ(read(off, &v, 8), -1);
        EQ(errno, EAGAIN);
    }
    uint64_t told = 0, passed = (uint64_t)((now_ns() - begun) / period);
    full_read(unread, &told, 8);
    // While a restart makes it again, it stands still.
    if (told > passed + 2 || told + 1000 < passed) fail("a timer told %llu periods of %llu", (unsigned long long)told, (unsigned long long)passed);
    EQ(timerfd_gettime(unread, &now), 0);
    CHECK(now.it_value.tv_sec == 0 && now.it_value.tv_nsec <= period);
}
// Of two processes that have ended: pidfds of one have one inode, and tell how it ended, where the kernel tells.
struct gone { int first, second, status; };
static struct gone end_one(int status) {
    pid_t p = (pid_t)OK(fork());
    if (!p) {
        if (WIFSIGNALED(status)) kill(getpid(), status);
        _exit(WEXITSTATUS(status));
    }
    struct gone g = {(int)OK(syscall(SYS_pidfd_open, p, 0)), (int)OK(syscall(SYS_pidfd_open, p, O_NONBLOCK)), status};
    reap(p, status);
    return g;
}
static void check_gone(const struct gone *one, const struct gone *other) {
    struct stat a, b, c, again;
    // They are other inodes after a restart, which may come between two looks.
    do {
        OK(fstat(one->first, &a));
        OK(fstat(one->second, &b));
        OK(fstat(other->first, &c));
        OK(fstat(one->first, &again));
    } while (a.st_ino != again.st_ino);
    EQ(a.st_ino, b.st_ino);
    struct statfs fs;
    OK(fstatfs(one->first, &fs));
    if (fs.f_type == 0x50494446) CHECK(a.st_ino != c.st_ino);  // since Linux 6.9 they are files
    EQ(fcntl(one->first, F_GETFL) & O_NONBLOCK, 0);
    EQ(fcntl(one->second, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
    EQ(syscall(SYS_pidfd_send_signal, one->first, 0, NULL, 0), -1);
    EQ(errno, ESRCH);
    struct { uint64_t mask, cgroup; uint32_t ids[11]; int32_t status; } info = {.mask = 8 /* PIDFD_INFO_EXIT */};
    if (ioctl(one->second, _IOWR(0xff, 11, info), &info) == 0 && info.mask & 8) EQ(info.status, one->status);
}
static void k_pidfd(void) {
    struct gone gone[] = {end_one(SIGTERM), end_one(7 << 8)};
    pid_t c = fork();
    if (c == 0) for (;;) pause();
    int f = (int)OK(syscall(SYS_pidfd_open, c, 0)), self = (int)OK(syscall(SYS_pidfd_open, getpid(), 0));
    while (running()) {
        nap_us(2000);
        check_gone(&gone[0], &gone[1]);
        check_gone(&gone[1], &gone[0]);
        OK(syscall(SYS_pidfd_send_signal, f, 0, NULL, 0));
        struct pollfd p = {f, POLLIN, 0};
        EQ(poll(&p, 1, 0), 0);
        char path[64], b[512] = {0}, *at;
        snprintf(path, sizeof path, "/proc/self/fdinfo/%d", self);
        int i = (int)OK(open(path, O_RDONLY));
        CHECK(read(i, b, sizeof b - 1) > 0);
        close(i);
        CHECK((at = strstr(b, "Pid:")));
        EQ(atoi(at + 4), getpid());
        EQ(fcntl(f, F_GETFD), FD_CLOEXEC);
    }
    OK(syscall(SYS_pidfd_send_signal, f, SIGKILL, NULL, 0));
    struct pollfd p = {f, POLLIN, 0};
    EQ(poll(&p, 1, 10000), 1);
    siginfo_t si;
    OK(waitid(3 /* P_PIDFD */, (id_t)f, &si, WEXITED));
    EQ(si.si_status, SIGKILL);
}
// How many events come now: of a symbolic link, which is watched itself. One may be lost at a restart, and is told of then.
static int link_events(int in, int wd) {
    char b[4096];
    int seen = 0;
    for (ssize_t n; (n = read(in, b, sizeof b)) > 0;)
        for (ssize_t at = 0; at < n;) {
            struct inotify_event *e = (struct inotify_event *)(b + at);
            at += (ssize_t)(sizeof *e + e->len);
            if (!(e->mask & IN_Q_OVERFLOW)) EQ(e->wd, wd);
            seen += e->mask & IN_Q_OVERFLOW ? 100 : 1;
        }
    return seen;
}
static void k_inotify(void) {
    char dir[64], f[128];
    // Deep below what the program has open.
    for (int depth = 0; depth < 4; depth++) {
        snprintf(dir, sizeof dir, "watch.%d%.*s", getpid(), 2 * depth, "/a/b/c");
        OK(mkdir(dir, 0700));
    }
    snprintf(f, sizeof f, "%s/file", dir);
    int in = (int)OK(inotify_init1(IN_NONBLOCK));
    char target[64], name[64];
    snprintf(target, sizeof target, "target.%d", getpid());
    snprintf(name, sizeof name, "link.%d", getpid());
    close((int)OK(open(target, O_CREAT | O_WRONLY, 0600)));
    OK(symlink(target, name));
    int links = (int)OK(inotify_init1(IN_NONBLOCK)), link = (int)OK(inotify_add_watch(links, name, IN_ATTRIB | IN_DONT_FOLLOW));
    int gone = (int)OK(inotify_add_watch(in, ".", IN_DELETE_SELF));
    OK(inotify_rm_watch(in, gone));
    int wd = (int)OK(inotify_add_watch(in, dir, IN_CREATE | IN_DELETE | IN_CLOSE_WRITE));
    char b[4096];
    int lost = 0;
    CHECK(read(in, b, sizeof b) > 0);  // IN_IGNORED of the removed watch
    while (running()) {
        close((int)OK(open(f, O_CREAT | O_WRONLY, 0600)));
        nap_us(3000);  // events wait in the queue
        // After a restart it may be gone: no process had it open at the checkpoint, and it is as the crash left it.
        if (unlink(f)) EQ(errno, ENOENT);
        // Events that nobody has read yet are lost at a restart (docs/limits.md); what comes is right and in order, and
        // new ones come.
        uint32_t want[] = {IN_CREATE, IN_CLOSE_WRITE, IN_DELETE};
        int next = 0, seen = 0;
        for (ssize_t n; (n = read(in, b, sizeof b)) > 0;)
            for (ssize_t at = 0; at < n;) {
                struct inotify_event *e = (struct inotify_event *)(b + at);
                at += (ssize_t)(sizeof *e + e->len);
                // What was lost is told as the kernel tells it when a queue is full.
                if (e->mask & IN_Q_OVERFLOW) continue;
                EQ(e->wd, wd);
                CHECK(!strcmp(e->name, "file"));
                while (next < 3 && want[next] != e->mask) next++;
                if (next == 3) fail("event %x is out of order", e->mask);
                seen++;
            }
        EQ(errno, EAGAIN);
        if (seen < 3 && ++lost > 8) fail("events get lost: %d of 3 in this round", seen);
        OK(chmod(target, 0600));
        EQ(link_events(links, link) % 100, 0);
        OK(lchown(name, getuid(), getgid()));
        CHECK(link_events(links, link) > 0);
    }
    unlink(name);
    unlink(target);
    for (int depth = 3; depth >= 0; depth--) {
        snprintf(dir, sizeof dir, "watch.%d%.*s", getpid(), 2 * depth, "/a/b/c");
        rmdir(dir);
    }
}
static void k_opath(void) {
    char f[64];
    snprintf(f, sizeof f, "opath.%d", getpid());
    close((int)OK(open(f, O_CREAT | O_WRONLY, 0600)));
    int d = (int)OK(open(".", O_PATH | O_DIRECTORY)), p = (int)OK(open(f, O_PATH | O_CLOEXEC));
    char link[64], ln[64];
    snprintf(link, sizeof link, "link.%d", getpid());
    OK(symlink("nowhere", link));
    int s = (int)OK(open(link, O_PATH | O_NOFOLLOW));
    while (running()) {
        nap_us(2000);
        char b;
        EQ(read(p, &b, 1), -1);
        EQ(errno, EBADF);
        struct stat st;
        OK(fstat(p, &st));
        OK(fstatat(d, f, &st, 0));
        CHECK(fcntl(d, F_GETFL) & O_PATH);
        EQ(readlinkat(s, "", ln, sizeof ln), 7);
        CHECK(!memcmp(ln, "nowhere", 7));
        OK(fstat(s, &st));
        CHECK(S_ISLNK(st.st_mode));
    }
    unlink(f);
    unlink(link);
}
// What executing a file of memory fails with.
static int execute(int fd) {
    pid_t p = (pid_t)OK(fork());
    if (!p) {
        char *args[] = {"true", NULL}, *env[] = {NULL};
        syscall(SYS_execveat, fd, "", args, env, AT_EMPTY_PATH);
        _exit(errno);
    }
    int st;
    EQ(waitpid(p, &st, 0), p);
    CHECK(WIFEXITED(st));
    return WEXITSTATUS(st);
}
static void k_memfd(void) {
    int f = (int)OK(memfd_create("table", MFD_ALLOW_SEALING | MFD_CLOEXEC)), ro;
    static uint64_t blk[4096];
    fill(blk, sizeof blk, 4);
    full_write(f, blk, sizeof blk);
    OK(ftruncate(f, 10 << 20));
    OK(fcntl(f, F_ADD_SEALS, F_SEAL_GROW));
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", f);
    ro = (int)OK(open(path, O_RDONLY));
    // It can be executed as long as no second description writes it.
    int run = (int)OK(memfd_create("run", 0)), more = (int)OK(memfd_create("more", 0));
    full_write(run, "#!/bin/true", 11);
    OK(fcntl(run, F_SETFL, O_APPEND));
    OK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, run, 0) == MAP_FAILED ? -1 : 0);
    full_write(more, "#!/bin/true", 11);
    char again[64];
    snprintf(again, sizeof again, "/proc/self/fd/%d", more);
    OK(open(again, O_RDWR | O_CLOEXEC));
    int busy = execute(more);
    while (running()) {
        nap_us(2000);
        EQ(execute(run), 0);
        EQ(execute(more), busy);  // where the kernel forbids it at all
        EQ(fcntl(run, F_GETFL) & O_APPEND, O_APPEND);
        EQ(lseek(f, 0, SEEK_CUR), sizeof blk);
        EQ(pread(ro, blk, sizeof blk, 0), sizeof blk);
        verify(blk, sizeof blk, 4, "a memfd");
        struct stat st;
        OK(fstat(f, &st));
        EQ(st.st_size, 10 << 20);
        EQ(fcntl(f, F_GET_SEALS), F_SEAL_GROW);
        EQ(ftruncate(f, 11 << 20), -1);
        char l[64] = {0};
        CHECK(readlink(path, l, sizeof l) > 0 && strstr(l, "/memfd:table"));
        uint64_t v = check_round, g;
        EQ(pwrite(f, &v, 8, 5 << 20), 8);
        EQ(pread(ro, &g, 8, 5 << 20), 8);
        EQ(v, g);
        EQ(write(ro, &v, 8), -1);
    }
}
static void k_devices(void) {
    int nul = (int)OK(open("/dev/null", O_RDWR | O_APPEND)), zero = (int)OK(open("/dev/zero", O_RDONLY)), rnd = (int)OK(open("/dev/urandom", O_RDONLY | O_CLOEXEC)), full = (int)OK(open("/dev/full", O_WRONLY));
    int proc = (int)OK(open("/proc/self/stat", O_RDONLY)), dir = (int)OK(open("/proc/self/fd", O_RDONLY | O_DIRECTORY)), stat = (int)OK(open("/proc/stat", O_RDONLY));
    while (running()) {
        nap_us(2000);
        char b[1024] = {1};
        EQ(read(nul, b, 8), 0);
        EQ(read(zero, b, 8), 8);
        EQ(b[0], 0);
        EQ(read(rnd, b, 8), 8);
        EQ(write(full, b, 1), -1);
        EQ(errno, ENOSPC);
        CHECK(fcntl(nul, F_GETFL) & O_APPEND);
        OK(lseek(proc, 0, SEEK_SET));
        CHECK(read(proc, b, sizeof b) > 0);
        EQ(atoi(b), getpid());
        OK(lseek(stat, 0, SEEK_SET));
        CHECK(read(stat, b, sizeof b) > 0 && !memcmp(b, "cpu", 3));
        OK(lseek(dir, 0, SEEK_SET));
        CHECK(syscall(SYS_getdents64, dir, b, sizeof b) > 0);
    }
}
// Files in the /proc directory of a process that has ended, of a thread that has, and of a process outside the job,
// which is gone after a restart.
static void *thread_until(void *arg) {
    pid_t tid = gettid();
    full_write(((int *)arg)[0], &tid, sizeof tid);
    char c;
    full_read(((int *)arg)[1], &c, 1);
    return NULL;
}
static int open_in(const char *fmt, pid_t pid, int flags) {
    char path[64];
    snprintf(path, sizeof path, fmt, pid, pid);
    return (int)OK(open(path, flags));
}
static void k_ended(void) {
    int out[2], in[2];
    OK(pipe(out));
    OK(pipe(in));
    pid_t p = (pid_t)OK(fork()), tid;
    if (p == 0) {
        pause();
        _exit(0);
    }
    pthread_t t;
    int ends[2] = {out[1], in[0]};
    CHECK(!pthread_create(&t, NULL, thread_until, ends));
    full_read(out[0], &tid, sizeof tid);
    int dirs[] = {open_in("/proc/%d", p, O_RDONLY | O_DIRECTORY | O_CLOEXEC), open_in("/proc/%d/task/%d/fd", p, O_RDONLY | O_DIRECTORY),
                  open_in("/proc/self/task/%d", tid, O_RDONLY | O_DIRECTORY)};
    int files[] = {open_in("/proc/%d/stat", p, O_RDONLY), open_in("/proc/%d/task/%d/comm", p, O_RDWR), open_in("/proc/self/task/%d/stat", tid, O_RDONLY)};
    int outside = open_in("/proc/%d/stat", 1, O_RDONLY);
    char b[1024], gone[64];
    OK(kill(p, SIGKILL));
    EQ(waitpid(p, NULL, 0), p);
    full_write(in[1], "", 1);
    CHECK(!pthread_join(t, NULL));
    snprintf(gone, sizeof gone, "/proc/self/task/%d", tid);
    while (access(gone, F_OK) == 0) nap_us(100);
    while (running()) {
        nap_us(2000);
        for (int i = 0; i < 3; i++) {
            EQ(syscall(SYS_getdents64, dirs[i], b, sizeof b), -1);
            EQ(errno, ENOENT);
            EQ(read(files[i], b, sizeof b), -1);
            EQ(errno, ESRCH);
        }
        EQ(fcntl(dirs[0], F_GETFD), FD_CLOEXEC);
        EQ(fcntl(files[1], F_GETFL) & O_ACCMODE, O_RDWR);
        ssize_t n = pread(outside, b, sizeof b, 0);
        CHECK(n > 0 ? !memcmp(b, "1 (", 3) : errno == ESRCH);
    }
}
static size_t whole(char *to, size_t space) {
    int fd = (int)OK(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
    size_t n = 0;
    for (ssize_t r; (r = OK(read(fd, to + n, space - n))) > 0;) n += (size_t)r;
    CHECK(n < space);
    OK(close(fd));
    return n;
}
// A list that is read piece by piece goes on where it was, though another process opens it again.
static void k_list(void) {
    static char want[65536], got[65536];
    while (running()) {
        int fd = (int)OK(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
        size_t n = 0;
        for (ssize_t r; (r = OK(read(fd, got + n, sizeof got - n < 100 ? sizeof got - n : 100))) > 0; n += (size_t)r) nap_us(300);
        OK(close(fd));
        EQ(whole(want, sizeof want), n);
        if (memcmp(got, want, n)) fail("a list that was read in pieces differs:\n%.*s", (int)n, got);
    }
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "eventfd";
    char name[64];
    snprintf(name, sizeof name, "fd_%s", kind);
    begin(name);
    struct { const char *k; void (*f)(void); } t[] = {{"eventfd", k_eventfd}, {"signalfd", k_signalfd}, {"timerfd", k_timerfd}, {"pidfd", k_pidfd}, {"inotify", k_inotify}, {"opath", k_opath}, {"memfd", k_memfd}, {"devices", k_devices}, {"ended", k_ended}, {"list", k_list}};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        if (!strcmp(kind, t[i].k)) {
            t[i].f();
            return finish();
        }
    fail("unknown kind");
}
