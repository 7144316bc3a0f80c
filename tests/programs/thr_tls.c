// Thread-local variables of every kind, pthread keys with destructors, errno, locale.
#include "check.h"
#include <locale.h>
#define N 12
static _Thread_local uint64_t plain = 5, big[512];
static _Thread_local char *own;
static pthread_key_t key[8];
static _Atomic int destroyed;
static void destroy(void *p) { free(p); destroyed++; }
static void *work(void *arg) {
    uint64_t i = (uint64_t)arg;
    EQ(plain, 5);
    EQ(big[100], 0);
    plain = i;
    fill(big, sizeof big, i);
    own = malloc(64);
    snprintf(own, 64, "thread %llu", (unsigned long long)i);
    for (int k = 0; k < 8; k++) {
        uint64_t *p = malloc(8);
        *p = mix(i * 8 + (uint64_t)k);
        pthread_setspecific(key[k], p);
    }
    uint64_t self = (uint64_t)pthread_self(), fs;
    for (int r = 0; r < 20; r++) {
        errno = (int)(i % 100) + 1;
        int64_t end = now_ns() + 3000000;
        while (now_ns() < end) CHECK(errno == (int)(i % 100) + 1);
        EQ(plain, i);
        verify(big, sizeof big, i, "thread-local array");
        char want[64];
        snprintf(want, sizeof want, "thread %llu", (unsigned long long)i);
        CHECK(!strcmp(want, own));
        for (int k = 0; k < 8; k++) EQ(*(uint64_t *)pthread_getspecific(key[k]), mix(i * 8 + (uint64_t)k));
        EQ((uint64_t)pthread_self(), self);
        __asm__("movq %%fs:0,%0" : "=r"(fs));
        EQ(fs, self);
    }
    free(own);
    return NULL;
}
int main(void) {
    begin("thr_tls");
    for (int k = 0; k < 8; k++) CHECK(pthread_key_create(&key[k], destroy) == 0);
    uint64_t next = 10;
    while (running()) {
        pthread_t t[N];
        destroyed = 0;
        for (int i = 0; i < N; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)next++) == 0);
        for (int i = 0; i < N; i++) CHECK(pthread_join(t[i], NULL) == 0);
        EQ(destroyed, N * 8);
        EQ(plain, 5);
    }
    return finish();
}
