// Every option of a socket that the kernel lets one read has the value that it had: fd_options set (all that may be set
// have got a value of their own) and fd_options fresh (nothing has been set: nothing may stay behind). All numbers of
// all levels are asked for, so what a newer kernel adds is looked at too.
#include "check.h"
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <net/if.h>
#include <sys/socket.h>
#include <sys/un.h>
#ifndef SO_GET_FILTER
#define SO_GET_FILTER SO_ATTACH_FILTER
#endif
enum { SOCKETS = 40, LONGEST = 64, NUMBERS = 128 };
enum { LEVEL_TCP = 6, LEVEL_UDP = 17, LEVEL_V6 = 41, LEVEL_UDPLITE = 136, LEVEL_NETLINK = 270 };
static const int levels[] = {SOL_SOCKET, IPPROTO_IP, LEVEL_TCP, LEVEL_UDP, LEVEL_V6, LEVEL_UDPLITE, LEVEL_NETLINK};
enum { LEVELS = sizeof levels / sizeof *levels };

typedef struct { int8_t there; socklen_t len; uint8_t bytes[LONGEST]; } value;
// connected: 1, or 2 with a connection of TCP.
static struct { const char *name; int fd, family, connected, filter, has_port; value want[LEVELS][NUMBERS]; } all[SOCKETS];
static int n;

static int add(const char *name, int fd, int family, int connected) {
    CHECK(n < SOCKETS);
    all[n].name = name;
    all[n].fd = fd;
    all[n].family = family;
    all[n].connected = connected;
    all[n].has_port = strstr(name, "TCP") && strncmp(name, "new", 3);
    n++;
    return fd;
}

// What is no setting: counters, errors, identities, what changes by itself or costs a descriptor to ask.
static int is_setting(int at, int level, int o) {
    int tcp_connected = all[at].connected == 2;
    switch (level) {
    case SOL_SOCKET:
        // Those of a connection grow by themselves.
        if (o == SO_SNDBUF || o == SO_RCVBUF) return !tcp_connected;
        // An ordinary user's job has it on where TCP has a port (plugins/src/sockets/tcp/README.md).
        if (o == SO_REUSEADDR && all[at].has_port && geteuid()) return 0;
        return o != SO_ERROR && o != SO_PEERCRED && o != SO_GET_FILTER && (o != 49 || !all[at].connected) /* SO_INCOMING_CPU: there the last packet's */ && o != 55 /* SO_MEMINFO */ &&
               o != 56 /* SO_INCOMING_NAPI_ID */ && o != 57 /* SO_COOKIE */ && o != 59 /* SO_PEERGROUPS */ && o != 71 /* SO_NETNS_COOKIE */ && o != 77 /* SO_PEERPIDFD */ &&
               o != SO_PEERNAME;
    case IPPROTO_IP: return o != 9 /* IP_PKTOPTIONS */ && o < 64;
    case LEVEL_V6: return o != 6 /* IPV6_2292PKTOPTIONS */ && o != 61 /* IPV6_PATHMTU */ && o < 80;
    case LEVEL_TCP:
        if (o == 2 || o == 10) return !tcp_connected; // TCP_MAXSEG, TCP_WINDOW_CLAMP
        return o != 11 /* TCP_INFO */ && o != 12 /* TCP_QUICKACK */ && o != 24 /* TCP_TIMESTAMP */ && o != 26 /* TCP_CC_INFO */ && o != 35 /* TCP_ZEROCOPY_RECEIVE */;
    default: return 1;
    }
}

static value ask(int fd, int level, int o) {
    value v = {.len = LONGEST};
    v.there = getsockopt(fd, level, o, v.bytes, &v.len) == 0;
    if (!v.there || v.len > LONGEST) v.len = 0;
    memset(v.bytes + v.len, 0, LONGEST - v.len);
    return v;
}

static const char *hex(const value *v) {
    static char text[4][2 * LONGEST + 16];
    static int turn;
    char *t = text[turn++ % 4];
    int len = snprintf(t, 16, v->there ? "" : "none");
    for (socklen_t i = 0; i < v->len; i++) len += snprintf(t + len, 4, "%02x", v->bytes[i]);
    return t;
}

// All sockets: their options are remembered, or compared with what is remembered.
static void look(int remember) {
    for (int at = 0; at < n; at++)
        for (int l = 0; l < LEVELS; l++)
            for (int o = 1; o < NUMBERS; o++) {
                if (!is_setting(at, levels[l], o)) continue;
                value v = ask(all[at].fd, levels[l], o), *want = &all[at].want[l][o];
                if (remember) *want = v;
                else if (v.there != want->there || v.len != want->len || memcmp(v.bytes, want->bytes, LONGEST))
                    fail("%s: option %d of level %d is %s, was %s", all[at].name, o, levels[l], hex(&v), hex(want));
            }
}

static int changed;
static void set(int at, int level, int o, const void *v, socklen_t len) {
    value before = ask(all[at].fd, level, o), after;
    if (setsockopt(all[at].fd, level, o, v, len)) return;
    after = ask(all[at].fd, level, o);
    changed += memcmp(&before, &after, sizeof before) != 0;
}
static void num(int at, int level, int o, int v) { set(at, level, o, &v, sizeof v); }

// Gives everything that can be set a value of its own. What needs privilege is set where there is some.
static void set_all(int at) {
    static const struct { int level, option, value; } plain[] = {
        {SOL_SOCKET, SO_REUSEADDR, 1}, {SOL_SOCKET, SO_REUSEPORT, 1}, {SOL_SOCKET, SO_DONTROUTE, 1}, {SOL_SOCKET, SO_BROADCAST, 1}, {SOL_SOCKET, SO_SNDBUF, 70000}, {SOL_SOCKET, SO_RCVBUF, 60000},
        {SOL_SOCKET, SO_KEEPALIVE, 1}, {SOL_SOCKET, SO_OOBINLINE, 1}, {SOL_SOCKET, SO_NO_CHECK, 1}, {SOL_SOCKET, SO_DEBUG, 1}, {SOL_SOCKET, SO_PASSCRED, 1}, {SOL_SOCKET, SO_RCVLOWAT, 7},
        {SOL_SOCKET, 34 /* SO_PASSSEC */, 1}, {SOL_SOCKET, SO_MARK, 77}, {SOL_SOCKET, 40 /* SO_RXQ_OVFL */, 1}, {SOL_SOCKET, 41 /* SO_WIFI_STATUS */, 1}, {SOL_SOCKET, 43 /* SO_NOFCS */, 1},
        {SOL_SOCKET, 45 /* SO_SELECT_ERR_QUEUE */, 1}, {SOL_SOCKET, 46 /* SO_BUSY_POLL */, 33}, {SOL_SOCKET, 60 /* SO_ZEROCOPY */, 1}, {SOL_SOCKET, 69 /* SO_PREFER_BUSY_POLL */, 1},
        {SOL_SOCKET, 74 /* SO_TXREHASH */, 0}, {SOL_SOCKET, 75 /* SO_RCVMARK */, 1}, {SOL_SOCKET, 76 /* SO_PASSPIDFD */, 1}, {SOL_SOCKET, 82 /* SO_RCVPRIORITY */, 1},
        {SOL_SOCKET, 83 /* SO_PASSRIGHTS */, 0}, {SOL_SOCKET, 84 /* SO_INQ */, 1},
        {IPPROTO_IP, 1 /* IP_TOS */, 0x28}, {IPPROTO_IP, 2 /* IP_TTL */, 41}, {IPPROTO_IP, 6 /* IP_RECVOPTS */, 1}, {IPPROTO_IP, 7 /* IP_RETOPTS */, 1}, {IPPROTO_IP, 8 /* IP_PKTINFO */, 1},
        {IPPROTO_IP, 10 /* IP_MTU_DISCOVER */, 3}, {IPPROTO_IP, 11 /* IP_RECVERR */, 1}, {IPPROTO_IP, 12 /* IP_RECVTTL */, 1}, {IPPROTO_IP, 13 /* IP_RECVTOS */, 1}, {IPPROTO_IP, 15 /* IP_FREEBIND */, 1},
        {IPPROTO_IP, 18 /* IP_PASSSEC */, 1}, {IPPROTO_IP, 19 /* IP_TRANSPARENT */, 1}, {IPPROTO_IP, 20 /* IP_RECVORIGDSTADDR */, 1}, {IPPROTO_IP, 21 /* IP_MINTTL */, 9},
        {IPPROTO_IP, 23 /* IP_CHECKSUM */, 1}, {IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, 1}, {IPPROTO_IP, 25 /* IP_RECVFRAGSIZE */, 1}, {IPPROTO_IP, 26 /* IP_RECVERR_RFC4884 */, 1},
        {IPPROTO_IP, 33 /* IP_MULTICAST_TTL */, 5}, {IPPROTO_IP, 34 /* IP_MULTICAST_LOOP */, 0}, {IPPROTO_IP, 49 /* IP_MULTICAST_ALL */, 0}, {IPPROTO_IP, 51 /* IP_LOCAL_PORT_RANGE */, 50000 << 16 | 40000},
        {LEVEL_V6, 2, 1}, {LEVEL_V6, 3, 1}, {LEVEL_V6, 4, 1}, {LEVEL_V6, 5, 1}, {LEVEL_V6, 8, 1}, // the options of RFC 2292
        {LEVEL_V6, 11 /* IPV6_FLOWINFO */, 1}, {LEVEL_V6, 16 /* IPV6_UNICAST_HOPS */, 43}, {LEVEL_V6, 18 /* IPV6_MULTICAST_HOPS */, 6}, {LEVEL_V6, 19 /* IPV6_MULTICAST_LOOP */, 0},
        {LEVEL_V6, 23 /* IPV6_MTU_DISCOVER */, 3}, {LEVEL_V6, 25 /* IPV6_RECVERR */, 1}, {LEVEL_V6, 29 /* IPV6_MULTICAST_ALL */, 0}, {LEVEL_V6, 31 /* IPV6_RECVERR_RFC4884 */, 1},
        {LEVEL_V6, 33 /* IPV6_FLOWINFO_SEND */, 1}, {LEVEL_V6, 49 /* IPV6_RECVPKTINFO */, 1}, {LEVEL_V6, 51 /* IPV6_RECVHOPLIMIT */, 1}, {LEVEL_V6, 53 /* IPV6_RECVHOPOPTS */, 1},
        {LEVEL_V6, 56 /* IPV6_RECVRTHDR */, 1}, {LEVEL_V6, 58 /* IPV6_RECVDSTOPTS */, 1}, {LEVEL_V6, 60 /* IPV6_RECVPATHMTU */, 1}, {LEVEL_V6, 62 /* IPV6_DONTFRAG */, 1}, {LEVEL_V6, 66 /* IPV6_RECVTCLASS */, 1},
        {LEVEL_V6, 67 /* IPV6_TCLASS */, 0x20}, {LEVEL_V6, 70 /* IPV6_AUTOFLOWLABEL */, 0}, {LEVEL_V6, 72 /* IPV6_ADDR_PREFERENCES */, 2}, {LEVEL_V6, 73 /* IPV6_MINHOPCOUNT */, 4},
        {LEVEL_V6, 74 /* IPV6_RECVORIGDSTADDR */, 1}, {LEVEL_V6, 75 /* IPV6_TRANSPARENT */, 1}, {LEVEL_V6, 77 /* IPV6_RECVFRAGSIZE */, 1}, {LEVEL_V6, 78 /* IPV6_FREEBIND */, 1},
        {LEVEL_TCP, 1 /* TCP_NODELAY */, 1}, {LEVEL_TCP, 3 /* TCP_CORK */, 1}, {LEVEL_TCP, 2 /* TCP_MAXSEG */, 1000}, {LEVEL_TCP, 4 /* TCP_KEEPIDLE */, 71}, {LEVEL_TCP, 5 /* TCP_KEEPINTVL */, 13}, {LEVEL_TCP, 6 /* TCP_KEEPCNT */, 5},
        {LEVEL_TCP, 7 /* TCP_SYNCNT */, 3}, {LEVEL_TCP, 8 /* TCP_LINGER2 */, 9}, {LEVEL_TCP, 9 /* TCP_DEFER_ACCEPT */, 3}, {LEVEL_TCP, 10 /* TCP_WINDOW_CLAMP */, 50000}, {LEVEL_TCP, 16 /* TCP_THIN_LINEAR_TIMEOUTS */, 1},
        {LEVEL_TCP, 18 /* TCP_USER_TIMEOUT */, 12345}, {LEVEL_TCP, 23 /* TCP_FASTOPEN */, 5}, {LEVEL_TCP, 25 /* TCP_NOTSENT_LOWAT */, 4000}, {LEVEL_TCP, 27 /* TCP_SAVE_SYN */, 1},
        {LEVEL_TCP, 30 /* TCP_FASTOPEN_CONNECT */, 1}, {LEVEL_TCP, 34 /* TCP_FASTOPEN_NO_COOKIE */, 1}, {LEVEL_TCP, 36 /* TCP_INQ */, 1}, {LEVEL_TCP, 37 /* TCP_TX_DELAY */, 500},
        {LEVEL_TCP, 44 /* TCP_RTO_MAX_MS */, 50000}, {LEVEL_TCP, 45 /* TCP_RTO_MIN_US */, 100000}, {LEVEL_TCP, 46 /* TCP_DELACK_MAX_US */, 30000},
        {LEVEL_UDP, 1 /* UDP_CORK */, 1}, {LEVEL_UDP, 100 /* UDP_ENCAP */, 2 /* UDP_ENCAP_ESPINUDP */}, {LEVEL_UDP, 101 /* UDP_NO_CHECK6_TX */, 1}, {LEVEL_UDP, 102 /* UDP_NO_CHECK6_RX */, 1}, {LEVEL_UDP, 103 /* UDP_SEGMENT */, 700}, {LEVEL_UDP, 104 /* UDP_GRO */, 1},
        {LEVEL_UDPLITE, 1 /* UDP_CORK */, 1}, {LEVEL_UDPLITE, 10 /* UDPLITE_SEND_CSCOV */, 20}, {LEVEL_UDPLITE, 11 /* UDPLITE_RECV_CSCOV */, 24},
        {LEVEL_NETLINK, 3 /* NETLINK_PKTINFO */, 1}, {LEVEL_NETLINK, 4 /* NETLINK_BROADCAST_ERROR */, 1}, {LEVEL_NETLINK, 5 /* NETLINK_NO_ENOBUFS */, 1}, {LEVEL_NETLINK, 8 /* NETLINK_LISTEN_ALL_NSID */, 1},
        {LEVEL_NETLINK, 10 /* NETLINK_CAP_ACK */, 1}, {LEVEL_NETLINK, 11 /* NETLINK_EXT_ACK */, 1}, {LEVEL_NETLINK, 12 /* NETLINK_GET_STRICT_CHK */, 1},
        // Behind what changes them too.
        {SOL_SOCKET, 49 /* SO_INCOMING_CPU */, 1}, {SOL_SOCKET, SO_PRIORITY, 3}, {SOL_SOCKET, SO_TIMESTAMPNS, 1}, {SOL_SOCKET, 42 /* SO_PEEK_OFF */, 0},
    };
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
        // Every second socket keeps the sizes that the kernel has chosen for its buffers, but for good.
        int size = plain[i].level == SOL_SOCKET && (plain[i].option == SO_SNDBUF || plain[i].option == SO_RCVBUF);
        if (size && at % 2) continue;
        num(at, plain[i].level, plain[i].option, plain[i].value);
    }
    if (at % 2) num(at, SOL_SOCKET, 72 /* SO_BUF_LOCK */, 1 + at % 4);
    int family = all[at].family, lo = (int)if_nametoindex("lo");
    struct timeval t = {17, 250000};
    struct linger linger = {1, 11};
    set(at, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    set(at, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    set(at, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    num(at, SOL_SOCKET, 37 /* SO_TIMESTAMPING */, 8 | 16 | 128);
    uint64_t rate = 123456789;
    set(at, SOL_SOCKET, 47 /* SO_MAX_PACING_RATE */, &rate, sizeof rate);
    struct { int clock; uint32_t flags; } when = {CLOCK_MONOTONIC, 2};
    set(at, SOL_SOCKET, 61 /* SO_TXTIME */, &when, sizeof when);
    if (family != AF_UNIX && family != AF_NETLINK) set(at, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
    if (family == AF_INET) {
        struct in_addr own = {htonl(INADDR_LOOPBACK)};
        uint32_t on = htonl((uint32_t)lo);
        set(at, IPPROTO_IP, 32 /* IP_MULTICAST_IF */, &own, sizeof own);
        set(at, IPPROTO_IP, 50 /* IP_UNICAST_IF */, &on, sizeof on);
        set(at, IPPROTO_IP, 4 /* IP_OPTIONS */, "\x01\x01\x01", 4);
    } else if (family == AF_INET6) {
        uint32_t on = htonl((uint32_t)lo);
        num(at, LEVEL_V6, 17 /* IPV6_MULTICAST_IF */, lo);
        set(at, LEVEL_V6, 76 /* IPV6_UNICAST_IF */, &on, sizeof on);
        set(at, LEVEL_V6, 59 /* IPV6_DSTOPTS */, "\0\0\x01\x04\0\0\0", 8);
    }
    set(at, LEVEL_TCP, 33 /* TCP_FASTOPEN_KEY */, "a key of sixteen", 16);
    if (all[at].connected != 2) set(at, LEVEL_TCP, 13 /* TCP_CONGESTION */, "reno", 5);
    // Lets everything pass.
    struct sock_filter pass[] = {BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0), BPF_STMT(BPF_RET | BPF_K, 0x7fffffff)};
    struct sock_fprog program = {2, pass};
    // (Not every kernel lets an ordinary user do that.)
    if (!setsockopt(all[at].fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program)) all[at].filter = 2;
    else if (!geteuid()) fail("%s: cannot attach a filter", all[at].name);
    num(at, SOL_SOCKET, 44 /* SO_LOCK_FILTER */, 1);
}

static void same_filter(int at) {
    struct sock_filter got[4];
    socklen_t len = 4;
    OK(getsockopt(all[at].fd, SOL_SOCKET, SO_GET_FILTER, got, &len));
    if ((int)len != all[at].filter) fail("%s: its filter has %d instructions", all[at].name, (int)len);
    if (len) EQ(got[1].k, 0x7fffffff);
}

static int make(int family, int type, int protocol) { return (int)OK(socket(family, type, protocol)); }

// At the loopback address of `family`, with a port of its own.
static struct sockaddr_storage bound(int s, int family) {
    struct sockaddr_storage a = {.ss_family = (sa_family_t)family};
    socklen_t len = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if (family == AF_INET) ((struct sockaddr_in *)&a)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else ((struct sockaddr_in6 *)&a)->sin6_addr = in6addr_loopback;
    OK(bind(s, (struct sockaddr *)&a, len));
    OK(getsockname(s, (struct sockaddr *)&a, &len));
    return a;
}

static void internet(int family, int with_lite) {
    socklen_t len = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    const char *v = family == AF_INET ? "4" : "6";
    char *names[9];
    static const char *what[] = {"new TCP", "bound TCP", "listening TCP", "connecting end of TCP", "accepted end of TCP", "new UDP", "bound UDP", "connected UDP", "UDP-Lite"};
    for (int i = 0; i < 9; i++) CHECK(asprintf(&names[i], "%s/%s", what[i], v) > 0);
    add(names[0], make(family, SOCK_STREAM, 0), family, 0);
    bound(add(names[1], make(family, SOCK_STREAM, 0), family, 0), family);
    int ls = add(names[2], make(family, SOCK_STREAM, 0), family, 0);
    struct sockaddr_storage to = bound(ls, family);
    OK(listen(ls, 5));
    int c = add(names[3], make(family, SOCK_STREAM, 0), family, 2);
    OK(connect(c, (struct sockaddr *)&to, len));
    add(names[4], (int)OK(accept(ls, NULL, NULL)), family, 2);
    add(names[5], make(family, SOCK_DGRAM, 0), family, 0);
    int u = add(names[6], make(family, SOCK_DGRAM, 0), family, 0);
    to = bound(u, family);
    u = add(names[7], make(family, SOCK_DGRAM, 0), family, 1);
    OK(connect(u, (struct sockaddr *)&to, len));
    if (!with_lite) return;
    int lite = socket(family, SOCK_DGRAM, LEVEL_UDPLITE);
    if (lite < 0 && errno == EPROTONOSUPPORT) return; // taken out of newer kernels
    bound(add(names[8], (int)OK(lite), family, 0), family);
}

int main(int argc, char **argv) {
    begin("fd_options");
    CHECK(argc > 1);
    int setting = !strcmp(argv[1], "set"), two[2];
    internet(AF_INET, 1);
    internet(AF_INET6, 1);
    static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    static const char *names[] = {"UNIX stream", "UNIX datagram", "UNIX seqpacket"};
    for (int i = 0; i < 3; i++) {
        OK(socketpair(AF_UNIX, types[i], 0, two));
        add(names[i], two[0], AF_UNIX, 1);
        add(names[i], two[1], AF_UNIX, 1);
    }
    int nl = add("netlink", make(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE), AF_NETLINK, 0);
    struct sockaddr_nl me = {.nl_family = AF_NETLINK};
    OK(bind(nl, (struct sockaddr *)&me, sizeof me));
    for (int at = 0; setting && at < n; at++) set_all(at);
    // So that nobody takes what could not be set for what has been kept: this many are set by an ordinary user too.
    if (setting && changed < 1400) fail("only %d options could be set", changed);
    look(1);
    while (running()) {
        look(0);
        for (int at = 0; at < n; at++) same_filter(at);
        nap_us(2000);
    }
    return finish();
}
