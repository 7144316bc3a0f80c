// Connections by librdmacm: a client and a server. Some stay, and carry checked messages in every round; others are made,
// rejected and ended again all the time, so that a checkpoint finds some in each state, and more are made after a restart.
//
//     verbs_cm PORT [serve | ask]      both, or one of them; PORT and the one after it are free
//
// VERBS_ADDRESS is the server's, else that of this host alone.
#include "verbscheck.h"
#include <rdma/rdma_cma.h>

enum { STAYING = 3, AREA = 8192, DEPTH = 4 };

struct hello {
    uint64_t round, kind;
};
struct offer {
    uint64_t area, round;
    uint32_t rkey;
};
struct note {
    uint64_t round, sum;
};
enum kind { STAYS, ECHO, SIMPLE, REJECTED, LAST };
enum { WAYS = 4 };

// One end of a connection.
struct end {
    struct rdma_cm_id *id;
    struct ibv_mr *area_mr, *in_mr, *out_mr;
    struct note in[DEPTH], out;
    struct hello hello;
    struct offer offer;
    int established;
    uint8_t area[AREA];
};

static int port;
static uint64_t round_of_all;

static struct sockaddr_in here(int p) {
    const char *address = getenv("VERBS_ADDRESS");
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)p)};
    if (inet_pton(AF_INET, address ? address : "127.0.0.1", &a.sin_addr) != 1) fail("VERBS_ADDRESS: %s", address);
    return a;
}

static void paint(uint8_t *area, uint64_t round) {
    for (int i = 0; i < AREA; i++) area[i] = (uint8_t)(round * 31 + (uint64_t)i * 7);
}

static uint64_t sum_of(const uint8_t *area) {
    uint64_t sum = 0;
    for (int i = 0; i < AREA; i++) sum = sum * 131 + area[i];
    return sum;
}

static void post_receive(struct end *e, int i) {
    struct ibv_sge sge = {(uintptr_t)&e->in[i], sizeof e->in[i], e->in_mr->lkey};
    struct ibv_recv_wr w = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1}, *bad;
    Z(ibv_post_recv(e->id->qp, &w, &bad));
}

static void post_note(struct end *e, uint64_t round, uint64_t sum) {
    e->out = (struct note){round, sum};
    struct ibv_sge sge = {(uintptr_t)&e->out, sizeof e->out, e->out_mr->lkey};
    struct ibv_send_wr w = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    Z(ibv_post_send(e->id->qp, &w, &bad));
}

// The queue pair makes its own completion queues.
static void make_queues(struct end *e) {
    struct ibv_qp_init_attr init = {.cap = {8, DEPTH, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    OK(rdma_create_qp(e->id, NULL, &init));
    CHECK(e->id->qp && e->id->pd && e->id->send_cq && e->id->recv_cq);
    e->area_mr = V(ibv_reg_mr(e->id->pd, e->area, AREA, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    e->in_mr = V(ibv_reg_mr(e->id->pd, e->in, sizeof e->in, IBV_ACCESS_LOCAL_WRITE));
    e->out_mr = V(ibv_reg_mr(e->id->pd, &e->out, sizeof e->out, 0));
    for (int i = 0; i < DEPTH; i++) post_receive(e, i);
}

static void drop_queues(struct end *e) {
    if (!e->id->qp) return;
    rdma_destroy_qp(e->id);
    Z(ibv_dereg_mr(e->area_mr));
    Z(ibv_dereg_mr(e->in_mr));
    Z(ibv_dereg_mr(e->out_mr));
}

static void drop(struct end *e) {
    drop_queues(e);
    OK(rdma_destroy_id(e->id));
    free(e);
}

// A completion, if there is one, which must be of a success.
static int done(struct ibv_cq *cq, struct ibv_wc *wc) {
    int n = ibv_poll_cq(cq, 1, wc);
    CHECK(n >= 0);
    if (n && wc->status) fail("completion: %s", ibv_wc_status_str(wc->status));
    return n;
}

// ---- the server

static struct end *served[64];
static int over;

static void forget(struct end *e) {
    for (int i = 0; i < 64; i++)
        if (served[i] == e) served[i] = NULL;
    drop(e);
}

static void accept_it(struct end *e) {
    make_queues(e);
    e->offer = (struct offer){(uintptr_t)e->area, e->hello.round, e->area_mr->rkey};
    struct rdma_conn_param p = {.private_data = &e->offer,
                                .private_data_len = sizeof e->offer,
                                .responder_resources = 1,
                                .initiator_depth = 1,
                                .rnr_retry_count = 7};
    if (!rdma_accept(e->id, &p)) return;
    // Who has asked may have given up; the event says so.
    EQ(errno, EINVAL);
}

static struct end *asked(const struct rdma_cm_event *event) {
    const struct rdma_conn_param *p = &event->param.conn;
    CHECK(event->listen_id && event->id != event->listen_id && event->id->verbs);
    EQ(p->private_data_len, 56);
    EQ(p->retry_count, 7);
    EQ(p->responder_resources, 1);
    struct end *e = V(calloc(1, sizeof *e));
    e->id = event->id;
    e->id->context = e;
    memcpy(&e->hello, p->private_data, sizeof e->hello);
    for (size_t i = sizeof e->hello; i < p->private_data_len; i++) EQ(((const uint8_t *)p->private_data)[i], 0);
    CHECK(ntohs(rdma_get_src_port(e->id)) == port);
    for (int i = 0; i < 64; i++)
        if (!served[i]) return served[i] = e;
    fail("too many connections");
}

static void serve_event(struct rdma_event_channel *channel, struct end **waiting) {
    struct rdma_cm_event *event;
    if (rdma_get_cm_event(channel, &event)) {
        EQ(errno, EAGAIN);
        return;
    }
    struct end *e = event->id->context;
    enum rdma_cm_event_type type = event->event;
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST) e = asked(event);
    OK(rdma_ack_cm_event(event));
    switch (type) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        // The one before is accepted now: it was half open all the time until another came, or nothing did.
        if (*waiting) accept_it(*waiting);
        *waiting = NULL;
        over = e->hello.kind == LAST;
        if (over || e->hello.kind == REJECTED) {
            OK(rdma_reject(e->id, "not you", 8));
            forget(e);
        } else *waiting = e;
        return;
    case RDMA_CM_EVENT_ESTABLISHED: e->established = 1; return;
    case RDMA_CM_EVENT_DISCONNECTED:
        CHECK(e->established);
        OK(rdma_disconnect(e->id));
        forget(e);
        return;
    default: fail("the server has %s", rdma_event_str(type));
    }
}

static void serve_end(struct end *e) {
    struct ibv_wc wc;
    while (e->id->qp && ibv_poll_cq(e->id->recv_cq, 1, &wc) > 0) {
        // They come back flushed when the other end has gone.
        if (wc.status) return;
        struct note n = e->in[wc.wr_id];
        post_receive(e, (int)wc.wr_id);
        if (n.sum != sum_of(e->area)) fail("the area of round %llu is wrong", (unsigned long long)n.round);
        post_note(e, n.round, ~n.sum);
        while (!done(e->id->send_cq, &wc)) sched_yield();
    }
}

static int serve(void) {
    struct rdma_event_channel *channel = V(rdma_create_event_channel());
    struct rdma_cm_id *listener;
    struct sockaddr_in a = here(port);
    struct end *waiting = NULL;
    OK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
    OK(rdma_bind_addr(listener, (struct sockaddr *)&a));
    OK(rdma_listen(listener, 0));
    EQ(ntohs(rdma_get_src_port(listener)), port);
    OK(fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK));
    int left = 0;
    for (int64_t since = now_ns(), last = since; !over || left; last = over ? last : now_ns()) {
        if (now_ns() - last > STUCK_NS / 4) fail("the ends of %d connections were not told", left);
        struct pollfd polled = {channel->fd, POLLIN, 0};
        OK(poll(&polled, 1, 0));
        if (polled.revents) serve_event(channel, &waiting);
        if (!waiting) since = now_ns();
        else if (now_ns() - since > 3000000) {
            accept_it(waiting);
            waiting = NULL;
        }
        left = 0;
        for (int i = 0; i < 64; i++) {
            if (!served[i]) continue;
            left++;
            serve_end(served[i]);
        }
        sched_yield();
    }
    OK(rdma_destroy_id(listener));
    rdma_destroy_event_channel(channel);
    return 0;
}

// ---- the client

// The next event of an identifier, which must be this one.
static void expect(struct end *e, enum rdma_cm_event_type type, int status) {
    struct rdma_cm_event *event;
    OK(rdma_get_cm_event(e->id->channel, &event));
    if (event->event != type || event->status != status)
        fail("%s with %d and not %s", rdma_event_str(event->event), event->status, rdma_event_str(type));
    CHECK(event->id == e->id);
    const struct rdma_conn_param *p = &event->param.conn;
    if (type == RDMA_CM_EVENT_ESTABLISHED) {
        EQ(p->private_data_len, 196);
        memcpy(&e->offer, p->private_data, sizeof e->offer);
    }
    if (type == RDMA_CM_EVENT_REJECTED && status == 28) {
        EQ(p->private_data_len, 148);
        CHECK(!memcmp(p->private_data, "not you", 8));
    }
    OK(rdma_ack_cm_event(event));
}

static void ask(struct end *e, enum kind kind) {
    e->hello = (struct hello){round_of_all, kind};
    struct rdma_conn_param p = {.private_data = &e->hello,
                                .private_data_len = sizeof e->hello,
                                .responder_resources = 1,
                                .initiator_depth = 1,
                                .retry_count = 7,
                                .rnr_retry_count = 7};
    int answer = rdma_connect(e->id, &p);
    if (answer) fail("rdma_connect: %s", strerror(errno));
}

static struct end *resolve(struct rdma_event_channel *channel, int to) {
    struct end *e = V(calloc(1, sizeof *e));
    struct sockaddr_in a = here(to);
    OK(rdma_create_id(channel, &e->id, e, RDMA_PS_TCP));
    OK(rdma_resolve_addr(e->id, NULL, (struct sockaddr *)&a, 2000));
    expect(e, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    OK(rdma_resolve_route(e->id, 2000));
    expect(e, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    CHECK(e->id->verbs && e->id->route.num_paths == 1);
    EQ(ntohs(rdma_get_dst_port(e->id)), to);
    make_queues(e);
    return e;
}

static struct end *connected(struct rdma_event_channel *channel, enum kind kind) {
    struct end *e = resolve(channel, port);
    ask(e, kind);
    expect(e, RDMA_CM_EVENT_ESTABLISHED, 0);
    EQ(e->offer.round, round_of_all);
    return e;
}

// Writes a pattern to the other end, says so, and hears that it is there.
static void exchange(struct end *e) {
    struct ibv_wc wc;
    paint(e->area, round_of_all);
    struct ibv_sge sge = {(uintptr_t)e->area, AREA, e->area_mr->lkey};
    struct ibv_send_wr w = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
    w.wr.rdma.remote_addr = e->offer.area;
    w.wr.rdma.rkey = e->offer.rkey;
    Z(ibv_post_send(e->id->qp, &w, &bad));
    uint64_t sum = sum_of(e->area);
    post_note(e, round_of_all, sum);
    while (!done(e->id->send_cq, &wc)) sched_yield();
    while (!done(e->id->recv_cq, &wc)) sched_yield();
    EQ(e->in[wc.wr_id].round, round_of_all);
    EQ(e->in[wc.wr_id].sum, ~sum);
    post_receive(e, (int)wc.wr_id);
}

static void end(struct end *e) {
    OK(rdma_disconnect(e->id));
    expect(e, RDMA_CM_EVENT_DISCONNECTED, 0);
    drop(e);
}

// The same without events: each call waits.
static void simply(void) {
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
    struct sockaddr_in a = here(port);
    char service[16], name[INET_ADDRSTRLEN];
    snprintf(service, sizeof service, "%d", port);
    Z(rdma_getaddrinfo(V((char *)inet_ntop(AF_INET, &a.sin_addr, name, sizeof name)), service, &hints, &found));
    struct end *e = V(calloc(1, sizeof *e));
    OK(rdma_create_ep(&e->id, found, NULL, NULL));
    rdma_freeaddrinfo(found);
    make_queues(e);
    ask(e, SIMPLE);
    EQ(e->id->event->event, RDMA_CM_EVENT_ESTABLISHED);
    memcpy(&e->offer, e->id->event->param.conn.private_data, sizeof e->offer);
    exchange(e);
    OK(rdma_disconnect(e->id));
    drop(e);
}

static void one_more(struct rdma_event_channel *channel) {
    struct end *e;
    switch (round_of_all % WAYS) {
    case 0: end(e = connected(channel, ECHO)); return;
    case 1: simply(); return;
    case 2:
        ask(e = resolve(channel, port), REJECTED);
        expect(e, RDMA_CM_EVENT_REJECTED, 28);
        drop(e);
        return;
    default:
        // Nobody listens there.
        ask(e = resolve(channel, port + 1), ECHO);
        expect(e, RDMA_CM_EVENT_REJECTED, 8);
        drop(e);
    }
}

// Until somebody listens.
static void await_server(struct rdma_event_channel *channel) {
    for (int64_t t0 = now_ns();; nap_us(10000)) {
        struct end *e = resolve(channel, port);
        struct rdma_cm_event *event;
        ask(e, REJECTED);
        OK(rdma_get_cm_event(channel, &event));
        EQ(event->event, RDMA_CM_EVENT_REJECTED);
        int status = event->status;
        OK(rdma_ack_cm_event(event));
        drop(e);
        if (status == 28) return;
        EQ(status, 8);
        if (now_ns() - t0 > STUCK_NS) fail("nobody listens");
    }
}

static void go_round(void) {
    struct rdma_event_channel *channel = V(rdma_create_event_channel());
    struct end *staying[STAYING], *last;
    await_server(channel);
    for (int i = 0; i < STAYING; i++) staying[i] = connected(channel, STAYS);
    while (running()) {
        round_of_all++;
        for (int i = 0; i < STAYING; i++) exchange(staying[i]);
        one_more(channel);
    }
    for (int i = 0; i < STAYING; i++) end(staying[i]);
    ask(last = resolve(channel, port), LAST);
    expect(last, RDMA_CM_EVENT_REJECTED, 28);
    drop(last);
    rdma_destroy_event_channel(channel);
}

int main(int argc, char **argv) {
    begin("verbs_cm");
    CHECK(argc == 2 || argc == 3);
    port = atoi(argv[1]);
    if (argc == 3 && !strcmp(argv[2], "serve")) return serve();
    pid_t server = 0;
    if (argc == 2) {
        server = (pid_t)OK(fork());
        setenv("FAKE_VERBS_HOST", server ? "host0" : "host1", 1);
        if (!server) {
            begin_child();
            return serve();
        }
    }
    go_round();
    if (server) reap(server, 0);
    return finish();
}
