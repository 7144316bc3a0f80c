// Whose things without a name are: pipes, memfds and sockets that a process of another user has made belong to that user,
// who may open them again and bind beside them. And SO_PEERCRED tells who was at the other end when it was made.
#include "check.h"
#include <grp.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <stddef.h>
#ifndef SO_PEERGROUPS
#define SO_PEERGROUPS 59
#endif
#define OTHER 65533
#define MANY 64

static int root;
static uid_t other;

// What is seen at the beginning has to be seen in each round.
static struct seen {
    int fd;
    struct stat st;
    struct ucred peer;
    gid_t groups[8];
    socklen_t size;
} all[MANY];
static int known;

static void look(struct seen *s) {
    OK(fstat(s->fd, &s->st));
    memset(&s->peer, 0, sizeof s->peer);
    memset(s->groups, 0, sizeof s->groups);
    s->size = sizeof s->groups;
    socklen_t size = sizeof s->peer;
    if (!S_ISSOCK(s->st.st_mode)) return;
    OK(getsockopt(s->fd, SOL_SOCKET, SO_PEERCRED, &s->peer, &size));
    if (getsockopt(s->fd, SOL_SOCKET, SO_PEERGROUPS, s->groups, &s->size)) s->size = 0;
}

static int keep(int fd) {
    CHECK(known < MANY);
    all[known].fd = fd;
    look(&all[known++]);
    return fd;
}

static void check_all(void) {
    for (int i = 0; i < known; i++) {
        struct seen now = {.fd = all[i].fd};
        look(&now);
        EQ(now.st.st_uid, all[i].st.st_uid);
        EQ(now.st.st_gid, all[i].st.st_gid);
        EQ(now.st.st_mode, all[i].st.st_mode);
        EQ(now.peer.uid, all[i].peer.uid);
        EQ(now.peer.gid, all[i].peer.gid);
        if (!root) continue;
        EQ(now.size, all[i].size);
        CHECK(memcmp(now.groups, all[i].groups, sizeof now.groups) == 0);
    }
}

static uid_t peer(int fd) {
    struct seen s = {.fd = fd};
    look(&s);
    return s.peer.uid;
}

static socklen_t named(struct sockaddr_un *a, const char *name) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "%s", name));
}

// A socket that shares its port, at `at`.
static int shared(int type, struct sockaddr_in *at) {
    int s = (int)OK(socket(AF_INET, type | SOCK_CLOEXEC, 0)), one = 1;
    OK(setsockopt(s, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one));
    if (bind(s, (struct sockaddr *)at, sizeof *at)) {
        EQ(errno, EADDRINUSE);
        close(s);
        return -1;
    }
    socklen_t size = sizeof *at;
    OK(getsockname(s, (struct sockaddr *)at, &size));
    return s;
}

static int stream(struct sockaddr_un *to, socklen_t size) {
    int s = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
    OK(connect(s, (struct sockaddr *)to, size));
    return s;
}

static struct sockaddr_in tcp = {.sin_family = AF_INET}, udp = {.sin_family = AF_INET};

struct told {
    struct sockaddr_in tcp, udp;
    char name[64];
};

static int reopened(int fd, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return close((int)OK(open(path, flags | O_NONBLOCK | O_CLOEXEC)));
}

// The process of the other user: it makes things, connects to `own`, which is root's, and has a listener for root.
static int another(int ask, int answer, struct sockaddr_un *own, socklen_t size) {
    begin_child();
    if (root) {
        gid_t groups[] = {OTHER - 1, OTHER - 2};
        OK(setgroups(2, groups));
        OK(setresgid(OTHER, OTHER, OTHER));
        OK(setresuid(OTHER, OTHER, OTHER));
    }
    // Of a process that has changed its user, the kernel gives what is below /proc/self to root else.
    OK(prctl(PR_SET_DUMPABLE, 1));
    int p[2], q[2], pair[2];
    OK(pipe(p));
    keep(p[0]), keep(p[1]);
    OK(pipe(q));
    OK(fchmod(q[0], 0640));
    keep(q[0]), keep(q[1]);
    int memory = (int)OK(memfd_create("memory", 0)), closed = (int)OK(memfd_create("closed", MFD_ALLOW_SEALING));
    OK(ftruncate(memory, 4096));
    OK(fchmod(closed, 0600));
    keep(memory), keep(closed);
    for (int i = 0; i < 3; i++) {
        OK(socketpair(AF_UNIX, (int[]){SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET}[i], 0, pair));
        keep(pair[0]), keep(pair[1]);
        EQ(peer(pair[1]), other);
    }
    OK(fchmod(pair[0], 0600));
    all[known - 2].fd = pair[0];
    look(&all[known - 2]);
    // Its other end has gone.
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    close(pair[1]);
    keep(pair[0]);
    struct told told = {.tcp = tcp, .udp = udp};
    int t = shared(SOCK_STREAM, &told.tcp);
    OK(listen(t, 1));
    keep(t), keep(shared(SOCK_DGRAM, &told.udp));
    keep((int)OK(socket(AF_INET, SOCK_STREAM, 0)));
    keep((int)OK(socket(AF_INET6, SOCK_DGRAM, 0)));
    keep((int)OK(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)));
    keep((int)OK(socket(AF_UNIX, SOCK_DGRAM, 0)));
    // A connection inside this process.
    int c = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(c, (struct sockaddr *)&told.tcp, sizeof told.tcp));
    keep(c), keep((int)OK(accept(t, NULL, NULL)));
    struct sockaddr_un a;
    snprintf(told.name, sizeof told.name, "fd_owner.%d", getpid());
    int l = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
    OK(bind(l, (struct sockaddr *)&a, named(&a, told.name)));
    OK(listen(l, 4));
    keep(l);
    full_write(answer, &told, sizeof told);
    // Root's connection to this, and this one's to root: the second waits to be accepted.
    int from = (int)OK(accept(l, NULL, NULL));
    EQ(peer(from), geteuid() == OTHER ? 0 : other);
    keep(from), keep(stream(own, size)), keep(stream(own, size));
    full_write(answer, "", 1);
    for (char b; read(ask, &b, 1) == 1; full_write(answer, &b, 1)) {
        check_all();
        reopened(p[0], O_WRONLY), reopened(p[1], O_RDONLY), reopened(q[1], O_RDONLY);
        reopened(memory, O_RDWR), reopened(closed, O_RDWR);
        close((int)OK(shared(SOCK_STREAM, &told.tcp)));
        close((int)OK(shared(SOCK_DGRAM, &told.udp)));
    }
    return 0;
}

int main(void) {
    begin("fd_owner");
    root = geteuid() == 0;
    other = root ? OTHER : geteuid();
    struct sockaddr_un own = {.sun_family = AF_UNIX}, a;
    snprintf(own.sun_path, sizeof own.sun_path, "owner.%d", getpid());
    int l = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0)), ask[2], answer[2];
    OK(bind(l, (struct sockaddr *)&own, sizeof own));
    OK(chmod(own.sun_path, 0777));
    OK(listen(l, 8));
    OK(pipe(ask));
    OK(pipe(answer));
    pid_t pid = (pid_t)OK(fork());
    if (!pid) {
        close(ask[1]), close(answer[0]);
        return another(ask[0], answer[1], &own, sizeof own);
    }
    close(ask[0]), close(answer[1]);
    struct told told;
    full_read(answer[0], &told, sizeof told);
    keep(stream(&a, named(&a, told.name)));
    char b;
    full_read(answer[0], &b, 1);
    int from = (int)OK(accept(l, NULL, NULL));
    EQ(peer(from), other);
    keep(from), keep(l);
    // Nobody else may connect from now on.
    OK(chmod(own.sun_path, 0600));
    // Who has listened last is told to those that connect from now on, and not to those that are connected.
    struct sockaddr_un twice;
    char name[64];
    snprintf(name, sizeof name, "fd_owner.twice.%d", getpid());
    socklen_t size = named(&twice, name);
    int again = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
    OK(bind(again, (struct sockaddr *)&twice, size));
    OK(listen(again, 4));
    keep(stream(&twice, size)), keep((int)OK(accept(again, NULL, NULL)));
    if (root) OK(seteuid(OTHER));
    OK(listen(again, 4));
    if (root) OK(seteuid(0));
    keep(again), keep(stream(&twice, size)), keep((int)OK(accept(again, NULL, NULL)));
    EQ(peer(again), other);
    while (running()) {
        nap_us(1500);
        check_all();
        full_write(ask[1], "", 1);
        full_read(answer[0], &b, 1);
        // Others may not have its ports.
        if (root) EQ(shared(SOCK_STREAM, &told.tcp), -1);
        if (root) EQ(shared(SOCK_DGRAM, &told.udp), -1);
    }
    int waited = (int)OK(accept(l, NULL, NULL));
    EQ(peer(waited), other);
    close(ask[1]);
    int status;
    OK(waitpid(pid, &status, 0));
    EQ(status, 0);
    unlink(own.sun_path);
    return finish();
}
