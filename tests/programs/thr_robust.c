// Robust mutexes: an owner that dies (thread, process) leaves EOWNERDEAD; the kernel's robust list survives a restart.
#include "check.h"
static pthread_mutex_t *m;
static _Atomic int go, held;
static void *die_holding(void *arg) {
    (void)arg;
    CHECK(pthread_mutex_lock(m) == 0);
    held = 1;
    while (!go) nap_us(1000);
    return NULL;  // without unlocking
}
int main(void) {
    begin("thr_robust");
    m = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    CHECK(pthread_mutex_init(m, &a) == 0);
    while (running()) {
        pthread_t t;
        go = held = 0;
        CHECK(pthread_create(&t, NULL, die_holding, NULL) == 0);
        while (!held) nap_us(500);
        EQ(pthread_mutex_trylock(m), EBUSY);
        nap_us(15000);  // a checkpoint usually falls here
        go = 1;
        EQ(pthread_mutex_lock(m), EOWNERDEAD);
        EQ(pthread_mutex_consistent(m), 0);
        EQ(pthread_mutex_unlock(m), 0);
        pthread_join(t, NULL);
        int p[2];
        OK(pipe(p));
        pid_t c = fork();
        if (c == 0) {
            begin_child();
            CHECK(pthread_mutex_lock(m) == 0);
            close(p[0]);
            full_write(p[1], "x", 1);
            nap_us(15000);
            kill(getpid(), SIGKILL);
        }
        char b;
        close(p[1]);
        full_read(p[0], &b, 1);
        close(p[0]);
        EQ(pthread_mutex_lock(m), EOWNERDEAD);  // blocks in a shared futex until the child is killed
        EQ(pthread_mutex_consistent(m), 0);
        EQ(pthread_mutex_unlock(m), 0);
        reap(c, SIGKILL);
    }
    return finish();
}
