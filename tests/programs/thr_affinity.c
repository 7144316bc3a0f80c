// Threads on processors: one that has asked for nothing has those that the agent has, here as after a restart with the
// upper half of them (with which `thr_affinity under COMMAND...` runs it); one that has asked for one has that, or where
// it is given others, the one in the same place.
#include "check.h"
static _Atomic int ending, ready;
static int first, last;
static cpu_set_t at_first;
static cpu_set_t given(void) {
    cpu_set_t set;
    OK(sched_getaffinity(getppid(), sizeof set, &set));
    return set;
}
// The processor at `place` of a set, from the beginning again where it has fewer.
static int at(const cpu_set_t *set, int place) {
    place %= CPU_COUNT(set);
    for (int c = 0;; c++)
        if (CPU_ISSET(c, set) && place-- == 0) return c;
}
static int place_of(const cpu_set_t *set, int cpu) {
    int place = 0;
    for (int c = 0; c < cpu; c++) place += CPU_ISSET(c, set) != 0;
    return place;
}
static void compare(const char *who, int wanted) {
    cpu_set_t is, agent = given(), own = agent;
    OK(sched_getaffinity(0, sizeof is, &is));
    if (wanted >= 0) {
        CPU_ZERO(&own);
        CPU_SET(CPU_EQUAL(&agent, &at_first) ? wanted : at(&agent, place_of(&at_first, wanted)), &own);
    }
    if (!CPU_EQUAL(&is, &own)) fail("%s has %d processors, the first is %d and not %d; the agent has %d", who, CPU_COUNT(&is), at(&is, 0), at(&own, 0), CPU_COUNT(&agent));
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
    OK(sched_getaffinity(0, sizeof at_first, &at_first));
    first = at(&at_first, 0);
    last = at(&at_first, CPU_COUNT(&at_first) - 1);
}
static void run_under(char **command) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = CPU_COUNT(&at_first) / 2; i < CPU_COUNT(&at_first); i++) CPU_SET(at(&at_first, i), &set);
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
