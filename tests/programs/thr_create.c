// Threads are created and joined all the time; every result arrives, TIDs differ from the main thread's.
#include "check.h"
#define N 16
static void *work(void *arg) {
    uint64_t v = (uint64_t)arg, local[64];
    fill(local, sizeof local, v);
    pid_t t = gettid();
    if (v % 3 == 0) nap_us(1000);
    sched_yield();
    verify(local, sizeof local, v, "a thread's stack");
    EQ(gettid(), t);
    CHECK(t != getpid());
    return (void *)mix(v);
}
int main(void) {
    begin("thr_create");
    uint64_t next = 1;
    pthread_t t[N];
    uint64_t id[N];
    for (int i = 0; i < N; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)(id[i] = next++)) == 0);
    for (int i = 0; running(); i = (i + 1) % N) {
        void *r;
        CHECK(pthread_join(t[i], &r) == 0);
        EQ((uint64_t)r, mix(id[i]));
        CHECK(pthread_create(&t[i], NULL, work, (void *)(id[i] = next++)) == 0);
    }
    for (int i = 0; i < N; i++) {
        void *r;
        CHECK(pthread_join(t[i], &r) == 0);
        EQ((uint64_t)r, mix(id[i]));
    }
    no_children();
    return finish();
}
