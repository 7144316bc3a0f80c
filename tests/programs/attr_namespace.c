// The number of the user namespace, as MPI libraries compare it: three processes, one of them with a second thread, each see their own and that of the others as before.
#include "check.h"
#define PROCESSES 3
struct shared { _Atomic pid_t pids[PROCESSES]; _Atomic unsigned turn, seen[PROCESSES]; _Atomic int ending; };
static struct shared *s;
static ino_t before;
static ino_t number(const char *of) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%s/ns/user", of);
    OK(stat(path, &st));
    return st.st_ino;
}
static void look(int held) {
    struct stat st;
    EQ(number("self"), before);
    for (int i = 0; i < PROCESSES; i++) {
        char pid[16];
        snprintf(pid, sizeof pid, "%d", s->pids[i]);
        EQ(number(pid), before);
    }
    // A descriptor of before shows the same, and so does a new one.
    OK(fstat(held, &st));
    EQ(st.st_ino, before);
}
static int open_own(void) { return (int)OK(open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC)); }
// A checkpoint finds the old descriptor or the new one, or both.
static int renew(int held) {
    int next = open_own();
    close(held);
    return next;
}
static void *watch(void *none) {
    while (!s->ending) {
        EQ(number("self"), before);
        usleep(1000);
    }
    return none;
}
// A child of now may see another number than its parent; it holds its own namespace while checkpoints are taken.
static void fork_one(void) {
    pid_t child = (pid_t)OK(fork());
    if (child == 0) {
        begin_child();
        open_own();
        usleep(2000);
        CHECK(number("self") != 0);
        _exit(0);
    }
    reap(child, 0);
}
static void attend(unsigned me) {
    pthread_t thread;
    begin_child();
    if (me == 1) EQ(pthread_create(&thread, NULL, watch, NULL), 0);
    int held = open_own();
    for (unsigned last = 0; !s->ending;) {
        unsigned t = s->turn;
        if (t == last) { usleep(200); continue; }
        last = t;
        look(held);
        if (me == 2) held = renew(held);
        s->seen[me] = t;
    }
    if (me == 1) EQ(pthread_join(thread, NULL), 0);
    _exit(0);
}
int main(void) {
    begin("attr_namespace");
    before = number("self");
    s = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    s->pids[0] = getpid();
    for (unsigned i = 1; i < PROCESSES; i++) {
        pid_t p = (pid_t)OK(fork());
        if (p == 0) {
            while (!s->pids[PROCESSES - 1]) usleep(200);
            attend(i);
        }
        s->pids[i] = p;
    }
    int held = open_own();
    for (unsigned t = 1; running(); t++) {
        s->turn = t;
        int64_t t0 = now_ns();
        for (unsigned i = 1; i < PROCESSES; i++)
            while (s->seen[i] != t) {
                int st;
                if (waitpid(s->pids[i], &st, WNOHANG) > 0) fail("process %u has ended with status %x", i, st);
                if (now_ns() - t0 > 60000000000LL) fail("process %u does not answer", i);
                nap_us(200);
            }
        look(held);
        fork_one();
    }
    s->ending = 1;
    for (unsigned i = 1; i < PROCESSES; i++) reap(s->pids[i], 0);
    return finish();
}
