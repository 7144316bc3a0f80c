// Ranks for programs of the verbs: how they find each other, go round by round, and end.
//
// A program is started once and forks its ranks, or is started once for each: then VERBS_RANK, VERBS_SIZE and
// VERBS_ROOT (ADDRESS:PORT of rank 0) say which it is. As MPI libraries do, the ranks exchange their numbers over TCP
// connections to rank 0, which stay open. Where there is a stand-in for the verbs, forked ranks call their hosts host0,
// host1, ...
#ifndef VERBSCHECK_H
#define VERBSCHECK_H
#include "../check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

enum { MOST_RANKS = 64 };
// Longer than any stop of the job.
#define STUCK_NS (120 * 1000000000LL)

static int rank, size, wires[MOST_RANKS];
static pid_t children[MOST_RANKS];

// Without a number of errno.
#define V(p)                                                                                                           \
    __extension__({                                                                                                    \
        __typeof__(p) p_ = (p);                                                                                        \
        if (!p_) fail("line " STR(__LINE__) ": %s: %s", #p, strerror(errno));                                          \
        p_;                                                                                                            \
    })
#define Z(c)                                                                                                           \
    do {                                                                                                               \
        int z_ = (c);                                                                                                  \
        if (z_) fail("line " STR(__LINE__) ": %s returned %d: %s", #c, z_, strerror(z_ < 0 ? errno : z_));             \
    } while (0)

static struct sockaddr_in root_address(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const char *root = getenv("VERBS_ROOT"), *colon = root ? strchr(root, ':') : NULL;
    if (!colon) return a;
    char host[64];
    snprintf(host, sizeof host, "%.*s", (int)(colon - root), root);
    if (inet_pton(AF_INET, host, &a.sin_addr) != 1) fail("VERBS_ROOT: %s", root);
    a.sin_port = htons((uint16_t)atoi(colon + 1));
    return a;
}

static void no_delay(int s) {
    int one = 1;
    OK(setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
}

static void dial_root(const struct sockaddr_in *a) {
    for (int64_t t0 = now_ns();; nap_us(10000)) {
        wires[0] = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (!connect(wires[0], (const struct sockaddr *)a, sizeof *a)) break;
        if (errno != ECONNREFUSED || now_ns() - t0 > STUCK_NS) fail("connect to rank 0: %s", strerror(errno));
        close(wires[0]);
    }
    no_delay(wires[0]);
    full_write(wires[0], &rank, sizeof rank);
}

static void welcome_all(int listener) {
    for (int n = 1, who; n < size; n++) {
        int s = (int)OK(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
        no_delay(s);
        full_read(s, &who, sizeof who);
        CHECK(who > 0 && who < size && !wires[who]);
        wires[who] = s;
    }
    OK(close(listener));
}

static void name_host(void) {
    char name[32];
    snprintf(name, sizeof name, "host%d", rank);
    setenv("FAKE_VERBS_HOST", name, 1);
}

static void fork_ranks(const struct sockaddr_in *a, int listener) {
    for (int r = 1; r < size; r++) {
        children[r] = (pid_t)OK(fork());
        if (children[r]) continue;
        rank = r;
        begin_child();
        memset(children, 0, sizeof children);
        OK(close(listener));
        break;
    }
    name_host();
    if (rank) dial_root(a);
}

// What a program can be asked to check.
struct check {
    const char *name;
    void (*run)(void);
};

// Runs the one of that name, for main to return.
static int run_check(const char *name, const struct check *checks, size_t count) {
    for (size_t i = 0; name && i < count; i++)
        if (!strcmp(name, checks[i].name)) {
            checks[i].run();
            return finish();
        }
    fail("no such check");
}

static void world_begin(const char *name, int ranks) {
    begin(name);
    const char *r = getenv("VERBS_RANK"), *n = getenv("VERBS_SIZE");
    size = n ? atoi(n) : ranks;
    rank = r ? atoi(r) : 0;
    CHECK(size > 0 && size <= MOST_RANKS && rank < size);
    struct sockaddr_in a = root_address();
    socklen_t l = sizeof a;
    int listener = -1, one = 1;
    if (!rank) {
        listener = (int)OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        OK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
        OK(bind(listener, (struct sockaddr *)&a, sizeof a));
        OK(listen(listener, MOST_RANKS));
        OK(getsockname(listener, (struct sockaddr *)&a, &l));
    }
    if (!r) fork_ranks(&a, listener);
    else if (rank) dial_root(&a);
    if (rank) check_beat[0] = 0;
    else welcome_all(listener);
}

// Everybody's `bytes` bytes, by rank, on every rank. No rank leaves before all have come.
static void gather(const void *mine, size_t bytes, void *all) {
    if (rank) {
        full_write(wires[0], mine, bytes);
        full_read(wires[0], all, bytes * (size_t)size);
        return;
    }
    memcpy(all, mine, bytes);
    for (int r = 1; r < size; r++) full_read(wires[r], (char *)all + (size_t)r * bytes, bytes);
    for (int r = 1; r < size; r++) full_write(wires[r], all, bytes * (size_t)size);
}

static void barrier(void) {
    char all[MOST_RANKS];
    gather("b", 1, all);
}

// The same answer on every rank.
static int world_running(void) {
    int all[MOST_RANKS], go = running();
    gather(&go, sizeof go, all);
    if (rank && !check_over) check_over = !all[0];
    return all[0];
}

static int world_finish(void) {
    barrier();
    for (int r = 1; r < size; r++)
        if (children[r]) reap(children[r], 0);
    if (!rank) no_children();
    return rank ? 0 : finish();
}

// The device of this rank and what most programs need on it.
struct port {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel; // Only with events.
    struct ibv_port_attr attr;
    int gid_index; // -1: addresses are LIDs.
    union ibv_gid gid;
};

// How a queue pair is called.
struct address {
    union ibv_gid gid;
    uint32_t qpn, psn;
    uint16_t lid;
};

static void open_port(struct port *p, int events) {
    int n;
    struct ibv_device **list = V(ibv_get_device_list(&n));
    if (!n) fail("no device");
    p->context = V(ibv_open_device(list[0]));
    ibv_free_device_list(list);
    p->pd = V(ibv_alloc_pd(p->context));
    p->channel = events ? V(ibv_create_comp_channel(p->context)) : NULL;
    Z(ibv_query_port(p->context, 1, &p->attr));
    EQ(p->attr.state, IBV_PORT_ACTIVE);
    p->gid_index = p->attr.link_layer == IBV_LINK_LAYER_ETHERNET ? 0 : -1;
    if (getenv("VERBS_GID")) p->gid_index = atoi(getenv("VERBS_GID"));
    if (p->gid_index >= 0) Z(ibv_query_gid(p->context, 1, p->gid_index, &p->gid));
}

static void close_port(struct port *p) {
    if (p->channel) Z(ibv_destroy_comp_channel(p->channel));
    Z(ibv_dealloc_pd(p->pd));
    Z(ibv_close_device(p->context));
}

static struct address address_of(const struct port *p, const struct ibv_qp *qp, uint32_t psn) {
    return (struct address){p->gid, qp->qp_num, psn, p->attr.lid};
}

static struct ibv_ah_attr ah_attr_to(const struct port *p, const struct address *to) {
    struct ibv_ah_attr a = {.dlid = to->lid, .port_num = 1};
    if (p->gid_index < 0) return a;
    a.is_global = 1;
    a.grh.dgid = to->gid;
    a.grh.sgid_index = (uint8_t)p->gid_index;
    a.grh.hop_limit = 64;
    return a;
}

static int all_access(void) {
    return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
}

static void rc_init(struct ibv_qp *qp) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)all_access()};
    Z(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

static void rc_ready(const struct port *p, struct ibv_qp *qp, const struct address *to) {
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = to->qpn,
        .rq_psn = to->psn,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 1,
        .ah_attr = ah_attr_to(p, to),
    };
    Z(ibv_modify_qp(qp, &a,
                    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
}

// How long an adapter waits for an acknowledgement: 4.096 us, doubled so often.
static uint8_t ack_timeout = 12;

static void rc_send(struct ibv_qp *qp, uint32_t psn, uint8_t retry, uint8_t rnr_retry) {
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTS,
        .timeout = ack_timeout,
        .retry_cnt = retry,
        .rnr_retry = rnr_retry,
        .sq_psn = psn,
        .max_rd_atomic = 4,
    };
    Z(ibv_modify_qp(qp, &a,
                    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                        IBV_QP_MAX_QP_RD_ATOMIC));
}

// Has an argument of this name been given?
static int given(int argc, char **argv, const char *word) {
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], word)) return 1;
    return 0;
}

// The first argument that is a number.
static int number_of_ranks(int argc, char **argv, int usual) {
    for (int i = 1; i < argc; i++)
        if (atoi(argv[i]) > 0) return atoi(argv[i]);
    return usual;
}

// Waits for something to come into a completion queue that is polled by `poll_once`, which returns how much it found.
static void wait_cq(const struct port *p, struct ibv_cq *cq, int (*poll_once)(void), int64_t since, const char *what) {
    if (poll_once()) return;
    if (!p->channel) {
        if (now_ns() - since > STUCK_NS) fail("%s: nothing comes", what);
        sched_yield();
        return;
    }
    Z(ibv_req_notify_cq(cq, 0));
    if (poll_once()) return;
    struct pollfd f = {p->channel->fd, POLLIN, 0};
    int r = poll(&f, 1, (int)(STUCK_NS / 1000000));
    if (r != 1) fail("%s: no event: poll returned %d: %s", what, r, strerror(errno));
    struct ibv_cq *which;
    void *context;
    Z(ibv_get_cq_event(p->channel, &which, &context));
    CHECK(which == cq);
    ibv_ack_cq_events(which, 1);
}
#endif
