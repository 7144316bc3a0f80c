// pthread_cancel of threads blocked in read, condvar and a loop; cleanup handlers run exactly once.
#include "check.h"
static int p[2];
static _Atomic int cleaned;
static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t c = PTHREAD_COND_INITIALIZER;
static void clean(void *arg) { cleaned += (int)(long)arg; }
static void unlock(void *arg) { (void)arg; pthread_mutex_unlock(&m); cleaned += 10; }
static void *in_read(void *arg) {
    (void)arg;
    pthread_cleanup_push(clean, (void *)1L);
    char b;
    ssize_t r = read(p[0], &b, 1);
    fail("read returned %zd", r);
    pthread_cleanup_pop(0);
    return NULL;
}
static void *in_cond(void *arg) {
    (void)arg;
    pthread_mutex_lock(&m);
    pthread_cleanup_push(unlock, NULL);
    for (;;) pthread_cond_wait(&c, &m);
    pthread_cleanup_pop(0);
    return NULL;
}
static void *in_loop(void *arg) {
    (void)arg;
    pthread_cleanup_push(clean, (void *)100L);
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    for (;;) __asm__ volatile("");
    pthread_cleanup_pop(0);
    return NULL;
}
int main(void) {
    begin("thr_cancel");
    OK(pipe(p));
    while (running()) {
        pthread_t t[3];
        void *(*f[])(void *) = {in_read, in_cond, in_loop};
        cleaned = 0;
        for (int i = 0; i < 3; i++) CHECK(pthread_create(&t[i], NULL, f[i], NULL) == 0);
        nap_us(10000);
        for (int i = 0; i < 3; i++) CHECK(pthread_cancel(t[i]) == 0);
        for (int i = 0; i < 3; i++) {
            void *r;
            CHECK(pthread_join(t[i], &r) == 0);
            CHECK(r == PTHREAD_CANCELED);
        }
        EQ(cleaned % 10 + cleaned / 100 * 100, 101);  // the condvar one may be cancelled before its handler was pushed
    }
    return finish();
}
