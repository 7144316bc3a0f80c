// What belongs to a process: nice, affinity, limits, umask, cwd, comm, prctl settings, personality, I/O priority, scheduler, oom adjustment.
#include "check.h"
#include <sys/personality.h>
#include <sys/resource.h>
#ifndef PR_SET_THP_DISABLE
#define PR_SET_THP_DISABLE 41
#define PR_GET_THP_DISABLE 42
#endif
static int oom(void) {
    int fd = (int)OK(open("/proc/self/oom_score_adj", O_RDONLY)), v;
    char b[16] = {0};
    CHECK(read(fd, b, 15) > 0);
    close(fd);
    v = atoi(b);
    return v;
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
    int fd = (int)OK(open("/proc/self/oom_score_adj", O_WRONLY));
    full_write(fd, "321", 3);
    close(fd);
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
        EQ(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
        EQ(prctl(PR_GET_DUMPABLE), 1);
        EQ(personality(0xffffffff), pers);
        EQ(syscall(SYS_ioprio_get, 1, 0), 2 << 13 | 6);
        EQ(sched_getscheduler(0), SCHED_BATCH);
        EQ(oom(), 321);
    }
    OK(chdir(".."));
    OK(rmdir(dir));
    return finish();
}
