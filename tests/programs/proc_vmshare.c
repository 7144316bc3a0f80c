// Processes that share their memory (CLONE_VM without CLONE_THREAD): with own descriptors and signal handlers ("own"),
// with nothing of their own but the number ("all"), below each other with threads ("deep"), and beside the first
// ("sibling"). All but the first use raw system calls only: libc's state is the first one's.
#include "check.h"
#include <asm/prctl.h>
#include <linux/futex.h>
#define STACK 262144
#define SAME 200
struct member { uint64_t self; int index; _Atomic uint64_t done; char *_Atomic given; pid_t pid, tid, ppid; _Atomic int hits; char *stack; };
struct outside { _Atomic int ending; _Atomic uint64_t rounds; pid_t sibling; };
static struct member m[4];
static int members, shared_files, shared_handlers, tables[4], sibling;
static _Atomic int turn, ending, line, passed_fd[4];
static struct outside *s;
static int parent;   // mode "own": member 1 has a child with memory of its own
static pid_t plain;
static long raw(long nr, long a, long b, long c, long d) {
    long r;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = 0;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return r;
}
// Tells the first where it went wrong.
#define RAW(c) do { if (!(c)) { line = __LINE__; raw(SYS_exit_group, 99, 0, 0, 0); } } while (0)
static void count_first(int sig) { (void)sig; m[0].hits++; }
__attribute__((optimize("no-stack-protector"))) static void count_guest(int sig) {
    (void)sig;
    pid_t tid = (pid_t)raw(SYS_gettid, 0, 0, 0, 0);
    for (int i = 1; i < members; i++)
        if (m[i].tid == tid) m[i].hits++;
}
static int guest(void *arg);
static void make(int index, int flags) {
    struct member *x = &m[index];
    x->index = index;
    x->self = (uint64_t)x;
    clone(guest, x->stack + STACK, CLONE_VM | flags, x);
}
__attribute__((noinline, optimize("no-stack-protector"))) static int guest(void *arg) {
    struct member *x = arg;
    raw(SYS_arch_prctl, ARCH_SET_FS, (long)x, 0, 0);
    x->tid = (pid_t)raw(SYS_gettid, 0, 0, 0, 0);
    x->pid = (pid_t)raw(SYS_getpid, 0, 0, 0, 0);
    x->ppid = (pid_t)raw(SYS_getppid, 0, 0, 0, 0);
    if (tables[x->index] == x->index) {  // its own table
        if (x->index == 3) RAW(raw(SYS_unshare, CLONE_FILES, 0, 0, 0) == 0);
        long fd = raw(SYS_memfd_create, (long)"own", 0, 0, 0);
        RAW(fd >= 0 && raw(SYS_ftruncate, fd, 4096 * (x->index + 1), 0, 0) == 0);
        RAW(raw(SYS_dup2, fd, SAME, 0, 0) == SAME && raw(SYS_close, fd, 0, 0, 0) == 0);
    }
    if (x->index == 1 && members == 2 && !shared_files && !sibling) RAW(raw(SYS_setsid, 0, 0, 0, 0) == x->pid);
    if (x->index == 1 && members == 4) make(2, CLONE_FILES | CLONE_SIGHAND);
    if (parent) {
        long p = raw(SYS_fork, 0, 0, 0, 0);
        RAW(p >= 0);
        while (p == 0) {  // it has a copy of its parent's thread pointer, and of the memory
            struct timespec t = {0, 5000000};
            if (raw(SYS_getppid, 0, 0, 0, 0) != x->pid || raw(SYS_nanosleep, (long)&t, 0, 0, 0) || turn != 1) raw(SYS_exit_group, 98, 0, 0, 0);
        }
        plain = (pid_t)p;
    }
    if (x->index == 2) make(3, CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM);
    x->done = 1;
    for (int seen = 1; !ending;) {
        raw(SYS_futex, (long)&turn, FUTEX_WAIT_PRIVATE, seen, 0);
        int now = turn;
        if (now == seen || ending) continue;
        uint64_t fs;
        __asm__ volatile("movq %%fs:0,%0" : "=r"(fs));
        RAW(fs == (uint64_t)x && raw(SYS_gettid, 0, 0, 0, 0) == x->tid && raw(SYS_getpid, 0, 0, 0, 0) == x->pid && raw(SYS_getppid, 0, 0, 0, 0) == x->ppid);
        RAW(raw(SYS_lseek, SAME, 0, SEEK_END, 0) == 4096 * (tables[x->index] + 1));
        if (parent) RAW(raw(SYS_wait4, plain, 0, WNOHANG, 0) == 0);
        // Memory is everybody's: what one maps another unmaps.
        char *p = (char *)raw(SYS_mmap, 0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        RAW((long)p > 0);
        for (int i = 0; i < 1024; i++) ((uint64_t *)p)[i] = (uint64_t)now * 1000003 + (uint64_t)i;
        if (shared_files) {
            RAW(passed_fd[x->index] >= 0);
            char b = (char)now;
            RAW(raw(SYS_write, passed_fd[x->index], (long)&b, 1, 0) == 1 && raw(SYS_close, passed_fd[x->index], 0, 0, 0) == 0);
        }
        x->given = p;
        x->done = (uint64_t)now;
        seen = now;
    }
    if (parent) {
        int st = 0;
        RAW(raw(SYS_kill, plain, SIGKILL, 0, 0) == 0 && raw(SYS_wait4, plain, (long)&st, 0, 0) == plain && st == SIGKILL);
    }
    raw(x->index == 3 ? SYS_exit : SYS_exit_group, 7, 0, 0, 0);
    return 0;
}
static void await_round(int i, uint64_t want) {
    int64_t t0 = now_ns();
    while (m[i].done != want) {
        if (line) fail("member %d failed in line %d", i, line);
        if (now_ns() - t0 > 90000000000LL) fail("member %d does not answer", i);
        nap_us(300);
    }
}
static void set_handler(int sig, void (*h)(int)) {
    struct sigaction a = {.sa_handler = h, .sa_flags = SA_RESTART};
    OK(sigaction(sig, &a, NULL));
}
static void start(int flags) {
    for (int i = 1; i < members; i++) {
        m[i].stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(m[i].stack != MAP_FAILED);
    }
    int fd = (int)OK(memfd_create("first", 0));
    OK(ftruncate(fd, 4096));
    OK(dup2(fd, SAME));
    close(fd);
    set_handler(SIGUSR1, count_guest);
    turn = 1;
    make(1, flags);
    for (int i = 1; i < members; i++) await_round(i, 1);
    if (!shared_handlers) set_handler(SIGUSR1, count_first);
}
static void one_round(void) {
    int pipes[4], hits[4];
    for (int i = 1; i < members && shared_files; i++) {
        int p[2];
        OK(pipe(p));
        pipes[i] = p[0];
        passed_fd[i] = p[1];
    }
    for (int i = 1; i < members; i++) hits[i] = m[i].hits;
    int now = turn + 1;
    turn = now;
    syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, 64, NULL, NULL, 0);
    for (int i = 1; i < members; i++) {
        await_round(i, (uint64_t)now);
        char *p = m[i].given;
        for (int k = 0; k < 1024; k++) EQ(((uint64_t *)p)[k], (uint64_t)now * 1000003 + (uint64_t)k);
        OK(munmap(p, 8192));
        if (shared_files) {  // closed by the other, so this was the last writer
            char b[2];
            EQ(read(pipes[i], b, 2), 1);
            EQ(b[0], (char)now);
            EQ(read(pipes[i], b, 2), 0);
            close(pipes[i]);
        }
    }
    struct stat st;
    OK(fstat(SAME, &st));
    EQ(st.st_size, 4096 * (tables[0] + 1));
    if (now % 8 == 0) {
        for (int i = 1; i < members; i++) OK(syscall(SYS_tgkill, m[i].pid, m[i].tid, SIGUSR1));
        int own = m[0].hits;
        OK(kill(getpid(), SIGUSR1));
        EQ(m[0].hits, own + !shared_handlers);
        int64_t t0 = now_ns();
        for (int i = 1; i < members; i++)
            while (m[i].hits != hits[i] + 1) {
                if (now_ns() - t0 > 90000000000LL) fail("member %d has had %d signals, expected %d", i, m[i].hits, hits[i] + 1);
                nap_us(300);
            }
    }
    if (members == 2 && !shared_files && !sibling) EQ(getsid(m[1].pid), m[1].pid);
}
// A round at the low end of the stack, which nobody may write to.
__attribute__((noinline)) static void low_round(int depth) {
    uint64_t here[512];
    fill(here, sizeof here, (uint64_t)depth);
    if (depth > 0) low_round(depth - 1);
    else one_round();
    verify(here, sizeof here, (uint64_t)depth, "stack");
}
static void stop(void) {
    ending = 1;
    turn++;
    syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, 64, NULL, NULL, 0);
}
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "own";
    char name[64];
    snprintf(name, sizeof name, "proc_vmshare %s", mode);
    begin(name);
    members = 2;
    for (int i = 0; i < 4; i++) tables[i] = i;
    int flags = SIGCHLD;
    if (!strcmp(mode, "all")) {
        shared_files = shared_handlers = 1;
        tables[1] = 0;
        flags |= CLONE_FILES | CLONE_FS | CLONE_SIGHAND;
    } else if (!strcmp(mode, "own")) {
        parent = 1;
    } else if (!strcmp(mode, "deep")) {
        members = 4;
        tables[2] = 1;
        flags = 0;  // no signal at its end
    } else if (!strcmp(mode, "sibling")) {
        sibling = 1;
        flags = CLONE_PARENT;
        s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        pid_t first = (pid_t)OK(fork());
        if (first == 0) {
            begin_child();
            start(flags);
            s->sibling = m[1].pid;
            while (!s->ending) {
                one_round();
                s->rounds++;
            }
            stop();
            _exit(0);
        }
        while (running()) {
            uint64_t r = s->rounds;
            int64_t t0 = now_ns();
            while (s->rounds == r) {
                if (now_ns() - t0 > 90000000000LL) fail("nothing goes on below");
                nap_us(2000);
            }
        }
        s->ending = 1;
        reap(first, 0);
        reap(s->sibling, 7 << 8);
        no_children();
        return finish();
    }
    start(flags);
    EQ(m[1].ppid, getpid());
    while (running()) {
        if (shared_files) low_round(80);
        else one_round();
    }
    stop();
    int st = -1;
    EQ(waitpid(m[1].pid, &st, __WALL), m[1].pid);
    EQ(st, 7 << 8);
    if (members == 2) no_children();
    return finish();
}
