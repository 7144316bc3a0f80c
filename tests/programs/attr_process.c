// What belongs to a process: nice, affinity, limits, umask, cwd, comm, prctl settings, personality, I/O priority,
// scheduler, oom adjustment, what a core dump holds, the nice value of its session; for root also whether equal pages
// are merged, and what it can never do (capability bounding set).
#include "check.h"
#include <sys/personality.h>
#include <sys/resource.h>
#ifndef PR_SET_THP_DISABLE
#define PR_SET_THP_DISABLE 41
#define PR_GET_THP_DISABLE 42
#endif
#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#define PR_GET_MEMORY_MERGE 68
#endif
// Linux 6.18
#define THP_EXCEPT_ADVISED 2
static void get(const char *path, char text[64]) {
    int fd = (int)OK(open(path, O_RDONLY));
    ssize_t n = read(fd, text, 63);
    CHECK(n > 0);
    text[n] = 0;
    close(fd);
}
static void set(const char *path, const char *text) {
    int fd = (int)OK(open(path, O_WRONLY));
    full_write(fd, text, strlen(text));
    close(fd);
}
static int oom(void) {
    char b[64];
    get("/proc/self/oom_score_adj", b);
    return atoi(b);
}
// The nice value of the session, where the kernel has one.
static int session(void) {
    char b[64], *nice;
    if (access("/proc/self/autogroup", F_OK)) return 0;
    get("/proc/self/autogroup", b);
    nice = strstr(b, "nice");
    return nice ? atoi(nice + 4) : 0;
}
int main(void) {
    begin("attr_process");
    char dir[PATH_MAX], cwd[PATH_MAX], name[16];
    CHECK(getcwd(dir, sizeof dir - 32));
    snprintf(dir + strlen(dir), 32, "/attr dir.%d", getpid());
    OK(mkdir(dir, 0700));
    OK(chdir(dir));
    int nice = getpriority(PRIO_PROCESS, 0) > 7 ? getpriority(PRIO_PROCESS, 0) : 7;
    OK(setpriority(PRIO_PROCESS, 0, nice));
    umask(0137);
    OK(prctl(PR_SET_NAME, "a (weird) name"));
    struct rlimit lim[RLIM_NLIMITS], l;
    for (int i = 0; i < (int)RLIM_NLIMITS; i++) {
        OK(getrlimit(i, &lim[i]));
        rlim_t cap = 1000000000ULL + (rlim_t)i * 4096;
        if (i == RLIMIT_NICE || i == RLIMIT_RTPRIO || i == RLIMIT_AS || i == RLIMIT_DATA || i == RLIMIT_CPU || i == RLIMIT_FSIZE || i == RLIMIT_NPROC) continue;
        if (i == RLIMIT_STACK) cap = 9 << 20;
        if (i == RLIMIT_NOFILE) cap = lim[i].rlim_cur > 300 ? 300 : lim[i].rlim_cur;
        if (lim[i].rlim_max > cap) lim[i].rlim_cur = cap;
        OK(setrlimit(i, &lim[i]));
    }
    cpu_set_t cpus, now;
    OK(sched_getaffinity(0, sizeof cpus, &cpus));
    for (int c = CPU_SETSIZE - 1; c > 0 && CPU_COUNT(&cpus) > 1; c--) CPU_CLR(c, &cpus);
    OK(sched_setaffinity(0, sizeof cpus, &cpus));
    OK(prctl(PR_SET_PDEATHSIG, SIGUSR1));
    OK(prctl(PR_SET_TIMERSLACK, 77777));
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    OK(prctl(PR_SET_CHILD_SUBREAPER, 1));
    OK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0));
    OK(prctl(PR_SET_TSC, PR_TSC_ENABLE));
    int pers = (int)OK(personality(0xffffffff)) | ADDR_NO_RANDOMIZE;
    OK(personality((unsigned long)pers));
    OK(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6));
    struct sched_param sp = {0};
    OK(sched_setscheduler(0, SCHED_BATCH, &sp));
    set("/proc/self/oom_score_adj", "321");
    set("/proc/self/coredump_filter", "0x7b");
    OK(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0));
    // A session of its own, so that no other process changes its value; without autogroups there is none.
    pid_t leader = fork();
    if (leader == 0) {
        begin_child();
        OK(setsid());
        int nice = access("/proc/self/autogroup", F_OK) ? 0 : 5;
        // One session of the machine in a tenth of a second, for all ordinary users together.
        if (nice) {
            int fd = (int)OK(open("/proc/self/autogroup", O_WRONLY));
            while (write(fd, "5", 1) < 0) {
                EQ(errno, EAGAIN);
                nap_us(30000);
            }
            close(fd);
        }
        while (running()) {
            nap_us(3000);
            EQ(session(), nice);
        }
        _exit(0);
    }
    int thp = prctl(PR_SET_THP_DISABLE, 1, THP_EXCEPT_ADVISED, 0, 0) ? 1 : 1 | THP_EXCEPT_ADVISED;
    int root = geteuid() == 0, merge = 0;
    if (root) {
        OK(prctl(PR_CAPBSET_DROP, 16 /* CAP_SYS_MODULE */));
        merge = prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) == 0;
    }
    while (running()) {
        nap_us(3000);
        EQ(getpriority(PRIO_PROCESS, 0), nice);
        mode_t u = umask(0137);
        EQ(u, 0137);
        CHECK(getcwd(cwd, sizeof cwd));
        if (strcmp(cwd, dir)) fail("working directory is %s", cwd);
        prctl(PR_GET_NAME, name);
        if (strcmp(name, "a (weird) name")) fail("comm is %s", name);
        for (int i = 0; i < (int)RLIM_NLIMITS; i++) {
            OK(getrlimit(i, &l));
            if (l.rlim_cur != lim[i].rlim_cur || l.rlim_max != lim[i].rlim_max) fail("limit %d is %lu/%lu, was %lu/%lu", i, l.rlim_cur, l.rlim_max, lim[i].rlim_cur, lim[i].rlim_max);
        }
        OK(sched_getaffinity(0, sizeof now, &now));
        CHECK(CPU_EQUAL(&now, &cpus));
        int v = 0;
        OK(prctl(PR_GET_PDEATHSIG, &v));
        EQ(v, SIGUSR1);
        EQ(prctl(PR_GET_TIMERSLACK), 77777);
        EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
        OK(prctl(PR_GET_CHILD_SUBREAPER, &v));
        EQ(v, 1);
        EQ(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), thp);
        char filter[64];
        get("/proc/self/coredump_filter", filter);
        EQ(strtol(filter, NULL, 16), 0x7b);
        EQ(prctl(PR_MCE_KILL_GET, 0, 0, 0, 0), PR_MCE_KILL_EARLY);
        if (root) EQ(prctl(PR_CAPBSET_READ, 16), 0);
        if (merge) EQ(prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0), 1);
        EQ(prctl(PR_GET_DUMPABLE), 1);
        EQ(personality(0xffffffff), pers);
        EQ(syscall(SYS_ioprio_get, 1, 0), 2 << 13 | 6);
        EQ(sched_getscheduler(0), SCHED_BATCH);
        EQ(oom(), 321);
    }
    reap(leader, 0);
    OK(chdir(".."));
    OK(rmdir(dir));
    return finish();
}
