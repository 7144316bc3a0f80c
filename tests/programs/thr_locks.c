// Barriers, read-write locks, spin locks, semaphores and once: counted work of eight threads is never lost.
#include "check.h"
#include <semaphore.h>
#define N 8
static pthread_barrier_t bar;
static pthread_rwlock_t rw = PTHREAD_RWLOCK_INITIALIZER;
static pthread_spinlock_t spin;
static sem_t sem;
static uint64_t a, b, spun;
static _Atomic int in_sem, ending;
static void *work(void *arg) {
    long id = (long)arg;
    for (uint64_t r = 0;; r++) {
        pthread_barrier_wait(&bar);
        if (ending) return NULL;
        pthread_barrier_wait(&bar);
        pthread_rwlock_rdlock(&rw);
        if (a != b) fail("reader sees %llu and %llu", (unsigned long long)a, (unsigned long long)b);
        pthread_rwlock_unlock(&rw);
        pthread_rwlock_wrlock(&rw);
        a++;
        sched_yield();
        b++;
        pthread_rwlock_unlock(&rw);
        pthread_spin_lock(&spin);
        spun++;
        pthread_spin_unlock(&spin);
        CHECK(sem_wait(&sem) == 0);
        CHECK(++in_sem <= 3);
        nap_us(200 * (id % 3));
        in_sem--;
        sem_post(&sem);
        pthread_barrier_wait(&bar);
        if (a != (r + 1) * N || b != a || spun != a) fail("round %llu counted %llu %llu %llu", (unsigned long long)r, (unsigned long long)a, (unsigned long long)b, (unsigned long long)spun);
    }
}
int main(void) {
    begin("thr_locks");
    pthread_barrier_init(&bar, NULL, N + 1);
    pthread_spin_init(&spin, 0);
    sem_init(&sem, 0, 3);
    pthread_t t[N];
    for (long i = 0; i < N; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)i) == 0);
    for (int more = 1; more;) {
        more = running();
        ending = !more;
        pthread_barrier_wait(&bar);
        if (!more) break;
        pthread_barrier_wait(&bar);
        pthread_barrier_wait(&bar);
    }
    for (int i = 0; i < N; i++) pthread_join(t[i], NULL);
    return finish();
}
