// ipc_posix mq: message queues with waiting messages and priorities, one by name, one without, which is always full: a
// child waits to send. ipc_posix sem: named semaphores shared by two processes, and with whoever opens one by its name.
#include "check.h"
#include <mqueue.h>
#include <semaphore.h>
// Sends 1, 2, 3, ... into a queue that has no name any more.
static pid_t sender(mqd_t *to) {
    char n[64];
    struct mq_attr a = {.mq_maxmsg = 3, .mq_msgsize = sizeof(unsigned)};
    snprintf(n, sizeof n, "/belay-v%d-%d", getuid(), getpid());
    *to = (mqd_t)OK(mq_open(n, O_RDONLY | O_CREAT | O_EXCL, 0640, &a));
    mqd_t w = (mqd_t)OK(mq_open(n, O_WRONLY));
    OK(mq_unlink(n));
    pid_t p = fork();
    if (p == 0)
        for (unsigned i = 1;; i++)
            if (mq_send(w, (char *)&i, sizeof i, 5)) fail("mq_send: %s", strerror(errno));
    OK(close(w));
    return p;
}
// Whether the file of the semaphore's name is the memory in which this process has it; sem_open would not look.
static void same_by_name(const char *name, sem_t *s) {
    char path[128];
    snprintf(path, sizeof path, "/dev/shm/sem.%s", name + 1);
    int fd = (int)OK(open(path, O_RDWR));
    sem_t *found = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(found != MAP_FAILED);
    int before, after;
    OK(sem_getvalue(found, &before));
    OK(sem_post(s));
    OK(sem_getvalue(found, &after));
    if (after != before + 1) fail("the semaphore of that name is another");
    OK(sem_wait(found));
    OK(munmap(found, sizeof *s));
    OK(close(fd));
}
int main(int argc, char **argv) {
    int use_mq = argc > 1 && !strcmp(argv[1], "mq");
    begin(use_mq ? "ipc_posix-mq" : "ipc_posix-sem");
    char n[64];
    // A job that was killed leaves its name behind, and there is room for 256.
    for (int p = 2; use_mq && p < 65536; p++)
        if (kill(p, 0) && errno == ESRCH) {
            snprintf(n, sizeof n, "/belay-t%d-%d", getuid(), p);
            mq_unlink(n);
        }
    snprintf(n, sizeof n, "/belay-t%d-%d", getuid(), getpid());
    struct mq_attr a = {.mq_maxmsg = 6, .mq_msgsize = 200};
    mqd_t q = use_mq ? mq_open(n, O_RDWR | O_CREAT | O_EXCL | O_NONBLOCK, 0600, &a) : 0;
    OK(q);
    mqd_t full = -1;
    pid_t s1 = use_mq ? sender(&full) : 0;
    unsigned expected = 1, got;
    sem_unlink(n);  // a job that was killed may have had this number, here or in another PID namespace
    sem_t *s = sem_open(n, O_CREAT | O_EXCL, 0600, 0), *back;
    CHECK(s != SEM_FAILED);
    // It keeps its name; that of `back` is gone at once. Of this one nobody makes use but by its name.
    char lasting[64];
    snprintf(lasting, sizeof lasting, "/belay-w%d-%d", getuid(), getpid());
    sem_unlink(lasting);
    sem_t *by_name = sem_open(lasting, O_CREAT | O_EXCL, 0600, 3);
    CHECK(by_name != SEM_FAILED);
    snprintf(n, sizeof n, "/belay-u%d-%d", getuid(), getpid());
    sem_unlink(n);
    back = sem_open(n, O_CREAT | O_EXCL, 0600, 0);
    sem_unlink(n);
    pid_t k = fork();
    if (k == 0) for (;;) {
        if (sem_wait(s)) fail("sem_wait: %s", strerror(errno));
        sem_post(back);
    }
    char m[200], g[200];
    while (running()) {
        for (unsigned i = 0; use_mq && i < 5; i++) {
            fill(m, 160, check_round * 8 + i);
            OK(mq_send(q, m, 100 + i * 8, i % 3));
        }
        nap_us(4000);
        unsigned order[] = {2, 1, 4, 0, 3}, pr;
        for (int i = 0; use_mq && i < 5; i++) {
            EQ(mq_receive(q, g, sizeof g, &pr), 100 + order[i] * 8);
            EQ(pr, order[i] % 3);
            verify(g, 96, check_round * 8 + order[i], "a message");
        }
        if (use_mq) {
            EQ(mq_receive(q, g, sizeof g, &pr), -1);
            EQ(errno, EAGAIN);
            OK(mq_getattr(q, &a));
            struct stat st;
            OK(fstat(full, &st));
            CHECK((st.st_mode & 07777) == 0640 && st.st_nlink == 0 && st.st_uid == getuid());
            snprintf(n, sizeof n, "/belay-t%d-%d", getuid(), getpid());
            mqd_t again = (mqd_t)OK(mq_open(n, O_RDONLY | O_NONBLOCK));
            EQ(mq_receive(again, g, sizeof g, &pr), -1);
            EQ(errno, EAGAIN);
            OK(close(again));
            for (int i = 0; i < 5; i++, expected++) {
                EQ(mq_receive(full, (char *)&got, sizeof got, &pr), sizeof got);
                EQ(got, expected);
                EQ(pr, 5);
            }
            CHECK(a.mq_maxmsg == 6 && a.mq_msgsize == 200 && a.mq_flags == O_NONBLOCK && a.mq_curmsgs == 0);
        }
        same_by_name(lasting, by_name);
        sem_post(s);
        if (sem_wait(back)) fail("sem_wait: %s", strerror(errno));
    }
    kill(k, SIGKILL);
    reap(k, SIGKILL);
    if (s1) {
        kill(s1, SIGKILL);
        reap(s1, SIGKILL);
    }
    snprintf(n, sizeof n, "/belay-t%d-%d", getuid(), getpid());
    mq_unlink(n);
    sem_unlink(n);
    sem_unlink(lasting);
    return finish();
}
