// System V objects that no living process has used last: queues that nobody has used yet (one with a process that waits
// in its first msgrcv), results that a worker has left in a queue and in a segment and has ended.
#include "check.h"
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/shm.h>
struct message { long type; char text[600]; };
enum { BYTES = 100000 };
static key_t key;
// What a worker leaves: its number is nobody's any more when this returns.
static int segment_of_worker(void) {
    pid_t w = (pid_t)OK(fork());
    if (w == 0) {
        int id = (int)OK(shmget(key, BYTES, IPC_CREAT | IPC_EXCL | 0600));
        void *at = shmat(id, NULL, 0);
        CHECK(at != (void *)-1);
        fill(at, BYTES, 7);
        OK(shmdt(at));
        _exit(0);
    }
    reap(w, 0);
    return (int)OK(shmget(key, 0, 0));
}
static void results_of_worker(int q) {
    pid_t w = (pid_t)OK(fork());
    if (w == 0) {
        for (long t = 1; t <= 5; t++) {
            struct message m = {.type = t};
            fill(m.text, sizeof m.text, (uint64_t)t);
            OK(msgsnd(q, &m, (size_t)t * 120, 0));
        }
        _exit(0);
    }
    reap(w, 0);
}
static void look(int q, unsigned long messages) {
    struct msqid_ds ds;
    OK(msgctl(q, IPC_STAT, &ds));
    EQ(ds.msg_qnum, messages);
}
int main(void) {
    begin("ipc_left");
    key = (key_t)(mix((uint64_t)now_ns() + (uint64_t)getpid()) >> 33);
    int unused = (int)OK(msgget(IPC_PRIVATE, 0640)), awaited = (int)OK(msgget(IPC_PRIVATE, 0600));
    int results = (int)OK(msgget(key, IPC_CREAT | IPC_EXCL | 0600)), segment = segment_of_worker();
    int fresh = (int)OK(shmget(IPC_PRIVATE, BYTES, 0600));
    results_of_worker(results);
    pid_t server = (pid_t)OK(fork());
    if (server == 0) {
        begin_child();
        struct message m;
        EQ(msgrcv(awaited, &m, sizeof m.text, 0, 0), 600);
        verify(m.text, sizeof m.text, 3, "what the server waits for");
        _exit(9);
    }
    struct shmid_ds ds;
    while (running()) {
        // Nothing of this uses them.
        look(unused, 0);
        look(awaited, 0);
        look(results, 5);
        EQ(msgget(key, 0), results);
        EQ(shmget(key, 0, 0), segment);
        OK(shmctl(segment, IPC_STAT, &ds));
        EQ(ds.shm_segsz, BYTES);
        EQ(ds.shm_nattch, 0);
        OK(shmctl(fresh, IPC_STAT, &ds));
        nap_us(3000);
    }
    struct message m = {.type = 1};
    fill(m.text, sizeof m.text, 3);
    OK(msgsnd(awaited, &m, sizeof m.text, 0));
    reap(server, 9 << 8);
    for (long t = 1; t <= 5; t++) {
        EQ(msgrcv(results, &m, sizeof m.text, 0, IPC_NOWAIT), t * 120);
        EQ(m.type, t);
        verify(m.text, (size_t)t * 120, (uint64_t)t, "a result");
    }
    void *at = shmat(segment, NULL, SHM_RDONLY);
    CHECK(at != (void *)-1);
    verify(at, BYTES, 7, "a segment");
    for (int i = 0; i < 3; i++) OK(msgctl((int[]){unused, awaited, results}[i], IPC_RMID, NULL));
    OK(shmctl(segment, IPC_RMID, NULL));
    OK(shmctl(fresh, IPC_RMID, NULL));
    return finish();
}
