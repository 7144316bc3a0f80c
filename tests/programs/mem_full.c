// mem_full MEGABYTES [THREADS [alone]]: fills that much memory and rewrites all of it again and again, a page at a
// time; every page always holds what was written to it last. With `alone` it allows itself no more processes: nobody
// can make a copy of it.
#include "check.h"
#include <sys/resource.h>
#define P 4096
#define MAX 16
static char *m;
static size_t pages;
static int workers;
static uint64_t *round_of; // of each page
static atomic_int stop;
static void *work(void *arg) {
    size_t k = (size_t)(intptr_t)arg, first = pages * k / workers, last = pages * (k + 1) / workers;
    while (!stop) {
        for (size_t i = first; i < last && !stop; i++) {
            uint64_t *w = (uint64_t *)(m + i * P), r = round_of[i];
            // Cheap to make and to check: the program must be quick to be dangerous.
            for (size_t j = 0; j < P / 8; j += 64)
                if (w[j] != mix(i * 1000003 + r) + j) fail("page %zu: word %zu of round %llu is damaged: %llx", i, j, (unsigned long long)r, (unsigned long long)w[j]);
            round_of[i] = ++r;
            uint64_t v = mix(i * 1000003 + r);
            for (size_t j = 0; j < P / 8; j++) w[j] = v + j;
        }
    }
    return NULL;
}
int main(int argc, char **argv) {
    begin("mem_full");
    pages = (argc > 1 ? strtoull(argv[1], NULL, 10) : 32) << 8;
    workers = argc > 2 ? atoi(argv[2]) : 1;
    CHECK(workers >= 1 && workers <= MAX);
    m = mmap(NULL, pages * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    round_of = calloc(pages, 8);
    CHECK(m != MAP_FAILED && round_of);
    for (size_t i = 0; i < pages; i++)
        for (size_t j = 0; j < P / 8; j++) ((uint64_t *)(m + i * P))[j] = mix(i * 1000003) + j;
    pthread_t t[MAX];
    for (int k = 0; k < workers; k++) CHECK(pthread_create(&t[k], NULL, work, (void *)(intptr_t)k) == 0);
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NPROC, &limit));
    if (argc > 3) limit.rlim_cur = 1;
    OK(setrlimit(RLIMIT_NPROC, &limit));
    while (running()) nap_us(1000);
    struct rlimit now;
    OK(getrlimit(RLIMIT_NPROC, &now));
    EQ(now.rlim_cur, limit.rlim_cur);
    stop = 1;
    for (int k = 0; k < workers; k++) CHECK(pthread_join(t[k], NULL) == 0);
    for (size_t i = 0; i < pages; i++) {
        uint64_t *w = (uint64_t *)(m + i * P);
        for (size_t j = 0; j < P / 8; j++)
            if (w[j] != mix(i * 1000003 + round_of[i]) + j) fail("page %zu: word %zu is damaged at the end", i, j);
    }
    no_children();
    return finish();
}
