// What sockets have beside data and options. fd_sock KIND: refused (an answer from a closed port), unread (the same
// beside data), reset (the other end was closed with data unread), portless (an address, and no port yet), mutual
// (datagram sockets connected to each other), shared (several sockets at one port), failed (an attempt to connect that
// nobody has asked about yet, and one that somebody has), moved (the program has left the directory of a relative name),
// watched (the directory of a socket, and its file).
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
typedef union {
    struct sockaddr s;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} addr;
static socklen_t size(const addr *a) { return a->s.sa_family == AF_INET6 ? sizeof a->v6 : sizeof a->v4; }
static addr loopback(int family) {
    addr a = {0};
    a.s.sa_family = (sa_family_t)family;
    if (family == AF_INET6) a.v6.sin6_addr = in6addr_loopback;
    else a.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}
static addr any(int family) {
    addr a = {0};
    a.s.sa_family = (sa_family_t)family;
    return a;
}
static addr named(int s) {
    addr a = {0};
    socklen_t l = sizeof a;
    OK(getsockname(s, &a.s, &l));
    return a;
}
static int same(const addr *a, const addr *b) { return size(a) == size(b) && !memcmp(a, b, size(a)); }
static int bound(int type, addr at) {
    int s = (int)OK(socket(at.s.sa_family, type, 0));
    OK(bind(s, &at.s, size(&at)));
    return s;
}
static int option(int s, int level, int name) {
    int v = -1;
    socklen_t l = sizeof v;
    OK(getsockopt(s, level, name, &v, &l));
    return v;
}
static void set(int s, int level, int name, int value) { OK(setsockopt(s, level, name, &value, sizeof value)); }
static int empty(int s) { return recv(s, &(char){0}, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN; }
// Sends from `s`, connected to `to`, and waits for the answer that nobody is there.
static void fail_to_send(int s, addr to) {
    OK(connect(s, &to.s, size(&to)));
    EQ(send(s, "x", 1, 0), 1);
    await(s, POLLERR, "refusal");
}
static void refused(void) {
    enum { SOCKETS = 3 };
    char c;
    int shut[2], s[SOCKETS];
    addr at[2];
    for (int i = 0; i < 2; i++) {  // has a port, and takes nothing but what it sends itself
        shut[i] = bound(SOCK_DGRAM, loopback(i ? AF_INET6 : AF_INET));
        at[i] = named(shut[i]);
        OK(connect(shut[i], &at[i].s, size(&at[i])));
    }
    addr before[SOCKETS], other = loopback(AF_INET);
    other.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 8);
    s[0] = (int)OK(socket(AF_INET, SOCK_DGRAM, 0));
    s[1] = (int)OK(socket(AF_INET6, SOCK_DGRAM, 0));
    s[2] = bound(SOCK_DGRAM, other);
    while (running()) {
        for (int i = 0; i < SOCKETS; i++) {
            fail_to_send(s[i], at[i & 1]);
            before[i] = named(s[i]);
        }
        nap_us(4000);
        for (int i = 0; i < SOCKETS; i++) {
            addr now = named(s[i]), peer;
            socklen_t l = sizeof peer;
            CHECK(same(&now, &before[i]));
            OK(getpeername(s[i], &peer.s, &l));
            CHECK(same(&peer, &at[i & 1]));
            EQ(recv(s[i], &c, 1, MSG_DONTWAIT), -1);
            EQ(errno, ECONNREFUSED);
            CHECK(empty(s[i]));
        }
    }
}
static void unread(void) {
    int shut = bound(SOCK_DGRAM, loopback(AF_INET)), from = bound(SOCK_DGRAM, loopback(AF_INET));
    addr at = named(shut);
    OK(connect(shut, &at.s, size(&at)));
    int s = bound(SOCK_DGRAM, loopback(AF_INET));
    addr own = named(s), source = named(from);
    while (running()) {
        char c = 0;
        OK(connect(s, &source.s, size(&source)));
        EQ(sendto(from, "a", 1, 0, &own.s, size(&own)), 1);
        fail_to_send(s, at);
        nap_us(4000);
        EQ(recv(s, &c, 1, MSG_DONTWAIT), -1);
        EQ(errno, ECONNREFUSED);
        EQ(recv(s, &c, 1, MSG_DONTWAIT), 1);
        EQ(c, 'a');
        nap_us(8000);  // nothing is left: a checkpoint can be taken
    }
}
static void reset(void) {
    while (running()) {
        int s[4][2];
        char c[8];
        for (int i = 0; i < 4; i++) {
            OK(socketpair(AF_UNIX, i == 1 ? SOCK_SEQPACKET : SOCK_STREAM, 0, s[i]));
            if (i < 3) EQ(write(s[i][0], "x", 1), 1);
            if (i > 1) EQ(write(s[i][1], "abc", 3), 3);
            if (i == 2) OK(shutdown(s[i][0], SHUT_WR));
            close(s[i][1]);
        }
        nap_us(4000);
        for (int i = 0; i < 4; i++) {
            if (i > 1) EQ(read(s[i][0], c, sizeof c), 3);
            if (i < 3) {
                EQ(read(s[i][0], c, sizeof c), -1);
                EQ(errno, ECONNRESET);
            }
            EQ(read(s[i][0], c, sizeof c), 0);
            EQ(send(s[i][0], c, 1, MSG_NOSIGNAL), -1);
            EQ(errno, EPIPE);
            close(s[i][0]);
        }
    }
}
static void portless(void) {
    enum { NO_PORT = 24, SOCKETS = 4 };
    int s[SOCKETS], full = bound(SOCK_STREAM, loopback(AF_INET));
    addr before[SOCKETS], to = named(full);
    int idle = bound(SOCK_STREAM, loopback(AF_INET));  // and lends its port to nobody
    OK(listen(full, 0));
    int waits = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(waits, &to.s, size(&to)));
    for (int i = 0; i < SOCKETS - 1; i++) {
        addr at = loopback(i == 1 ? AF_INET6 : AF_INET);
        if (i != 1) at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 8);
        s[i] = (int)OK(socket(at.s.sa_family, i == 2 ? SOCK_DGRAM : SOCK_STREAM, 0));
        set(s[i], IPPROTO_IP, NO_PORT, 1);
        OK(bind(s[i], &at.s, size(&at)));
        set(s[i], IPPROTO_IP, NO_PORT, i != 0);
        before[i] = named(s[i]);
        CHECK(same(&before[i], &at));
    }
    s[3] = -1;
    int other = -1;
    while (running()) {  // attempts that go on: from an address of their own, and from any
        EQ(option(idle, SOL_SOCKET, SO_REUSEADDR), 0);
        if (s[3] >= 0) close(s[3]);
        if (other >= 0) close(other);
        addr at = loopback(AF_INET);
        at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 8);
        s[3] = bound(SOCK_STREAM, at);
        other = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
        for (int i = 0; i < 2; i++) {
            int c = i ? other : s[3];
            OK(fcntl(c, F_SETFL, O_NONBLOCK));
            EQ(connect(c, &to.s, size(&to)), -1);
            EQ(errno, EINPROGRESS);
        }
        before[3] = named(s[3]);
        addr chosen = named(other);
        nap_us(4000);
        for (int i = 0; i < SOCKETS; i++) {
            addr now = named(s[i]);
            if (!same(&now, &before[i])) fail("socket %d has another address, port %d, was %d", i, ntohs(now.v4.sin_port), ntohs(before[i].v4.sin_port));
            if (i < 3) EQ(option(s[i], IPPROTO_IP, NO_PORT), i != 0);
        }
        addr now = named(other);
        CHECK(same(&now, &chosen));
    }
}
static struct sockaddr_un file(const char *name, int i) {
    struct sockaddr_un u = {.sun_family = AF_UNIX};
    snprintf(u.sun_path, sizeof u.sun_path, "%s%d.%d", name, i, getpid());
    return u;
}
static int at_file(struct sockaddr_un *u) {
    int s = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0));
    bind_anew(s, u);
    return s;
}
static void link_to(int s, struct sockaddr_un *u) { OK(connect(s, (struct sockaddr *)u, sizeof *u)); }
// The next datagram is `want`, from `who`.
static void expect(int s, char want, struct sockaddr_un *who) {
    struct sockaddr_un from = {0};
    socklen_t l = sizeof from;
    char c = 0;
    EQ(recvfrom(s, &c, 1, MSG_DONTWAIT, (struct sockaddr *)&from, &l), 1);
    EQ(c, want);
    if (who) CHECK(!strcmp(from.sun_path, who->sun_path));
}
static void mutual(void) {
    enum { NAMES = 8, MORE = 10 };
    int most = 0, s[NAMES];
    struct sockaddr_un at[NAMES];
    FILE *f = fopen("/proc/sys/net/unix/max_dgram_qlen", "r");
    CHECK(f && fscanf(f, "%d", &most) == 1);
    fclose(f);
    // As many as fit a buffer of this size.
    if (most > 200) most = 200;
    while (running()) {
        for (int i = 0; i < NAMES; i++) {
            at[i] = file("mutual", i);
            s[i] = at_file(&at[i]);
        }
        // A stranger was heard before: 2 to 1.
        EQ(sendto(s[2], "s", 1, 0, (struct sockaddr *)&at[1], sizeof at[1]), 1);
        link_to(s[0], &at[1]);
        link_to(s[1], &at[0]);
        // One that listens to a sender only, and that sender has no peer: 3 to 4.
        link_to(s[4], &at[3]);
        // One whose peer is connected to another by now: 2 to 5, which has gone to 6.
        link_to(s[2], &at[5]);
        link_to(s[5], &at[6]);
        for (int i = 0; i < most + MORE; i++) {
            EQ(send(s[0], "x", 1, 0), 1);
            EQ(sendto(s[3], "y", 1, 0, (struct sockaddr *)&at[4], sizeof at[4]), 1);
        }
        EQ(send(s[5], "z", 1, 0), 1);
        // One that was heard, and has been closed since: 7 to 6.
        EQ(sendto(s[7], "g", 1, 0, (struct sockaddr *)&at[6], sizeof at[6]), 1);
        link_to(s[6], &at[7]);
        EQ(sendto(s[7], "h", 1, 0, (struct sockaddr *)&at[6], sizeof at[6]), 1);
        close(s[7]);
        nap_us(4000);
        expect(s[1], 's', &at[2]);
        for (int i = 0; i < most + MORE; i++) {
            expect(s[1], 'x', &at[0]);
            expect(s[4], 'y', &at[3]);
        }
        CHECK(empty(s[1]) && empty(s[4]));
        expect(s[6], 'z', &at[5]);
        // Nobody can have the name of a sender that is gone.
        expect(s[6], 'g', NULL);
        expect(s[6], 'h', NULL);
        EQ(send(s[6], "x", 1, MSG_NOSIGNAL), -1);
        EQ(errno, ECONNREFUSED);
        EQ(send(s[1], "b", 1, 0), 1);
        expect(s[0], 'b', &at[1]);
        EQ(sendto(s[2], "s", 1, 0, (struct sockaddr *)&at[1], sizeof at[1]), -1);
        EQ(errno, EPERM);
        EQ(send(s[2], "s", 1, 0), -1);
        EQ(errno, EPERM);
        for (int i = 0; i < NAMES; i++) {
            if (i != 7) close(s[i]);
            unlink(at[i].sun_path);
        }
    }
}
static int sharing(int option_, addr at) {
    int s = (int)OK(socket(at.s.sa_family, SOCK_DGRAM, 0));
    set(s, SOL_SOCKET, option_, 1);
    OK(bind(s, &at.s, size(&at)));
    return s;
}
static void shared(void) {
    enum { SENDERS = 6, PORTS = 3 };
    // A sender without address of its own, and one that is bound. The ports stay the same, so that no other program gets them.
    int s[SENDERS], lone[2], first[PORTS], how[PORTS] = {SO_REUSEADDR, SO_REUSEPORT, SO_REUSEADDR};
    addr at[PORTS], to[PORTS];
    for (int i = 0; i < SENDERS; i++) s[i] = i & 1 ? bound(SOCK_DGRAM, loopback(AF_INET)) : (int)OK(socket(AF_INET, SOCK_DGRAM, 0));
    for (int k = 0; k < PORTS; k++) {
        first[k] = sharing(how[k], k == 2 ? any(AF_INET) : loopback(AF_INET));
        at[k] = named(first[k]);
        to[k] = loopback(AF_INET);
        to[k].v4.sin_port = at[k].v4.sin_port;
    }
    for (int k = 0; k < 2; k++) lone[k] = bound(SOCK_DGRAM, any(k ? AF_INET6 : AF_INET));  // listens to everybody
    while (running()) {
        // What was there first has got what was sent before the second came.
        int second[PORTS];
        for (int k = 0; k < PORTS; k++) {
            for (int i = 0; i < SENDERS; i++) EQ(sendto(s[i], &(char){(char)i}, 1, 0, &to[k].s, size(&to[k])), 1);
            second[k] = sharing(how[k], to[k]);
            if (how[k] == SO_REUSEADDR) EQ(sendto(s[0], "2", 1, 0, &to[k].s, size(&to[k])), 1);
        }
        for (int k = 0; k < 2; k++) {
            addr own = loopback(AF_INET);
            own.v4.sin_port = named(lone[k]).v4.sin_port;
            for (int i = 0; i < SENDERS; i++) EQ(sendto(s[i], &(char){(char)i}, 1, 0, &own.s, size(&own)), 1);
        }
        nap_us(4000);
        int all[] = {first[0], first[1], first[2], lone[0], lone[1]};
        for (int k = 0; k < 5; k++) {
            for (int i = 0; i < SENDERS; i++) {
                char c = 0;
                addr from = {0}, sender = named(s[i]);
                socklen_t l = sizeof from;
                if (recvfrom(all[k], &c, 1, MSG_DONTWAIT, &from.s, &l) != 1) fail("socket %d lacks datagram %d", k, i);
                EQ(c, i);
                EQ(from.v4.sin_port, sender.v4.sin_port);
                if (k < 4) EQ(from.v4.sin_addr.s_addr, htonl(INADDR_LOOPBACK));
            }
            char more;
            if (recv(all[k], &more, 1, MSG_DONTWAIT) == 1) fail("socket %d has one datagram more: %d", k, more);
            addr peer, now = named(all[k]);
            socklen_t l = sizeof peer;
            EQ(getpeername(all[k], &peer.s, &l), -1);
            if (k >= 2) EQ(now.v4.sin_addr.s_addr, 0);
        }
        for (int k = 0; k < PORTS; k++) {
            char c = 0;
            if (how[k] == SO_REUSEADDR) {
                EQ(recv(second[k], &c, 1, MSG_DONTWAIT), 1);
                EQ(c, '2');
            }
            CHECK(empty(second[k]));
            close(second[k]);
        }
    }
}
static void failed(void) {
    int held = bound(SOCK_STREAM, loopback(AF_INET)), ls = bound(SOCK_STREAM, loopback(AF_INET));
    addr closed = named(held), open = named(ls);
    OK(listen(ls, 5));
    while (running()) {
        enum { SOCKETS = 3 };
        int s[SOCKETS];
        addr before[SOCKETS];
        for (int i = 0; i < SOCKETS; i++) {  // one not asked about, one asked about, one from an address of its own
            s[i] = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
            if (i == 2) {
                addr at = loopback(AF_INET);
                at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 8);
                OK(bind(s[i], &at.s, size(&at)));
            }
            EQ(connect(s[i], &closed.s, size(&closed)), -1);
            EQ(errno, EINPROGRESS);
            await(s[i], POLLOUT, "refusal");
            before[i] = named(s[i]);
        }
        EQ(option(s[1], SOL_SOCKET, SO_ERROR), ECONNREFUSED);
        nap_us(4000);
        for (int i = 0; i < SOCKETS; i++) {
            addr now = named(s[i]), peer;
            socklen_t l = sizeof peer;
            CHECK(same(&now, &before[i]));
            EQ(getpeername(s[i], &peer.s, &l), -1);
            EQ(errno, ENOTCONN);
            struct pollfd p = {s[i], POLLIN | POLLOUT, 0};
            EQ(poll(&p, 1, 0), 1);
            EQ(p.revents, POLLIN | POLLOUT | POLLHUP | (i == 1 ? 0 : POLLERR));
            if (i != 1) EQ(option(s[i], SOL_SOCKET, SO_ERROR), ECONNREFUSED);
            // The next attempt ends the one before, the one after that begins anew.
            EQ(connect(s[i], &open.s, size(&open)), -1);
            EQ(errno, ECONNABORTED);
            if (connect(s[i], &open.s, size(&open))) EQ(errno, EINPROGRESS);
            await(s[i], POLLOUT, "connection");
            EQ(option(s[i], SOL_SOCKET, SO_ERROR), 0);
            struct linger at_once = {1, 0};
            OK(setsockopt(s[i], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once));
            int c = (int)OK(accept(ls, NULL, NULL));
            close(s[i]);
            close(c);
        }
    }
}
static void moved(void) {
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "s"}, path = name, who;
    char dir[32];
    snprintf(dir, sizeof dir, "moved.%d", getpid());
    CHECK(snprintf(path.sun_path, sizeof path.sun_path, "%s/s", dir) > 0);
    OK(mkdir(dir, 0755));
    int home = (int)OK(open(".", O_PATH | O_DIRECTORY)), ls = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
    OK(chdir(dir));
    OK(bind(ls, (struct sockaddr *)&name, sizeof name));
    OK(chmod("s", 0640));
    OK(listen(ls, 5));
    OK(fchdir(home));
    close(home);
    while (running()) {
        struct stat st;
        OK(stat(path.sun_path, &st));
        EQ(st.st_mode, S_IFSOCK | 0640);
        int c = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
        OK(connect(c, (struct sockaddr *)&path, sizeof path));
        close((int)OK(accept(ls, NULL, NULL)));
        close(c);
        socklen_t l = sizeof who;
        OK(getsockname(ls, (struct sockaddr *)&who, &l));
        CHECK(!strcmp(who.sun_path, "s"));
        nap_us(4000);
    }
    OK(unlink(path.sun_path));
    OK(rmdir(dir));
}
static void watched(void) {
    char dir[32];
    snprintf(dir, sizeof dir, "watched.%d", getpid());
    OK(mkdir(dir, 0755));
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    CHECK(snprintf(at.sun_path, sizeof at.sun_path, "%s/s", dir) > 0);
    int s = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0)), to = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0));
    OK(bind(s, (struct sockaddr *)&at, sizeof at));
    int name = (int)OK(open(at.sun_path, O_PATH)), in = (int)OK(inotify_init1(IN_NONBLOCK));
    EQ(OK(inotify_add_watch(in, dir, IN_CREATE | IN_DELETE | IN_MOVE)), 1);
    EQ(OK(inotify_add_watch(in, at.sun_path, IN_ATTRIB | IN_DELETE_SELF)), 2);
    while (running()) {
        nap_us(4000);
        struct inotify_event e;
        EQ(read(in, &e, sizeof e), -1);
        EQ(errno, EAGAIN);
        struct stat file, held;
        OK(stat(at.sun_path, &file));
        OK(fstat(name, &held));
        EQ(held.st_ino, file.st_ino);
        struct sockaddr_un by = {.sun_family = AF_UNIX};
        snprintf(by.sun_path, sizeof by.sun_path, "/proc/self/fd/%d", name);
        OK(connect(to, (struct sockaddr *)&by, sizeof by));
        OK(chmod(at.sun_path, 0700));
        EQ(read(in, &e, sizeof e), sizeof e);
        // What a restart finds unread it replaces.
        CHECK((e.wd == 2 && e.mask == IN_ATTRIB) || (e.wd == -1 && e.mask == IN_Q_OVERFLOW));
    }
    OK(unlink(at.sun_path));
    OK(rmdir(dir));
}
int main(int argc, char **argv) {
    static const struct { const char *kind; void (*run)(void); } all[] = {{"refused", refused}, {"unread", unread}, {"reset", reset},
        {"portless", portless}, {"mutual", mutual}, {"shared", shared}, {"failed", failed}, {"moved", moved}, {"watched", watched}};
    const char *kind = argc > 1 ? argv[1] : "refused";
    char name[64];
    snprintf(name, sizeof name, "fd_sock-%s", kind);
    begin(name);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(kind, all[i].kind)) {
            all[i].run();
            return finish();
        }
    fail("unknown kind");
}
