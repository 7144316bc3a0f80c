// Priority-inheritance mutexes: the kernel knows the owner by its TID.
#include "check.h"
#define N 6
static pthread_mutex_t m;
static uint64_t counter;
static _Atomic uint64_t total;
static _Atomic int ending;
static void *work(void *arg) {
    (void)arg;
    while (!ending) {
        EQ(pthread_mutex_lock(&m), 0);
        uint64_t c = counter;
        nap_us(500);
        EQ(counter, c);
        counter = c + 1;
        EQ(pthread_mutex_unlock(&m), 0);
        total++;
    }
    return NULL;
}
int main(void) {
    begin("thr_pi");
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    CHECK(pthread_mutexattr_setprotocol(&a, PTHREAD_PRIO_INHERIT) == 0);
    CHECK(pthread_mutex_init(&m, &a) == 0);
    pthread_t t[N];
    for (int i = 0; i < N; i++) CHECK(pthread_create(&t[i], NULL, work, NULL) == 0);
    while (running()) {
        EQ(pthread_mutex_lock(&m), 0);
        EQ(pthread_mutex_trylock(&m), EBUSY);
        uint64_t c = counter;
        nap_us(5000);
        EQ(counter, c);
        EQ(pthread_mutex_unlock(&m), 0);
        nap_us(1000);
    }
    ending = 1;
    for (int i = 0; i < N; i++) CHECK(pthread_join(t[i], NULL) == 0);
    EQ(counter, total);
    return finish();
}
