// Threads on processors: one that has asked for nothing has those that the agent has, here as after a restart with fewer
// (under which `thr_affinity under COMMAND...` runs it); one that wants those that are not given has the same; one that
// wants one that is, has it.
#include "check.h"
static _Atomic int ending, ready;
static int first, last;
static cpu_set_t given(void) {
    cpu_set_t set;
    OK(sched_getaffinity(getppid(), sizeof set, &set));
    return set;
}
static void compare(const char *who, int wanted) {
    cpu_set_t is, agent = given(), own;
    OK(sched_getaffinity(0, sizeof is, &is));
    CPU_ZERO(&own);
    if (wanted >= 0 && CPU_ISSET(wanted, &agent)) CPU_SET(wanted, &own);
    else own = agent;
    if (!CPU_EQUAL(&is, &own)) fail("%s has %d processors, the first two %d %d; the agent has %d", who, CPU_COUNT(&is), CPU_ISSET(0, &is), CPU_ISSET(1, &is), CPU_COUNT(&agent));
}
static void *pinned(void *arg) {
    int cpu = *(int *)arg;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    OK(sched_setaffinity(0, sizeof set, &set));
    ready++;
    while (!ending) {
        nap_us(3000);
        compare(arg == &first ? "a thread on the first" : "a thread on the last", cpu);
    }
    return NULL;
}
static void find(void) {
    cpu_set_t set;
    OK(sched_getaffinity(0, sizeof set, &set));
    first = -1;
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (!CPU_ISSET(c, &set)) continue;
        if (first < 0) first = c;
        last = c;
    }
}
static void run_under(char **command) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(last, &set);
    OK(sched_setaffinity(0, sizeof set, &set));
    execv(command[0], command);
    fail("execute %s", command[0]);
}
int main(int argc, char **argv) {
    pthread_t t[2];
    begin("thr_affinity");
    find();
    if (argc > 2 && !strcmp(argv[1], "under")) run_under(argv + 2);
    CHECK(pthread_create(&t[0], NULL, pinned, &first) == 0);
    CHECK(pthread_create(&t[1], NULL, pinned, &last) == 0);
    while (ready < 2) nap_us(1000);
    while (running()) {
        nap_us(3000);
        compare("the main thread", -1);
    }
    ending = 1;
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
    return finish();
}
