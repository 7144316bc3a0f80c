// flock, POSIX and OFD locks: held by this process, seen by another, ranges and types kept, not lost and not added.
// POSIX and OFD locks also on what is no regular file.
#include "check.h"
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
static void lk(int fd, int cmd, short type, off_t a, off_t n) {
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = a, .l_len = n};
    OK(fcntl(fd, cmd, &l));
}
static void probe(int fd, off_t at, short want, pid_t who, off_t start, off_t len) {
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    OK(fcntl(fd, F_GETLK, &l));
    if (l.l_type != want) fail("lock at %ld has type %d, expected %d", (long)at, l.l_type, want);
    if (want == F_UNLCK) return;
    if (l.l_pid != who || l.l_start != start || l.l_len != len) fail("lock at %ld: pid %d start %ld len %ld, expected %d %ld %ld", (long)at, l.l_pid, (long)l.l_start, (long)l.l_len, who, (long)start, (long)len);
}
// One of each kind. Some of them all programs share: each locks its own bytes.
enum { KINDS = 7 };
static int kinds[KINDS];
static off_t own_bytes;
static void other_kinds(void) {
    char fifo[64];
    int pair[2], ends[2];
    snprintf(fifo, sizeof fifo, "lockfifo.%d", getpid());
    OK(mkfifo(fifo, 0600));
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    OK(pipe(ends));
    int all[KINDS] = {(int)OK(open(".", O_RDONLY | O_DIRECTORY)), (int)OK(open(fifo, O_RDWR)), pair[0], ends[1], (int)OK(open("/dev/null", O_RDWR)), (int)OK(eventfd(0, 0)), (int)OK(syscall(SYS_pidfd_open, getpid(), 0))};
    OK(unlink(fifo));
    own_bytes = 4096 * (off_t)getpid();
    for (int i = 0; i < KINDS; i++) {
        lk(kinds[i] = all[i], F_SETLK, i ? F_WRLCK : F_RDLCK, own_bytes, 10);
        lk(all[i], F_OFD_SETLK, i ? F_WRLCK : F_RDLCK, own_bytes + 20, 10);
    }
}
static void probe_kinds(pid_t owner) {
    for (int i = 0; i < KINDS; i++) {
        probe(kinds[i], own_bytes + 5, i ? F_WRLCK : F_RDLCK, owner, own_bytes, 10);
        probe(kinds[i], own_bytes + 15, F_UNLCK, 0, 0, 0);
        struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = own_bytes + 20, .l_len = 10};
        OK(fcntl(kinds[i], F_GETLK, &l));
        EQ(l.l_type, i ? F_WRLCK : F_RDLCK);
        EQ(l.l_pid, -1);
    }
}
// The process that the kernel shows with the lock of `flock` on descriptor `fd` of process `pid`.
static int shown(pid_t pid, int fd) {
    char name[64], line[256];
    snprintf(name, sizeof name, "/proc/%d/fdinfo/%d", pid, fd);
    FILE *f = fopen(name, "r");
    CHECK(f);
    int who = -1, one;
    while (fgets(line, sizeof line, f)) if (sscanf(line, "lock: %*d: FLOCK %*s %*s %d", &one) == 1) who = one;
    fclose(f);
    return who;
}
int main(void) {
    begin("fd_locks");
    char path[64];
    snprintf(path, sizeof path, "lock.%d", getpid());
    int f = (int)OK(open(path, O_RDWR | O_CREAT, 0600)), o = (int)OK(open(path, O_RDWR)), fl = (int)OK(open(path, O_RDWR));
    lk(f, F_SETLK, F_WRLCK, 100, 50);
    lk(f, F_SETLK, F_RDLCK, 300, 0);
    lk(o, F_OFD_SETLK, F_WRLCK, 200, 10);
    OK(flock(fl, LOCK_SH));
    other_kinds();
    int p[2], q[2];
    OK(pipe(p));
    OK(pipe(q));
    // A description that both have, and the child has locked.
    int kids = (int)OK(open("/tmp", O_RDWR | O_TMPFILE, 0600));
    pid_t owner = getpid(), k = fork();
    if (k == 0) {
        begin_child();
        OK(flock(kids, LOCK_EX));
        full_write(q[1], "l", 1);
        close(p[1]);
        char m;
        int mine = (int)OK(open(path, O_RDWR));
        while (read(p[0], &m, 1) == 1) {
            probe_kinds(owner);
            probe(mine, 99, F_UNLCK, 0, 0, 0);
            probe(mine, 100, F_WRLCK, owner, 100, 50);
            probe(mine, 149, F_WRLCK, owner, 100, 50);
            probe(mine, 150, F_UNLCK, 0, 0, 0);
            probe(mine, 205, F_WRLCK, -1, 200, 10);
            probe(mine, 5000, F_RDLCK, owner, 300, 0);
            EQ(flock(mine, LOCK_EX | LOCK_NB), -1);
            EQ(errno, EWOULDBLOCK);
            OK(flock(mine, LOCK_SH | LOCK_NB));
            OK(flock(mine, LOCK_UN));
            full_write(q[1], "k", 1);
        }
        _exit(0);
    }
    close(p[0]);
    close(q[1]);
    char b;
    full_read(q[0], &b, 1);
    while (running()) {
        nap_us(2000);
        full_write(p[1], "x", 1);
        full_read(q[0], &b, 1);
        EQ(shown(owner, fl), owner);
        EQ(shown(owner, kids), k);
    }
    close(p[1]);
    reap(k, 0);
    unlink(path);
    return finish();
}
