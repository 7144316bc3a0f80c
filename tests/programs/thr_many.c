// 512 computing threads, each with its own TID, name, stack contents and thread-local storage. thr_many N
#include "check.h"
#define MAX 1024
static _Thread_local uint64_t tls[16];
static _Atomic uint64_t rounds[MAX];
static _Atomic int ready, ending;
static void *work(void *arg) {
    long i = (long)arg;
    pid_t t = gettid();
    char name[16], got[16];
    snprintf(name, sizeof name, "worker-%ld", i);
    prctl(PR_SET_NAME, name);
    uint64_t local[32];
    fill(local, sizeof local, (uint64_t)i);
    fill(tls, sizeof tls, (uint64_t)i + 7);
    ready++;
    while (!ending) {
        nap_us(20000);
        verify(local, sizeof local, (uint64_t)i, "a thread's stack");
        verify(tls, sizeof tls, (uint64_t)i + 7, "thread-local storage");
        EQ(syscall(SYS_gettid), t);
        prctl(PR_GET_NAME, got);
        if (strcmp(name, got)) fail("thread %ld is named %s", i, got);
        rounds[i]++;
    }
    return NULL;
}
int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 512;
    char name[32];
    snprintf(name, sizeof name, "thr_many-%d", n);
    begin(name);
    static pthread_t t[MAX];
    pthread_attr_t at;
    pthread_attr_init(&at);
    pthread_attr_setstacksize(&at, 65536);
    for (long i = 0; i < n; i++) CHECK(pthread_create(&t[i], &at, work, (void *)i) == 0);
    while (ready < n) nap_us(1000);
    while (running()) {
        uint64_t before[MAX];
        for (int i = 0; i < n; i++) before[i] = rounds[i];
        int64_t t0 = now_ns();
        for (int i = 0; i < n; i++)
            while (rounds[i] == before[i]) {
                if (now_ns() - t0 > 20000000000LL) fail("thread %d stopped running", i);
                nap_us(5000);
            }
    }
    ending = 1;
    for (int i = 0; i < n; i++) CHECK(pthread_join(t[i], NULL) == 0);
    return finish();
}
