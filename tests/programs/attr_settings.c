// What a process or a thread can set for itself, beside what attr_process, thr_attrs and mem_policy look at: each
// setting of a table is made in a process of its own, and read back as text as long as the program runs. A setting that
// this kernel or this user may not make is left out; those that any may make must be there. attr_settings
#include "check.h"
#include <asm/prctl.h>
#include <linux/sched.h>
#include <sys/fsuid.h>
#include <sys/personality.h>
#include <sys/resource.h>
#include <sys/utsname.h>
enum { TEXT = 2048 };
enum { PR_SPECULATION = 53, PR_TIMER_IDS = 77, REGISTRATIONS = 512 };

static void add(char *text, const char *fmt, ...) {
    size_t n = strlen(text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + n, TEXT - n, fmt, ap);
    va_end(ap);
}
// Numbers of the process are not part of a setting.
static void file_text(char *text, const char *path) {
    int fd = (int)OK(open(path, O_RDONLY | O_CLOEXEC));
    size_t n = strlen(text);
    ssize_t r;
    while (n < TEXT - 1 && (r = read(fd, text + n, TEXT - 1 - n)) > 0) n += (size_t)r;
    text[n] = 0;
    close(fd);
}
static int write_file(const char *path, const char *what) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    int r = write(fd, what, strlen(what)) < 0 ? -1 : 0;
    close(fd);
    return r;
}

// The scheduler, as sched_setattr takes it.
struct attr { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; uint32_t low, high; };
static int sched(uint32_t policy, uint64_t flags, uint32_t priority, uint64_t runtime, uint32_t low, uint32_t high) {
    struct attr a = {sizeof a, policy, flags, 0, priority, runtime, policy == SCHED_DEADLINE ? 2 * runtime : 0, policy == SCHED_DEADLINE ? 3 * runtime : 0, low, high};
    return (int)syscall(SYS_sched_setattr, 0, &a, 0);
}
static void scheduler(char *t) {
    struct attr a = {0};
    OK(syscall(SYS_sched_getattr, 0, &a, sizeof a, 0));
    add(t, "policy %u flags %llx nice %d priority %u %llu %llu %llu clamp %u %u", a.policy, (unsigned long long)a.flags, a.nice, a.priority, (unsigned long long)a.runtime, (unsigned long long)a.deadline, (unsigned long long)a.period, a.low, a.high);
}
static int fifo(void) { return sched(SCHED_FIFO, 0, 3, 0, 0, 0); }
static int rr(void) { return sched(SCHED_RR, 1 /* RESET_ON_FORK */, 5, 0, 0, 0); }
static int deadline(void) {
    // On a busy machine it may need more than its time, and is told so.
    signal(SIGXCPU, SIG_IGN);
    return sched(SCHED_DEADLINE, 1 | 2 | 4 /* RESET_ON_FORK, RECLAIM, DL_OVERRUN */, 0, 3000000, 0, 0);
}
static int batch(void) { return sched(SCHED_BATCH, 1, 0, 0, 0, 0); }
static int slice(void) { return sched(SCHED_NORMAL, 0, 0, 7000000, 0, 0); }
static int clamps(void) { return sched(SCHED_NORMAL, 0x20 | 0x40 /* UTIL_CLAMP_MIN, UTIL_CLAMP_MAX */, 0, 0, 111, 888); }

static int ioprio(int value) { return (int)syscall(SYS_ioprio_set, 1, 0, value); }
static void io_priority(char *t) { add(t, "%ld", (long)OK(syscall(SYS_ioprio_get, 1, 0))); }
static int io_rt(void) { return ioprio(1 << 13 | 3); }
static int io_idle(void) { return ioprio(3 << 13); }
static int io_hint(void) { return ioprio(2 << 13 | 5 << 3 | 6); }

static void speculation(char *t) {
    for (int kind = 0; kind < 3; kind++) add(t, "%d ", prctl(52, kind, 0, 0, 0));
}
static int no_bypass(void) { return prctl(PR_SPECULATION, 0, 4 /* DISABLE */, 0, 0); }
static int never_bypass(void) { return prctl(PR_SPECULATION, 0, 8 /* FORCE_DISABLE */, 0, 0); }
static int noexec_bypass(void) { return prctl(PR_SPECULATION, 0, 16 /* DISABLE_NOEXEC */, 0, 0); }
static int no_branches(void) { return prctl(PR_SPECULATION, 1, 4, 0, 0); }
static int flush_l1d(void) { return prctl(PR_SPECULATION, 2, 2 /* ENABLE */, 0, 0); }

static int no_cpuid(void) { return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0); }
static void may_cpuid(char *t) { add(t, "%ld", syscall(SYS_arch_prctl, ARCH_GET_CPUID, 0)); }
static int own_gs(void) { return (int)syscall(SYS_arch_prctl, ARCH_SET_GS, 0x123456789000); }
static void gs(char *t) {
    unsigned long base = 0;
    OK(syscall(SYS_arch_prctl, ARCH_GET_GS, &base));
    add(t, "%lx", base);
}

static int bits(unsigned long b) { return prctl(PR_SET_SECUREBITS, b); }
static void securebits(char *t) { add(t, "%x", prctl(PR_GET_SECUREBITS)); }
static int bits_odd(void) { return bits(1 | 4 | 16 | 64); }
static int bits_even(void) { return bits(1 | 2 | 4 | 8); }
static int bits_keep(void) { return bits(16 | 32 | 64 | 128); }
static int bits_exec(void) { return bits(1 << 8 | 1 << 9 | 1 << 10 | 1 << 11); }

// Of who acts on files.
static int other_files(void) {
    setfsgid(4321);
    setfsuid(1234);
    return setfsuid((uid_t)-1) == 1234 ? 0 : -1;
}
static void file_user(char *t) { add(t, "%d %d", setfsuid((uid_t)-1), setfsgid((gid_t)-1)); }

static int undumpable(void) { return geteuid() ? -1 : prctl(PR_SET_DUMPABLE, 0); }
static void dumpable(char *t) { add(t, "%d", prctl(PR_GET_DUMPABLE)); }

static int barriers(void) {
    for (int bit = 2; bit <= 128; bit <<= 1)
        if ((bit == 4 || bit == 16 || bit == 64 || bit == 128) && syscall(SYS_membarrier, bit, 0, 0) && bit != 128) return -1;
    syscall(SYS_membarrier, 256, 0, 0);
    return 0;
}
static void registrations(char *t) {
    // Who has not registered may not use these. What is registered is told from Linux 6.3 on.
    for (int use = 8; use <= 128; use <<= 2) add(t, "%ld ", syscall(SYS_membarrier, use, 0, 0));
    add(t, "%lx", syscall(SYS_membarrier, REGISTRATIONS, 0, 0));
}

static int become(unsigned long p) { return personality(p) == -1 ? -1 : 0; }
static void persona(char *t) {
    struct utsname u;
    OK(uname(&u));
    add(t, "%x %s %s", (unsigned)personality(0xffffffff), u.machine, u.release);
}
static int odd_flags(void) { return become(READ_IMPLIES_EXEC | ADDR_COMPAT_LAYOUT | WHOLE_SECONDS | SHORT_INODE | STICKY_TIMEOUTS); }
static int old_release(void) { return become(UNAME26 | MMAP_PAGE_ZERO | FDPIC_FUNCPTRS | ADDR_NO_RANDOMIZE); }
static int linux32(void) { return become(PER_LINUX32 | ADDR_LIMIT_3GB | ADDR_LIMIT_32BIT); }
static int svr4(void) { return become(PER_SVR4); }

// Where the parts of the program lie, as the kernel shows them.
static void layout_numbers(unsigned long v[52]) {
    char text[TEXT] = "", *at;
    file_text(text, "/proc/self/stat");
    at = strrchr(text, ')') + 2;
    for (int field = 3; field < 52; field++, at = strchr(at, ' ') + 1) v[field] = field == 3 ? 0 : strtoul(at, NULL, 10);
}
static int moved_layout(void) {
    unsigned long v[52];
    layout_numbers(v);
    struct prctl_mm_map m = {.start_code = v[26] + 16, .end_code = v[27] - 16, .start_data = v[45] + 16, .end_data = v[46] - 16, .start_brk = v[47], .brk = (unsigned long)sbrk(0), .start_stack = v[28] - 64,
                             .arg_start = v[48] + 1, .arg_end = v[49] - 1, .env_start = v[50] + 2, .env_end = v[51] - 2, .exe_fd = (uint32_t)-1};
    return prctl(PR_SET_MM, PR_SET_MM_MAP, &m, sizeof m, 0);
}
static void layout(char *t) {
    unsigned long v[52];
    layout_numbers(v);
    static const int shown[] = {26, 27, 28, 45, 46, 47, 48, 49, 50, 51};
    for (int i = 0; i < 10; i++) add(t, "%lx ", v[shown[i]]);
    file_text(t, "/proc/self/cmdline");
}

static int keeps_ids(void) { return prctl(PR_TIMER_IDS, 1, 0, 0, 0); }
static void timer_ids(char *t) { add(t, "%d", prctl(PR_TIMER_IDS, 2, 0, 0, 0)); }

static int lower(void) {
    static const struct { int what; rlim_t soft; } all[] = {{RLIMIT_NICE, 3}, {RLIMIT_RTPRIO, 2}, {RLIMIT_AS, 1ULL << 45}, {RLIMIT_DATA, 1ULL << 44}, {RLIMIT_CPU, 100000}, {RLIMIT_FSIZE, 1ULL << 43}, {RLIMIT_NPROC, 12345}, {RLIMIT_RTTIME, 1234567}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct rlimit l;
        OK(getrlimit(all[i].what, &l));
        if (l.rlim_cur > all[i].soft) l.rlim_cur = all[i].soft;
        if (l.rlim_max > all[i].soft + 4096) l.rlim_max = all[i].soft + 4096;
        OK(setrlimit(all[i].what, &l));
    }
    return 0;
}
static void limits(char *t) { file_text(t, "/proc/self/limits"); }

static int never_killed(void) { return write_file("/proc/self/oom_score_adj", "-321"); }
static void oom(char *t) { file_text(t, "/proc/self/oom_score_adj"); }

static int own_root(void) {
    char dir[64];
    snprintf(dir, sizeof dir, "root.%d", getpid());
    if (geteuid()) return -1;
    OK(mkdir(dir, 0711));
    OK(chdir(dir));
    return chroot(".");
}
static void root_directory(char *t) {
    struct stat st;
    OK(stat("/", &st));
    add(t, "mode %o ", st.st_mode);
    OK(stat("/..", &st));
    add(t, "mode %o, above it %d", st.st_mode, access("/proc", F_OK));
}

static char alternate[65536];
static int disarmed(void) { return sigaltstack(&(stack_t){.ss_sp = alternate, .ss_flags = (int)(1u << 31) /* SS_AUTODISARM */, .ss_size = sizeof alternate}, NULL); }
static void signal_stack(char *t) {
    stack_t s;
    OK(sigaltstack(NULL, &s));
    add(t, "%p %x %zu", s.ss_sp, s.ss_flags, s.ss_size);
}
static int odd_handlers(void) {
    static const unsigned long flags[] = {1, 2, 4, 0x800 /* SA_EXPOSE_TAGBITS */, 0x08000000, 0x10000000, 0x40000000, 0x80000000};
    for (int i = 0; i < 8; i++) {
        unsigned long sa[] = {1 /* SIG_IGN */, flags[i] | 0x04000000 /* SA_RESTORER */, 0x1000, 1UL << (i + 20)};
        OK(syscall(SYS_rt_sigaction, SIGRTMIN + 3 + i, sa, NULL, 8));
    }
    return 0;
}
static void handlers(char *t) {
    for (int i = 0; i < 8; i++) {
        unsigned long sa[4];
        OK(syscall(SYS_rt_sigaction, SIGRTMIN + 3 + i, NULL, sa, 8));
        add(t, "%lx %lx %lx %lx, ", sa[0], sa[1], sa[2], sa[3]);
    }
}

// Timers of every clock: what they are, and that their time is neither lost nor grown.
static int clocks[16], armed;
static timer_t timers[16];
static int all_timers(void) {
    static const int kinds[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID, CLOCK_BOOTTIME, 8, 9, CLOCK_TAI};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct sigevent e = {.sigev_notify = i % 2 ? SIGEV_SIGNAL : SIGEV_NONE, .sigev_signo = SIGRTMIN + (int)i, .sigev_value.sival_int = (int)i};
        if (timer_create(kinds[i], &e, &timers[armed])) continue;
        struct itimerspec set = {{77, 1}, {5000, 0}};
        int absolute = i % 3 == 0;
        if (absolute) {
            OK(clock_gettime(kinds[i] == 8 ? CLOCK_REALTIME : kinds[i] == 9 ? CLOCK_BOOTTIME : kinds[i], &set.it_value));
            set.it_value.tv_sec += 5000;
        }
        OK(timer_settime(timers[armed], absolute ? TIMER_ABSTIME : 0, &set, NULL));
        clocks[armed++] = kinds[i];
    }
    return 0;
}
static void timer_list(char *t) {
    for (int i = 0; i < armed; i++) {
        struct itimerspec now;
        OK(timer_gettime(timers[i], &now));
        if (now.it_value.tv_sec < 4000 || now.it_value.tv_sec > 5000) fail("a timer of clock %d has %ld s left", clocks[i], (long)now.it_value.tv_sec);
        add(t, "clock %d every %ld.%ld; ", clocks[i], (long)now.it_interval.tv_sec, now.it_interval.tv_nsec);
    }
}

// needed: 0 not everywhere, 1 by everybody, 2 by root.
static const struct { const char *name; int (*set)(void); void (*get)(char *); int needed; } all[] = {
    {"SCHED_FIFO", fifo, scheduler, 2},
    {"SCHED_RR", rr, scheduler, 2},
    {"SCHED_DEADLINE", deadline, scheduler, 2},
    {"SCHED_BATCH", batch, scheduler, 1},
    {"a time slice", slice, scheduler, 1},
    {"clamps", clamps, scheduler, 0},
    {"IOPRIO_CLASS_RT", io_rt, io_priority, 2},
    {"IOPRIO_CLASS_IDLE", io_idle, io_priority, 1},
    {"IOPRIO_HINT", io_hint, io_priority, 0},
    {"no store bypass", no_bypass, speculation, 0},
    {"never store bypass", never_bypass, speculation, 0},
    {"store bypass after exec", noexec_bypass, speculation, 0},
    {"no indirect branches", no_branches, speculation, 0},
    {"flushes", flush_l1d, speculation, 0},
    {"ARCH_SET_CPUID", no_cpuid, may_cpuid, 0},
    {"ARCH_SET_GS", own_gs, gs, 1},
    {"securebits", bits_odd, securebits, 2},
    {"securebits, locked", bits_even, securebits, 2},
    {"securebits, others", bits_keep, securebits, 2},
    {"securebits for programs", bits_exec, securebits, 0},
    {"setfsuid", other_files, file_user, 2},
    {"PR_SET_DUMPABLE", undumpable, dumpable, 2},
    {"membarrier", barriers, registrations, 0},
    {"personality", odd_flags, persona, 1},
    {"UNAME26", old_release, persona, 1},
    {"PER_LINUX32", linux32, persona, 1},
    {"PER_SVR4", svr4, persona, 1},
    {"PR_SET_MM", moved_layout, layout, 0},
    {"PR_TIMER_CREATE_RESTORE_IDS", keeps_ids, timer_ids, 0},
    {"limits", lower, limits, 1},
    {"oom_score_adj", never_killed, oom, 0},
    {"chroot", own_root, root_directory, 2},
    {"SS_AUTODISARM", disarmed, signal_stack, 1},
    {"SA_*", odd_handlers, handlers, 1},
    {"timers", all_timers, timer_list, 1},
};
enum { SETTINGS = sizeof all / sizeof *all };

static void compare(size_t i, int tell) {
    char want[TEXT] = "", now[TEXT] = "", fresh[TEXT] = "";
    if (all[i].set != all_timers) all[i].get(fresh);
    if (all[i].set()) {
        if (all[i].needed == 1 || (all[i].needed == 2 && !geteuid())) fail("%s cannot be set", all[i].name);
        uint8_t left_out = (uint8_t)i;
        full_write(tell, &left_out, 1);
        _exit(0);
    }
    all[i].get(want);
    if (!strcmp(want, fresh)) fail("%s: setting it has changed nothing", all[i].name);
    close(tell);
    for (;;) {
        nap_us(3000);
        now[0] = 0;
        all[i].get(now);
        if (strcmp(now, want)) fail("%s is\n%s\nwas\n%s", all[i].name, now, want);
        if (getppid() != check_ppid) _exit(0);
    }
}

int main(int argc, char **argv) {
    begin("attr_settings");
    int tell[2];
    pid_t child[SETTINGS] = {0};
    OK(pipe(tell));
    for (size_t i = 0; i < SETTINGS; i++) {
        if (argc > 1 && strcmp(argv[1], all[i].name)) continue;
        child[i] = (pid_t)OK(fork());
        if (child[i] == 0) {
            begin_child();
            close(tell[0]);
            compare(i, tell[1]);
        }
    }
    close(tell[1]);
    // What is not here; the end comes when each has set what it sets, or has ended.
    uint8_t i;
    while (read(tell[0], &i, 1) == 1) {
        printf("not here: %s\n", all[i].name);
        reap(child[i], 0);
        child[i] = 0;
    }
    while (running()) {
        nap_us(3000);
        int st;
        if (waitpid(-1, &st, WNOHANG)) fail("a setting is not what it was: status %x", st);
    }
    for (size_t i = 0; i < SETTINGS; i++) {
        if (!child[i]) continue;
        kill(child[i], SIGKILL);
        reap(child[i], SIGKILL);
        char dir[64];
        snprintf(dir, sizeof dir, "root.%d", child[i]);
        rmdir(dir);
    }
    return finish();
}
