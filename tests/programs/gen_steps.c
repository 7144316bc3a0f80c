// gen_steps MEGABYTES [random | shared]: its memory is a function of one number, the step. The file `order` of its
// directory says which step to go to, or that all memory is to be compared with what it must be at a step; the file
// `answer` says what was done. Between two steps many, few, all or no pages change; some are alike, some zero; with
// `random` each step changes all of them, and no two are alike. With `shared` it is memory that could be shared.
#include "check.h"
#define P 4096
static const int share[] = {100, 1, 10, 50, 0, 60, 3, 100, 30};
static char *m;
static size_t pages;
static int all_random;
// Whether page i changes at step k; at the first all do.
static int changes(size_t i, uint64_t k) { return k == 1 || all_random || (int)(mix(i * 7919 + k) % 100) < share[k % 9]; }
static uint64_t seed(size_t i, uint64_t k) {
    switch (all_random ? 7 : mix(i + k) % 8) {
    case 0: return 0;
    case 1: return 1 + i % 5; // the same as other pages, and as at other steps
    default: return (uint64_t)i << 20 | k << 4 | 15;
    }
}
static void put(size_t i, uint64_t s) {
    if (s) fill(m + i * P, P, s);
    else memset(m + i * P, 0, P);
}
static void check_all(uint64_t step) {
    for (size_t i = 0; i < pages; i++) {
        uint64_t k = step;
        while (!changes(i, k)) k--;
        uint64_t s = seed(i, k);
        if (s) verify(m + i * P, P, s, "a page of the step");
        else
            for (size_t j = 0; j < P; j++)
                if (m[i * P + j]) fail("page %zu is not zero at step %llu", i, (unsigned long long)step);
    }
}
int main(int argc, char **argv) {
    begin("gen_steps");
    pages = (argc > 1 ? strtoull(argv[1], NULL, 10) : 8) << 8;
    all_random = argc > 2 && !strcmp(argv[2], "random");
    int sharing = argc > 2 && !strcmp(argv[2], "shared") ? MAP_SHARED : MAP_PRIVATE;
    m = mmap(NULL, pages * P, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    uint64_t step = 0;
    char last[64] = "";
    while (running()) {
        char order[64] = "", answer[96];
        int fd = open("order", O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            ssize_t n = read(fd, order, sizeof order - 1);
            order[n > 0 ? n : 0] = 0;
            OK(close(fd));
        }
        unsigned long long want;
        if (!strchr(order, '\n') || !strcmp(order, last)) {
            nap_us(1000);
            continue;
        }
        if (sscanf(order, "go %llu", &want) == 1) {
            while (step < want) {
                step++;
                for (size_t i = 0; i < pages; i++)
                    if (changes(i, step)) put(i, seed(i, step));
            }
        } else if (sscanf(order, "compare %llu", &want) == 1) {
            if (step != want) fail("this is step %llu, not %llu", (unsigned long long)step, want);
            check_all(step);
        } else fail("an order that cannot be understood: %s", order);
        memcpy(last, order, sizeof last);
        snprintf(answer, sizeof answer, "%s", order);
        fd = (int)OK(open("answer.new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
        full_write(fd, answer, strlen(answer));
        OK(close(fd));
        OK(rename("answer.new", "answer"));
    }
    if (step) check_all(step);
    return finish();
}
