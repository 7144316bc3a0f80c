// System V semaphores and message queues: values, messages waiting in order and by type, ids and keys.
#include "check.h"
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
int main(void) {
    begin("ipc_sysv");
    // One that was killed, and had this number, has left its objects.
    key_t key = (key_t)(mix((uint64_t)now_ns() + (uint64_t)getpid()) >> 33);
    int s = (int)OK(semget(key, 5, IPC_CREAT | IPC_EXCL | 0600)), q = (int)OK(msgget(key, IPC_CREAT | IPC_EXCL | 0620));
    unsigned short v[5] = {3, 1, 4, 1, 5}, got[5];
    OK(semctl(s, 0, SETALL, v));
    pid_t k = fork();
    if (k == 0) {
        begin_child();
        struct sembuf u = {2, -4, 0};
        OK(semop(s, &u, 1));
        for (;;) pause();
    }
    while (semctl(s, 2, GETVAL) != 0) nap_us(500);
    v[2] = 0;
    struct { long type; char text[600]; } m, r;
    while (running()) {
        for (long t = 1; t <= 4; t++) {
            m.type = t;
            fill(m.text, sizeof m.text, check_round * 10 + (unsigned long)t);
            OK(msgsnd(q, &m, (size_t)t * 144, 0));
        }
        nap_us(4000);
        OK(semctl(s, 0, GETALL, got));
        if (memcmp(v, got, sizeof v)) fail("semaphore values changed: %d %d %d %d %d", got[0], got[1], got[2], got[3], got[4]);
        EQ(semget(key, 0, 0), s);
        EQ(msgget(key, 0), q);
        struct msqid_ds ds;
        OK(msgctl(q, IPC_STAT, &ds));
        EQ(ds.msg_qnum, 4);
        EQ(ds.msg_perm.mode & 0777, 0620);
        long order[] = {3, 1, 2, 4};
        for (int i = 0; i < 4; i++) {
            EQ(msgrcv(q, &r, sizeof r.text, i == 0 ? 3 : 0, IPC_NOWAIT), order[i] * 144);
            EQ(r.type, order[i]);
            verify(r.text, (size_t)order[i] * 144, check_round * 10 + (unsigned long)order[i], "a message");
        }
        struct sembuf up = {0, 1, 0};
        OK(semop(s, &up, 1));
        v[0] = (unsigned short)(v[0] + 1);
        if (v[0] > 1000) { up.sem_op = -990; OK(semop(s, &up, 1)); v[0] = (unsigned short)(v[0] - 990); }
    }
    kill(k, SIGKILL);
    reap(k, SIGKILL);
    EQ(semctl(s, 2, GETVAL), 0);
    OK(semctl(s, 0, IPC_RMID));
    OK(msgctl(q, IPC_RMID, NULL));
    return finish();
}
