// Programs that use what cannot be checkpointed yet, and must go on undisturbed. refuse KIND:
//   io_uring, userfaultfd, ptrace, namespace, remote, dispatch
//   perf        a performance counter
//   ring        the memory of one that has no descriptor any more
//   append      a log to which one may only append (chattr +a)
//   zerocopy    the memory of a TCP socket (TCP_ZEROCOPY_RECEIVE)
//   itself      a TCP socket that is connected to itself
//   discipline  of a terminal
//   compat      a thread in 32-bit code
//   urgent      data in a socket
//   unseen      what is written to a pseudo-terminal before its slave is opened
//   pressure    a trigger
//   detached    a mount without a place
//   ended       a file in /proc of a descriptor of a process that has ended
//   cwd         a working directory in /proc of one
//   signals     20,000 pending
//   locks       more memory than the limit of now allows, and what is mapped would be locked too
//   landlock, scope                             domains of Landlock
//   landlocked, filter and strict (seccomp)     of a thread other than the first
//   apart       a host name of such a thread's own
//   children    a PID namespace for the children
#include "check.h"
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/landlock.h>
#include <linux/perf_event.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
// What is locked, KiB. Nothing can be allocated.
static long locked(void) {
    static char text[8192];
    int fd = (int)OK(open("/proc/self/status", O_RDONLY));
    ssize_t n = OK(read(fd, text, sizeof text - 1));
    close(fd);
    text[n] = 0;
    char *line = strstr(text, "VmLck:");
    CHECK(line);
    return strtol(line + 6, NULL, 10);
}
static void protect(int fd, int how) {
    int flags;
    OK(ioctl(fd, FS_IOC_GETFLAGS, &flags));
    flags = (flags & ~FS_APPEND_FL) | how;
    OK(ioctl(fd, FS_IOC_SETFLAGS, &flags));
}
static volatile char selector = SYSCALL_DISPATCH_FILTER_ALLOW;
static volatile sig_atomic_t trapped;
static void on_trap(int s) {
    (void)s;
    selector = SYSCALL_DISPATCH_FILTER_ALLOW;
    trapped++;
}
// Counts in 32-bit code until it is told to end. All that it needs lies below 2 GiB, its stack too.
static volatile uint32_t *counted;
static void *count(void *page) {
    uint8_t *at = page;
    uint32_t counter = (uint32_t)(uintptr_t)counted, end = counter + 4, low = (uint32_t)(uintptr_t)page + 64, back = low + 64;
    // mov $0x2b,%eax; mov %eax,%ds; push $0x23; push low; lretq
    uint8_t enter[] = {0xb8, 0x2b, 0, 0, 0, 0x8e, 0xd8, 0x6a, 0x23, 0x68, 0, 0, 0, 0, 0x48, 0xcb};
    memcpy(enter + 10, &low, 4);
    // incl counter; cmpl $0,end; je to the first; ljmp $0x33,back
    uint8_t code[] = {0xff, 0x05, 0, 0, 0, 0, 0x83, 0x3d, 0, 0, 0, 0, 0, 0x74, 0xf1, 0xea, 0, 0, 0, 0, 0x33, 0};
    memcpy(code + 2, &counter, 4);
    memcpy(code + 8, &end, 4);
    memcpy(code + 16, &back, 4);
    // xor %eax,%eax; mov %eax,%ds; ret
    const uint8_t leave[] = {0x31, 0xc0, 0x8e, 0xd8, 0xc3};
    memcpy(at, enter, sizeof enter);
    memcpy(at + 64, code, sizeof code);
    memcpy(at + 128, leave, sizeof leave);
    void (*run)(void);
    memcpy(&run, &page, sizeof run);
    run();
    return NULL;
}
// Enters a domain of Landlock that forbids to execute files, or (what headers may not know yet) only signals to
// processes outside of it.
static void enter_domain(int scope) {
    struct {
        uint64_t files, ports, scoped;
    } rules = {scope ? 0 : LANDLOCK_ACCESS_FS_EXECUTE, 0, scope ? 2 : 0};
    int fd = (int)syscall(SYS_landlock_create_ruleset, &rules, scope ? 24 : 8, 0);
    if (fd < 0) fail("there is no Landlock here: %s", strerror(errno));
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    OK(syscall(SYS_landlock_restrict_self, fd, 0));
    close(fd);
}
// A thread that lives in a sandbox of its own. It can do little more than read.
static _Atomic int boxed;
static int box[2];
static void *live_in_a_box(void *kind) {
    char byte;
    if (!strcmp(kind, "landlocked")) enter_domain(0);
    else if (!strcmp(kind, "strict")) OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
    else if (!strcmp(kind, "apart")) OK(unshare(CLONE_NEWUTS));
    else {
        struct sock_filter allow[] = {{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
        struct sock_fprog all = {1, allow};
        OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
        OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &all));
    }
    boxed = 1;
    // The C library's own end of a thread is not allowed in a strict one.
    syscall(SYS_read, box[0], &byte, 1);
    boxed = 2;
    syscall(SYS_exit, 0);
    return NULL;
}
int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[2], "orted"))
        for (;;) pause();
    const char *kind = argc > 1 ? argv[1] : "io_uring";
    char name[64];
    snprintf(name, sizeof name, "refuse-%s", kind);
    begin(name);
    pid_t c = 0;
    long kib = 0;
    int pair[2] = {-1, -1}, log = -1;
    pthread_t counter = 0;
    if (!strcmp(kind, "io_uring")) {
        struct io_uring_params p;
        memset(&p, 0, sizeof p);
        OK(syscall(SYS_io_uring_setup, 8, &p));
    } else if (!strcmp(kind, "userfaultfd")) {
        OK(syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY | O_CLOEXEC));
    } else if (!strcmp(kind, "ptrace")) {
        c = fork();
        if (c == 0) {
            ptrace(PTRACE_TRACEME, 0, 0, 0);
            raise(SIGSTOP);
            for (;;) pause();
        }
        int st;
        EQ(waitpid(c, &st, 0), c);
        CHECK(WIFSTOPPED(st));
        OK(ptrace(PTRACE_CONT, c, 0, 0));
    } else if (!strcmp(kind, "namespace")) {
        int p[2];
        OK(pipe(p));
        c = fork();
        if (c == 0) {
            OK(unshare(CLONE_NEWUSER | CLONE_NEWUTS));
            full_write(p[1], "", 1);
            for (;;) pause();
        }
        char made;
        full_read(p[0], &made, 1);
    } else if (!strcmp(kind, "landlock") || !strcmp(kind, "scope")) {
        enter_domain(kind[0] == 's');
    } else if (!strcmp(kind, "children")) {
        OK(unshare(CLONE_NEWPID));
    } else if (!strcmp(kind, "landlocked") || !strcmp(kind, "strict") || !strcmp(kind, "apart") || !strcmp(kind, "filter")) {
        pthread_t t;
        OK(pipe(box));
        CHECK(pthread_create(&t, NULL, live_in_a_box, (void *)kind) == 0);
        while (!boxed) nap_us(100);
    } else if (!strcmp(kind, "remote")) {
        c = fork();
        if (c == 0) {
            execl("/proc/self/exe", "ssh", "n2", "orted", "-mca", NULL);
            _exit(127);
        }
    } else if (!strcmp(kind, "locks")) {
        void *m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        OK(mlock(m, 1 << 20));
        OK(mlockall(MCL_FUTURE));
        OK(setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){65536, 65536}));
        struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct caps[2];
        OK(syscall(SYS_capget, &h, caps));
        caps[0].effective &= ~(1u << CAP_IPC_LOCK);
        OK(syscall(SYS_capset, &h, caps));
        kib = locked();
        CHECK(kib >= 1024);
    } else if (!strcmp(kind, "dispatch")) {
        signal(SIGSYS, on_trap);
        OK(prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0L, 0L, &selector));
    } else if (!strcmp(kind, "compat")) {
        const int all = PROT_READ | PROT_WRITE | PROT_EXEC, low = MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT;
        char *m = mmap(NULL, 1 << 20, all, low, -1, 0);
        CHECK(m != MAP_FAILED);
        counted = (volatile uint32_t *)(m + 4096);
        pthread_attr_t at;
        pthread_attr_init(&at);
        CHECK(pthread_attr_setstack(&at, m + 65536, (1 << 20) - 65536) == 0);
        CHECK(pthread_create(&counter, &at, count, m) == 0);
    } else if (!strcmp(kind, "ended") || !strcmp(kind, "cwd")) {
        c = fork();
        if (c == 0)
            for (;;) pause();
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fdinfo/1", c);
        if (!strcmp(kind, "ended")) OK(open(path, O_RDONLY));
        *strstr(path, "/fdinfo") = 0;
        if (!strcmp(kind, "cwd")) OK(chdir(path));
        kill(c, SIGKILL);
        reap(c, SIGKILL);
        c = 0;
    } else if (!strcmp(kind, "discipline")) {
        int m = (int)OK(open("/dev/ptmx", O_RDWR | O_NOCTTY)), discipline = 27 /* N_NULL */;
        OK(unlockpt(m));
        OK(ioctl(OK(open(ptsname(m), O_RDWR | O_NOCTTY)), TIOCSETD, &discipline));
    } else if (!strcmp(kind, "unseen")) {
        OK(write(OK(open("/dev/ptmx", O_RDWR | O_NOCTTY)), "wait\n", 5));
    } else if (!strcmp(kind, "pressure")) {
        const char trigger[] = "some 200000 2000000";
        OK(write(OK(open("/proc/pressure/memory", O_RDWR | O_NONBLOCK)), trigger, sizeof trigger));
    } else if (!strcmp(kind, "detached")) {
        OK(syscall(428 /* open_tree */, AT_FDCWD, "/tmp", 1 /* OPEN_TREE_CLONE */));
    } else if (!strcmp(kind, "urgent")) {
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
        EQ(send(pair[0], "ab", 2, 0), 2);
        EQ(send(pair[0], "U", 1, MSG_OOB), 1);
        EQ(send(pair[0], "cd", 2, 0), 2);
    } else if (!strcmp(kind, "signals")) {
        sigset_t s;
        sigemptyset(&s);
        sigaddset(&s, SIGRTMIN);
        OK(sigprocmask(SIG_BLOCK, &s, NULL));
        for (int i = 0; i < 20000; i++) OK(sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i}));
    } else if (!strcmp(kind, "perf") || !strcmp(kind, "ring")) {
        struct perf_event_attr attr = {.type = PERF_TYPE_SOFTWARE, .size = sizeof attr, .config = PERF_COUNT_SW_TASK_CLOCK, .exclude_kernel = 1};
        int fd = (int)OK(syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0));
        if (kind[0] == 'r') {
            CHECK(mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED);
            close(fd);
        }
    } else if (!strcmp(kind, "append")) {
        log = (int)OK(open("refuse.log", O_CREAT | O_WRONLY | O_APPEND, 0600));
        protect(log, FS_APPEND_FL);
    } else if (!strcmp(kind, "zerocopy")) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof at;
        int listens = (int)OK(socket(AF_INET, SOCK_STREAM, 0)), connects = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
        OK(bind(listens, (void *)&at, n));
        OK(listen(listens, 1));
        OK(getsockname(listens, (void *)&at, &n));
        OK(connect(connects, (void *)&at, n));
        CHECK(mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, connects, 0) != MAP_FAILED);
        OK(accept(listens, NULL, NULL));
    } else if (!strcmp(kind, "itself")) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof at;
        int own = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
        OK(bind(own, (void *)&at, n));
        OK(getsockname(own, (void *)&at, &n));
        OK(connect(own, (void *)&at, n));
    } else
        fail("unknown kind");
    while (running()) {
        if (log >= 0) full_write(log, "x", 1);
        nap_us(2000);
        if (!strcmp(kind, "dispatch")) {
            sig_atomic_t before = trapped;
            selector = SYSCALL_DISPATCH_FILTER_BLOCK;
            for (int i = 0; i < 100000 && selector == SYSCALL_DISPATCH_FILTER_BLOCK; i++) atomic_signal_fence(memory_order_seq_cst);
            syscall(SYS_getpid);
            EQ(trapped, before + 1);
        }
        for (uint32_t before = counter ? *counted : 0; counter && *counted == before;) nap_us(100);
        if (kib && locked() != kib) fail("%ld KiB are locked, were %ld", locked(), kib);
    }
    if (counter) {
        counted[1] = 1;
        CHECK(pthread_join(counter, NULL) == 0);
    }
    if (boxed) {
        full_write(box[1], "", 1);
        while (boxed != 2) nap_us(100);
    }
    if (pair[0] >= 0) {
        char b[8];
        EQ(recv(pair[1], b, 1, MSG_OOB), 1);
        EQ(b[0], 'U');
        EQ(recv(pair[1], b, sizeof b, 0), 2);
        CHECK(!memcmp(b, "ab", 2));
        EQ(recv(pair[1], b, sizeof b, 0), 2);
        CHECK(!memcmp(b, "cd", 2));
    }
    if (log >= 0) protect(log, 0);
    if (c) {
        kill(c, SIGKILL);
        reap(c, SIGKILL);
    }
    return finish();
}
