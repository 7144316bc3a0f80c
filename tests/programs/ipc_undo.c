// System V semaphores with SEM_UNDO: what a process has noted down is carried out when it ends, neither more nor less,
// however it ends. "all": all there is, in one set of many semaphores. "ended": another process has used the semaphore
// last and has ended. "left": nobody uses a set that an ended process has made.
#include "check.h"
#include <sys/sem.h>
// More than one call can ask about lie between them.
enum { HELD = 0, GIVEN = 30, MIXED = 70, BALANCED = 71, FULL = 72, EMPTY = 142, THREADED = 150, PLAIN = 213, SHARED = 214, COUNT = 240 };
static unsigned short stays[COUNT];
static int set;
static void op(unsigned short number, int amount, int flags) {
    struct sembuf b = {number, (short)amount, (short)flags};
    OK(semop(set, &b, 1));
}
static void expect(const unsigned short *want, const char *when) {
    unsigned short got[COUNT];
    OK(semctl(set, 0, GETALL, got));
    for (int i = 0; i < COUNT; i++)
        if (got[i] != want[i]) fail("%s: semaphore %d is %d, expected %d", when, i, got[i], want[i]);
}
static void *threaded(void *none) {
    op(THREADED, -4, SEM_UNDO);
    return none;
}
static int wait_for(int fd) {
    char c;
    full_read(fd, &c, 1);
    return c;
}
static void tell(int fd, int what) {
    char c = (char)what;
    full_write(fd, &c, 1);
}
// Has one list with the worker: what it notes down is carried out when both have ended.
static void sharer(int told, int end) {
    begin_child();
    op(SHARED, -2, SEM_UNDO);
    tell(told, 1);
    op(SHARED, wait_for(end) ? 2 : -1, SEM_UNDO);
    _exit(0);
}
// Takes and gives, tells so, and waits for its end. Of what it does a part stays.
static void worker(int told, int end, int gives_back) {
    pthread_t t;
    int ready[2], go[2];
    begin_child();
    op(HELD, -1, SEM_UNDO);
    op(GIVEN, 3, SEM_UNDO);
    op(MIXED, -5, SEM_UNDO);
    op(MIXED, 2, 0);
    op(BALANCED, -2, SEM_UNDO);
    op(BALANCED, 2, SEM_UNDO);
    op(FULL, -32767, SEM_UNDO);
    op(EMPTY, 32767, SEM_UNDO);
    op(PLAIN, 1, 0);
    EQ(pthread_create(&t, NULL, threaded, NULL), 0);
    op(THREADED, 1, SEM_UNDO);
    EQ(pthread_join(t, NULL), 0);
    OK(pipe(ready));
    OK(pipe(go));
    pid_t p = (pid_t)OK(syscall(SYS_clone, CLONE_SYSVSEM | SIGCHLD, 0, 0, 0, 0));
    if (p == 0) sharer(ready[1], go[0]);
    wait_for(ready[0]);
    tell(told, 1);
    wait_for(end);
    // With what was noted down before this comes to nothing.
    if (gives_back) {
        op(HELD, 1, SEM_UNDO);
        op(GIVEN, -3, SEM_UNDO);
        op(FULL, 32767, SEM_UNDO);
    }
    tell(go[1], gives_back);
    reap(p, 0);
    EQ(semctl(set, SHARED, GETVAL), stays[SHARED] - (gives_back ? 0 : 3));
    tell(told, 1);
    for (;;) pause();
}
// Neither process may have been given a list.
static void without_list(pid_t idle) { EQ(syscall(SYS_kcmp, getpid(), idle, 6, 0, 0), 0); }
static pid_t child(void) {
    pid_t p = (pid_t)OK(fork());
    if (p == 0) begin_child();
    return p;
}
// Takes, tells so, and waits for its end.
static pid_t holder(unsigned short number) {
    int told[2];
    OK(pipe(told));
    pid_t p = child();
    if (p == 0) {
        op(number, -2, SEM_UNDO);
        tell(told[1], 1);
        for (;;) pause();
    }
    wait_for(told[0]);
    close(told[0]);
    close(told[1]);
    return p;
}
static int all(void) {
    // What nobody may change any more can be read all the same.
    int closed = set = (int)OK(semget(IPC_PRIVATE, 1, IPC_CREAT | 0600));
    OK(semctl(set, 0, SETVAL, 5));
    pid_t keeper = holder(0);
    struct semid_ds ds;
    OK(semctl(set, 0, IPC_STAT, &ds));
    ds.sem_perm.mode = 0400;
    OK(semctl(set, 0, IPC_SET, &ds));
    for (unsigned i = 0; i < COUNT; i++) stays[i] = (unsigned short)(i % 7);
    stays[HELD] = 3, stays[MIXED] = 10, stays[BALANCED] = 4, stays[FULL] = 32767, stays[EMPTY] = 0, stays[THREADED] = 9, stays[SHARED] = 4;
    set = (int)OK(semget(IPC_PRIVATE, COUNT, IPC_CREAT | 0600));
    OK(semctl(set, 0, SETALL, stays));
    pid_t idle = child();
    if (idle == 0)
        for (;;) pause();
    for (unsigned n = 0; running(); n++) {
        int told[2], end[2], gives_back = n % 2;
        OK(pipe(told));
        OK(pipe(end));
        pid_t p = child();
        if (p == 0) worker(told[1], end[0], gives_back);
        wait_for(told[0]);
        unsigned short busy[COUNT];
        memcpy(busy, stays, sizeof busy);
        busy[HELD] -= 1, busy[GIVEN] += 3, busy[MIXED] -= 3, busy[FULL] = 0, busy[EMPTY] = 32767, busy[THREADED] -= 3, busy[PLAIN] += 1, busy[SHARED] -= 2;
        expect(busy, "as the worker has left it");
        for (int i = 0; i < 3; i++) {
            nap_us(4000);
            expect(busy, "while it waits");
            EQ(semctl(closed, 0, GETVAL), 3);
        }
        tell(end[1], 1);
        wait_for(told[0]);
        OK(kill(p, SIGKILL));
        reap(p, SIGKILL);
        stays[MIXED] += 2, stays[PLAIN] += 1;
        expect(stays, "when it has ended");
        without_list(idle);
        OK(semctl(closed, 0, IPC_STAT, &ds));
        EQ(ds.sem_perm.mode & 0777, 0400);
        for (int i = 0; i < 2; i++) {
            close(told[i]);
            close(end[i]);
        }
        if (stays[PLAIN] > 1000) op(PLAIN, -990, 0), stays[PLAIN] -= 990;
        if (stays[MIXED] > 1000) op(MIXED, -980, 0), stays[MIXED] -= 980;
    }
    OK(kill(idle, SIGKILL));
    reap(idle, SIGKILL);
    OK(kill(keeper, SIGKILL));
    reap(keeper, SIGKILL);
    OK(semctl(closed, 0, IPC_RMID));
    OK(semctl(set, 0, IPC_RMID));
    return finish();
}
static void passer(unsigned short number) {
    pid_t p = child();
    if (p == 0) {
        op(number, -1, 0);
        op(number, 1, 0);
        _exit(0);
    }
    reap(p, 0);
}
static int ended(void) {
    unsigned short start[3] = {5, 6, 1};
    // No process that lives is the last user of any of these.
    set = (int)OK(semget(IPC_PRIVATE, 3, IPC_CREAT | 0600));
    pid_t p = child();
    if (p == 0) {
        OK(semctl(set, 0, SETALL, start));
        _exit(0);
    }
    reap(p, 0);
    pid_t always = holder(1);
    passer(1);
    while (running()) {
        p = holder(0);
        passer(0);
        for (int i = 0; i < 3; i++) {
            nap_us(4000);
            EQ(semctl(set, 0, GETVAL), 3);
            EQ(semctl(set, 1, GETVAL), 4);
        }
        OK(kill(p, SIGKILL));
        reap(p, SIGKILL);
        EQ(semctl(set, 0, GETVAL), 5);
    }
    OK(kill(always, SIGKILL));
    reap(always, SIGKILL);
    EQ(semctl(set, 1, GETVAL), 6);
    OK(semctl(set, 0, IPC_RMID));
    return finish();
}
static int left(void) {
    // One that was killed, and had this number, has left its set.
    key_t key = (key_t)(mix((uint64_t)now_ns() + (uint64_t)getpid()) >> 33);
    pid_t p = child();
    if (p == 0) {
        int made = (int)OK(semget(key, 3, IPC_CREAT | IPC_EXCL | 0640));
        unsigned short values[3] = {7, 11, 0};
        OK(semctl(made, 0, SETALL, values));
        _exit(0);
    }
    reap(p, 0);
    set = (int)OK(semget(key, 0, 0));
    while (running()) {
        struct semid_ds ds;
        EQ(semget(key, 0, 0), set);
        OK(semctl(set, 0, IPC_STAT, &ds));
        EQ(ds.sem_perm.mode & 0777, 0640);
        EQ(ds.sem_otime, 0);
        EQ(semctl(set, 0, GETVAL), 7);
        EQ(semctl(set, 1, GETVAL), 11);
        nap_us(1000);
    }
    OK(semctl(set, 0, IPC_RMID));
    return finish();
}
int main(int argc, char **argv) {
    char name[64];
    const char *mode = argc > 1 ? argv[1] : "";
    snprintf(name, sizeof name, "ipc_undo %s", mode);
    begin(name);
    if (!strcmp(mode, "all")) return all();
    if (!strcmp(mode, "ended")) return ended();
    if (!strcmp(mode, "left")) return left();
    fail("unknown mode");
}
