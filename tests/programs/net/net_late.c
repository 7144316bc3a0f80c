// Two processes on two hosts remember addresses from before a restart, and connect to them only at the end.
//
// net_late serve OWN-ADDRESS OTHER-HOST PORTS-FILE    starts, through ssh: net_late client ADDRESS PORT PORT
// net_late squat READY-FILE PORT...                   takes these ports
// net_late told ADDRESS PORT                          was started since, and has been told an address from before
#include "../check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static struct sockaddr_in at(const char *ip, int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, ip, &a.sin_addr) != 1) fail("%s is no address", ip);
    return a;
}
static struct sockaddr_in name(int fd, int peer) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    OK(peer ? getpeername(fd, (void *)&a, &n) : getsockname(fd, (void *)&a, &n));
    EQ(n, sizeof a);
    return a;
}
#define SAME(a, b) do { EQ((a).sin_addr.s_addr, (b).sin_addr.s_addr); } while (0)
static int listener(const char *ip, int port) {
    int fd = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    struct sockaddr_in a = at(ip, port);
    OK(bind(fd, (void *)&a, sizeof a));
    OK(listen(fd, 8));
    return fd;
}
static void exchange(int fd, uint64_t v) {
    uint64_t got;
    full_write(fd, &v, 8);
    full_read(fd, &got, 8);
    EQ(got, v);
}
// Connects to where `to` was. Mode 0 waits, 1 does not, 2 has bound the address that this process had.
static int late(struct sockaddr_in to, struct sockaddr_in own, int mode) {
    int fd = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (mode == 1 ? SOCK_NONBLOCK : 0), 0));
    own.sin_port = 0;
    if (mode == 2) OK(bind(fd, (void *)&own, sizeof own));
    int r = connect(fd, (void *)&to, sizeof to);
    if (mode == 1 && r == -1 && errno == EINPROGRESS) {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        EQ(OK(poll(&p, 1, 20000)), 1);
        int e = 0;
        socklen_t n = sizeof e;
        OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
        EQ(e, 0);
        r = 0;
    }
    if (r) fail("connect to port %d, mode %d: %s", ntohs(to.sin_port), mode, strerror(errno));
    if (mode == 1) OK(fcntl(fd, F_SETFL, 0));
    struct sockaddr_in peer = name(fd, 1);
    SAME(peer, to);
    EQ(peer.sin_port, to.sin_port);
    return fd;
}
// Who connects to where another process says that it listens.
static int told(char **arg) {
    struct sockaddr_in to = at(arg[0], atoi(arg[1]));
    for (int mode = 0; mode < 2; mode++) {
        int fd = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | (mode ? SOCK_NONBLOCK : 0), 0)), e = 0;
        socklen_t n = sizeof e;
        if (connect(fd, (void *)&to, sizeof to)) {
            if (errno != EINPROGRESS) fail("connect, mode %d: %s", mode, strerror(errno));
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            EQ(OK(poll(&p, 1, 20000)), 1);
            OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n));
            EQ(e, 0);
        }
        OK(fcntl(fd, F_SETFL, 0));
        exchange(fd, 6);
        OK(close(fd));
    }
    return 0;
}
static int client(char **arg) {
    struct sockaddr_in any = at(arg[0], atoi(arg[1])), mine = at(arg[0], atoi(arg[2]));
    int early = late(any, any, 0);
    struct sockaddr_in own = name(early, 0);
    for (uint64_t k = 1; k; full_write(early, &k, 8)) {
        full_read(early, &k, 8);
        if (k) k = mix(k);
    }
    uint64_t port;
    full_read(early, &port, 8);
    // Opened since the restart, at an address from before; and a port at which nobody listens.
    struct sockaddr_in fresh = at(arg[0], (int)port);
    int nobody = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    struct sockaddr_in none = at(arg[0], 1);
    for (int again = 0; again < 2; again++, none.sin_port = htons(65535)) {
        CHECK(connect(nobody, (void *)&none, sizeof none) == -1);
        EQ(errno, ECONNREFUSED);
    }
    OK(close(nobody));
    for (int mode = 0; mode < 3; mode++) {
        int fd = late(fresh, own, mode);
        exchange(fd, 8);
        OK(close(fd));
    }
    pid_t other = (pid_t)OK(fork());
    if (!other) {
        char number[8];
        snprintf(number, sizeof number, "%d", (int)port);
        execl("/proc/self/exe", "net_late", "told", arg[0], number, NULL);
        fail("exec: %s", strerror(errno));
    }
    reap(other, 0);
    for (int mode = 0; mode < 3; mode++)
        for (int which = 0; which < 2; which++) {
            int fd = late(which ? mine : any, own, mode);
            struct sockaddr_in again = name(fd, 0);
            SAME(again, own);
            exchange(fd, 7);
            OK(close(fd));
        }
    OK(close(early));
    return 0;
}
static void squat(const char *ready, char **port) {
    for (; *port; port++) listener("0.0.0.0", atoi(*port));
    close((int)OK(open(ready, O_CREAT | O_WRONLY, 0666)));
    for (;;) pause();
}
static void answer(int c) {
    uint64_t v;
    full_read(c, &v, 8);
    full_write(c, &v, 8);
    OK(close(c));
}
static void served(int fd, struct sockaddr_in own, struct sockaddr_in peer) {
    int c = (int)OK(accept4(fd, NULL, NULL, SOCK_CLOEXEC));
    struct sockaddr_in a = name(c, 0), p = name(c, 1);
    SAME(a, own);
    EQ(a.sin_port, own.sin_port);
    SAME(p, peer);
    answer(c);
}
int main(int argc, char **argv) {
    begin("net_late");
    if (argc > 4 && !strcmp(argv[1], "client")) return client(argv + 2);
    if (argc > 3 && !strcmp(argv[1], "told")) return told(argv + 2);
    if (argc > 3 && !strcmp(argv[1], "squat")) squat(argv[2], argv + 3);
    CHECK(argc == 5 && !strcmp(argv[1], "serve"));
    int any = listener("0.0.0.0", 0), mine = listener(argv[2], 0), loop = listener("127.0.0.1", 0);
    int ports[3] = {ntohs(name(any, 0).sin_port), ntohs(name(mine, 0).sin_port), ntohs(name(loop, 0).sin_port)};
    char line[PATH_MAX + 100], a[16], m[16], path[PATH_MAX];
    FILE *f = fopen(argv[4], "w");
    CHECK(f);
    fprintf(f, "%d %d %d\n", ports[0], ports[1], ports[2]);
    CHECK(!fclose(f));
    snprintf(a, sizeof a, "%d", ports[0]);
    snprintf(m, sizeof m, "%d", ports[1]);
    ssize_t n = OK(readlink("/proc/self/exe", path, sizeof path - 1));
    path[n] = 0;
    snprintf(line, sizeof line, "%s client %s %s %s", path, argv[2], a, m);
    pid_t shell = (pid_t)OK(fork());
    if (!shell) {
        execlp("ssh", "ssh", argv[3], line, NULL);
        fail("ssh: %s", strerror(errno));
    }
    int early = (int)OK(accept4(any, NULL, NULL, SOCK_CLOEXEC));
    struct sockaddr_in peer = name(early, 1), own = at(argv[2], ports[0]);
    for (uint64_t k = 1; running(); k++) {
        uint64_t v;
        full_write(early, &k, 8);
        full_read(early, &v, 8);
        EQ(v, mix(k));
    }
    EQ(ntohs(name(any, 0).sin_port), ports[0]);
    SAME(name(mine, 0), own);
    EQ(ntohs(name(mine, 0).sin_port), ports[1]);
    uint64_t end = 0;
    full_write(early, &end, 8);
    full_read(early, &end, 8);
    int fresh = listener("0.0.0.0", 0);
    own.sin_port = name(fresh, 0).sin_port;
    uint64_t port = ntohs(own.sin_port);
    full_write(early, &port, 8);
    for (int mode = 0; mode < 3; mode++) served(fresh, own, peer);
    for (int mode = 0; mode < 2; mode++) answer((int)OK(accept4(fresh, NULL, NULL, SOCK_CLOEXEC)));
    OK(close(fresh));
    for (int mode = 0; mode < 3; mode++)
        for (int which = 0; which < 2; which++) {
            own.sin_port = htons((uint16_t)ports[which]);
            served(which ? mine : any, own, peer);
        }
    // On this host: by the loopback, and by the address that it had.
    for (int which = 0; which < 3; which++) {
        struct sockaddr_in to = at(which < 2 ? argv[2] : "127.0.0.1", ports[which]);
        int fd = late(to, to, 0), to_fd[3] = {any, mine, loop};
        uint64_t v = 9;
        full_write(fd, &v, 8);
        served(to_fd[which], to, name(fd, 0));
        full_read(fd, &v, 8);
        EQ(v, 9);
        OK(close(fd));
    }
    reap(shell, 0);
    no_children();
    return finish();
}
