// What belongs to a thread, not to the process: name, mask, affinity, scheduling, nice, alternate stack, timer slack, capabilities' absence.
#include "check.h"
#include <sys/resource.h>
#define N 6
static _Atomic int ending;
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
    while (!ending) {
        nap_us(3000);
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
