// UDP: bound and connected sockets, datagrams waiting with their senders' addresses, boundaries kept; multicast groups,
// directions shut down, and datagrams that come as one (UDP_GRO).
#include "check.h"
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
static int mk(struct sockaddr_in *a) {
    int s = (int)OK(socket(AF_INET, SOCK_DGRAM, 0));
    memset(a, 0, sizeof *a);
    a->sin_family = AF_INET;
    a->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    OK(bind(s, (struct sockaddr *)a, sizeof *a));
    socklen_t l = sizeof *a;
    OK(getsockname(s, (struct sockaddr *)a, &l));
    return s;
}
enum { GRO = 104, SEGMENT = 103, SIZE = 64, FIRST = 7 };
// The mode and the number of chosen senders of a group that `s` has joined at `on`.
static void joined(int s, const char *group, unsigned on, unsigned mode, unsigned senders) {
    struct { uint32_t interface; struct sockaddr_storage group; uint32_t mode, count; struct sockaddr_storage list[4]; } f = {.interface = on, .count = 4};
    struct sockaddr_in *to = (struct sockaddr_in *)&f.group;
    to->sin_family = AF_INET;
    to->sin_addr.s_addr = inet_addr(group);
    socklen_t l = sizeof f;
    OK(getsockopt(s, IPPROTO_IP, 48 /* MCAST_MSFILTER */, &f, &l));
    EQ(f.mode, mode);
    EQ(f.count, senders);
}
static int shut(int how, int connected, struct sockaddr_in *to) {
    struct sockaddr_in a;
    int s = mk(&a);
    if (connected) OK(connect(s, (struct sockaddr *)to, sizeof *to));
    if (shutdown(s, how)) EQ(errno, ENOTCONN);
    return s;
}
// Whether each direction is shut down.
static void is_shut(int s, int reads, int writes, struct sockaddr_in *to) {
    struct pollfd p = {s, POLLIN | POLLRDHUP, 0};
    OK(poll(&p, 1, 0));
    EQ(!!(p.revents & POLLRDHUP), reads);
    errno = 0;
    ssize_t sent = sendto(s, "x", 1, MSG_NOSIGNAL, (struct sockaddr *)to, sizeof *to);
    EQ(sent, writes ? -1 : 1);
    if (writes) EQ(errno, EPIPE);
}
int main(void) {
    begin("fd_udp");
    struct sockaddr_in a, b, who;
    int s = mk(&a), c = mk(&b), one = 1;
    OK(connect(c, (struct sockaddr *)&a, sizeof a));
    OK(setsockopt(s, SOL_SOCKET, SO_BROADCAST, &one, sizeof one));
    unsigned lo = if_nametoindex("lo");
    struct in_addr own = {htonl(INADDR_LOOPBACK)};
    struct ip_mreqn all = {{inet_addr("239.9.8.7")}, own, 0}, by_number = {{inet_addr("239.9.8.6")}, {0}, (int)lo};
    struct ip_mreq_source some = {{inet_addr("239.9.8.5")}, own, {inet_addr("10.1.2.3")}};
    OK(setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &all, sizeof all));
    OK(setsockopt(s, IPPROTO_IP, IP_ADD_MEMBERSHIP, &by_number, sizeof by_number));
    OK(setsockopt(s, IPPROTO_IP, IP_ADD_SOURCE_MEMBERSHIP, &some, sizeof some));
    struct sockaddr_in sink, tx, rx;
    int sink_fd = mk(&sink), gro = mk(&rx), gso = mk(&tx), size = SIZE;
    (void)sink_fd;
    int shuts[] = {shut(SHUT_RD, 0, &sink), shut(SHUT_WR, 0, &sink), shut(SHUT_RDWR, 1, &sink), shut(SHUT_WR, 1, &sink)};
    OK(setsockopt(gro, IPPROTO_UDP, GRO, &one, sizeof one));
    OK(setsockopt(gso, IPPROTO_UDP, SEGMENT, &size, sizeof size));
    OK(connect(gso, (struct sockaddr *)&rx, sizeof rx));
    uint64_t m[200], g[200];
    while (running()) {
        for (uint64_t i = 1; i <= 6; i++) {
            fill(m, i * 80, check_round * 10 + i);
            EQ(send(c, m, i * 80, 0), i * 80);
        }
        EQ(send(c, m, 0, 0), 0);
        fill(m, 10 * SIZE, check_round);
        EQ(send(gso, m, 10 * SIZE - FIRST, 0), 10 * SIZE - FIRST);
        nap_us(4000);
        // As one, or, when they have been put back, one by one; each says how long its parts are, or is one.
        for (size_t done = 0; done < 10 * SIZE - FIRST;) {
            char control[64];
            struct iovec v = {(char *)g + done, sizeof g - done};
            struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
            ssize_t n = OK(recvmsg(gro, &h, MSG_DONTWAIT));
            struct cmsghdr *c = CMSG_FIRSTHDR(&h);
            if (c) EQ(*(int *)CMSG_DATA(c), SIZE);
            else CHECK(n <= SIZE);
            done += (size_t)n;
        }
        EQ(memcmp(m, g, 10 * SIZE - FIRST), 0);
        joined(s, "239.9.8.7", lo, 0, 0);
        joined(s, "239.9.8.6", lo, 0, 0);
        joined(s, "239.9.8.5", lo, 1, 1);
        is_shut(shuts[0], 1, 0, &sink);
        is_shut(shuts[1], 0, 1, &sink);
        is_shut(shuts[2], 1, 1, &sink);
        is_shut(shuts[3], 0, 1, &sink);
        while (recv(sink_fd, g, sizeof g, MSG_DONTWAIT) > 0) {}
        socklen_t l = sizeof who;
        for (uint64_t i = 1; i <= 6; i++) {
            EQ(recvfrom(s, g, sizeof g, MSG_DONTWAIT, (struct sockaddr *)&who, &l), i * 80);
            verify(g, i * 80, check_round * 10 + i, "a datagram");
            EQ(who.sin_port, b.sin_port);
        }
        EQ(recv(s, g, sizeof g, MSG_DONTWAIT), 0);
        EQ(recv(s, g, sizeof g, MSG_DONTWAIT), -1);
        EQ(sendto(s, m, 8, 0, (struct sockaddr *)&b, sizeof b), 8);
        EQ(recv(c, g, sizeof g, 0), 8);
        int v = 0;
        l = sizeof v;
        OK(getsockopt(s, SOL_SOCKET, SO_BROADCAST, &v, &l));
        EQ(v, 1);
    }
    // As it has been joined.
    OK(setsockopt(s, IPPROTO_IP, IP_DROP_MEMBERSHIP, &all, sizeof all));
    OK(setsockopt(s, IPPROTO_IP, IP_DROP_MEMBERSHIP, &by_number, sizeof by_number));
    return finish();
}
