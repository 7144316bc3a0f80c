// Threads with a descriptor table of their own (unshare(CLONE_FILES)): one alone, and two that share one which is not
// the process's.
#include "check.h"
#include <dirent.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
enum { MAIN, ALONE, MAKER, TABLES };
#define SAME 200          // a number that means another file in each table
#define ONLY(k) (300 + k) // a number that only table k has
static atomic_int ready, ending, made_fd = -1;
static _Atomic uint64_t turn, done[TABLES];
static int offset_fd, lock_fd, feed[TABLES][2];
static void lock(int k, int cmd, short want, pid_t pid) {
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10 * k, .l_len = 5};
    OK(fcntl(lock_fd, cmd, &l));
    if (cmd == F_GETLK) {
        EQ(l.l_type, want);
        if (want == F_WRLCK) EQ(l.l_pid, pid);
    }
}
static int count(void) {
    DIR *d = opendir("/proc/thread-self/fd");
    CHECK(d);
    int n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}
// Gives table k its own descriptors.
static void furnish(int k) {
    int m = (int)OK(memfd_create("own", k & 1 ? MFD_CLOEXEC : 0)), e = (int)OK(eventfd((unsigned)k, 0));
    OK(ftruncate(m, 4096 * (k + 1)));
    OK(dup3(m, SAME, k & 1 ? O_CLOEXEC : 0));
    OK(dup2(e, ONLY(k)));
    OK(lseek(m, k, SEEK_SET));
    close(m);
    close(e);
    lock(k, F_SETLK, 0, 0);
}
static void check(int k, int descriptors) {
    struct stat st;
    OK(fstat(SAME, &st));
    EQ(st.st_size, 4096 * (k + 1));
    EQ(lseek(SAME, 0, SEEK_CUR), k);
    EQ(fcntl(SAME, F_GETFD), k & 1 ? FD_CLOEXEC : 0);
    uint64_t v;
    full_read(ONLY(k), &v, 8 * (k != MAIN));
    if (k != MAIN) {
        EQ(v, k);
        full_write(ONLY(k), &v, 8);
    }
    // Locks belong to a table, and are seen as another's from outside.
    for (int i = 0; i < TABLES; i++) {
        CHECK((fcntl(ONLY(i), F_GETFD) >= 0) == (i == k));
        lock(i, F_GETLK, i == k ? F_UNLCK : F_WRLCK, getpid());
    }
    EQ(count(), descriptors);
    EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
}
// Opens what the other thread of this table closes.
static void *made(void *arg) {
    (void)arg;
    while (!ending) {
        if (made_fd < 0) { usleep(300); continue; }
        uint64_t v;
        full_read(made_fd, &v, 8);
        EQ(v, 77);
        OK(close(made_fd));
        EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
        CHECK(fcntl(ONLY(MAKER), F_GETFD) >= 0 && fcntl(ONLY(MAIN), F_GETFD) == -1);
        made_fd = -1;
    }
    return NULL;
}
static void *run(void *arg) {
    int k = (int)(intptr_t)arg;
    OK(unshare(CLONE_FILES));
    for (int i = 0; i < TABLES; i++) {
        close(feed[i][1]);
        if (i != k) close(feed[i][0]);
    }
    furnish(k);
    int ep = (int)OK(epoll_create1(0));
    struct epoll_event e = {EPOLLIN | EPOLLRDHUP, {.u64 = (uint64_t)k}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, feed[k][0], &e));
    pthread_t other;
    if (k == MAKER) CHECK(pthread_create(&other, NULL, made, NULL) == 0);
    int descriptors = count();
    ready++;
    for (;;) {
        memset(&e, 0, sizeof e);
        int r = epoll_wait(ep, &e, 1, 60000);
        if (r != 1) fail("epoll_wait of thread %d returned %d: %s", k, r, strerror(errno));
        EQ(e.data.u64, k);
        char b;
        ssize_t n = read(feed[k][0], &b, 1);
        if (n == 0) break;  // the one writing end, in the process's table, is closed
        EQ(n, 1);
        EQ(b, (char)turn);
        EQ(lseek(offset_fd, 0, SEEK_CUR), turn % 1000);
        check(k, descriptors);
        if (k == MAKER) {
            made_fd = (int)OK(eventfd(77, 0));
            int64_t t0 = now_ns();
            while (made_fd >= 0) {
                if (now_ns() - t0 > 60000000000LL) fail("the other thread of the table does not answer");
                usleep(300);
            }
        }
        done[k] = turn;
    }
    if (k == MAKER) {
        ending = 1;
        pthread_join(other, NULL);
    }
    return NULL;
}
int main(void) {
    begin("thr_files");
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));  // each thread has it for itself
    pthread_t t[TABLES];
    offset_fd = (int)OK(open("offset", O_RDWR | O_CREAT | O_TRUNC, 0600));
    lock_fd = (int)OK(open("lock", O_RDWR | O_CREAT | O_TRUNC, 0600));
    for (int i = 1; i < TABLES; i++) OK(pipe2(feed[i], 0));
    feed[MAIN][0] = feed[MAIN][1] = -1;
    for (int i = 1; i < TABLES; i++) CHECK(pthread_create(&t[i], NULL, run, (void *)(intptr_t)i) == 0);
    while (ready < TABLES - 1) usleep(300);
    for (int i = 1; i < TABLES; i++) OK(close(feed[i][0]));
    furnish(MAIN);
    int descriptors = count();
    while (running()) {
        uint64_t next = turn + 1;
        OK(lseek(offset_fd, (off_t)(next % 1000), SEEK_SET));  // one description in all tables
        turn = next;
        char b = (char)next;
        for (int i = 1; i < TABLES; i++) full_write(feed[i][1], &b, 1);
        check(MAIN, descriptors);
        int64_t t0 = now_ns();
        for (int i = 1; i < TABLES; i++)
            while (done[i] != next) {
                if (now_ns() - t0 > 90000000000LL) fail("thread %d does not answer", i);
                usleep(300);
            }
    }
    for (int i = 1; i < TABLES; i++) OK(close(feed[i][1]));
    for (int i = 1; i < TABLES; i++) pthread_join(t[i], NULL);
    return finish();
}
