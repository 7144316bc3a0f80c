// Shared by every test program: rounds, heartbeat, verdict.
//
// A program calls begin(), works while running() is true, and ends with finish(). running() returns 0 once the file named by
// BELAY_TEST_GO exists; each few milliseconds it writes the round number to BELAY_TEST_BEAT (fixed width, so that the file's
// length never changes). It also checks in every round that the process is still the one it was.
#ifndef CHECK_H
#define CHECK_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CHECK_CAP_S (getenv("BELAY_TEST_LONG") ? 100000 : 240)

static char check_name[256], check_go[PATH_MAX], check_beat[PATH_MAX];
static pid_t check_pid, check_ppid;
static unsigned long check_round;
static int64_t check_t0, check_last;
static int check_quiet_parent, check_over;

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *fmt, ...) {
    int e = errno;
    char b[2048];
    va_list ap;
    va_start(ap, fmt);
    int n = snprintf(b, sizeof b, "FAIL %s: ", check_name);
    n += vsnprintf(b + n, sizeof b - (size_t)n - 64, fmt, ap);
    va_end(ap);
    n += snprintf(b + n, sizeof b - (size_t)n, " (round %lu, pid %d, errno %d)\n", check_round, getpid(), e);
    if (write(1, b, (size_t)n) < 0) _exit(3);
    _exit(1);
}
#define STR2(x) #x
#define STR(x) STR2(x)
// CHECK(condition): the program's own state. Prints the condition and the line.
#define CHECK(c) do { if (!(c)) fail("line " STR(__LINE__) ": not true: %s", #c); } while (0)
// EQ(a, b): two integers that must be equal; both are printed.
#define EQ(a, b) do { long long a_ = (long long)(a), b_ = (long long)(b); \
    if (a_ != b_) fail("line " STR(__LINE__) ": %s is %lld, expected %s = %lld", #a, a_, #b, b_); } while (0)
// OK(call): a system call that must not return -1.
#define OK(c) __extension__({ long long r_ = (long long)(c); if (r_ == -1) fail("line " STR(__LINE__) ": %s: %s", #c, strerror(errno)); r_; })

// A new identity for a forked child (and its descendants).
static void begin_child(void) {
    check_pid = getpid();
    check_ppid = getppid();
    check_beat[0] = 0;
}

static void begin(const char *name) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    snprintf(check_name, sizeof check_name, "%s", name);
    const char *go = getenv("BELAY_TEST_GO"), *beat = getenv("BELAY_TEST_BEAT");
    snprintf(check_go, sizeof check_go, "%s", go ? go : "");
    check_pid = getpid();
    check_ppid = getppid();
    check_quiet_parent = getenv("BELAY_TEST_QUIET_PARENT") != NULL;
    snprintf(check_beat, sizeof check_beat, "%s", beat ? beat : "");
    check_t0 = now_ns();
}

static void beat(void) {
    if (!check_beat[0]) return;
    char b[24];
    snprintf(b, sizeof b, "%019lu\n", check_round);
    int fd = open(check_beat, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) fail("open heartbeat %s: %s", check_beat, strerror(errno));
    if (pwrite(fd, b, 20, 0) != 20) fail("write heartbeat: %s", strerror(errno));
    if (close(fd)) fail("close heartbeat: %s", strerror(errno));
}

// Has the harness asked the program to end?
static int told_to_end(void) { return check_go[0] ? access(check_go, F_OK) == 0 : now_ns() - check_t0 > 500000000LL; }

static void check_identity(void) {
    EQ(getpid(), check_pid);
    if (!check_quiet_parent) EQ(getppid(), check_ppid);
}

static int running(void) {
    int64_t t = now_ns();
    if (check_over) return 0;
    check_round++;
    check_identity();
    if (t < check_last) fail("the monotonic clock went back");
    if (t - check_last < 4000000 && check_round > 1) return 1;
    check_last = t;
    if (t - check_t0 > CHECK_CAP_S * 1000000000LL) fail("nobody asked the program to end within %d s", CHECK_CAP_S);
    beat();
    check_over = told_to_end();
    return !check_over;
}

// Sleeps; an interrupted sleep is a failure.
static inline void nap_us(long us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000}, rem = {0, 0};
    int r = nanosleep(&t, &rem);
    if (r) fail("nanosleep returned %d: %s", r, strerror(errno));
}

static int finish(void) {
    check_round++;
    beat();
    printf("PASS %s\n", check_name);
    fflush(stdout);
    return 0;
}

// A reproducible pattern: word i of block `seed`.
static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
__attribute__((noinline, unused)) static void fill(void *p, size_t len, uint64_t seed) {
    uint64_t *w = p;
    for (size_t i = 0; i < len / 8; i++) w[i] = mix(seed * 1000003 + i);
}
__attribute__((noinline, unused)) static void verify(const void *p, size_t len, uint64_t seed, const char *what) {
    const uint64_t *w = p;
    for (size_t i = 0; i < len / 8; i++)
        if (w[i] != mix(seed * 1000003 + i)) fail("%s: word %zu of pattern %llu is damaged: %llx", what, i, (unsigned long long)seed, (unsigned long long)w[i]);
}

// The number behind `key:` in a file of the kernel's, which counts in KiB; -1 where it is not there.
static inline long told_kib(const char *path, const char *key) {
    FILE *f = fopen(path, "r");
    CHECK(f);
    char line[256];
    long kib = -1;
    size_t n = strlen(key);
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && line[n] == ':') kib = atol(line + n + 1);
    fclose(f);
    return kib;
}

static inline void no_children(void) {
    int st;
    pid_t r = waitpid(-1, &st, WNOHANG | __WALL);
    if (r != -1 || errno != ECHILD) fail("an unexpected child: waitpid returned %d, status %x", (int)r, r > 0 ? st : 0);
}
// Waits for exactly this child with exactly this raw status.
static inline void reap(pid_t pid, int want) {
    int st = -1;
    pid_t r = waitpid(pid, &st, 0);
    if (r != pid) fail("waitpid(%d) returned %d: %s", pid, (int)r, strerror(errno));
    if (st != want) fail("child %d has status %x, expected %x", pid, st, want);
}
static inline void full_write(int fd, const void *p, size_t n) {
    for (size_t d = 0; d < n;) {
        ssize_t r = write(fd, (const char *)p + d, n - d);
        if (r <= 0) fail("write to descriptor %d returned %zd: %s", fd, r, strerror(errno));
        d += (size_t)r;
    }
}
static inline void full_read(int fd, void *p, size_t n) {
    for (size_t d = 0; d < n;) {
        ssize_t r = read(fd, (char *)p + d, n - d);
        if (r <= 0) fail("read from descriptor %d returned %zd: %s", fd, r, strerror(errno));
        d += (size_t)r;
    }
}
// Readable within ten seconds, or fail as a lost event.
static inline void await(int fd, short ev, const char *what) {
    struct pollfd p = {fd, ev, 0};
    int r = poll(&p, 1, 10000);
    if (r != 1) fail("%s: poll returned %d: %s", what, r, r < 0 ? strerror(errno) : "lost wakeup");
}
// Binds socket `s` to a file. One of that name can be there that a killed job has left, also since it was last removed:
// the job may have been killed and restarted right before this.
static inline void bind_anew(int s, const struct sockaddr_un *at) {
    do {
        unlink(at->sun_path);
    } while (bind(s, (const struct sockaddr *)at, sizeof *at) == -1 && errno == EADDRINUSE);
    struct sockaddr_un now = {0};
    socklen_t l = sizeof now;
    OK(getsockname(s, (struct sockaddr *)&now, &l));
    CHECK(!strcmp(now.sun_path, at->sun_path));
}

#endif
