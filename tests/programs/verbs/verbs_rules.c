// What the verbs promise where something goes wrong, or is not as usual. verbs_rules CHECK, one of the table at the
// end.
#include "verbsends.h"
#include "verbsfar.h"
#include <pthread.h>
#include <sys/time.h>

// Each of these is an access that the other end must refuse: `spoil` makes it one.
static void refused(enum ibv_wr_opcode op, uint32_t length, void (*spoil)(struct ibv_send_wr *)) {
    struct ibv_send_wr w = request(&a, op, 1, length);
    spoil(&w);
    memset(b.memory, 0x11, BYTES);
    Z(post(&a, &w));
    expect(&a, 1, IBV_WC_REM_ACCESS_ERR);
    expect_event(&b, IBV_EVENT_QP_ACCESS_ERR);
    for (size_t i = 0; i < BYTES; i++) CHECK(b.memory[i] == 0x11);
    EQ(state(&a), IBV_QPS_ERR);
    EQ(state(&b), IBV_QPS_ERR);
    again();
}

static void wrong_key(struct ibv_send_wr *w) { w->wr.rdma.rkey ^= 0x100; }
static void local_key(struct ibv_send_wr *w) { w->wr.rdma.rkey = b.mr->lkey; }
static void past_end(struct ibv_send_wr *w) { w->wr.rdma.remote_addr += BYTES - 8; }
static void before_start(struct ibv_send_wr *w) { w->wr.rdma.remote_addr -= 8; }
static void wrong_atomic(struct ibv_send_wr *w) { w->wr.atomic.rkey ^= 0x100; }
static struct ibv_mr *foreign;
static void foreign_key(struct ibv_send_wr *w) { w->wr.rdma.rkey = foreign->rkey; }
static void own(struct ibv_send_wr *w) { (void)w; }

static void keys(void) {
    make_both();
    refused(IBV_WR_RDMA_WRITE, 64, wrong_key);
    refused(IBV_WR_RDMA_WRITE, 64, local_key);
    refused(IBV_WR_RDMA_WRITE, 64, past_end);
    refused(IBV_WR_RDMA_READ, 64, before_start);
    refused(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, wrong_atomic);
    struct ibv_pd *other = V(ibv_alloc_pd(b.port.context));
    foreign = V(ibv_reg_mr(other, b.memory, BYTES, all_access()));
    refused(IBV_WR_RDMA_WRITE, 64, foreign_key);
    Z(ibv_dereg_mr(foreign));
    Z(ibv_dealloc_pd(other));
    // Not what the region allows, nor the queue pair.
    Z(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
    refused(IBV_WR_RDMA_WRITE, 64, own);
    Z(ibv_rereg_mr(b.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, all_access()));
    struct ibv_qp_attr none = {.qp_access_flags = 0};
    Z(ibv_modify_qp(b.qp, &none, IBV_QP_ACCESS_FLAGS));
    refused(IBV_WR_RDMA_WRITE, 64, own);
    // Of this end's own region.
    struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 5, 64);
    one_sge.lkey = a.mr->rkey;
    Z(post(&a, &w));
    expect(&a, 5, IBV_WC_LOC_PROT_ERR);
    EQ(state(&b), IBV_QPS_RTS);
    EQ(state(&a), IBV_QPS_ERR);
    again();
    do_post(&a, IBV_WR_RDMA_WRITE, 6, 64);
    expect(&a, 6, IBV_WC_SUCCESS);
}

static void zero(void) {
    make_both();
    struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 0);
    w.num_sge = 0;
    w.wr.rdma.rkey = 0;
    w.wr.rdma.remote_addr = 0;
    Z(post(&a, &w));
    expect(&a, 1, IBV_WC_SUCCESS);
    fault("zero_write=2");
    Z(post(&a, &w));
    expect(&a, 1, IBV_WC_REM_INV_REQ_ERR);
    expect_event(&b, IBV_EVENT_QP_REQ_ERR);
    drop_end(&a);
    drop_end(&b);
    fault("zero_write=1");
    make_both();
    EQ(post(&a, &w), EINVAL);
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
    fault("zero_write=0");
}

static void rnr(void) {
    make_both();
    do_post(&a, IBV_WR_SEND, 1, 100);
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 100);
    nothing(&a);
    Z(give(&b, 10, 1000));
    expect(&a, 1, IBV_WC_SUCCESS);
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&b, 10, IBV_WC_SUCCESS);
    rnr_retries = 2;
    again();
    do_post(&a, IBV_WR_SEND, 3, 100);
    expect(&a, 3, IBV_WC_RNR_RETRY_EXC_ERR);
    EQ(state(&b), IBV_QPS_RTS);
}

static void nobody(void) {
    make_both();
    Z(go_to(&b, IBV_QPS_RESET));
    do_post(&a, IBV_WR_SEND, 1, 8);
    do_post(&a, IBV_WR_SEND, 2, 8);
    expect(&a, 1, IBV_WC_RETRY_EXC_ERR);
    expect(&a, 2, IBV_WC_WR_FLUSH_ERR);
    b.psn++;
    again();
    // Packets with other sequence numbers than the peer expects get no answer.
    Z(go_to(&b, IBV_QPS_RESET));
    rc_init(b.qp);
    struct address to_a = address_of(&a.port, a.qp, a.psn + 1);
    connect_to(&b, &to_a);
    Z(give(&b, 1, 100));
    do_post(&a, IBV_WR_SEND, 3, 8);
    expect(&a, 3, IBV_WC_RETRY_EXC_ERR);
    nothing(&b);
}

static void flush(void) {
    make_both();
    for (uint64_t i = 0; i < 3; i++) Z(give(&a, 100 + i, 64));
    do_post(&a, IBV_WR_SEND, 1, 8);
    struct ibv_send_wr w = request(&a, IBV_WR_SEND, 2, 8);
    w.send_flags = 0;
    Z(post(&a, &w));
    nothing(&a);
    Z(go_to(&a, IBV_QPS_ERR));
    expect(&a, 1, IBV_WC_WR_FLUSH_ERR);
    expect(&a, 2, IBV_WC_WR_FLUSH_ERR);
    for (uint64_t i = 0; i < 3; i++) expect(&a, 100 + i, IBV_WC_WR_FLUSH_ERR);
    do_post(&a, IBV_WR_SEND, 3, 8);
    Z(give(&a, 103, 64));
    struct ibv_wc x = next(&a), y = next(&a);
    CHECK(x.status == IBV_WC_WR_FLUSH_ERR && y.status == IBV_WC_WR_FLUSH_ERR && x.wr_id + y.wr_id == 106);
    // A reset takes the completions with it that have not been polled.
    do_post(&a, IBV_WR_SEND, 4, 8);
    Z(go_to(&a, IBV_QPS_RESET));
    nothing(&a);
    Z(go_to(&b, IBV_QPS_RESET));
    rc_init(a.qp);
    rc_init(b.qp);
    Z(give(&b, 9, 64));
    connect_both();
    do_post(&a, IBV_WR_SEND, 5, 8);
    expect(&a, 5, IBV_WC_SUCCESS);
    expect(&b, 9, IBV_WC_SUCCESS);
}

static void drained(void) {
    make_both();
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
    Z(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    expect_event(&a, IBV_EVENT_SQ_DRAINED);
    do_post(&a, IBV_WR_RDMA_WRITE, 1, 8);
    nothing(&a);
    EQ(state(&a), IBV_QPS_SQD);
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 1, IBV_WC_SUCCESS);
}

static void states(void) {
    make_end(&a, "rules0", 64);
    make_end(&b, "rules1", 64);
    struct ibv_send_wr w = request(&a, IBV_WR_SEND, 1, 8);
    EQ(post(&a, &w), EINVAL);
    EQ(go_to(&a, IBV_QPS_RTS), EINVAL);
    EQ(go_to(&a, IBV_QPS_RTR), EINVAL);
    Z(go_to(&a, IBV_QPS_RESET));
    EQ(go_to(&a, IBV_QPS_ERR), EINVAL);
    rc_init(a.qp);
    struct address to_a = address_of(&a.port, a.qp, a.psn), to_b = address_of(&b.port, b.qp, b.psn);
    rc_ready(&a.port, a.qp, &to_b);
    EQ(post(&a, &w), EINVAL);
    rc_send(a.qp, a.psn, 3, 5);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    Z(ibv_query_qp(a.qp, &attr, 0, &init));
    EQ(attr.qp_state, IBV_QPS_RTS);
    EQ(attr.dest_qp_num, b.qp->qp_num);
    EQ(attr.sq_psn, a.psn);
    EQ(attr.rq_psn, b.psn);
    EQ(attr.rnr_retry, 5);
    EQ(attr.retry_cnt, 3);
    EQ(attr.timeout, 12);
    EQ(attr.qp_access_flags, (unsigned)all_access());
    EQ(attr.ah_attr.dlid, b.port.attr.lid);
    EQ(attr.path_mtu, IBV_MTU_1024);
    EQ(init.cap.max_send_wr, DEPTH);
    CHECK(init.send_cq == a.cq && init.qp_type == IBV_QPT_RC);
    Z(go_to(&a, IBV_QPS_RESET));
    EQ(give(&a, 1, 8), EINVAL);
    // Who has only received so far hears that the connection is there.
    rc_init(a.qp);
    connect_to(&a, &to_b);
    Z(give(&b, 1, 64));
    rc_ready(&b.port, b.qp, &to_a);
    do_post(&a, IBV_WR_SEND, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&b, 1, IBV_WC_SUCCESS);
    expect_event(&b, IBV_EVENT_COMM_EST);
}

static void length(void) {
    make_both();
    Z(give(&b, 1, 64));
    do_post(&a, IBV_WR_SEND, 2, 65);
    expect(&a, 2, IBV_WC_REM_INV_REQ_ERR);
    expect(&b, 1, IBV_WC_LOC_LEN_ERR);
    EQ(state(&b), IBV_QPS_ERR);
}

// Places in the queues come back with the completions that are polled.
static void full(void) {
    make_both();
    struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 8);
    w.send_flags = 0;
    for (int i = 0; i < DEPTH - 1; i++) Z(post(&a, &w));
    w.send_flags = IBV_SEND_SIGNALED;
    Z(post(&a, &w));
    nap_us(20000);
    EQ(post(&a, &w), ENOMEM);
    expect(&a, 1, IBV_WC_SUCCESS);
    Z(post(&a, &w));
    expect(&a, 1, IBV_WC_SUCCESS);
    for (int i = 0; i < DEPTH; i++) Z(give(&b, 1, 8));
    EQ(give(&b, 1, 8), ENOMEM);
    do_post(&a, IBV_WR_SEND, 1, 8);
    expect(&b, 1, IBV_WC_SUCCESS);
    Z(give(&b, 1, 8));
    EQ(give(&b, 1, 8), ENOMEM);
}

static void overrun(void) {
    room_a = 2;
    make_both();
    EQ(a.cq->cqe, 2);
    // A queue may have more places than it tells of, but not all these.
    for (uint64_t i = 0; i < DEPTH; i++) do_post(&a, IBV_WR_RDMA_WRITE, i, 8);
    expect_event(&a, IBV_EVENT_CQ_ERR);
    expect_event(&a, IBV_EVENT_QP_FATAL);
    EQ(state(&a), IBV_QPS_ERR);
    struct ibv_wc wc;
    uint64_t got = 0;
    for (; ibv_poll_cq(a.cq, 1, &wc) == 1; got++) CHECK(wc.wr_id == got && wc.status == IBV_WC_SUCCESS);
    CHECK(got >= 2 && got < DEPTH);
    nothing(&a);
    fault("max_cqe=100");
    struct ibv_context *c = V(ibv_open_device(a.port.context->device));
    CHECK(!ibv_create_cq(c, 101, NULL, NULL, 0) && errno == EINVAL);
    Z(ibv_destroy_cq(V(ibv_create_cq(c, 100, NULL, NULL, 0))));
    Z(ibv_close_device(c));
    fault("max_cqe=100000");
}

static volatile int going, alarms;

static int event_comes(struct end *e) {
    struct ibv_cq *cq;
    void *context;
    if (ibv_get_cq_event(e->port.channel, &cq, &context)) {
        EQ(errno, EAGAIN);
        return 0;
    }
    CHECK(cq == e->cq && context == e);
    ibv_ack_cq_events(cq, 1);
    return 1;
}

static void *wait_for_event(void *unused) {
    struct ibv_cq *cq;
    void *context;
    (void)unused;
    return ibv_get_cq_event(b.port.channel, &cq, &context) ? NULL : cq;
}

// A thread that was told to end before it comes to wait.
static void *end_then_wait(void *unused) {
    Z(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL));
    full_write(lines[1], "r", 1);
    while (!going) sched_yield();
    Z(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL));
    return wait_for_event(unused);
}

static void on_alarm(int signal) {
    (void)signal;
    alarms++;
}

static void message(int solicited) {
    Z(give(&b, 1, 64));
    struct ibv_send_wr w = request(&a, IBV_WR_SEND, 2, 8);
    if (solicited) w.send_flags |= IBV_SEND_SOLICITED;
    Z(post(&a, &w));
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&b, 1, IBV_WC_SUCCESS);
}

static void events(void) {
    make_both();
    message(0);
    CHECK(!event_comes(&b));
    Z(ibv_req_notify_cq(b.cq, 0));
    message(0);
    await(b.port.channel->fd, POLLIN, "an event");
    CHECK(event_comes(&b));
    message(0);
    CHECK(!event_comes(&b));
    Z(ibv_req_notify_cq(b.cq, 1));
    message(0);
    CHECK(!event_comes(&b));
    message(1);
    await(b.port.channel->fd, POLLIN, "a solicited event");
    CHECK(event_comes(&b));
    EQ(ibv_destroy_comp_channel(b.port.channel), EBUSY);
    EQ(ibv_destroy_cq(b.cq), EBUSY);
    // An event of a queue that is gone is not handed out.
    struct ibv_cq *kept = b.cq;
    Z(ibv_destroy_qp(b.qp));
    b.cq = V(ibv_create_cq(b.port.context, 8, &b, b.port.channel, 0));
    make_qp(&b);
    Z(ibv_destroy_qp(a.qp));
    make_qp(&a);
    connect_both();
    Z(ibv_req_notify_cq(b.cq, 0));
    message(0);
    await(b.port.channel->fd, POLLIN, "an event");
    Z(ibv_destroy_qp(b.qp));
    Z(ibv_destroy_cq(b.cq));
    b.cq = kept;
    CHECK(!event_comes(&b));
    make_qp(&b);
}

// A thread that waits for an event may be ended, whoever comes then finds everything as it was.
static void ended(void) {
    void *(*const ways[])(void *) = {wait_for_event, end_then_wait};
    pthread_t thread;
    void *result;
    char ready;
    make_both();
    OK(fcntl(b.port.channel->fd, F_SETFL, 0));
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, lines));
    for (int i = 0; i < 2; i++) {
        going = 0;
        Z(pthread_create(&thread, NULL, ways[i], NULL));
        if (i) full_read(lines[0], &ready, 1);
        else nap_us(20000);
        Z(pthread_cancel(thread));
        going = 1;
        Z(pthread_join(thread, &result));
        CHECK(result == PTHREAD_CANCELED);
        Z(ibv_req_notify_cq(b.cq, 0));
        message(0);
        await(b.port.channel->fd, POLLIN, "an event");
        CHECK(event_comes(&b));
    }
}

// A signal whose handler lets calls go on does not end the wait for an event; another does.
static void signals(void) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct itimerval every = {.it_interval.tv_usec = 2000, .it_value.tv_usec = 2000};
    make_both();
    OK(fcntl(b.port.channel->fd, F_SETFL, 0));
    OK(sigaction(SIGALRM, &action, NULL));
    Z(ibv_req_notify_cq(b.cq, 0));
    Z(give(&b, 1, 64));
    fault("latency_us=100000");
    OK(setitimer(ITIMER_REAL, &every, NULL));
    do_post(&a, IBV_WR_SEND, 2, 8);
    CHECK(wait_for_event(NULL) == b.cq);
    CHECK(alarms > 5);
    ibv_ack_cq_events(b.cq, 1);
    action.sa_flags = 0;
    OK(sigaction(SIGALRM, &action, NULL));
    CHECK(!wait_for_event(NULL) && errno == EINTR);
    OK(setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL));
    fault("latency_us=0");
}

static void shared(void) {
    use_srq = 1;
    make_both();
    for (uint64_t i = 0; i < DEPTH; i++) Z(give(&b, i, 64));
    EQ(give(&b, 9, 64), ENOMEM);
    struct ibv_srq_attr limit = {.srq_limit = DEPTH - 2}, now;
    Z(ibv_modify_srq(b.srq, &limit, IBV_SRQ_LIMIT));
    Z(ibv_query_srq(b.srq, &now));
    EQ(now.srq_limit, DEPTH - 2);
    for (uint64_t i = 0; i < 3; i++) {
        do_post(&a, IBV_WR_SEND, i, 8);
        expect(&a, i, IBV_WC_SUCCESS);
        expect(&b, i, IBV_WC_SUCCESS);
    }
    expect_event(&b, IBV_EVENT_SRQ_LIMIT_REACHED);
    Z(ibv_query_srq(b.srq, &now));
    EQ(now.srq_limit, 0);
    // Receives of a shared queue stay there when a queue pair fails.
    Z(go_to(&b, IBV_QPS_ERR));
    expect_event(&b, IBV_EVENT_QP_LAST_WQE_REACHED);
    nothing(&b);
    again();
    do_post(&a, IBV_WR_SEND, 7, 8);
    expect(&b, 3, IBV_WC_SUCCESS);
    uint32_t number;
    Z(ibv_get_srq_num(b.srq, &number));
    CHECK(number);
}

static void resize(void) {
    make_both();
    for (uint64_t i = 0; i < 5; i++) do_post(&a, IBV_WR_RDMA_WRITE, i, 8);
    nap_us(20000);
    expect(&a, 0, IBV_WC_SUCCESS);
    EQ(ibv_resize_cq(a.cq, 3), EINVAL);
    Z(ibv_resize_cq(a.cq, 4));
    EQ(a.cq->cqe, 4);
    for (uint64_t i = 1; i < 5; i++) expect(&a, i, IBV_WC_SUCCESS);
    Z(ibv_resize_cq(a.cq, 200));
    do_post(&a, IBV_WR_RDMA_WRITE, 9, 8);
    expect(&a, 9, IBV_WC_SUCCESS);
}

// Messages arrive and nothing says so to the sender; then all of it does.
static void held(void) {
    make_both();
    fault("hold_acks=1");
    Z(give(&b, 1, 64));
    do_post(&a, IBV_WR_SEND, 2, 8);
    expect(&b, 1, IBV_WC_SUCCESS);
    nothing(&a);
    *(uint64_t *)b.memory = 40;
    struct ibv_send_wr w = request(&a, IBV_WR_ATOMIC_FETCH_AND_ADD, 3, 8);
    w.wr.atomic.compare_add = 2;
    Z(post(&a, &w));
    for (int64_t t0 = now_ns(); *(volatile uint64_t *)b.memory != 42; sched_yield()) CHECK(now_ns() - t0 < STUCK_NS);
    nothing(&a);
    fault("hold_acks=0");
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&a, 3, IBV_WC_SUCCESS);
    EQ(*(uint64_t *)a.memory, 40);
    EQ(*(uint64_t *)b.memory, 42);
}

static void restart_both(void) {
    restart_host("rules0");
    restart_host("rules1");
}

// A host that goes down and comes back: its devices are dead, and none of its old numbers is of any use.
static void reopened(void) {
    restart_both();
    make_both();
    struct address old = address_of(&b.port, b.qp, b.psn);
    uint32_t keys[] = {a.mr->lkey, a.mr->rkey, b.mr->lkey, b.mr->rkey};
    // Numbers of two hosts coincide, as those of two adapters do.
    EQ(a.qp->qp_num, b.qp->qp_num);
    EQ(a.mr->rkey, b.mr->rkey);
    CHECK(a.port.attr.lid != b.port.attr.lid && a.mr->lkey != a.mr->rkey);
    restart_both();
    expect_event(&a, IBV_EVENT_DEVICE_FATAL);
    struct end dead_a = a, dead_b = b;
    struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 8);
    post(&a, &w);
    nothing(&a);
    EQ(ibv_query_port(a.port.context, 1, &a.port.attr), EIO);
    make_both();
    CHECK(a.port.attr.lid != dead_a.port.attr.lid && b.port.attr.lid != dead_b.port.attr.lid);
    CHECK(a.qp->qp_num != old.qpn && b.qp->qp_num != old.qpn);
    for (size_t i = 0; i < 4; i++)
        CHECK(keys[i] != a.mr->lkey && keys[i] != a.mr->rkey && keys[i] != b.mr->lkey && keys[i] != b.mr->rkey);
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
    w = request(&a, IBV_WR_RDMA_WRITE, 3, 8);
    w.wr.rdma.rkey = keys[3];
    Z(post(&a, &w));
    expect(&a, 3, IBV_WC_REM_ACCESS_ERR);
    again();
    one_sge.lkey = keys[0];
    Z(post(&a, &w));
    expect(&a, 3, IBV_WC_LOC_PROT_ERR);
    // The old number at the new address, and the new number at the old one.
    for (int i = 0; i < 2; i++) {
        again();
        Z(go_to(&a, IBV_QPS_RESET));
        rc_init(a.qp);
        struct address mixed = address_of(&b.port, b.qp, b.psn);
        if (i) mixed.lid = old.lid;
        else mixed.qpn = old.qpn;
        connect_to(&a, &mixed);
        do_post(&a, IBV_WR_SEND, 4, 8);
        expect(&a, 4, IBV_WC_RETRY_EXC_ERR);
    }
    Z(ibv_close_device(dead_a.port.context));
    Z(ibv_close_device(dead_b.port.context));
}

static const struct check checks[] = {
    {"keys", keys},       {"zero", zero},     {"rnr", rnr},       {"nobody", nobody}, {"flush", flush},
    {"drained", drained}, {"states", states}, {"length", length}, {"full", full},     {"overrun", overrun},
    {"events", events},   {"shared", shared}, {"resize", resize}, {"held", held},     {"reopened", reopened},
    {"stopped", stopped}, {"killed", killed}, {"ended", ended},   {"signals", signals},
};

int main(int argc, char **argv) {
    char name[64];
    snprintf(name, sizeof name, "verbs_rules-%s", argc > 1 ? argv[1] : "");
    begin(name);
    return run_check(argc > 1 ? argv[1] : NULL, checks, sizeof checks / sizeof *checks);
}
