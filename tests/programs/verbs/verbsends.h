// Two ends of a reliable connection, on two hosts of a fabric without adapters, both in this process.
//
// VERBS_FAULT is a command that takes faults of the fabric as words, VERBS_RESTART one that takes a host that is to
// go down and come back.
#ifndef VERBSENDS_H
#define VERBSENDS_H
#include "verbscheck.h"

enum { BYTES = 65536, DEPTH = 8 };

struct end {
    struct port port;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_srq *srq;
    struct ibv_mr *mr;
    char *memory;
    uint32_t psn;
};

static struct end a, b;
static uint8_t retries = 1, rnr_retries = 7;
static int use_srq, room_a = 64;

static void fault(const char *words) {
    char line[512];
    const char *command = getenv("VERBS_FAULT");
    if (!command) fail("VERBS_FAULT is not set");
    snprintf(line, sizeof line, "%s %s", command, words);
    EQ(system(line), 0);
}

static void restart_host(const char *host) {
    char line[512];
    const char *command = getenv("VERBS_RESTART");
    if (!command) fail("VERBS_RESTART is not set");
    snprintf(line, sizeof line, "%s %s", command, host);
    EQ(system(line), 0);
}

static void make_qp(struct end *e) {
    struct ibv_qp_init_attr init = {
        .send_cq = e->cq,
        .recv_cq = e->cq,
        .srq = e->srq,
        .cap =
            {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64},
        .qp_type = IBV_QPT_RC,
    };
    e->qp = V(ibv_create_qp(e->port.pd, &init));
    e->psn = e->qp->qp_num * 7 & 0xffffff;
    rc_init(e->qp);
}

static void make_end(struct end *e, const char *host, int room) {
    setenv("FAKE_VERBS_HOST", host, 1);
    open_port(&e->port, 1);
    OK(fcntl(e->port.context->async_fd, F_SETFL, O_NONBLOCK));
    OK(fcntl(e->port.channel->fd, F_SETFL, O_NONBLOCK));
    e->cq = V(ibv_create_cq(e->port.context, room, e, e->port.channel, 0));
    struct ibv_srq_init_attr srq = {.attr = {.max_wr = DEPTH, .max_sge = 1}};
    if (use_srq) e->srq = V(ibv_create_srq(e->port.pd, &srq));
    e->memory = V(aligned_alloc(4096, BYTES));
    memset(e->memory, 0, BYTES);
    e->mr = V(ibv_reg_mr(e->port.pd, e->memory, BYTES, all_access()));
    make_qp(e);
}

static void connect_to(struct end *e, const struct address *to) {
    rc_ready(&e->port, e->qp, to);
    rc_send(e->qp, e->psn, retries, rnr_retries);
}

static void connect_both(void) {
    struct address to_a = address_of(&a.port, a.qp, a.psn), to_b = address_of(&b.port, b.qp, b.psn);
    connect_to(&a, &to_b);
    connect_to(&b, &to_a);
}

static void make_both(void) {
    make_end(&a, "rules0", room_a);
    make_end(&b, "rules1", 64);
    connect_both();
}

static void drop_end(struct end *e) {
    Z(ibv_destroy_qp(e->qp));
    if (e->srq) Z(ibv_destroy_srq(e->srq));
    Z(ibv_dereg_mr(e->mr));
    Z(ibv_destroy_cq(e->cq));
    close_port(&e->port);
    free(e->memory);
}

static void again(void) {
    Z(ibv_destroy_qp(a.qp));
    Z(ibv_destroy_qp(b.qp));
    make_qp(&a);
    make_qp(&b);
    connect_both();
}

static struct ibv_wc next(struct end *e) {
    struct ibv_wc wc;
    for (int64_t t0 = now_ns(); ibv_poll_cq(e->cq, 1, &wc) != 1; sched_yield())
        if (now_ns() - t0 > STUCK_NS) fail("no completion comes");
    return wc;
}

static void expect(struct end *e, uint64_t id, enum ibv_wc_status status) {
    struct ibv_wc wc = next(e);
    if (wc.wr_id != id || wc.status != status)
        fail("completion %llu: %s, expected %llu: %s", (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status),
             (unsigned long long)id, ibv_wc_status_str(status));
}

static void nothing(struct end *e) {
    struct ibv_wc wc;
    nap_us(20000);
    EQ(ibv_poll_cq(e->cq, 1, &wc), 0);
}

static void expect_event(struct end *e, enum ibv_event_type type) {
    struct ibv_async_event event;
    await(e->port.context->async_fd, POLLIN, "an asynchronous event");
    Z(ibv_get_async_event(e->port.context, &event));
    if (event.event_type != type)
        fail("%s, expected %s", ibv_event_type_str(event.event_type), ibv_event_type_str(type));
    ibv_ack_async_event(&event);
}

static void no_event(struct end *e) {
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(e->port.context, &event) && errno == EAGAIN);
    struct pollfd f = {e->port.context->async_fd, POLLIN, 0};
    EQ(poll(&f, 1, 0), 0);
}

static enum ibv_qp_state state(struct end *e) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    Z(ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init));
    return attr.qp_state;
}

static int go_to(struct end *e, enum ibv_qp_state s) {
    struct ibv_qp_attr attr = {.qp_state = s};
    return ibv_modify_qp(e->qp, &attr, IBV_QP_STATE);
}

static int give(struct end *e, uint64_t id, uint32_t length) {
    struct ibv_sge sge = {(uintptr_t)e->memory, length, e->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;
    return e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad);
}

static struct ibv_sge one_sge;

static struct ibv_send_wr request(struct end *e, enum ibv_wr_opcode op, uint64_t id, uint32_t length) {
    struct end *other = e == &a ? &b : &a;
    one_sge = (struct ibv_sge){(uintptr_t)e->memory, length, e->mr->lkey};
    struct ibv_send_wr w = {
        .wr_id = id, .sg_list = &one_sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED};
    if (op == IBV_WR_ATOMIC_FETCH_AND_ADD || op == IBV_WR_ATOMIC_CMP_AND_SWP) {
        w.wr.atomic.remote_addr = (uintptr_t)other->memory;
        w.wr.atomic.rkey = other->mr ? other->mr->rkey : 0;
    } else {
        w.wr.rdma.remote_addr = (uintptr_t)other->memory;
        w.wr.rdma.rkey = other->mr ? other->mr->rkey : 0;
    }
    return w;
}

static int post(struct end *e, struct ibv_send_wr *w) {
    struct ibv_send_wr *bad = NULL;
    int r = ibv_post_send(e->qp, w, &bad);
    if (r) CHECK(bad == w);
    return r;
}

static void do_post(struct end *e, enum ibv_wr_opcode op, uint64_t id, uint32_t length) {
    struct ibv_send_wr w = request(e, op, id, length);
    Z(post(e, &w));
}

// The program is ready for the harness, which has done its part when this returns.
static void await_harness(void) {
    Z(close((int)OK(open("ready", O_CREAT | O_WRONLY, 0666))));
    while (access("done", F_OK)) nap_us(1000);
    Z(unlink("ready"));
    Z(unlink("done"));
}

static void works(void) {
    while (running()) {
        do_post(&a, IBV_WR_RDMA_WRITE, 7, 8);
        expect(&a, 7, IBV_WC_SUCCESS);
    }
}
#endif
