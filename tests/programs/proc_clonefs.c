// Three processes that share working directory and file mode creation mask (CLONE_FS): each in turn changes both, and
// all see it. A fourth has its own.
#include "check.h"
#define SHARING 3
struct shared { _Atomic unsigned turn, seen[SHARING]; _Atomic int ending; };
static struct shared *s;
static char stacks[2][65536] __attribute__((aligned(16)));
static char base[PATH_MAX];
static mode_t mask(void) {
    mode_t m = umask(0077);
    umask(m);
    return m;
}
static void is(const char *dir, unsigned n) {
    char want[PATH_MAX + 16], have[PATH_MAX + 16];
    snprintf(want, sizeof want, "%s/%s.%u", base, dir, n);
    CHECK(getcwd(have, sizeof have));
    if (strcmp(want, have)) fail("the working directory is %s, expected %s", have, want);
}
static int peer(void *arg) {
    unsigned me = (unsigned)(uintptr_t)arg;
    begin_child();
    for (unsigned last = 0; !s->ending;) {
        unsigned t = s->turn;
        if (t == last) { usleep(200); continue; }
        last = t;
        if (t % SHARING == me) {
            char d[PATH_MAX + 16];
            snprintf(d, sizeof d, "%s/shared.%u", base, t % 4);
            OK(chdir(d));
            umask((mode_t)(t % 64));
        }
        s->seen[me] = t;
    }
    _exit(0);
}
int main(void) {
    begin("proc_clonefs");
    CHECK(getcwd(base, sizeof base));
    for (int i = 0; i < 4; i++) {
        char d[64];
        snprintf(d, sizeof d, "shared.%d", i);
        OK(mkdir(d, 0700));
    }
    OK(mkdir("own.0", 0700));
    s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t p[SHARING];
    for (unsigned i = 1; i < SHARING; i++)
        p[i] = (pid_t)OK(clone(peer, stacks[i - 1] + sizeof stacks[0], CLONE_FS | SIGCHLD, (void *)(uintptr_t)i));
    pid_t own = (pid_t)OK(fork());
    if (own == 0) {
        begin_child();
        OK(chdir("own.0"));
        umask(0125);
        while (!s->ending) {
            is("own", 0);
            EQ(mask(), 0125);
            usleep(500);
        }
        _exit(0);
    }
    unsigned t = 0;
    while (running()) {
        t++;
        unsigned who = t % SHARING;
        char d[PATH_MAX + 16];
        snprintf(d, sizeof d, "%s/shared.%u", base, t % 4);
        if (who == 0) {
            OK(chdir(d));
            umask((mode_t)(t % 64));
        }
        s->turn = t;
        int64_t t0 = now_ns();
        for (unsigned i = 1; i < SHARING; i++)
            while (s->seen[i] != t) {
                if (now_ns() - t0 > 60000000000LL) fail("peer %u does not answer", i);
                nap_us(200);
            }
        is("shared", t % 4);
        EQ(mask(), t % 64);
    }
    s->ending = 1;
    for (unsigned i = 1; i < SHARING; i++) reap(p[i], 0);
    reap(own, 0);
    return finish();
}
