// Questions to the kernel over netlink, as every MPI library asks at start: the answer must come, whole, whenever a
// checkpoint is taken between the question and the reading of the answer.
#include "check.h"
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>

// Asks for all interfaces (a dump, answered in several messages); returns how many there are.
static int interfaces(int s, uint32_t seq) {
    struct { struct nlmsghdr h; struct rtgenmsg g; } q = {{sizeof q, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, seq, 0}, {AF_UNSPEC}};
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    EQ(OK(sendto(s, &q, sizeof q, 0, (struct sockaddr *)&kernel, sizeof kernel)), sizeof q);
    nap_us(300);
    static char b[65536] __attribute__((aligned(16)));
    int n = 0;
    for (;;) {
        struct sockaddr_nl from;
        struct iovec v = {b, sizeof b};
        struct msghdr m = {.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &v, .msg_iovlen = 1};
        long len = (long)OK(recvmsg(s, &m, 0));
        EQ(from.nl_pid, 0);
        for (struct nlmsghdr *h = (struct nlmsghdr *)b; NLMSG_OK(h, len); h = NLMSG_NEXT(h, len)) {
            EQ(h->nlmsg_seq, seq);
            if (h->nlmsg_type == NLMSG_DONE) return n;
            EQ(h->nlmsg_type, RTM_NEWLINK);
            n++;
        }
    }
}
// A socket that is connected to itself keeps its address, its peer's, and gets what it sends.
static int own(void) {
    int s = (int)OK(socket(AF_NETLINK, SOCK_DGRAM, NETLINK_USERSOCK));
    struct sockaddr_nl a = {.nl_family = AF_NETLINK};
    OK(bind(s, (struct sockaddr *)&a, sizeof a));
    socklen_t l = sizeof a;
    OK(getsockname(s, (struct sockaddr *)&a, &l));
    OK(connect(s, (struct sockaddr *)&a, sizeof a));
    return s;
}
static void talk(int s, uint32_t pid, uint32_t seq) {
    struct sockaddr_nl a;
    socklen_t l = sizeof a;
    OK(getsockname(s, (struct sockaddr *)&a, &l));
    EQ(a.nl_pid, pid);
    OK(getpeername(s, (struct sockaddr *)&a, &l));
    EQ(a.nl_pid, pid);
    struct nlmsghdr h = {sizeof h, 0x1234, NLM_F_REQUEST, seq, 0}, got;
    EQ(send(s, &h, sizeof h, 0), sizeof h);
    EQ(recv(s, &got, sizeof got, 0), sizeof got);
    EQ(got.nlmsg_seq, seq);
}
int main(void) {
    begin("fd_netlink");
    int self = own();
    struct sockaddr_nl mine;
    socklen_t length = sizeof mine;
    OK(getsockname(self, (struct sockaddr *)&mine, &length));
    int s = (int)OK(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
    struct sockaddr_nl me = {.nl_family = AF_NETLINK}, now;
    OK(bind(s, (struct sockaddr *)&me, sizeof me));
    uint32_t seq = 1;
    int n = interfaces(s, seq);
    CHECK(n > 0);
    while (running()) {
        EQ(interfaces(s, ++seq), n);
        talk(self, mine.nl_pid, seq);
        nap_us(2000);
        socklen_t l = sizeof now;
        OK(getsockname(s, (struct sockaddr *)&now, &l));
        CHECK(now.nl_pid != 0);
    }
    return finish();
}
