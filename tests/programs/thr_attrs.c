// What belongs to a thread, not to the process: name, mask, affinity, scheduling, nice, alternate stack, timer slack,
// memory policy, what machine checks and the time stamp counter do, execution domain, signal at the end of the parent,
// no_new_privs; for root also users, groups, capabilities and the flag of those who serve I/O. All but the first have
// values of their own.
#include "check.h"
#include <linux/capability.h>
#include <linux/mempolicy.h>
#include <linux/securebits.h>
#include <sys/personality.h>
#include <sys/resource.h>
#define N 6
#ifndef PR_SET_IO_FLUSHER
#define PR_SET_IO_FLUSHER 57
#define PR_GET_IO_FLUSHER 58
#endif
static _Atomic int ending;
// Whose thread this is, as the system calls themselves say: those of the C library act on all threads.
struct identity {
    uid_t uids[3];
    gid_t gids[3], groups[8];
    long count, bits, raised, unbound, privileges, serves;
    struct __user_cap_data_struct caps[2];
};
static void identify(struct identity *w) {
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    memset(w, 0, sizeof *w);
    OK(syscall(SYS_getresuid, &w->uids[0], &w->uids[1], &w->uids[2]));
    OK(syscall(SYS_getresgid, &w->gids[0], &w->gids[1], &w->gids[2]));
    w->count = OK(syscall(SYS_getgroups, 8, w->groups));
    w->bits = OK(prctl(PR_GET_SECUREBITS));
    OK(syscall(SYS_capget, &h, w->caps));
    w->raised = OK(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_NET_RAW, 0, 0));
    w->unbound = OK(prctl(PR_CAPBSET_READ, CAP_SYS_MODULE));
    w->serves = prctl(PR_GET_IO_FLUSHER, 0, 0, 0, 0);
    w->privileges = OK(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
}
// A thread of root's becomes somebody of its own.
static void become(long i) {
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct caps[2] = {{0}};
    gid_t groups[] = {(gid_t)(5000 + i), (gid_t)(6000 + i)};
    if (i == 0) return;
    // Not even root may, without CAP_SYS_RESOURCE.
    prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
    if (i == 1) OK(prctl(PR_CAPBSET_DROP, CAP_SYS_MODULE));
    OK(prctl(PR_SET_SECUREBITS, i == 1 ? SECBIT_KEEP_CAPS : i == 2 ? SECBIT_NOROOT | SECBIT_KEEP_CAPS : SECBIT_KEEP_CAPS | SECBIT_KEEP_CAPS_LOCKED));
    OK(syscall(SYS_setgroups, 2, groups));
    OK(syscall(SYS_setresgid, 1000 + i, 2000 + i, 3000 + i));
    OK(syscall(SYS_setresuid, i == 3 ? 0 : 1000 + i, 2000 + i, 3000 + i));
    caps[0].permitted = 1u << CAP_NET_RAW | 1u << CAP_CHOWN;
    caps[0].inheritable = 1u << CAP_NET_RAW;
    caps[0].effective = i == 4 ? 1u << CAP_CHOWN : 0;
    OK(syscall(SYS_capset, &h, caps));
    if (i == 4) OK(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_RAW, 0, 0));
}
static void *work(void *arg) {
    long i = (long)arg;
    pid_t tid = gettid();
    char name[16], got[16];
    snprintf(name, sizeof name, "thr attr %ld)", i);
    OK(prctl(PR_SET_NAME, name));
    sigset_t set, have;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN + (int)i);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    cpu_set_t cpus, all, now;
    OK(sched_getaffinity(0, sizeof all, &all));
    CPU_ZERO(&cpus);
    int k = 0;
    for (int c = 0; c < CPU_SETSIZE; c++) if (CPU_ISSET(c, &all) && (k++ % 2 == i % 2 || k == 1)) CPU_SET(c, &cpus);
    OK(sched_setaffinity(0, sizeof cpus, &cpus));
    int nice = getpriority(PRIO_PROCESS, 0) > (int)i + 3 ? getpriority(PRIO_PROCESS, 0) : (int)i + 3;
    OK(setpriority(PRIO_PROCESS, (id_t)tid, nice));
    struct sched_param sp = {0};
    int pol = i % 3 == 0 ? SCHED_OTHER : i % 3 == 1 ? SCHED_BATCH : SCHED_IDLE;
    OK(sched_setscheduler(0, pol, &sp));
    OK(prctl(PR_SET_TIMERSLACK, 60000 + i));
    stack_t ss = {.ss_sp = malloc(32768), .ss_size = 32768}, ss2;
    OK(sigaltstack(&ss, NULL));
    const int policies[] = {MPOL_DEFAULT, MPOL_BIND, MPOL_INTERLEAVE, MPOL_PREFERRED, MPOL_LOCAL, MPOL_BIND | MPOL_F_STATIC_NODES};
    unsigned long nodes[16], zero[16] = {i == 0 || i == 4 ? 0 : 1};
    OK(syscall(SYS_set_mempolicy, policies[i], i == 0 || i == 4 ? NULL : zero, 1024));
    OK(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, i % 3, 0, 0));
    // Clocks are asked by this one through the kernel only.
    if (i == 5) OK(prctl(PR_SET_TSC, PR_TSC_SIGSEGV));
    if (i == 4) OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    int root = geteuid() == 0;
    if (root) become(i);
    struct identity was, is;
    int domain = (int)OK(personality(0xffffffff)) | (i % 2 ? WHOLE_SECONDS : 0) | (i == 2 ? SHORT_INODE : 0);
    OK(personality((unsigned long)domain));
    OK(prctl(PR_SET_PDEATHSIG, i % 3 ? SIGRTMIN + i : 0));
    identify(&was);
    EQ(was.privileges, i == 4);
    while (!ending) {
        OK(syscall(SYS_nanosleep, &(struct timespec){0, 3000000}, NULL));
        int policy, tsc;
        memset(nodes, 0, sizeof nodes);
        OK(syscall(SYS_get_mempolicy, &policy, nodes, 1024, NULL, 0));
        EQ(policy, policies[i]);
        CHECK(!memcmp(nodes, zero, sizeof nodes));
        EQ(prctl(PR_MCE_KILL_GET, 0, 0, 0, 0), i % 3);
        OK(prctl(PR_GET_TSC, &tsc));
        EQ(tsc, i == 5 ? PR_TSC_SIGSEGV : PR_TSC_ENABLE);
        EQ(personality(0xffffffff), domain);
        int death;
        OK(prctl(PR_GET_PDEATHSIG, &death));
        EQ(death, i % 3 ? SIGRTMIN + i : 0);
        identify(&is);
        if (memcmp(&is, &was, sizeof is))
            fail("thread %ld is %d/%d/%d, %ld groups, bits %lx, capabilities %x %x %x; was %d/%d/%d, %ld groups, bits %lx, capabilities %x %x %x", i, is.uids[0], is.uids[1], is.uids[2], is.count, is.bits, is.caps[0].effective, is.caps[0].permitted, is.caps[0].inheritable, was.uids[0], was.uids[1], was.uids[2], was.count, was.bits, was.caps[0].effective, was.caps[0].permitted, was.caps[0].inheritable);
        prctl(PR_GET_NAME, got);
        if (strcmp(got, name)) fail("thread %ld is named %s", i, got);
        pthread_sigmask(SIG_SETMASK, NULL, &have);
        for (int s = 1; s < 65; s++) if (s < 32 || s >= SIGRTMIN) EQ(sigismember(&have, s), sigismember(&set, s));
        OK(sched_getaffinity(0, sizeof now, &now));
        CHECK(CPU_EQUAL(&now, &cpus));
        errno = 0;
        EQ(getpriority(PRIO_PROCESS, 0), nice);
        EQ(sched_getscheduler(0), pol);
        EQ(prctl(PR_GET_TIMERSLACK), 60000 + i);
        OK(sigaltstack(NULL, &ss2));
        CHECK(ss2.ss_sp == ss.ss_sp && ss2.ss_size == ss.ss_size && ss2.ss_flags == 0);
    }
    return NULL;
}
int main(void) {
    begin("thr_attrs");
    pthread_t t[N];
    for (long i = 0; i < N; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)i) == 0);
    while (running()) nap_us(2000);
    ending = 1;
    for (int i = 0; i < N; i++) pthread_join(t[i], NULL);
    return finish();
}
