// Memory that processes have in common because one has forked the other stays in memory once: several levels of
// children, that write to some of it, give some back, and have some for themselves. What all of them together take
// (Pss) is no more than before, and their contents are their own. Code that was made before all of them runs in each,
// as in emulators and compilers at run time. usage: proc_kin MIB
#include "check.h"
#define P 4096
enum { N = 6, CODE = 2 << 20 };
static char *m, *late, *code;
static size_t pages;
static int told[N][2], answers[2];
static pid_t kids[N];
static long pss(pid_t pid) {
    char path[64], l[256];
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", pid);
    FILE *f = fopen(path, "r");
    CHECK(f);
    long kib = -1;
    while (fgets(l, sizeof l, f)) sscanf(l, "Pss: %ld", &kib);
    fclose(f);
    CHECK(kib >= 0);
    return kib;
}
static long together(void) {
    long sum = pss(getpid());
    for (int i = 0; i < N; i++) sum += pss(kids[i]);
    return sum;
}
// Process `who` (0: the parent) has written each 100th page from `who` on; the pattern of all others is what its maker had.
static uint64_t seed_of(int who, size_t page) {
    static const int maker[N + 1] = {0, 0, 0, 0, 1, 4, 5};
    for (;; who = maker[who]) {
        if (who == 0 || page % 100 == (size_t)who) return page * 16 + (uint64_t)who;
    }
}
static void check(int who) {
    for (size_t i = 0; i < pages; i++) {
        if (who == 2 && i % 100 == 50) { // given back
            CHECK(m[i * P] == 0 && m[i * P + P - 8] == 0);
            continue;
        }
        verify(m + i * P, 64, seed_of(who, i), "common memory");
        verify(m + i * P + P - 64, 64, seed_of(who, i) + 1, "the end of common memory");
    }
    verify(late, 16 * P, (uint64_t)who, "memory that came later");
    for (size_t at = 0; at < CODE; at += 64 * P) EQ(((int (*)(void))(void *)(code + at))(), (int)at);
}
// Functions that say where they are, in memory that can be written, too.
static void compile(void) {
    code = mmap(NULL, CODE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(code != MAP_FAILED);
    OK(madvise(code, CODE, MADV_NOHUGEPAGE));
    fill(code, CODE, 5);
    for (int at = 0; at < CODE; at += 64 * P) {
        code[at] = (char)0xb8; // mov $at, %eax; ret
        memcpy(code + at + 1, &at, 4);
        code[at + 5] = (char)0xc3;
    }
}
static void put(int who) {
    for (size_t i = 0; i < pages; i++) {
        if (seed_of(who, i) != i * 16 + (uint64_t)who) continue;
        fill(m + i * P, P, i * 4096 + 7);
        fill(m + i * P, 64, i * 16 + (uint64_t)who);
        fill(m + i * P + P - 64, 64, i * 16 + (uint64_t)who + 1);
    }
    late = mmap(NULL, 16 * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(late != MAP_FAILED);
    fill(late, 16 * P, (uint64_t)who);
}
static void child(int who);
static void make(int who) {
    pid_t c = (pid_t)OK(fork());
    if (c == 0) {
        begin_child();
        child(who);
        _exit(0);
    }
}
static void child(int who) {
    char b;
    put(who);
    if (who == 2)
        for (size_t i = 50; i < pages; i += 100) OK(madvise(m + i * P, P, MADV_DONTNEED));
    if (who == 1 || who == 4 || who == 5) make(who == 1 ? 4 : who + 1);
    pid_t me = getpid();
    full_write(answers[1], &(int[2]){who, me}, sizeof(int[2]));
    for (;;) {
        full_read(told[who - 1][0], &b, 1);
        if (b == 'e') break;
        check(who);
        full_write(answers[1], &(int[2]){who, me}, sizeof(int[2]));
    }
    if (who == 1 || who == 4 || who == 5) {
        int st;
        CHECK(wait(&st) > 0 && st == 0);
    }
}
static void hear(void) {
    for (int i = 0; i < N; i++) {
        int a[2];
        full_read(answers[0], a, sizeof a);
        CHECK(a[0] >= 1 && a[0] <= N);
        kids[a[0] - 1] = a[1];
    }
}
static void tell(char b) {
    for (int i = 0; i < N; i++) full_write(told[i][1], &b, 1);
}
int main(int argc, char **argv) {
    begin("proc_kin");
    pages = (size_t)(argc > 1 ? atoi(argv[1]) : 16) << 8;
    m = mmap(NULL, pages * P, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED);
    OK(madvise(m, pages * P, MADV_NOHUGEPAGE)); // a huge page is copied whole
    for (int i = 0; i < N; i++) OK(pipe(told[i]));
    OK(pipe(answers));
    put(0);
    compile();
    for (int i = 1; i <= 3; i++) make(i);
    hear();
    tell('c');
    hear();
    check(0);
    long before = together(), now = 0;
    while (running()) nap_us(3000);
    tell('c');
    hear();
    check(0);
    now = together();
    if (now > before + before / 20 + 2048) fail("%ld KiB are in use, %ld before", now, before);
    tell('e');
    for (int i = 0; i < 3; i++) {
        int st;
        CHECK(wait(&st) > 0 && st == 0);
    }
    return finish();
}
