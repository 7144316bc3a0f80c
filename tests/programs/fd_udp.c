// UDP: bound and connected sockets, datagrams waiting with their senders' addresses, boundaries kept.
#include "check.h"
#include <arpa/inet.h>
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
int main(void) {
    begin("fd_udp");
    struct sockaddr_in a, b, who;
    int s = mk(&a), c = mk(&b), one = 1;
    OK(connect(c, (struct sockaddr *)&a, sizeof a));
    OK(setsockopt(s, SOL_SOCKET, SO_BROADCAST, &one, sizeof one));
    uint64_t m[200], g[200];
    while (running()) {
        for (uint64_t i = 1; i <= 6; i++) {
            fill(m, i * 80, check_round * 10 + i);
            EQ(send(c, m, i * 80, 0), i * 80);
        }
        EQ(send(c, m, 0, 0), 0);
        nap_us(4000);
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
    return finish();
}
