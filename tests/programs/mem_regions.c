// Guard regions (MADV_GUARD_INSTALL), as newer C libraries end their threads' stacks with: on anonymous memory, on
// private and shared mappings of files, beside what is kept from children or locked. Each access faults, all around is
// as it was, and a region can be taken away and put back.
#include "check.h"
#include <setjmp.h>
#define P 4096
#define GUARD_INSTALL 102
#define GUARD_REMOVE 103
static sigjmp_buf jb;
static void on(int s) {
    (void)s;
    siglongjmp(jb, 1);
}
static int faults(volatile char *p, int write) {
    if (sigsetjmp(jb, 1)) return 1;
    if (write) *p = 1; else (void)*p;
    return 0;
}
struct place {
    const char *name;
    char *at;
    int first, pages, all; // guarded pages of all
    int data;              // pages hold the pattern; 2: of what the process may write
};
static struct place place[16];
static int places;
static void guard(const char *name, char *at, int first, int pages, int all, int data) {
    CHECK(at != MAP_FAILED);
    place[places] = (struct place){name, at, first, pages, all, data};
    for (int i = 0; i < all && data; i++) fill(at + i * P, P, (uint64_t)(places * 100 + i));
    OK(madvise(at + first * P, (size_t)pages * P, GUARD_INSTALL));
    places++;
}
static char *anon(int pages, int prot) { return mmap(NULL, (size_t)pages * P, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }
static void look(int n, int wiped) {
    struct place *p = &place[n];
    for (int i = 0; i < p->all; i++) {
        char *at = p->at + i * P;
        int guarded = p->first <= i && i < p->first + p->pages && !wiped;
        if (faults(at, 0) != guarded) fail("%s: page %d %s", p->name, i, guarded ? "is no guard any more" : "faults");
        if (guarded && !faults(at, 1)) fail("%s: page %d can be written", p->name, i);
        if (!guarded && p->data && !wiped) verify(at, P, (uint64_t)(n * 100 + i), p->name);
    }
}
static void *thread(void *stack) {
    for (;;) {
        CHECK((char *)__builtin_frame_address(0) > (char *)stack + P);
        nap_us(1000);
    }
    return NULL;
}
int main(void) {
    begin("mem_regions");
    static char alt[65536];
    stack_t ss = {.ss_sp = alt, .ss_size = sizeof alt};
    OK(sigaltstack(&ss, NULL));
    struct sigaction sa = {.sa_handler = on, .sa_flags = SA_ONSTACK};
    sigaction(SIGSEGV, &sa, NULL);
    int rw = PROT_READ | PROT_WRITE;
    guard("memory", anon(64, rw), 3, 2, 64, 1);
    guard("the end of memory", anon(8, rw), 0, 1, 8, 1);
    guard("untouched memory", anon(8, rw), 2, 3, 8, 0);
    guard("nothing but guards", anon(2, rw), 0, 2, 2, 0);
    char *m = anon(8, rw);
    OK(madvise(m, 8 * P, MADV_WIPEONFORK));
    int wiped = places;
    guard("memory wiped for children", m, 4, 2, 8, 1);
    m = anon(8, rw);
    OK(madvise(m, 8 * P, MADV_DONTFORK));
    int kept = places;
    guard("memory kept from children", m, 1, 1, 8, 1);
    m = anon(4, rw);
    guard("locked memory", m, 1, 1, 4, 1);
    mlock(m, 4 * P); // tells of the guard
    m = anon(2 << 10, rw);
    guard("much memory", m, 1000, 24, 2 << 10, 1);
    int self = (int)OK(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    guard("a private mapping of a file", mmap(NULL, 3 * P, rw, MAP_PRIVATE, self, 0), 1, 1, 3, 1);
    guard("untouched pages of a file", mmap(NULL, 3 * P, rw, MAP_PRIVATE, self, 0), 1, 1, 3, 0);
    close(self);
    int fd = (int)OK(memfd_create("guarded", 0));
    OK(ftruncate(fd, 8 * P));
    guard("a shared mapping", mmap(NULL, 8 * P, rw, MAP_SHARED, fd, 0), 5, 2, 8, 1);
    m = mmap(NULL, 8 * P, rw, MAP_SHARED, fd, 0);
    CHECK(m != MAP_FAILED);
    verify(m + 5 * P, P, (uint64_t)((places - 1) * 100 + 5), "what lies behind a guard");
    OK(madvise(m, 8 * P, MADV_DONTFORK));
    int kept_shared = places;
    guard("a shared mapping kept from children", m, 0, 1, 8, 0);
    char *stack = anon(64, rw);
    OK(madvise(stack, P, GUARD_INSTALL));
    pthread_attr_t a;
    pthread_t t;
    pthread_attr_init(&a);
    CHECK(!pthread_attr_setstack(&a, stack + P, 63 * P));
    CHECK(!pthread_create(&t, &a, thread, stack));
    while (running()) {
        nap_us(2000);
        for (int i = 0; i < places; i++) look(i, 0);
        CHECK(faults(stack, 1));
    }
    pid_t c = fork();
    if (c == 0) {
        begin_child();
        for (int i = 0; i < places; i++)
            if (i != kept && i != kept_shared) look(i, i == wiped);
        _exit(0);
    }
    reap(c, 0);
    for (int i = 0; i < places; i++) {
        char *at = place[i].at + place[i].first * P;
        if (!strcmp(place[i].name, "locked memory")) OK(munlock(place[i].at, (size_t)place[i].all * P));
        OK(madvise(at, P, GUARD_REMOVE));
        if (faults(at, 1)) fail("%s: the guard stays", place[i].name);
        OK(madvise(at, P, GUARD_INSTALL));
        if (!faults(at, 0)) fail("%s: no guard can be put back", place[i].name);
    }
    return finish();
}
