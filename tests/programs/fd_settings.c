// What can be set of an open description and of its number, beside what other programs look at: flags of open, status
// flags, owner and signal, leases, seals, sizes of pipes, and what an instance of epoll, eventfd, signalfd, timerfd or
// pidfd has been told. Each is read back as text as long as the program runs: fcntl, ioctl, and what the kernel says in
// fdinfo (but for numbers of mounts and inodes, and remaining times). What this kernel or this user may not set is left
// out and named.
#include "check.h"
#include <linux/fs.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x20
#endif
enum { MOST = 96, TEXT = 1000, NOEXEC_SEAL = 8, EXEC = 16 };
// As linux/eventpoll.h has it.
struct busy { uint32_t us; uint16_t budget; uint8_t prefer, pad; };
#define SET_BUSY _IOW(0x8A, 1, struct busy)
#define GET_BUSY _IOR(0x8A, 2, struct busy)
static struct { const char *name; int fd; char want[TEXT]; } all[MOST];
static int n, missing;

static void add(const char *name, int fd) {
    if (fd < 0) {
        printf("not here: %s (%s)\n", name, strerror(errno));
        missing++;
        return;
    }
    CHECK(n < MOST);
    all[n].name = name;
    all[n++].fd = fd;
}
// A setting that is not to be had here takes its descriptor with it.
static void add_set(const char *name, int fd, int failed) {
    int e = errno;
    if (failed) close(fd);
    errno = e;
    add(name, failed ? -1 : fd);
}

static void line(char *t, const char *fmt, long v) {
    size_t at = strlen(t);
    snprintf(t + at, TEXT - at, fmt, v);
}
static int is_kept(const char *word) {
    static const char *const other[] = {"mnt_id:", "ino:", "it_value:", "eventfd-id:", "scm_fds:", "Pid:", "NSpid:"};
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        if (!strncmp(word, other[i], strlen(other[i]))) return 0;
    return 1;
}
// Of a lock its number in a list and its inode are the kernel's affair.
static const char *bare(char *word) {
    static const char *const kinds[] = {"FLOCK", "OFDLCK", "LEASE", "POSIX"};
    for (int i = 0; !strncmp(word, "lock:", 5) && i < 4; i++) {
        char *kind = strstr(word, kinds[i]), *end = kind ? strchr(kind, ':') : NULL;
        if (end) strcpy(end, "\n");
        if (kind) return kind;
    }
    return word;
}
static void describe(int fd, char *t) {
    t[0] = 0;
    line(t, "FD %lx ", fcntl(fd, F_GETFD));
    line(t, "FL %lx ", fcntl(fd, F_GETFL));
    struct f_owner_ex who = {-1, -1};
    fcntl(fd, F_GETOWN_EX, &who);
    line(t, "owner %ld", who.type);
    line(t, ":%ld ", who.pid);
    line(t, "signal %ld ", fcntl(fd, F_GETSIG));
    line(t, "lease %ld ", fcntl(fd, F_GETLEASE));
    line(t, "pipe %ld ", fcntl(fd, F_GETPIPE_SZ));
    line(t, "seals %lx ", fcntl(fd, F_GET_SEALS));
    struct stat st;
    if (!fstat(fd, &st)) line(t, "mode %lo\n", st.st_mode);
    struct busy busy;
    if (!ioctl(fd, GET_BUSY, &busy)) {
        line(t, "busy %ld", busy.us);
        line(t, " %ld", busy.budget);
        line(t, " %ld\n", busy.prefer);
    }
    char path[64], word[256];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
    FILE *f = fopen(path, "re");
    CHECK(f);
    while (fgets(word, sizeof word, f)) {
        size_t at = strlen(t);
        if (is_kept(word)) snprintf(t + at, TEXT - at, "%s", bare(word));
    }
    fclose(f);
}

static char own[64], leased[2][80];
static int file(int flags) { return open(own, flags, 0600); }
static void files(void) {
    static const struct { const char *name; int flags; } how[] = {
        {"O_RDONLY", O_RDONLY}, {"O_WRONLY|O_APPEND", O_WRONLY | O_APPEND}, {"O_RDWR|O_NONBLOCK", O_RDWR | O_NONBLOCK},
        {"O_DSYNC", O_RDWR | O_DSYNC}, {"O_SYNC|O_CLOEXEC", O_RDWR | O_SYNC | O_CLOEXEC}, {"O_DIRECT", O_RDWR | O_DIRECT},
        {"O_NOATIME", O_RDONLY | O_NOATIME}, {"O_NOFOLLOW", O_RDONLY | O_NOFOLLOW}, {"O_NOFOLLOW|O_NONBLOCK", O_RDWR | O_NOFOLLOW | O_NONBLOCK},
        {"O_PATH", O_PATH}, {"O_PATH|O_CLOEXEC", O_PATH | O_CLOEXEC},
    };
    snprintf(own, sizeof own, "settings.%d", getpid());
    close((int)OK(open(own, O_CREAT | O_EXCL | O_RDWR, 0640)));
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) add(how[i].name, (int)OK(file(how[i].flags)));
    add("O_DIRECTORY", (int)OK(open(".", O_RDONLY | O_DIRECTORY)));
    add("O_DIRECTORY|O_NOFOLLOW", (int)OK(open(".", O_RDONLY | O_DIRECTORY | O_NOFOLLOW)));
    // Of these one has bytes, one can only be written and appends.
    int t = (int)OK(open(".", O_TMPFILE | O_RDWR | O_DSYNC, 0604));
    full_write(t, "nameless", 8);
    add("O_TMPFILE", t);
    t = (int)OK(open(".", O_TMPFILE | O_WRONLY | O_APPEND | O_EXCL | O_NOATIME, 0604));
    full_write(t, "more", 4);
    add("O_TMPFILE|O_WRONLY|O_APPEND", t);
    char again[64];
    snprintf(again, sizeof again, "/proc/self/fd/%d", t);
    add("a file of O_TMPFILE opened again", (int)OK(open(again, O_RDONLY)));
    // Leases need a file that nobody else has open.
    for (int i = 0; i < 2; i++) {
        snprintf(leased[i], sizeof leased[i], "%s.lease%d", own, i);
        int h = (int)OK(open(leased[i], O_CREAT | (i ? O_RDWR : O_RDONLY), 0600));
        OK(fcntl(h, F_SETLEASE, i ? F_WRLCK : F_RDLCK));
        add(i ? "F_SETLEASE F_WRLCK" : "F_SETLEASE F_RDLCK", h);
    }
    t = file(O_RDWR);
    OK(flock(t, LOCK_SH));
    add("LOCK_SH", t);
    t = file(O_RDWR);
    struct flock part = {.l_type = F_WRLCK, .l_start = 10, .l_len = 5};
    OK(fcntl(t, F_OFD_SETLK, &part));
    add("F_OFD_SETLK", t);
}
static void owners(void) {
    static const struct { const char *name; int type; } how[] = {
        {"F_OWNER_TID", F_OWNER_TID}, {"F_OWNER_PID", F_OWNER_PID}, {"F_OWNER_PGRP", F_OWNER_PGRP}};
    int p[2], s[2];
    for (int i = 0; i < 3; i++) {
        struct f_owner_ex who = {how[i].type, i == 2 ? getpgrp() : getpid()};
        OK(pipe(p));
        OK(fcntl(p[0], F_SETOWN_EX, &who));
        OK(fcntl(p[0], F_SETSIG, SIGRTMIN + i));
        OK(fcntl(p[0], F_SETFL, O_ASYNC | (i ? O_NONBLOCK : 0)));
        add(how[i].name, p[0]);
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
        OK(fcntl(s[0], F_SETOWN_EX, &who));
        OK(ioctl(s[0], FIOASYNC, &(int){1}));
        OK(ioctl(s[0], FIOCLEX));
        add("FIOASYNC, FIOCLEX", s[0]);
        OK(fcntl(s[1], F_SETOWN, -getpgrp()));
        OK(fcntl(s[1], F_SETFD, FD_CLOEXEC));
        OK(ioctl(s[1], FIONCLEX));
        add("F_SETOWN, FIONCLEX", s[1]);
    }
    OK(pipe2(p, O_DIRECT | O_NONBLOCK));
    EQ(fcntl(p[0], F_SETPIPE_SZ, 8192), 8192);
    add("F_SETPIPE_SZ", p[0]);
    add("O_DIRECT of a pipe", p[1]);
}
static void memory_files(void) {
    static const struct { const char *name; int seal; } seals[] = {
        {"F_SEAL_SEAL", F_SEAL_SEAL}, {"F_SEAL_SHRINK", F_SEAL_SHRINK}, {"F_SEAL_GROW", F_SEAL_GROW}, {"F_SEAL_WRITE", F_SEAL_WRITE},
        {"F_SEAL_FUTURE_WRITE", F_SEAL_FUTURE_WRITE}, {"F_SEAL_EXEC", F_SEAL_EXEC}};
    for (int i = 0; i < 6; i++) {
        int m = (int)OK(memfd_create(seals[i].name, MFD_ALLOW_SEALING));
        OK(ftruncate(m, 8192));
        EQ(pwrite(m, "sealed", 6, 4096), 6);
        add_set(seals[i].name, m, fcntl(m, F_ADD_SEALS, seals[i].seal));
    }
    add("MFD_NOEXEC_SEAL", memfd_create("not executable", NOEXEC_SEAL | MFD_CLOEXEC));
    add("MFD_EXEC", memfd_create("executable", EXEC | MFD_ALLOW_SEALING));
    int m = (int)OK(memfd_create("mode", 0));
    OK(fchmod(m, 0421));
    add("mode of a memfd", m);
}
static void timers(void) {
    // The third is a clock that tells its time where the machine has none that wakes it.
    static const struct { const char *name; int clock, told; } clocks[] = {
        {"timerfd of CLOCK_REALTIME", CLOCK_REALTIME, CLOCK_REALTIME}, {"timerfd of CLOCK_MONOTONIC", CLOCK_MONOTONIC, CLOCK_MONOTONIC},
        {"timerfd of CLOCK_BOOTTIME", CLOCK_BOOTTIME, CLOCK_BOOTTIME}, {"timerfd of CLOCK_REALTIME_ALARM", CLOCK_REALTIME_ALARM, CLOCK_REALTIME},
        {"timerfd of CLOCK_BOOTTIME_ALARM", CLOCK_BOOTTIME_ALARM, CLOCK_BOOTTIME}};
    for (int i = 0; i < 10; i++) {
        int c = i % 5, absolute = i >= 5, t = timerfd_create(clocks[c].clock, TFD_NONBLOCK | (i % 2 ? TFD_CLOEXEC : 0));
        struct timespec now = {0};
        if (absolute) OK(clock_gettime(clocks[c].told, &now));
        struct itimerspec when = {{7, i}, {now.tv_sec + 9999, 0}};
        add_set(clocks[c].name, t, t < 0 || timerfd_settime(t, absolute ? TFD_TIMER_ABSTIME : 0, &when, NULL));
    }
    int t = (int)OK(timerfd_create(CLOCK_REALTIME, 0));
    struct itimerspec far = {.it_value.tv_sec = time(NULL) + 9999};
    OK(timerfd_settime(t, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &far, NULL));
    add("TFD_TIMER_CANCEL_ON_SET", t);
    t = (int)OK(timerfd_create(CLOCK_MONOTONIC, 0));
    uint64_t ticks = 5;
    add_set("TFD_IOC_SET_TICKS", t, ioctl(t, _IOW('T', 0, uint64_t), &ticks));
}
static void instances(void) {
    add("EFD_SEMAPHORE", (int)OK(eventfd(3, EFD_SEMAPHORE | EFD_NONBLOCK | EFD_CLOEXEC)));
    struct busy busy = {77, 33, 1, 0};
    int e = (int)OK(epoll_create1(EPOLL_CLOEXEC));
    add_set("EPIOCSPARAMS", e, ioctl(e, SET_BUSY, &busy));
    sigset_t m;
    sigemptyset(&m);
    for (int s = 1; s < 60; s += 5) sigaddset(&m, s);
    add("SFD_NONBLOCK|SFD_CLOEXEC", (int)OK(signalfd(-1, &m, SFD_NONBLOCK | SFD_CLOEXEC)));
    add("PIDFD_NONBLOCK", (int)OK(syscall(SYS_pidfd_open, getpid(), O_NONBLOCK)));
    add("PIDFD_THREAD", (int)syscall(SYS_pidfd_open, getpid(), O_EXCL));
}

int main(void) {
    begin("fd_settings");
    // Signals of owners and leases do not end it, and go to nobody else.
    OK(setpgid(0, 0));
    for (int i = 0; i < 4; i++) signal(SIGRTMIN + i, SIG_IGN);
    signal(SIGIO, SIG_IGN);
    files();
    owners();
    memory_files();
    timers();
    instances();
    CHECK(n > 50 && missing < 8);
    for (int i = 0; i < n; i++) describe(all[i].fd, all[i].want);
    while (running()) {
        nap_us(3000);
        char now[TEXT], what[1800] = "";
        for (int i = 0; i < n; i++) {
            // A restart between two reads of fdinfo shifts its text.
            for (int again = 0; again < 2; again++) {
                describe(all[i].fd, now);
                if (!strcmp(now, all[i].want)) break;
            }
            size_t at = strlen(what);
            if (strcmp(now, all[i].want)) snprintf(what + at, sizeof what - at, "%s is\n%s\nwas\n%s\n", all[i].name, now, all[i].want);
        }
        if (what[0]) fail("%s", what);
    }
    OK(unlink(own));
    for (int i = 0; i < 2; i++) OK(unlink(leased[i]));
    return finish();
}
