// A program for fault tests: some megabytes that change all the time, two threads, a child, a pipe. fault_target [MEGABYTES]
// Its parent may die (a killed agent), so that the parent's PID is not checked.
#include "check.h"
static _Atomic uint64_t ticks;
static void *tick(void *a) {
    (void)a;
    for (;;) {
        nap_us(1000);
        ticks++;
    }
    return NULL;
}
int main(int argc, char **argv) {
    size_t mb = argc > 1 ? (size_t)atoi(argv[1]) : 24, n = mb * 256;
    begin("fault_target");
    check_quiet_parent = 1;
    char *m = mmap(NULL, n * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    uint64_t *seed = calloc(n, 8);
    for (size_t i = 0; i < n; i++) fill(m + i * 4096, 4096, seed[i] = i);
    int to[2], from[2];
    OK(pipe(to));
    OK(pipe(from));
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        close(to[1]);
        close(from[0]);
        uint64_t v;
        while (read(to[0], &v, 8) == 8) {
            v = mix(v);
            full_write(from[1], (char *)&v, 8);
        }
        _exit(0);
    }
    close(to[0]);
    close(from[1]);
    pthread_t t;
    CHECK(pthread_create(&t, NULL, tick, NULL) == 0);
    for (uint64_t r = n; running(); r++) {
        size_t i = mix(r) % n;
        verify(m + i * 4096, 4096, seed[i], "memory");
        fill(m + i * 4096, 4096, seed[i] = r);
        uint64_t v = r, before = ticks;
        full_write(to[1], (char *)&v, 8);
        full_read(from[0], &v, 8);
        EQ(v, mix(r));
        if (r % 8 == 0) {
            int64_t t0 = now_ns();
            while (ticks == before) {
                nap_us(500);
                if (now_ns() - t0 > 10000000000LL) fail("the other thread stopped");
            }
        }
    }
    for (size_t i = 0; i < n; i++) verify(m + i * 4096, 4096, seed[i], "memory at the end");
    close(to[1]);
    reap(c, 0);
    no_children();
    return finish();
}
