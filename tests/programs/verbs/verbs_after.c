// What a checkpoint, a restart, or a queue pair that goes leaves of queues and ports. verbs_after CHECK, one of the
// table at the end.
#include "verbsends.h"
#include <pthread.h>

// The program's own allocator, with a lock that it may have while it calls the verbs.
static pthread_mutex_t heap = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), __libc_free(void *);

#define LOCKED(call)                                                                                                   \
    __extension__({                                                                                                    \
        pthread_mutex_lock(&heap);                                                                                     \
        void *p_ = (call);                                                                                             \
        pthread_mutex_unlock(&heap);                                                                                   \
        p_;                                                                                                            \
    })
void *malloc(size_t n) { return LOCKED(__libc_malloc(n)); }
// The domain in which the allocator registers memory when it is next asked for some, and what it got.
static struct ibv_pd *registers;
static struct ibv_mr *registered;
void *calloc(size_t n, size_t size) {
    struct ibv_pd *pd = registers;
    registers = NULL;
    if (pd) registered = ibv_reg_mr(pd, a.memory, 4096, all_access());
    return LOCKED(__libc_calloc(n, size));
}
void *realloc(void *old, size_t n) { return LOCKED(__libc_realloc(old, n)); }
void free(void *p) { LOCKED((__libc_free(p), NULL)); }

// More regions than a restart could tell the others of, and as many as it can.
static void many(void) {
    enum { MANY = 260000, FEW = 20000 };
    struct ibv_mr **all = V(calloc(MANY, sizeof *all));
    make_both();
    for (size_t i = 0; i < MANY; i++) all[i] = V(ibv_reg_mr(a.port.pd, a.memory, 4096, all_access()));
    await_harness();
    for (size_t i = FEW; i < MANY; i++) Z(ibv_dereg_mr(all[i]));
    await_harness();
    works();
}

// A checkpoint that is put off has posted something of its own, which is not done yet: all places of both queues are the
// program's all the same.
static void marked(void) {
    struct ibv_device_attr most;
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    room_a = 2;
    fault("max_cqe=64 max_qp_wr=32");
    make_both();
    EQ(a.cq->cqe, 2);
    Z(ibv_query_qp(a.qp, &attr, IBV_QP_CAP, &init));
    EQ(attr.cap.max_send_wr, DEPTH);
    EQ(init.cap.max_send_wr, DEPTH);
    Z(ibv_query_device(a.port.context, &most));
    CHECK(most.max_qp_wr >= 31 && most.max_cqe >= 60);
    EQ(V(ibv_create_cq(a.port.context, most.max_cqe, NULL, NULL, 0))->cqe, most.max_cqe);
    fault("hold_acks=1");
    struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 8);
    w.send_flags = 0;
    Z(post(&a, &w));
    await_harness();
    for (int i = 0; i < DEPTH - 3; i++) Z(post(&a, &w));
    w.send_flags = IBV_SEND_SIGNALED;
    for (w.wr_id = 2; w.wr_id < 4; w.wr_id++) Z(post(&a, &w));
    EQ(post(&a, &w), ENOMEM);
    fault("hold_acks=0");
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&a, 3, IBV_WC_SUCCESS);
    nothing(&a);
    EQ(state(&a), IBV_QPS_RTS);
    // The place of the marker is free again, and nobody else's.
    for (w.wr_id = 4; w.wr_id < 4 + DEPTH; w.wr_id++) {
        w.send_flags = w.wr_id == 3 + DEPTH ? IBV_SEND_SIGNALED : 0;
        Z(post(&a, &w));
    }
    EQ(post(&a, &w), ENOMEM);
    expect(&a, 3 + DEPTH, IBV_WC_SUCCESS);
    works();
}

static void *poll_with_lock(void *unused) {
    struct ibv_wc wc;
    (void)unused;
    while (!check_over) {
        Z(pthread_mutex_lock(&heap));
        EQ(ibv_poll_cq(b.cq, 1, &wc), 0);
        Z(pthread_mutex_unlock(&heap));
    }
    return NULL;
}

// A thread that waits at the gate has the lock of the allocator.
static void locked(void) {
    pthread_t t;
    make_both();
    Z(pthread_create(&t, NULL, poll_with_lock, NULL));
    works();
    Z(pthread_join(t, NULL));
}

// Asks again what the port is called. Whether it is something else than before.
static int look(struct end *e) {
    struct port before = e->port, *p = &e->port;
    Z(ibv_query_port(p->context, 1, &p->attr));
    EQ(p->attr.state, IBV_PORT_ACTIVE);
    if (p->gid_index >= 0) Z(ibv_query_gid(p->context, 1, p->gid_index, &p->gid));
    return before.attr.lid != p->attr.lid || memcmp(&before.gid, &p->gid, sizeof p->gid);
}

static void both_ways(void) {
    struct end *each[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        do_post(each[i], IBV_WR_RDMA_WRITE, 5, 8);
        expect(each[i], 5, IBV_WC_SUCCESS);
    }
}

// The hardware address of b's port, for RoCE: another one after each restart.
static uint64_t hardware_address(void) {
    uint64_t mac = 0;
    struct ibv_ah_attr to = {.is_global = 1, .port_num = 1, .grh = {.dgid = b.port.gid, .sgid_index = (uint8_t)a.port.gid_index}};
    if (b.port.gid_index >= 0) Z(ibv_resolve_eth_l2_from_gid(a.port.context, &to, (uint8_t *)&mac, NULL));
    return mac;
}

static void address_changes(void) {
    await_harness();
    expect_event(&b, b.port.gid_index < 0 ? IBV_EVENT_LID_CHANGE : IBV_EVENT_GID_CHANGE);
}

// One port gets another address while its device is open, and then both in a restart; after it one again, which comes
// back by another restart. A program sees the first, and not the others.
static void ports(void) {
    make_both();
    both_ways();
    address_changes();
    CHECK(look(&b) && !look(&a));
    // A checkpoint, while both are still connected to what there was.
    await_harness();
    again();
    both_ways();
    uint64_t before = hardware_address();
    // A restart.
    await_harness();
    CHECK(!look(&b) && !look(&a));
    CHECK(b.port.gid_index < 0 || hardware_address() != before);
    both_ways();
    again();
    both_ways();
    address_changes();
    CHECK(!look(&b) && !look(&a));
    // A restart.
    await_harness();
    both_ways();
    again();
    both_ways();
    works();
}

// Queue pairs that go while messages arrive take requests of the shared queue with them only as far as those are done:
// there is room for as many again.
static void gone(void) {
    use_srq = 1;
    fault("latency_us=20 jitter_us=60");
    make_both();
    for (int i = 0; i < 300; i++) {
        give(&b, 1, 64);
        // More than there are places for in b's completion queue besides those that it was made with.
        struct ibv_send_wr w = request(&b, IBV_WR_RDMA_WRITE, 2, 8);
        w.send_flags = 0;
        for (int k = 0; k < DEPTH; k++) Z(post(&b, &w));
        do_post(&a, IBV_WR_SEND, 1, 8);
        for (int64_t t0 = now_ns(); now_ns() - t0 < (i * 7919 % 200) * 1000LL;) continue;
        if (i % 2) Z(go_to(&b, IBV_QPS_RESET));
        again();
    }
    while (!give(&b, 2, 64)) continue;
    fault("latency_us=0 jitter_us=0");
    for (uint64_t i = 0; i < DEPTH; i++) {
        do_post(&a, IBV_WR_SEND, i, 8);
        expect(&a, i, IBV_WC_SUCCESS);
        EQ(next(&b).status, IBV_WC_SUCCESS);
    }
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(b.port.context, &event) && errno == EAGAIN);
}

// The next completion of `id`, behind some of `old`.
static void expect_behind(struct end *e, uint64_t old, uint64_t id) {
    struct ibv_wc wc;
    while ((wc = next(e)).wr_id == old) CHECK(!wc.status);
    EQ(wc.wr_id, id);
    CHECK(!wc.status);
}

// Where a provider leaves completions of a queue pair that is gone or was reset in their queue, they come under their
// own numbers or not at all, and say nothing of what was posted since.
static void stale(void) {
    struct ibv_wc wc;
    fault("keep_cqes=1");
    make_both();
    Z(give(&b, 10, 64));
    do_post(&a, IBV_WR_SEND, 1, 8);
    expect(&a, 1, IBV_WC_SUCCESS);
    Z(ibv_destroy_qp(b.qp));
    while (ibv_poll_cq(b.cq, 1, &wc)) EQ(wc.wr_id, 10);
    make_qp(&b);
    again();
    Z(give(&b, 11, 64));
    do_post(&a, IBV_WR_SEND, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
    do_post(&a, IBV_WR_RDMA_WRITE, 3, 8);
    nap_us(20000);
    Z(go_to(&a, IBV_QPS_RESET));
    Z(go_to(&b, IBV_QPS_RESET));
    rc_init(a.qp);
    rc_init(b.qp);
    for (uint64_t i = 12; i < 14; i++) Z(give(&b, i, 64));
    connect_both();
    do_post(&a, IBV_WR_SEND, 4, 8);
    do_post(&a, IBV_WR_SEND, 5, 8);
    expect_behind(&a, 3, 4);
    expect(&a, 5, IBV_WC_SUCCESS);
    expect_behind(&b, 11, 12);
    expect(&b, 13, IBV_WC_SUCCESS);
    fault("keep_cqes=0");
}

// Events of each kind of object, of which the program reads none.
static void bring_about(void) {
    struct ibv_srq_attr limit = {.srq_limit = DEPTH};
    make_both();
    for (uint64_t i = 0; i < DEPTH; i++) Z(give(&b, i, 64));
    Z(ibv_modify_srq(b.srq, &limit, IBV_SRQ_LIMIT));
    do_post(&a, IBV_WR_SEND, 1, 8);
    expect(&b, 0, IBV_WC_SUCCESS);
    Z(go_to(&b, IBV_QPS_ERR));
    // More completions than the queue has places.
    for (uint64_t i = 0; i < DEPTH - 1; i++) do_post(&a, IBV_WR_RDMA_WRITE, i, 8);
    nap_us(50000);
    Z(go_to(&a, IBV_QPS_ERR));
}

static void destroy_objects(struct end *e) {
    Z(ibv_destroy_qp(e->qp));
    Z(ibv_destroy_srq(e->srq));
    Z(ibv_destroy_cq(e->cq));
}

// An object whose events nobody has read can be destroyed, also when a checkpoint has found them. Those that are left
// can be read.
static void unread(void) {
    use_srq = 1;
    room_a = 1;
    bring_about();
    // A checkpoint.
    await_harness();
    struct end *each[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        destroy_objects(each[i]);
        no_event(each[i]);
    }
    bring_about();
    // A restart.
    await_harness();
    expect_event(&b, IBV_EVENT_SRQ_LIMIT_REACHED);
    expect_event(&b, IBV_EVENT_QP_LAST_WQE_REACHED);
    no_event(&b);
    for (int i = 0; i < 2; i++) {
        destroy_objects(each[i]);
        no_event(each[i]);
    }
    room_a = 64;
    make_both();
    works();
}

static void send_one(void) {
    Z(give(&b, 1, 64));
    do_post(&a, IBV_WR_SEND, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&b, 1, IBV_WC_SUCCESS);
}

// One end is reset while the other keeps its connection, over which messages went.
static void recycled(void) {
    make_both();
    for (int initialized = 0; initialized < 2; initialized++) {
        send_one();
        Z(go_to(&b, IBV_QPS_RESET));
        if (initialized) rc_init(b.qp);
        // A restart.
        await_harness();
        EQ(state(&a), IBV_QPS_RTS);
        Z(go_to(&a, IBV_QPS_RESET));
        rc_init(a.qp);
        if (!initialized) rc_init(b.qp);
        connect_both();
    }
    send_one();
    works();
}

// One end has messages of the other, to which it cannot send yet.
static void early(void) {
    make_end(&a, "rules0", room_a);
    make_end(&b, "rules1", 64);
    struct address to_a = address_of(&a.port, a.qp, a.psn), to_b = address_of(&b.port, b.qp, b.psn);
    rc_ready(&b.port, b.qp, &to_a);
    connect_to(&a, &to_b);
    send_one();
    // A restart.
    await_harness();
    send_one();
    rc_send(b.qp, b.psn, retries, rnr_retries);
    both_ways();
    works();
}

// A peer goes with the last messages, of which nothing tells the sender that they have arrived.
static void left(void) {
    make_both();
    for (int i = 0; i < 2; i++) {
        struct ibv_send_wr w = request(&a, IBV_WR_SEND, 5, 8);
        w.send_flags = 0;
        Z(give(&b, 1, 64));
        Z(post(&a, &w));
        expect(&b, 1, IBV_WC_SUCCESS);
        Z(ibv_destroy_qp(b.qp));
        // A checkpoint, and then a restart.
        await_harness();
        nothing(&a);
        make_qp(&b);
        again();
        send_one();
    }
    works();
}

// What is on its way for longer than a checkpoint may take is not called done, whether it completes (an adapter that
// sends again soon) or not (one that sends again late). Then nothing is lost.
static void late(void) {
    for (int signalled = 0; signalled < 2; signalled++) {
        ack_timeout = signalled ? 12 : 19;
        make_both();
        fault("hold_messages=1");
        struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 6, 8);
        if (!signalled) w.send_flags = 0;
        memset(a.memory, 0x5a, 8);
        w.wr.rdma.remote_addr += 512;
        Z(post(&a, &w));
        do_post(&a, IBV_WR_SEND, 7, 8);
        // A checkpoint that is put off.
        await_harness();
        fault("hold_messages=0");
        Z(give(&b, 8, 64));
        expect(&b, 8, IBV_WC_SUCCESS);
        EQ(b.memory[512], 0x5a);
        if (signalled) expect(&a, 6, IBV_WC_SUCCESS);
        expect(&a, 7, IBV_WC_SUCCESS);
        drop_end(&a);
        drop_end(&b);
    }
    make_both();
    works();
}

// The last process on a port ends after a checkpoint; its peer keeps the connection.
static void alone(void) {
    int lines[2];
    char ready;
    struct address there, here;
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, lines));
    pid_t p = (pid_t)OK(fork());
    if (!p) {
        begin_child();
        make_end(&b, "rules1", 64);
        here = address_of(&b.port, b.qp, b.psn);
        full_write(lines[1], &here, sizeof here);
        full_read(lines[1], &there, sizeof there);
        connect_to(&b, &there);
        full_write(lines[1], "r", 1);
        full_read(lines[1], &ready, 1);
        drop_end(&b);
        _exit(0);
    }
    make_end(&a, "rules0", 64);
    here = address_of(&a.port, a.qp, a.psn);
    full_read(lines[0], &there, sizeof there);
    full_write(lines[0], &here, sizeof here);
    full_read(lines[0], &ready, 1);
    connect_to(&a, &there);
    // A checkpoint of both, and then a restart of one.
    await_harness();
    full_write(lines[0], "e", 1);
    reap(p, 0);
    await_harness();
    nothing(&a);
    make_end(&b, "rules1", 64);
    Z(ibv_destroy_qp(a.qp));
    make_qp(&a);
    connect_both();
    works();
}

// An allocator registers memory while the provider asks for some.
static void registering(void) {
    make_both();
    struct ibv_qp *kept = a.qp;
    registers = a.port.pd;
    make_qp(&a);
    CHECK(!registers && registered && registered->pd == a.port.pd && registered->lkey);
    Z(ibv_dereg_mr(registered));
    Z(ibv_destroy_qp(a.qp));
    a.qp = kept;
    both_ways();
}

enum { KEY = 0x1234 };

// A queue pair for datagrams, which is not ready yet.
static void make_datagrams(struct end *e) {
    struct ibv_qp_init_attr init = {.send_cq = e->cq,
                                    .recv_cq = e->cq,
                                    .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_UD};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = KEY};
    Z(ibv_destroy_qp(e->qp));
    e->qp = V(ibv_create_qp(e->port.pd, &init));
    Z(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
}

// A queue pair that has joined a group before it was ready has what is sent there after a restart.
static void joined(void) {
    const union ibv_gid group = {.raw = {0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, [15] = 0x78}};
    struct ibv_qp_attr sends = {.qp_state = IBV_QPS_RTS};
    struct ibv_ah_attr to = {.dlid = 0xc002, .port_num = 1, .is_global = 1, .grh = {.dgid = group, .hop_limit = 1}};
    make_end(&a, "rules0", 64);
    make_end(&b, "rules1", 64);
    make_datagrams(&a);
    make_datagrams(&b);
    Z(ibv_attach_mcast(b.qp, &group, 0xc002));
    await_harness();
    Z(give(&b, 4, 64));
    Z(go_to(&a, IBV_QPS_RTR));
    Z(ibv_modify_qp(a.qp, &sends, IBV_QP_STATE | IBV_QP_SQ_PSN));
    Z(go_to(&b, IBV_QPS_RTR));
    struct ibv_send_wr w = request(&a, IBV_WR_SEND, 3, 8);
    w.wr.ud.ah = V(ibv_create_ah(a.port.pd, &to));
    w.wr.ud.remote_qpn = 0xffffff;
    w.wr.ud.remote_qkey = KEY;
    Z(post(&a, &w));
    expect(&a, 3, IBV_WC_SUCCESS);
    expect(&b, 4, IBV_WC_SUCCESS);
    Z(ibv_detach_mcast(b.qp, &group, 0xc002));
    Z(ibv_destroy_ah(w.wr.ud.ah));
    Z(ibv_destroy_qp(a.qp));
    Z(ibv_destroy_qp(b.qp));
    make_qp(&a);
    make_qp(&b);
    connect_both();
    works();
}

static const struct check checks[] = {
    {"many", many}, {"marked", marked}, {"locked", locked}, {"ports", ports},
    {"gone", gone},     {"unread", unread}, {"stale", stale},
    {"recycled", recycled}, {"early", early},
    {"left", left},         {"alone", alone},
    {"late", late},         {"registering", registering},
    {"joined", joined},
};

int main(int argc, char **argv) {
    begin("verbs_after");
    return run_check(argc > 1 ? argv[1] : NULL, checks, sizeof checks / sizeof *checks);
}
