// UNIX sockets. fd_unix KIND: stream, dgram, seqpacket (pairs with data in flight both ways), named (listening with
// backlog), renamed (the file has another name than its socket), reused (several sockets have been bound to one path),
// rights (descriptors in flight), half (shutdown), creds, left (one end of a pair has gone elsewhere, a listener has less
// room than clients, a sender is gone, a packet is empty). fd_unix KIND crowd: beside many others, each with something in
// it.
#include "check.h"
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
static void send_fds(int s, const void *d, size_t n, int *fds, int k) {
    struct iovec v = {(void *)d, n};
    char c[CMSG_SPACE(sizeof(int) * 8)];
    memset(c, 0, sizeof c);
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)k)};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)k);
    memcpy(CMSG_DATA(h), fds, sizeof(int) * (size_t)k);
    EQ(sendmsg(s, &m, 0), n);
}
static int recv_fds(int s, void *d, size_t n, int *fds) {
    struct iovec v = {d, n};
    char c[CMSG_SPACE(sizeof(int) * 8)];
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c};
    EQ(recvmsg(s, &m, MSG_DONTWAIT), n);
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    CHECK(h && h->cmsg_type == SCM_RIGHTS);
    int k = (int)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(h), sizeof(int) * (size_t)k);
    return k;
}
// Messages in flight of whoever may be named (root: somebody else). After a restart another process has sent them.
static void creds(void) {
    enum { KINDS = 3, OTHER = 1234 };
    static const int types[KINDS] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    int s[KINDS][2], on = 1;
    for (int i = 0; i < KINDS; i++) {
        OK(socketpair(AF_UNIX, types[i], 0, s[i]));
        OK(setsockopt(s[i][1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on));
    }
    uid_t who = geteuid() ? geteuid() : OTHER;
    gid_t group = geteuid() ? getegid() : OTHER;
    while (running()) {
        for (int i = 0; i < KINDS; i++) {
            char d = 'x', c[CMSG_SPACE(sizeof(struct ucred))];
            memset(c, 0, sizeof c);
            struct iovec v = {&d, 1};
            struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c};
            struct cmsghdr *h = CMSG_FIRSTHDR(&m);
            *h = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(struct ucred)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_CREDENTIALS};
            struct ucred own = {getpid(), who, group}, told;
            memcpy(CMSG_DATA(h), &own, sizeof own);
            EQ(sendmsg(s[i][0], &m, 0), 1);
            nap_us(2000);
            EQ(recvmsg(s[i][1], &m, MSG_DONTWAIT), 1);
            h = CMSG_FIRSTHDR(&m);
            CHECK(h && h->cmsg_type == SCM_CREDENTIALS);
            memcpy(&told, CMSG_DATA(h), sizeof told);
            EQ(told.uid, who);
            EQ(told.gid, group);
            CHECK(told.pid > 0);
        }
    }
}
static int named(int type, struct sockaddr_un *ad, const char *what) {
    *ad = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(ad->sun_path, sizeof ad->sun_path, "%s.%d", what, getpid());
    int s = (int)OK(socket(AF_UNIX, type, 0));
    bind_anew(s, ad);
    return s;
}
static void left(void) {
    enum { CLIENTS = 6, MESSAGES = 3 };
    char got[16];
    for (uint64_t r = 0; running(); r++) {
        struct sockaddr_un to, listens, gone, from;
        int pair[2], waiting[CLIENTS], packets[2];
        OK(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
        for (char i = 0; i < MESSAGES; i++) EQ(send(pair[0], &i, 1, 0), 1);
        int other = named(SOCK_DGRAM, &to, "to");
        OK(connect(pair[0], (struct sockaddr *)&to, sizeof to));
        int error;
        socklen_t l = sizeof error;
        OK(getsockopt(pair[1], SOL_SOCKET, SO_ERROR, &error, &l));  // it is told that it is left
        EQ(send(pair[0], "away", 4, 0), 4);
        struct sockaddr_un open_to;
        int all = named(SOCK_DGRAM, &open_to, "all");
        int lost = named(SOCK_DGRAM, &gone, "gone");
        EQ(sendto(lost, "farewell", 8, 0, (struct sockaddr *)&open_to, sizeof open_to), 8);
        close(lost);
        unlink(gone.sun_path);
        int ls = named(SOCK_STREAM, &listens, "listens");
        OK(listen(ls, CLIENTS));
        for (int i = 0; i < CLIENTS; i++) {
            waiting[i] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            OK(connect(waiting[i], (struct sockaddr *)&listens, sizeof listens));
        }
        OK(listen(ls, 1));
        OK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, packets));
        EQ(send(packets[0], "", 0, 0), 0);
        EQ(send(packets[0], "one", 3, 0), 3);
        nap_us(4000);
        for (char i = 0; i < MESSAGES; i++) {
            EQ(recv(pair[1], got, sizeof got, MSG_DONTWAIT), 1);
            EQ(got[0], i);
        }
        EQ(recv(pair[1], got, sizeof got, MSG_DONTWAIT), -1);
        EQ(errno, EAGAIN);
        EQ(recv(other, got, sizeof got, MSG_DONTWAIT), 4);
        CHECK(!memcmp(got, "away", 4));
        EQ(send(pair[0], "again", 5, 0), 5);
        EQ(recv(other, got, sizeof got, MSG_DONTWAIT), 5);
        EQ(send(pair[1], "back", 4, 0), -1);
        EQ(errno, EPERM);
        l = sizeof from;
        EQ(recvfrom(all, got, sizeof got, MSG_DONTWAIT, (struct sockaddr *)&from, &l), 8);
        CHECK(!strcmp(from.sun_path, gone.sun_path));
        int one = (int)OK(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
        EQ(connect(one, (struct sockaddr *)&listens, sizeof listens), -1);
        EQ(errno, EAGAIN);
        close(one);
        for (int i = 0; i < CLIENTS; i++) {
            int s = (int)OK(accept(ls, NULL, NULL));
            EQ(write(s, &i, sizeof i), sizeof i);
            int told = -1;
            EQ(read(waiting[i], &told, sizeof told), sizeof told);
            EQ(told, i);
            close(s);
            close(waiting[i]);
        }
        EQ(recv(packets[1], got, sizeof got, MSG_DONTWAIT), 0);
        EQ(recv(packets[1], got, sizeof got, MSG_DONTWAIT), 3);
        int ends[] = {pair[0], pair[1], packets[0], packets[1], other, all, ls};
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) close(ends[i]);
        unlink(to.sun_path);
        unlink(open_to.sun_path);
        unlink(listens.sun_path);
    }
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "stream";
    char name[64];
    snprintf(name, sizeof name, "fd_unix-%s", kind);
    begin(name);
    int type = !strcmp(kind, "dgram") ? SOCK_DGRAM : !strcmp(kind, "seqpacket") ? SOCK_SEQPACKET : SOCK_STREAM;
    static uint64_t a[2048], b[2048];
    enum { CROWD = 40 };
    int crowd[CROWD][2], others = argc > 2 ? CROWD : 0;
    for (int i = 0; i < others; i++) {
        OK(socketpair(AF_UNIX, i % 2 ? SOCK_STREAM : SOCK_DGRAM, 0, crowd[i]));
        EQ(send(crowd[i][0], &i, sizeof i, 0), sizeof i);
        if (i % 3 == 0) OK(shutdown(crowd[i][0], SHUT_WR));
    }
    if (!strcmp(kind, "stream") || type != SOCK_STREAM) {
        int s[2];
        OK(socketpair(AF_UNIX, type, 0, s));
        int sz = 131072, got;
        OK(setsockopt(s[0], SOL_SOCKET, SO_SNDBUF, &sz, sizeof sz));
        socklen_t l = sizeof got;
        OK(getsockopt(s[0], SOL_SOCKET, SO_SNDBUF, &got, &l));
        int want = got;
        struct timeval tv = {3, 250000}, tg;
        OK(setsockopt(s[1], SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv));
        for (uint64_t r = 0; running(); r++) {
            size_t len = 8 * (1 + mix(r) % 1500);
            for (uint64_t m = 0; m < 4; m++) {
                fill(a, len, r * 10 + m);
                EQ(send(s[m % 2], a, len, 0), len);
            }
            nap_us(3000);
            for (uint64_t m = 0; m < 4; m++) {
                ssize_t n = recv(s[(m + 1) % 2], b, type == SOCK_STREAM ? len : sizeof b, 0);
                EQ(n, len);
                verify(b, len, r * 10 + m, "data in a socket");
            }
            EQ(recv(s[0], b, 8, MSG_DONTWAIT), -1);
            EQ(errno, EAGAIN);
            l = sizeof got;
            OK(getsockopt(s[0], SOL_SOCKET, SO_SNDBUF, &got, &l));
            EQ(got, want);
            l = sizeof tg;
            OK(getsockopt(s[1], SOL_SOCKET, SO_RCVTIMEO, &tg, &l));
            CHECK(tg.tv_sec == 3 && llabs(tg.tv_usec - 250000) < 5000);
            l = sizeof got;
            OK(getsockopt(s[0], SOL_SOCKET, SO_TYPE, &got, &l));
            EQ(got, type);
        }
    } else if (!strcmp(kind, "named") || !strcmp(kind, "abstract")) {
        struct sockaddr_un ad = {.sun_family = AF_UNIX}, who;
        int abs = !strcmp(kind, "abstract");
        snprintf(ad.sun_path + abs, sizeof ad.sun_path - 1, "sock.%d", getpid());
        socklen_t al = (socklen_t)(sizeof(sa_family_t) + (size_t)abs + strlen(ad.sun_path + abs) + !abs), l;
        int ls = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
        OK(bind(ls, (struct sockaddr *)&ad, al));
        OK(listen(ls, 5));
        for (uint64_t r = 0; running(); r++) {
            int c[3];
            for (int i = 0; i < 3; i++) {  // three connections wait in the backlog, with data already sent
                c[i] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
                OK(connect(c[i], (struct sockaddr *)&ad, al));
                fill(a, 800, r * 3 + (uint64_t)i);
                full_write(c[i], a, 800);
            }
            nap_us(5000);
            for (int i = 0; i < 3; i++) {
                int s = (int)OK(accept(ls, NULL, NULL));
                full_read(s, b, 800);
                verify(b, 800, r * 3 + (uint64_t)i, "data of a connection in the backlog");
                full_write(s, b, 800);
                if (i == 1) nap_us(2000);  // established, one answer in flight
                full_read(c[i], b, 800);
                verify(b, 800, r * 3 + (uint64_t)i, "the answer");
                l = sizeof who;
                OK(getpeername(c[i], (struct sockaddr *)&who, &l));
                CHECK(l == al && !memcmp(&who, &ad, al));
                struct ucred uc;
                l = sizeof uc;
                OK(getsockopt(s, SOL_SOCKET, SO_PEERCRED, &uc, &l));
                EQ(uc.uid, getuid());
                close(s);
                EQ(read(c[i], b, 8), 0);
                close(c[i]);
            }
            nap_us(8000);  // nobody waits: a checkpoint can be taken
        }
        if (!abs) unlink(ad.sun_path);
    } else if (!strcmp(kind, "creds")) {
        creds();
    } else if (!strcmp(kind, "left")) {
        left();
    } else if (!strcmp(kind, "reused")) {  // one path, to which several sockets have been bound, one after the other
        struct sockaddr_un path = {.sun_family = AF_UNIX}, who;
        snprintf(path.sun_path, sizeof path.sun_path, "reused.%d", getpid());
        enum { DATAGRAMS = 3, LISTENERS = 3 };
        int to[DATAGRAMS], from[DATAGRAMS], ls[LISTENERS], cl[LISTENERS], sv[LISTENERS];
        for (int i = 0; i < DATAGRAMS; i++) {
            to[i] = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0));
            from[i] = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0));
            OK(bind(to[i], (struct sockaddr *)&path, sizeof path));
            OK(connect(from[i], (struct sockaddr *)&path, sizeof path));
            OK(unlink(path.sun_path));
        }
        for (int i = 0; i < LISTENERS; i++) {
            if (i) OK(unlink(path.sun_path));
            ls[i] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            cl[i] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            OK(bind(ls[i], (struct sockaddr *)&path, sizeof path));
            OK(listen(ls[i], 5));
            OK(connect(cl[i], (struct sockaddr *)&path, sizeof path));
            sv[i] = (int)OK(accept(ls[i], NULL, NULL));
        }
        OK(chmod(path.sun_path, 0640));
        for (uint64_t r = 0; running(); r++) {
            for (int i = 0; i < DATAGRAMS; i++) {
                a[0] = r * 10 + (uint64_t)i;
                EQ(send(from[i], a, 8, 0), 8);
            }
            nap_us(4000);
            for (int i = 0; i < DATAGRAMS; i++) {
                EQ(recv(to[i], b, 16, MSG_DONTWAIT), 8);
                EQ(b[0], r * 10 + (uint64_t)i);
            }
            for (int i = 0; i < LISTENERS; i++) {
                fill(a, 800, r);
                full_write(cl[i], a, 800);
                full_read(sv[i], b, 800);
                verify(b, 800, r, "data of a connection");
                socklen_t l = sizeof who;
                OK(getsockname(ls[i], (struct sockaddr *)&who, &l));
                CHECK(!strcmp(who.sun_path, path.sun_path));
            }
            // The last one has the file.
            struct stat st;
            OK(stat(path.sun_path, &st));
            EQ(st.st_mode, S_IFSOCK | 0640);
            int c = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            OK(connect(c, (struct sockaddr *)&path, sizeof path));
            close((int)OK(accept(ls[LISTENERS - 1], NULL, NULL)));
            close(c);
        }
        unlink(path.sun_path);
    } else if (!strcmp(kind, "covered")) {  // the file has been removed, and a FIFO or a file of the program's has the name now
        char cwd[PATH_MAX];
        CHECK(getcwd(cwd, sizeof cwd));
        struct sockaddr_un at[2] = {{.sun_family = AF_UNIX}, {.sun_family = AF_UNIX}}, who;
        CHECK(snprintf(at[0].sun_path, sizeof at[0].sun_path, "covered.%d", getpid()) > 0);
        // What is too long is done relatively.
        if (snprintf(at[1].sun_path, sizeof at[1].sun_path, "%s/whole.%d", cwd, getpid()) >= (int)sizeof at[1].sun_path)
            snprintf(at[1].sun_path, sizeof at[1].sun_path, "whole.%d", getpid());
        int to[2], from[2], ls[2], cl[2], sv[2];
        for (int i = 0; i < 2; i++) {
            to[i] = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0));
            from[i] = (int)OK(socket(AF_UNIX, SOCK_DGRAM, 0));
            OK(bind(to[i], (struct sockaddr *)&at[i], sizeof at[i]));
            OK(connect(from[i], (struct sockaddr *)&at[i], sizeof at[i]));
            OK(unlink(at[i].sun_path));
            ls[i] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            cl[i] = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            OK(bind(ls[i], (struct sockaddr *)&at[i], sizeof at[i]));
            OK(listen(ls[i], 5));
            OK(connect(cl[i], (struct sockaddr *)&at[i], sizeof at[i]));
            sv[i] = (int)OK(accept(ls[i], NULL, NULL));
            OK(unlink(at[i].sun_path));
        }
        OK(mkfifo(at[0].sun_path, 0600));
        int f = (int)OK(open(at[1].sun_path, O_CREAT | O_EXCL | O_RDWR, 0600));
        full_write(f, "mine", 4);
        OK(close(f));
        for (uint64_t r = 0; running(); r++) {
            for (int i = 0; i < 2; i++) EQ(send(from[i], &r, 8, 0), 8);
            nap_us(4000);
            for (int i = 0; i < 2; i++) {
                EQ(recv(to[i], b, 16, MSG_DONTWAIT), 8);
                EQ(b[0], r);
                full_write(cl[i], &r, 8);
                full_read(sv[i], b, 8);
                EQ(b[0], r);
                int all[] = {to[i], ls[i], sv[i]};
                for (int k = 0; k < 3; k++) {
                    socklen_t l = sizeof who;
                    OK(getsockname(all[k], (struct sockaddr *)&who, &l));
                    CHECK(!strcmp(who.sun_path, at[i].sun_path));
                }
                EQ(connect(from[i], (struct sockaddr *)&at[i], sizeof at[i]), -1);
                EQ(errno, ECONNREFUSED);
            }
            struct stat st;
            OK(stat(at[0].sun_path, &st));
            EQ(st.st_mode, S_IFIFO | 0600);
            f = (int)OK(open(at[1].sun_path, O_RDONLY));
            full_read(f, b, 4);
            CHECK(!memcmp(b, "mine", 4));
            OK(close(f));
        }
        OK(unlink(at[0].sun_path));
        OK(unlink(at[1].sun_path));
    } else if (!strcmp(kind, "renamed")) {
        struct sockaddr_un first = {.sun_family = AF_UNIX}, now = first, who;
        snprintf(first.sun_path, sizeof first.sun_path, "first.%d", getpid());
        snprintf(now.sun_path, sizeof now.sun_path, "now.%d", getpid());
        socklen_t l;
        int ls = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0)), cl = -1, sv = -1;
        OK(bind(ls, (struct sockaddr *)&first, sizeof first));
        OK(chmod(first.sun_path, 0640));
        OK(rename(first.sun_path, now.sun_path));
        OK(listen(ls, 5));
        for (uint64_t r = 0; running(); r++) {
            if (cl >= 0) {  // a connection of the round before
                fill(a, 800, r);
                full_write(cl, a, 800);
                full_read(sv, b, 800);
                verify(b, 800, r, "data of a connection of before");
                close(cl);
                close(sv);
            }
            cl = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
            OK(connect(cl, (struct sockaddr *)&now, sizeof now));
            sv = (int)OK(accept(ls, NULL, NULL));
            l = sizeof who;
            OK(getpeername(cl, (struct sockaddr *)&who, &l));
            CHECK(!strcmp(who.sun_path, first.sun_path));
            struct stat st;
            OK(stat(now.sun_path, &st));
            EQ(st.st_mode, S_IFSOCK | 0640);
            EQ(stat(first.sun_path, &st), -1);
            EQ(errno, ENOENT);
            nap_us(4000);
        }
        unlink(now.sun_path);
    } else if (!strcmp(kind, "rights")) {
        int s[2], p[2];
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
        for (uint64_t r = 0; running(); r++) {
            OK(pipe(p));
            full_write(p[1], &r, 8);
            int f = (int)OK(memfd_create("sent", 0)), in[2];
            OK(socketpair(AF_UNIX, SOCK_DGRAM, 0, in));
            EQ(pwrite(f, &r, 8, 100), 8);
            int fds[3] = {p[0], f, in[0]};
            send_fds(s[0], "x", 1, fds, 3);
            close(p[0]);
            close(f);
            close(in[0]);  // the only references are in flight now
            send_fds(s[0], "yz", 2, &s[1], 1);
            nap_us(5000);
            char m[4];
            int got[8];
            EQ(recv_fds(s[1], m, 1, got), 3);
            EQ(m[0], 'x');
            uint64_t v = 0;
            full_read(got[0], &v, 8);
            EQ(v, r);
            EQ(pread(got[1], &v, 8, 100), 8);
            EQ(v, r);
            EQ(send(in[1], &r, 8, 0), 8);
            EQ(recv(got[2], &v, 8, 0), 8);
            EQ(v, r);
            int again[8];
            EQ(recv_fds(s[1], m, 2, again), 1);
            CHECK(m[0] == 'y' && m[1] == 'z');
            close(again[0]);
            for (int i = 0; i < 3; i++) close(got[i]);
            close(p[1]);
            close(in[1]);
        }
    } else if (!strcmp(kind, "handed")) {  // what needs a process is in flight at times
        int s[2], got[8];
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        snprintf(name.sun_path, sizeof name.sun_path, "./handed.%d", getpid());
        int named = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
        OK(bind(named, (void *)&name, sizeof name));
        while (running()) {
            char path[64], m[4], text[64] = {0};
            struct stat st;
            snprintf(path, sizeof path, "/proc/%d/stat", getpid());
            int fds[3] = {(int)OK(syscall(SYS_pidfd_open, getpid(), 0)), (int)OK(open(path, O_RDONLY)),
                          (int)OK(open(name.sun_path, O_PATH))};
            send_fds(s[0], "x", 1, fds, 3);
            nap_us(3000);  // at first the sender has them too
            for (int i = 0; i < 3; i++) close(fds[i]);
            nap_us(3000);
            EQ(recv_fds(s[1], m, 1, got), 3);
            OK(syscall(SYS_pidfd_send_signal, got[0], 0, NULL, 0));
            CHECK(read(got[1], text, sizeof text - 1) > 0);
            EQ(atoi(text), getpid());
            OK(fstat(got[2], &st));
            CHECK(S_ISSOCK(st.st_mode));
            for (int i = 0; i < 3; i++) close(got[i]);
            nap_us(8000);  // nothing is in flight: a checkpoint can be taken
        }
    } else if (!strcmp(kind, "half")) {
        while (running()) {
            int s[2];
            OK(socketpair(AF_UNIX, SOCK_STREAM, 0, s));
            fill(a, 4096, check_round);
            full_write(s[0], a, 4096);
            OK(shutdown(s[0], SHUT_WR));
            nap_us(4000);
            full_read(s[1], b, 4096);
            verify(b, 4096, check_round, "data before a half close");
            EQ(read(s[1], b, 8), 0);
            full_write(s[1], a, 4096);
            full_read(s[0], b, 4096);
            signal(SIGPIPE, SIG_IGN);
            EQ(write(s[0], a, 8), -1);
            EQ(errno, EPIPE);
            close(s[1]);
            nap_us(3000);
            EQ(read(s[0], b, 8), 0);  // the peer is gone
            close(s[0]);
        }
    } else
        fail("unknown kind");
    for (int i = 0; i < others; i++) {
        int got;
        EQ(recv(crowd[i][1], &got, sizeof got, MSG_DONTWAIT), sizeof got);
        EQ(got, i);
        if (i % 6 == 3) EQ(recv(crowd[i][1], &got, sizeof got, MSG_DONTWAIT), 0);
    }
    return finish();
}
