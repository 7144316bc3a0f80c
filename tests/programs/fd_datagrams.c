// Datagrams that wait, and what is told of them. fd_datagrams KIND: small (the receive buffer has been made smaller than what
// is in it), gro (many that have come as one: UDP_GRO), told (where they came to, hops left, class; of IPv4 and of IPv6).
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip6.h>
#include <sys/socket.h>
enum { GRO = 104, SEGMENT = 103, COUNT = 60, LENGTH = 200, PIECES = 6, PIECE = 100, WHOLE = 6400 };
static int v6;
static socklen_t address(struct sockaddr_storage *a, const char *host, in_port_t port) {
    memset(a, 0, sizeof *a);
    struct sockaddr_in *four = (struct sockaddr_in *)a;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)a;
    a->ss_family = v6 ? AF_INET6 : AF_INET;
    EQ(inet_pton(a->ss_family, host, v6 ? (void *)&six->sin6_addr : (void *)&four->sin_addr), 1);
    *(v6 ? &six->sin6_port : &four->sin_port) = port;
    return v6 ? sizeof *six : sizeof *four;
}
static int bound(const char *host, in_port_t *port) {
    struct sockaddr_storage a;
    socklen_t l = address(&a, host, 0);
    int s = (int)OK(socket(a.ss_family, SOCK_DGRAM, 0));
    OK(bind(s, (struct sockaddr *)&a, l));
    OK(getsockname(s, (struct sockaddr *)&a, &l));
    *port = v6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port;
    return s;
}
static void send_from(int s, const void *data, size_t n, const char *host, in_port_t port) {
    struct sockaddr_storage a;
    socklen_t l = address(&a, host, port);
    EQ(sendto(s, data, n, 0, (struct sockaddr *)&a, l), n);
}
static void on(int s, int level, int option, int value) { OK(setsockopt(s, level, option, &value, sizeof value)); }
// Reads one datagram, of `from` and sent to `host` with so many hops left and of this class.
static void is_told(int r, in_port_t from, const char *host, int hops, int class) {
    char data[8], control[256];
    struct sockaddr_storage a, want;
    struct iovec v = {data, sizeof data};
    struct msghdr h = {.msg_name = &a, .msg_namelen = sizeof a, .msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    EQ(OK(recvmsg(r, &h, MSG_DONTWAIT)), 1);
    EQ(v6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port, from);
    address(&want, host, 0);
    int seen = 0, number;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&h); c; c = CMSG_NXTHDR(&h, c)) {
        void *at = CMSG_DATA(c);
        seen++;
        if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo *i = at;
            EQ(i->ipi_addr.s_addr, ((struct sockaddr_in *)&want)->sin_addr.s_addr);
            CHECK(i->ipi_ifindex > 0);
        } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
            struct in6_pktinfo *i = at;
            EQ(memcmp(&i->ipi6_addr, &((struct sockaddr_in6 *)&want)->sin6_addr, 16), 0);
            CHECK(i->ipi6_ifindex > 0);
        } else if (c->cmsg_type == (v6 ? IPV6_HOPLIMIT : IP_TTL)) {
            memcpy(&number, at, sizeof number);
            EQ(number, hops);
        } else if (c->cmsg_type == (v6 ? IPV6_TCLASS : IP_TOS)) {
            EQ(*(unsigned char *)at, class);
        } else
            fail("control message %d of level %d", c->cmsg_type, c->cmsg_level);
    }
    EQ(seen, 3);
}
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "small";
    char name[64];
    snprintf(name, sizeof name, "fd_datagrams-%s", kind);
    begin(name);
    in_port_t to, from;
    static char m[65536], g[65536];
    if (!strcmp(kind, "small")) {
        int r = bound("127.0.0.1", &to), s = bound("127.0.0.1", &from), least = 0;
        while (running()) {
            on(r, SOL_SOCKET, SO_RCVBUF, 100000);
            for (int i = 0; i < COUNT; i++) {
                fill(m, LENGTH, check_round * COUNT + (unsigned)i);
                send_from(s, m, LENGTH, "127.0.0.1", to);
            }
            on(r, SOL_SOCKET, SO_RCVBUF, 1);
            for (int i = 0; i < 5 && running(); i++) nap_us(4000);
            int size;
            socklen_t l = sizeof size;
            OK(getsockopt(r, SOL_SOCKET, SO_RCVBUF, &size, &l));
            if (!least) least = size;
            EQ(size, least);
            int n = 0;
            for (ssize_t got; (got = recv(r, g, sizeof g, MSG_DONTWAIT)) >= 0; n++) EQ(got, LENGTH);
            EQ(n, COUNT);
        }
    } else if (!strcmp(kind, "gro")) {
        int r = bound("127.0.0.1", &to), s = bound("127.0.0.1", &from);
        on(r, IPPROTO_UDP, GRO, 1);
        on(s, IPPROTO_UDP, SEGMENT, PIECE);
        while (running()) {
            fill(m, PIECES * WHOLE, check_round);
            for (int i = 0; i < PIECES; i++) send_from(s, m + i * WHOLE, WHOLE, "127.0.0.1", to);
            for (int i = 0; i < 5 && running(); i++) nap_us(4000);
            size_t done = 0;
            for (ssize_t got; (got = recv(r, g + done, sizeof g - done, MSG_DONTWAIT)) >= 0; done += (size_t)got) {}
            EQ(done, PIECES * WHOLE);
            EQ(memcmp(m, g, done), 0);
        }
    } else if (!strcmp(kind, "told")) {
        int both[2][2], four[] = {IP_PKTINFO, IP_RECVTTL, IP_RECVTOS}, six[] = {IPV6_RECVPKTINFO, IPV6_RECVHOPLIMIT, IPV6_RECVTCLASS};
        in_port_t ports[2][2];
        int probe = socket(AF_INET6, SOCK_DGRAM, 0), families = 1;
        struct sockaddr_storage a;
        v6 = 1;
        socklen_t l = address(&a, "::1", 0);
        if (probe >= 0 && !bind(probe, (struct sockaddr *)&a, l)) families = 2;
        if (probe >= 0) close(probe);
        for (v6 = 0; v6 < families; v6++) {
            both[v6][0] = bound(v6 ? "::" : "0.0.0.0", &ports[v6][0]);
            both[v6][1] = bound(v6 ? "::1" : "127.0.0.1", &ports[v6][1]);
            for (int i = 0; i < 3; i++) on(both[v6][0], v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? six[i] : four[i], 1);
            on(both[v6][1], v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_UNICAST_HOPS : IP_TTL, 77);
            on(both[v6][1], v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_TCLASS : IP_TOS, 0x28);
        }
        while (running()) {
            in_port_t gone[2];
            for (v6 = 0; v6 < families; v6++) {
                const char *host = v6 ? "::1" : "127.0.0.5";
                send_from(both[v6][1], "q", 1, host, ports[v6][0]);
                int s = bound(v6 ? "::1" : "127.0.0.9", &gone[v6]);
                on(s, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_UNICAST_HOPS : IP_TTL, 66);
                send_from(s, "q", 1, host, ports[v6][0]);
                close(s);
            }
            for (int i = 0; i < 5 && running(); i++) nap_us(4000);
            for (v6 = 0; v6 < families; v6++) {
                const char *host = v6 ? "::1" : "127.0.0.5";
                is_told(both[v6][0], ports[v6][1], host, 77, 0x28);
                is_told(both[v6][0], gone[v6], host, 66, 0);
                EQ(recv(both[v6][0], g, 1, MSG_DONTWAIT), -1);
            }
        }
    } else
        fail("unknown kind");
    return finish();
}
