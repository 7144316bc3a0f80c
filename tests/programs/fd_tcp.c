// TCP inside the job. fd_tcp KIND: flow (both directions, buffers full), backlog, half, options, v6, big, interrupted
// (a connect that succeeds while its caller is stopped in it), lingering (closed connections hold the port), full and
// closing and closed (as much on its way as fits), stuck and left (more than ever fits), gone (closed before it is
// accepted), urgent (MSG_OOB, read or not), crowded (more wait to be accepted than the backlog allows by now, with data
// and without).
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
static int v6;
static int listener(struct sockaddr_storage *a, socklen_t *l, int backlog) {
    int s = (int)OK(socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0)), one = 1;
    OK(setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    memset(a, 0, sizeof *a);
    a->ss_family = v6 ? AF_INET6 : AF_INET;
    if (v6) ((struct sockaddr_in6 *)a)->sin6_addr = in6addr_loopback;
    else ((struct sockaddr_in *)a)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *l = v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    OK(bind(s, (struct sockaddr *)a, *l));
    OK(listen(s, backlog));
    OK(getsockname(s, (struct sockaddr *)a, l));
    return s;
}
static int dial(struct sockaddr_storage *a, socklen_t l) {
    int c = (int)OK(socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0));
    OK(connect(c, (struct sockaddr *)a, l));
    return c;
}
// Waits until process `p` stands in system call `nr`.
static void await_call(pid_t p, long nr) {
    char path[64], text[32];
    snprintf(path, sizeof path, "/proc/%d/syscall", p);
    do {
        nap_us(1000);
        int fd = (int)OK(open(path, O_RDONLY | O_CLOEXEC));
        ssize_t n = OK(read(fd, text, sizeof text - 1));
        text[n] = 0;
        close(fd);
    } while (strtol(text, NULL, 10) != nr);
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "flow";
    char name[64];
    snprintf(name, sizeof name, "fd_tcp-%s", kind);
    begin(name);
    v6 = !strcmp(kind, "v6");
    struct sockaddr_storage ad, x, y;
    socklen_t al, l;
    int ls = listener(&ad, &al, 8);
    static uint64_t a[16384], b[16384];
    if (!strcmp(kind, "flow") || v6) {
        pid_t p = fork();
        if (p == 0) {  // echoes with its own pace; also sends its own stream
            begin_child();
            int c = dial(&ad, al);
            close(ls);
            uint64_t out[1024], in[1024], s = 0;
            for (;; s++) {
                fill(out, sizeof out, s + 1000000);
                full_write(c, out, sizeof out);
                ssize_t r = 0;
                for (size_t d = 0; d < sizeof in; d += (size_t)r) {
                    r = read(c, (char *)in + d, sizeof in - d);
                    if (r == 0) _exit(31);
                    if (r < 0) fail("read: %s", strerror(errno));
                }
                verify(in, sizeof in, s, "data in a tcp connection");
            }
        }
        int s = (int)OK(accept(ls, NULL, NULL));
        l = sizeof x;
        OK(getpeername(s, (struct sockaddr *)&x, &l));
        uint64_t sent = 0, got = 0;
        while (running()) {
            while (sent < got + 8) {  // up to 64 KiB ahead in one direction, as much waiting in the other
                fill(a, 8192, sent++);
                full_write(s, a, 8192);
            }
            nap_us(1000);
            full_read(s, b, 8192);
            verify(b, 8192, 1000000 + got++, "data from the peer");
            l = sizeof y;
            OK(getpeername(s, (struct sockaddr *)&y, &l));
            CHECK(!memcmp(&x, &y, l));
        }
        OK(shutdown(s, SHUT_WR));
        while (read(s, b, sizeof b) > 0) {}
        reap(p, 31 << 8);
    } else if (!strcmp(kind, "backlog")) {
        for (uint64_t r = 0; running(); r++) {
            int c[4];
            for (int i = 0; i < 4; i++) {
                c[i] = dial(&ad, al);
                fill(a, 1600, r * 4 + (uint64_t)i);
                full_write(c[i], a, 1600);
            }
            nap_us(8000);
            struct sockaddr_storage peer[4], mine;
            for (int i = 0; i < 4; i++) {
                l = sizeof peer[i];
                int s = (int)OK(accept(ls, (struct sockaddr *)&peer[i], &l));
                int k = -1;
                for (int j = 0; j < 4; j++) {
                    if (c[j] < 0) continue;
                    socklen_t ml = sizeof mine;
                    OK(getsockname(c[j], (struct sockaddr *)&mine, &ml));
                    if (!memcmp(&mine, &peer[i], ml)) k = j;
                }
                CHECK(k >= 0);
                full_read(s, b, 1600);
                verify(b, 1600, r * 4 + (uint64_t)k, "data of a connection in the backlog");
                full_write(s, b, 1600);
                full_read(c[k], b, 1600);
                verify(b, 1600, r * 4 + (uint64_t)k, "the answer");
                close(c[k]);
                c[k] = -1;
                EQ(read(s, b, 1), 0);
                close(s);
            }
            int q = 0, ql = sizeof q;
            OK(getsockopt(ls, SOL_SOCKET, SO_ACCEPTCONN, &q, (socklen_t *)&ql));
            EQ(q, 1);
        }
    } else if (!strcmp(kind, "crowded")) {
        enum { N = 6, PORTS = 51 /* IP_LOCAL_PORT_RANGE */ };
        uint32_t ports = 60000u << 16 | 33000, now;
        OK(fcntl(ls, F_SETFL, O_RDWR | O_NONBLOCK));
        for (uint64_t r = 0; running(); r++) {
            int c[N], known = 0, carries = r % 2 == 0;
            OK(listen(ls, 16));
            for (int i = 0; i < N; i++) {
                c[i] = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
                known = setsockopt(c[i], IPPROTO_IP, PORTS, &ports, sizeof ports) == 0;
                OK(connect(c[i], (struct sockaddr *)&ad, al));
                fill(a, 800, r * N + (uint64_t)i);
                if (carries && i != 2) full_write(c[i], a, 800);
            }
            OK(listen(ls, 1));
            for (int i = 0; i < 5 && running(); i++) nap_us(4000);
            struct tcp_info info;
            l = sizeof info;
            OK(getsockopt(ls, IPPROTO_TCP, TCP_INFO, &info, &l));
            EQ(info.tcpi_unacked, N);
            EQ(info.tcpi_sacked, 1);
            for (int i = 0; i < N; i++) {
                int s = (int)OK(accept4(ls, NULL, NULL, 0));
                fill(a, 800, r * N + (uint64_t)i);
                if (!carries || i == 2) full_write(c[i], a, 800);
                full_read(s, b, 800);
                verify(b, 800, r * N + (uint64_t)i, "data of one of a crowd");
                full_write(s, b, 8);
                full_read(c[i], b, 8);
                l = sizeof now;
                if (known) {
                    OK(getsockopt(c[i], IPPROTO_IP, PORTS, &now, &l));
                    EQ(now, ports);
                }
                close(c[i]);
                EQ(read(s, b, 1), 0);
                close(s);
            }
        }
    } else if (!strcmp(kind, "half")) {
        while (running()) {
            int c = dial(&ad, al), s = (int)OK(accept(ls, NULL, NULL));
            fill(a, 65536, check_round);
            full_write(c, a, 65536);
            OK(shutdown(c, SHUT_WR));
            nap_us(6000);
            full_read(s, b, 65536);
            verify(b, 65536, check_round, "data before a half close");
            EQ(read(s, b, 8), 0);
            fill(a, 8000, check_round + 5);
            full_write(s, a, 8000);
            nap_us(6000);
            full_read(c, b, 8000);
            verify(b, 8000, check_round + 5, "data after a half close");
            close(s);
            nap_us(3000);
            EQ(read(c, b, 8), 0);
            close(c);
        }
    } else if (!strcmp(kind, "options")) {
        int c = dial(&ad, al), s = (int)OK(accept(ls, NULL, NULL));
        struct { int level, opt, val; } o[] = {{IPPROTO_TCP, TCP_NODELAY, 1}, {SOL_SOCKET, SO_KEEPALIVE, 1}, {IPPROTO_TCP, TCP_KEEPIDLE, 77}, {IPPROTO_TCP, TCP_KEEPINTVL, 13},
            {IPPROTO_TCP, TCP_KEEPCNT, 5}, {IPPROTO_TCP, TCP_USER_TIMEOUT, 30000}, {IPPROTO_IP, IP_TOS, 0x10}, {IPPROTO_IP, IP_TTL, 33}, {SOL_SOCKET, SO_RCVLOWAT, 9}, {SOL_SOCKET, SO_PRIORITY, 3}};
        int got;
        for (size_t i = 0; i < sizeof o / sizeof *o; i++) OK(setsockopt(c, o[i].level, o[i].opt, &o[i].val, sizeof(int)));
        struct linger lg = {1, 7}, lgot;
        OK(setsockopt(c, SOL_SOCKET, SO_LINGER, &lg, sizeof lg));
        OK(fcntl(c, F_SETFL, O_RDWR | O_NONBLOCK));
        while (running()) {
            for (size_t i = 0; i < sizeof o / sizeof *o; i++) {
                l = sizeof got;
                OK(getsockopt(c, o[i].level, o[i].opt, &got, &l));
                if (got != o[i].val) fail("option %d/%d is %d, was %d", o[i].level, o[i].opt, got, o[i].val);
            }
            l = sizeof lgot;
            OK(getsockopt(c, SOL_SOCKET, SO_LINGER, &lgot, &l));
            CHECK(lgot.l_onoff == 1 && lgot.l_linger == 7);
            EQ(fcntl(c, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
            fill(a, 96, check_round);
            full_write(s, a, 96);
            await(c, POLLIN, "tcp");
            full_read(c, b, 96);
            verify(b, 96, check_round, "data");
            nap_us(2000);
        }
    } else if (!strcmp(kind, "big")) {  // buffers filled until neither side can send more
        int c = dial(&ad, al), s = (int)OK(accept(ls, NULL, NULL));
        OK(fcntl(c, F_SETFL, O_RDWR | O_NONBLOCK));
        OK(fcntl(s, F_SETFL, O_RDWR | O_NONBLOCK));
        uint64_t next[2] = {0, 0}, seen[2] = {0, 0};  // bytes sent and received in each direction
        int fd[2] = {c, s}, lowest, normal, most;
        FILE *limits = fopen("/proc/sys/net/ipv4/tcp_wmem", "r");
        CHECK(limits && fscanf(limits, "%d %d %d", &lowest, &normal, &most) == 3);
        fclose(limits);
        while (running()) {
            for (int k = 0; k < 2; k++) {  // no more can be on its way than the system allows without a restart
                int size;
                l = sizeof size;
                OK(getsockopt(fd[k], SOL_SOCKET, SO_SNDBUF, &size, &l));
                CHECK(size <= most);
            }
            for (int k = 0; k < 2; k++) {
                for (;;) {
                    uint64_t w[513], at = next[k] / 8, skip = next[k] % 8;
                    for (uint64_t i = 0; i < 513; i++) w[i] = mix(at + i + (uint64_t)k * 7777);
                    ssize_t r = write(fd[k], (char *)w + skip, 4096);
                    if (r < 0) { EQ(errno, EAGAIN); break; }
                    next[k] += (uint64_t)r;
                }
            }
            nap_us(10000);
            for (int k = 0; k < 2; k++) {
                while (seen[k] < next[k]) {
                    unsigned char w[4096];
                    await(fd[!k], POLLIN, "tcp");
                    ssize_t r = read(fd[!k], w, sizeof w);
                    CHECK(r > 0);
                    uint64_t v = 0;
                    for (ssize_t i = 0; i < r; i++) {
                        uint64_t at = seen[k] + (uint64_t)i;
                        if (i == 0 || at % 8 == 0) v = mix(at / 8 + (uint64_t)k * 7777);
                        if (w[i] != (unsigned char)(v >> (at % 8 * 8))) fail("byte %llu of direction %d is damaged", (unsigned long long)at, k);
                    }
                    seen[k] += (uint64_t)r;
                }
            }
        }
    } else if (!strcmp(kind, "full") || !strcmp(kind, "closing") || !strcmp(kind, "closed")) {
        // As much on its way as fits, in small pieces; closing, closed: the sender sends no more by then, or is gone.
        int closed = !strcmp(kind, "closed"), closing = closed || !strcmp(kind, "closing"), c = -1, s = -1;
        while (running()) {
            if (c < 0) {
                c = dial(&ad, al);
                s = (int)OK(accept(ls, NULL, NULL));
                OK(fcntl(c, F_SETFL, O_NONBLOCK));
                int large = 100 << 20, small = 50000;  // as much as the system allows, or most of it left with the sender
                OK(setsockopt(c, SOL_SOCKET, SO_SNDBUF, &large, sizeof large));
                OK(setsockopt(s, SOL_SOCKET, SO_RCVBUF, closing ? &small : &large, sizeof large));
            }
            uint32_t sent = 0, seen = 0;
            for (ssize_t n = 0; n >= 0; sent += n > 0 ? (uint32_t)n : 0) {
                unsigned char piece[20];
                for (uint32_t i = 0; i < sizeof piece; i++) piece[i] = (unsigned char)((sent + i) * 2654435761u >> 13);
                n = write(c, piece, sizeof piece);
                if (n < 0) EQ(errno, EAGAIN);
            }
            if (closed) OK(close(c));
            else if (closing) OK(shutdown(c, SHUT_WR));
            for (int i = 0; i < 400 && running(); i++) nap_us(4000);  // longer than a checkpoint is tried again
            while (seen < sent) {
                unsigned char *got = (unsigned char *)b;
                ssize_t n = OK(read(s, got, sizeof b));
                if (n <= 0 || (uint32_t)n > sent - seen) fail("%zd bytes came behind %u of %u", n, seen, sent);
                for (uint32_t i = 0; i < (uint32_t)n; i++)
                    if (got[i] != (unsigned char)((seen + i) * 2654435761u >> 13)) fail("byte %u is damaged", seen + i);
                seen += (uint32_t)n;
            }
            if (!closing) continue;
            EQ(read(s, b, 1), 0);
            close(s);
            if (!closed) close(c);
            c = -1;
        }
    } else if (!strcmp(kind, "stuck") || !strcmp(kind, "left")) {
        // More than the largest buffer takes, from a sender that sends no more, or is gone.
        int c = dial(&ad, al), s = (int)OK(accept(ls, NULL, NULL)), large = 100 << 20, all = INT_MAX, one = 1;
        OK(fcntl(c, F_SETFL, O_NONBLOCK));
        OK(setsockopt(c, SOL_SOCKET, SO_SNDBUF, &large, sizeof large));
        OK(setsockopt(s, SOL_SOCKET, SO_RCVLOWAT, &all, sizeof all));
        OK(setsockopt(s, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one));
        uint64_t sent = 0, seen = 0;
        // Until nothing has gone for a while.
        for (int idle = 0; idle < 20; nap_us(10000), idle++)
            for (ssize_t n; (n = write(c, b, sizeof b)) > 0; sent += (uint64_t)n) idle = 0;
        OK(kind[0] == 'l' ? close(c) : shutdown(c, SHUT_WR));
        while (running()) nap_us(3000);
        for (ssize_t n; (n = OK(read(s, b, sizeof b))) > 0;) seen += (uint64_t)n;
        EQ(seen, sent);
    } else if (!strcmp(kind, "interrupted")) {
        int full = listener(&ad, &al, 0);  // one connection fills it; the next attempt waits
        while (running()) {
            int first = dial(&ad, al);
            pid_t p = fork();
            if (p == 0) {
                begin_child();
                int c = dial(&ad, al);
                full_write(c, a, 8);
                full_read(c, b, 8);
                _exit(32);
            }
            await_call(p, SYS_connect);
            OK(kill(p, SIGSTOP));
            int status;
            EQ(OK(waitpid(p, &status, WUNTRACED)), p);
            CHECK(WIFSTOPPED(status));
            close((int)OK(accept(full, NULL, NULL)));
            int other = (int)OK(accept(full, NULL, NULL));
            for (int i = 0; i < 25 && running(); i++) nap_us(4000);
            OK(kill(p, SIGCONT));
            full_read(other, b, 8);
            full_write(other, b, 8);
            reap(p, 32 << 8);
            close(other);
            close(first);
        }
    } else if (!strcmp(kind, "lingering")) {  // no SO_REUSEADDR: what the server has closed stays in TIME_WAIT under its port
        int plain = (int)OK(socket(AF_INET, SOCK_STREAM, 0));
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        al = sizeof at;
        OK(bind(plain, (struct sockaddr *)&at, al));
        OK(listen(plain, 4));
        OK(getsockname(plain, (struct sockaddr *)&at, &al));
        memcpy(&ad, &at, sizeof at);
        for (int k = 0; running(); k++) {
            if (k < 5) {
                int c = dial(&ad, al);
                close((int)OK(accept(plain, NULL, NULL)));
                EQ(read(c, b, 1), 0);
                close(c);
            }
            nap_us(1000);
            socklen_t now = sizeof x;
            OK(getsockname(plain, (struct sockaddr *)&x, &now));
            CHECK(now == al && !memcmp(&x, &ad, now));
        }
    } else if (!strcmp(kind, "gone")) {
        while (running()) {
            nap_us(3000);
            for (uint64_t k = 0; k < 3; k++) {
                int c = dial(&ad, al);
                fill(a, 800, check_round + k);
                full_write(c, a, 800);
                close(c);
            }
            nap_us(3000);
            for (uint64_t k = 0; k < 3; k++) {
                await(ls, POLLIN, "a connection");
                int s = (int)OK(accept(ls, NULL, NULL));
                full_read(s, b, 800);
                verify(b, 800, check_round + k, "data of a closed connection");
                EQ(read(s, b, 1), 0);
                close(s);
            }
        }
    } else if (!strcmp(kind, "urgent")) {
        int c = dial(&ad, al), s = (int)OK(accept(ls, NULL, NULL));
        while (running()) {
            char in[8], byte;
            full_write(c, "abc", 3);
            EQ(send(c, "!", 1, MSG_OOB), 1);
            await(s, POLLPRI, "urgent data");
            nap_us(2000);
            EQ(recv(s, &byte, 1, MSG_OOB), 1);
            EQ(byte, '!');
            nap_us(2000);  // the mark is behind all there is to read
            if (check_round % 2) full_write(c, "def", 3);
            nap_us(2000);
            full_read(s, in, 3);
            CHECK(!memcmp(in, "abc", 3));
            if (check_round % 2) {
                full_read(s, in, 3);
                CHECK(!memcmp(in, "def", 3));
            }
            nap_us(2000);
        }
    } else
        fail("unknown kind");
    return finish();
}
