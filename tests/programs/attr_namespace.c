// The numbers of the user, IPC and PID namespaces, as MPI libraries compare them: three processes, one of them with a
// second thread, each see their own and those of the others as before.
#include "check.h"
#define PROCESSES 3
#define KINDS 3
static const char *const kinds[KINDS] = {"user", "ipc", "pid"};
struct shared { _Atomic pid_t pids[PROCESSES]; _Atomic unsigned turn, seen[PROCESSES]; _Atomic int ending; };
static struct shared *s;
static ino_t before[KINDS];
static ino_t number(const char *of, int kind) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%s/ns/%s", of, kinds[kind]);
    OK(stat(path, &st));
    return st.st_ino;
}
static void look(const int *held) {
    for (int k = 0; k < KINDS; k++) {
        struct stat st;
        EQ(number("self", k), before[k]);
        for (int i = 0; i < PROCESSES; i++) {
            char pid[16];
            snprintf(pid, sizeof pid, "%d", s->pids[i]);
            EQ(number(pid, k), before[k]);
        }
        // A descriptor of before shows the same, and so does a new one.
        OK(fstat(held[k], &st));
        EQ(st.st_ino, before[k]);
    }
}
static void open_own(int *held) {
    for (int k = 0; k < KINDS; k++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/ns/%s", kinds[k]);
        held[k] = (int)OK(open(path, O_RDONLY | O_CLOEXEC));
    }
}
// A checkpoint finds the old descriptors or the new ones, or both.
static void renew(int *held) {
    int next[KINDS];
    open_own(next);
    for (int k = 0; k < KINDS; k++) {
        close(held[k]);
        held[k] = next[k];
    }
}
static void *watch(void *none) {
    while (!s->ending) {
        for (int k = 0; k < KINDS; k++) EQ(number("self", k), before[k]);
        usleep(1000);
    }
    return none;
}
// A child of now may see other numbers than its parent; it holds its own namespaces while checkpoints are taken.
static void fork_one(void) {
    pid_t child = (pid_t)OK(fork());
    if (child == 0) {
        int held[KINDS];
        begin_child();
        open_own(held);
        usleep(2000);
        for (int k = 0; k < KINDS; k++) CHECK(number("self", k) != 0);
        _exit(0);
    }
    reap(child, 0);
}
static void attend(unsigned me) {
    pthread_t thread;
    begin_child();
    if (me == 1) EQ(pthread_create(&thread, NULL, watch, NULL), 0);
    int held[KINDS];
    open_own(held);
    for (unsigned last = 0; !s->ending;) {
        unsigned t = s->turn;
        if (t == last) { usleep(200); continue; }
        last = t;
        look(held);
        if (me == 2) renew(held);
        s->seen[me] = t;
    }
    if (me == 1) EQ(pthread_join(thread, NULL), 0);
    _exit(0);
}
int main(void) {
    begin("attr_namespace");
    for (int k = 0; k < KINDS; k++) before[k] = number("self", k);
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
    int held[KINDS];
    open_own(held);
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
