// Limits under which a restart (in `attr_limits under COMMAND...`) would not get what the program has: as much memory, and
// locked memory. What is there stays, and the limits are those of the program.
#include "check.h"
#include <linux/capability.h>
#include <sys/resource.h>
enum { LOCKED = 1 << 20 };
#define MIB (1UL << 20)
static void put(int what, rlim_t soft) {
    struct rlimit l;
    OK(getrlimit(what, &l));
    if (soft < l.rlim_cur) l.rlim_cur = soft;
    // Who has the capability may raise it again.
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct caps[2];
    OK(syscall(SYS_capget, &h, caps));
    if (what == RLIMIT_DATA && caps[0].effective & 1u << CAP_SYS_RESOURCE) l.rlim_max = l.rlim_cur;
    OK(setrlimit(what, &l));
}
static void run_under(char **command) {
    put(RLIMIT_DATA, 400 * MIB);
    put(RLIMIT_AS, 4096 * MIB);
    put(RLIMIT_MEMLOCK, 64 << 10);
    put(RLIMIT_SIGPENDING, 8);
    execv(command[0], command);
    fail("execute %s", command[0]);
}
int main(int argc, char **argv) {
    begin("attr_limits");
    if (argc > 2 && !strcmp(argv[1], "under")) run_under(argv + 2);
    struct rlimit want[RLIM_NLIMITS], is;
    for (int i = 0; i < (int)RLIM_NLIMITS; i++) OK(getrlimit(i, &want[i]));
    char *m = mmap(NULL, 500 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(m != MAP_FAILED);
    CHECK(mmap(NULL, 5000 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED);
    fill(m, LOCKED, 1);
    int locks = mlock(m, LOCKED) == 0;
    // What is queued, each with what it is of.
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN);
    OK(sigprocmask(SIG_BLOCK, &set, NULL));
    for (int i = 0; i < 20; i++) OK(sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i}));
    while (running()) {
        nap_us(3000);
        if (locks) EQ(told_kib("/proc/self/status", "VmLck"), LOCKED >> 10);
        for (int i = 0; i < (int)RLIM_NLIMITS; i++) {
            OK(getrlimit(i, &is));
            if (is.rlim_cur != want[i].rlim_cur || is.rlim_max != want[i].rlim_max) fail("limit %d is %lx %lx, was %lx %lx", i, is.rlim_cur, is.rlim_max, want[i].rlim_cur, want[i].rlim_max);
        }
        verify(m, LOCKED, 1, "locked memory");
    }
    for (int i = 0; i < 20; i++) {
        siginfo_t info;
        OK(sigwaitinfo(&set, &info));
        EQ(info.si_value.sival_int, i);
    }
    return finish();
}
