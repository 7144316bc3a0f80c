// The rseq area of each thread stays registered with the kernel and keeps showing the current cpu.
#include "check.h"
#include <sys/rseq.h>
static struct rseq *area(void) { return (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset); }
static void one(void) {
    if (__rseq_size == 0) return;
    struct rseq *r = area();
    unsigned a = r->cpu_id, now = 0, b;
    syscall(SYS_getcpu, &now, NULL, NULL);
    b = *(volatile unsigned *)&r->cpu_id;
    if (a == b && now != a) fail("rseq shows cpu %u, the thread runs on %u", a, now);
    if ((int)a < 0) fail("rseq shows cpu %d: not registered", (int)a);
    static _Thread_local struct rseq other __attribute__((aligned(64)));
    long ret = syscall(SYS_rseq, &other, 32, 0, 0x53053053);
    if (ret == 0) fail("the kernel accepted a second rseq area: the first was lost");
    ret = syscall(SYS_rseq, r, 32, 0, 0x53053053);
    if (ret == 0 || (errno != EBUSY && errno != EINVAL)) fail("the registered rseq area differs: %ld %s", ret, strerror(errno));
}
static _Atomic int ending;
static void *work(void *a) {
    (void)a;
    while (!ending) {
        for (int i = 0; i < 1000; i++) one();
        nap_us(1000);
    }
    return NULL;
}
int main(void) {
    begin("thr_rseq");
    pthread_t t[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&t[i], NULL, work, NULL) == 0);
    while (running()) {
        one();
        nap_us(2000);
    }
    ending = 1;
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    return finish();
}
