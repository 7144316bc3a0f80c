// Limits of System V message queues: one that may hold less than it holds, and for root one that may hold more than the
// namespace gives a new one. Where the program has been restarted, it is alone in its namespace, and as root it sets the
// limits of that, and sends what only they allow.
#include "check.h"
#include <sys/ipc.h>
#include <sys/msg.h>
struct message { long type; char text[20000]; };
static struct message m;
static const struct { const char *path, *value; } limits[] = {
    {"/proc/sys/kernel/msgmax", "20000"},     {"/proc/sys/kernel/msgmnb", "70001"},       {"/proc/sys/kernel/msgmni", "31999"}, {"/proc/sys/kernel/sem", "31999\t1023999999\t499\t31999"},
    {"/proc/sys/kernel/shmall", "123456789"}, {"/proc/sys/kernel/shmmax", "12345678901"}, {"/proc/sys/kernel/shmmni", "4095"},
};
enum { LIMITS = sizeof limits / sizeof *limits };
static void put(int q, int count, size_t bytes) {
    for (int i = 0; i < count; i++) {
        m.type = i + 1;
        fill(m.text, bytes, (uint64_t)i);
        OK(msgsnd(q, &m, bytes, IPC_NOWAIT));
    }
}
static void get(int q, int count, size_t bytes) {
    for (int i = 0; i < count; i++) {
        EQ(msgrcv(q, &m, sizeof m.text, 0, IPC_NOWAIT), bytes);
        EQ(m.type, i + 1);
        verify(m.text, bytes, (uint64_t)i, "a message");
    }
    EQ(msgrcv(q, &m, sizeof m.text, 0, IPC_NOWAIT), -1);
    EQ(errno, ENOMSG);
}
static void may_hold(int q, unsigned long bytes) {
    struct msqid_ds ds;
    OK(msgctl(q, IPC_STAT, &ds));
    ds.msg_qbytes = bytes;
    OK(msgctl(q, IPC_SET, &ds));
}
static void look(int q, unsigned long messages, unsigned long bytes) {
    struct msqid_ds ds;
    OK(msgctl(q, IPC_STAT, &ds));
    EQ(ds.msg_qnum, messages);
    EQ(ds.msg_qbytes, bytes);
}
// How the namespace is called. After a restart, which gives the job one of its own, it is called otherwise, or not at all.
static void called(char name[64]) {
    memset(name, 0, 64);
    if (readlink("/proc/self/ns/ipc", name, 63) < 0) memset(name, 0, 64);
}
// Whether the machine lets this user have queues that hold more than the namespace gives a new one.
static int may_raise(void) {
    int q = (int)OK(msgget(IPC_PRIVATE, 0600));
    struct msqid_ds ds;
    OK(msgctl(q, IPC_STAT, &ds));
    ds.msg_qbytes = 65536;
    int may = msgctl(q, IPC_SET, &ds) == 0;
    OK(msgctl(q, IPC_RMID, NULL));
    return may;
}
static void set_limits(void) {
    for (int i = 0; i < LIMITS; i++) {
        int fd = (int)OK(open(limits[i].path, O_WRONLY));
        full_write(fd, limits[i].value, strlen(limits[i].value));
        close(fd);
    }
}
static void look_at_limits(void) {
    for (int i = 0; i < LIMITS; i++) {
        char is[80] = "";
        int fd = (int)OK(open(limits[i].path, O_RDONLY));
        CHECK(read(fd, is, sizeof is - 1) > 0);
        close(fd);
        is[strcspn(is, "\n")] = 0;
        if (strcmp(is, limits[i].value)) fail("%s is %s, was %s", limits[i].path, is, limits[i].value);
    }
}
int main(void) {
    begin("ipc_limits");
    int root = !geteuid(), may = may_raise(), lowered = (int)OK(msgget(IPC_PRIVATE, 0600)), raised = -1, large = -1;
    put(lowered, 10, 1000);
    may_hold(lowered, 500);
    if (may) {
        raised = (int)OK(msgget(IPC_PRIVATE, 0600));
        may_hold(raised, 65536);
        put(raised, 60, 1000);
    }
    char first[64], now[64];
    called(first);
    while (running()) {
        nap_us(3000);
        look(lowered, 10, 500);
        called(now);
        if (may) look(raised, 60, 65536);
        if (!root || !strcmp(first, now)) continue;
        if (large == -1) {
            set_limits();
            large = (int)OK(msgget(IPC_PRIVATE, 0600));
            put(large, 3, 20000);
        }
        look_at_limits();
        look(large, 3, 70001);
    }
    get(lowered, 10, 1000);
    OK(msgctl(lowered, IPC_RMID, NULL));
    if (may) get(raised, 60, 1000);
    if (may) OK(msgctl(raised, IPC_RMID, NULL));
    if (large != -1) get(large, 3, 20000);
    if (large != -1) OK(msgctl(large, IPC_RMID, NULL));
    return finish();
}
