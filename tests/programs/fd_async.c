// Descriptor owners and signals: O_ASYNC with F_SETOWN and F_SETSIG, without an owner, with one that has ended,
// and of a descriptor in flight; leases aside.
#include "check.h"
#include <sys/socket.h>
static _Atomic int hits, fd_seen;
static void on(int s, siginfo_t *si, void *u) {
    (void)s; (void)u;
    fd_seen = si->si_fd;
    hits++;
}
int main(void) {
    begin("fd_async");
    int p[2];
    OK(pipe(p));
    struct sigaction sa = {.sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGRTMIN + 4, &sa, NULL);
    OK(fcntl(p[0], F_SETOWN, getpid()));
    OK(fcntl(p[0], F_SETSIG, SIGRTMIN + 4));
    OK(fcntl(p[0], F_SETFL, O_ASYNC));
    int nobody[2], ended[2];
    OK(pipe(nobody));
    OK(fcntl(nobody[0], F_SETFL, O_ASYNC | O_NONBLOCK));
    OK(pipe(ended));
    pid_t c = (pid_t)OK(fork());
    if (c == 0) for (;;) pause();
    OK(fcntl(ended[0], F_SETOWN, c));
    OK(fcntl(ended[0], F_SETFL, O_ASYNC));
    OK(kill(c, SIGKILL));
    reap(c, SIGKILL);
    // One that is in flight in a socket.
    int sent[2], way[2];
    char byte = 's';
    union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } rights = {.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    OK(pipe(sent));
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, way));
    OK(fcntl(sent[0], F_SETOWN, getpid()));
    OK(fcntl(sent[0], F_SETSIG, SIGRTMIN + 4));
    OK(fcntl(sent[0], F_SETFL, O_ASYNC));
    memcpy(CMSG_DATA(&rights.head), &sent[0], sizeof(int));
    EQ(sendmsg(way[0], &message, 0), 1);
    OK(close(sent[0]));
    while (running()) {
        EQ(fcntl(nobody[0], F_GETFL) & (O_ASYNC | O_NONBLOCK), O_ASYNC | O_NONBLOCK);
        EQ(fcntl(nobody[0], F_GETOWN), 0);
        EQ(fcntl(ended[0], F_GETFL) & O_ASYNC, O_ASYNC);
        EQ(fcntl(p[0], F_GETOWN), getpid());
        EQ(fcntl(p[0], F_GETSIG), SIGRTMIN + 4);
        EQ(fcntl(p[0], F_GETFL) & O_ASYNC, O_ASYNC);
        int before = hits;
        full_write(p[1], "x", 1);
        int64_t t0 = now_ns();
        while (hits == before) if (now_ns() - t0 > 10000000000LL) fail("no signal for arriving data");
        EQ(fd_seen, p[0]);
        char b;
        full_read(p[0], &b, 1);
        struct timespec t = {0, 2000000};
        nanosleep(&t, NULL);
    }
    // An owner is told at once: the flag was more than shown.
    OK(fcntl(nobody[0], F_SETSIG, SIGRTMIN + 4));
    OK(fcntl(nobody[0], F_SETOWN, getpid()));
    int before = hits;
    full_write(nobody[1], "x", 1);
    for (int64_t t0 = now_ns(); hits == before;) if (now_ns() - t0 > 10000000000LL) fail("no signal where there was no owner");
    EQ(fd_seen, nobody[0]);
    message.msg_controllen = sizeof rights;
    EQ(recvmsg(way[1], &message, 0), 1);
    memcpy(&sent[0], CMSG_DATA(&rights.head), sizeof(int));
    EQ(fcntl(sent[0], F_GETFL) & O_ASYNC, O_ASYNC);
    EQ(fcntl(sent[0], F_GETOWN), getpid());
    EQ(fcntl(sent[0], F_GETSIG), SIGRTMIN + 4);
    return finish();
}
