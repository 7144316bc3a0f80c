// What the library does by itself, when a queue pair goes or everything is made again, does not show. verbs_back CHECK, one
// of the table at the end.
#include "verbsgrams.h"
#include <sys/time.h>

// A queue pair with a shared queue that is reset has not failed: no event says that it takes no more receives. One that
// has failed before it was reset has said so.
static void renewed(void) {
    use_srq = 1;
    make_both();
    for (int failed = 0; failed < 2; failed++) {
        if (failed) {
            struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 8);
            w.wr.rdma.rkey += 1 << 20;
            Z(post(&a, &w));
            expect(&a, 1, IBV_WC_REM_ACCESS_ERR);
            await(b.port.context->async_fd, POLLIN, "an asynchronous event");
            nap_us(20000);
        }
        Z(go_to(&b, IBV_QPS_RESET));
        struct pollfd f = {b.port.context->async_fd, POLLIN, 0};
        EQ(poll(&f, 1, 0), failed);
        Z(go_to(&a, IBV_QPS_RESET));
        rc_init(a.qp);
        rc_init(b.qp);
        connect_both();
        if (failed) {
            expect_event(&b, IBV_EVENT_QP_ACCESS_ERR);
            expect_event(&b, IBV_EVENT_QP_LAST_WQE_REACHED);
        }
        no_event(&b);
    }
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 8);
    expect(&a, 2, IBV_WC_SUCCESS);
}

// Requests without completions of their own get none when their queue pair goes: the queue has no places for them, which
// another queue pair goes on using.
static void crowded(void) {
    struct end gone;
    use_srq = 1;
    room_a = 2;
    make_both();
    for (int destroy = 0; destroy < 2; destroy++) {
        gone = a;
        make_qp(&a);
        Z(ibv_destroy_qp(b.qp));
        make_qp(&b);
        struct ibv_qp *other = b.qp;
        make_qp(&b);
        struct address to = address_of(&b.port, other, b.psn);
        Z(go_to(&gone, IBV_QPS_RESET));
        rc_init(gone.qp);
        connect_to(&gone, &to);
        connect_both();
        fault("hold_messages=1");
        struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 1, 8);
        w.send_flags = 0;
        for (int i = 0; i < DEPTH; i++) Z(post(&gone, &w));
        if (!destroy) Z(go_to(&gone, IBV_QPS_RESET));
        Z(ibv_destroy_qp(gone.qp));
        Z(ibv_destroy_qp(other));
        fault("hold_messages=0");
        no_event(&a);
        for (uint64_t i = 0; i < 8; i++) {
            do_post(&a, IBV_WR_RDMA_WRITE, i, 8);
            expect(&a, i, IBV_WC_SUCCESS);
        }
    }
}

// A queue pair in error comes back so, and the program hears no second time of its last receive.
static void heard(void) {
    use_srq = 1;
    make_both();
    Z(go_to(&b, IBV_QPS_ERR));
    expect_event(&b, IBV_EVENT_QP_LAST_WQE_REACHED);
    // A restart.
    await_harness();
    EQ(state(&b), IBV_QPS_ERR);
    no_event(&b);
    again();
    works();
}

// Who asked for an event when the queue is drained gets it also where that is after a restart, and once.
static void drained(void) {
    make_both();
    // Waits, once it has begun: the other end has no request for it. Where it has not, the event comes at once.
    do_post(&a, IBV_WR_SEND, 1, 8);
    nap_us(20000);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
    Z(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    await_harness();
    EQ(state(&a), IBV_QPS_SQD);
    Z(give(&b, 2, 64));
    expect_event(&a, IBV_EVENT_SQ_DRAINED);
    await_harness();
    EQ(state(&a), IBV_QPS_SQD);
    no_event(&a);
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&b, 2, IBV_WC_SUCCESS);
    expect(&a, 1, IBV_WC_SUCCESS);
    works();
}

// A queue pair in error beside others, over any adapter: nobody says when a checkpoint or a restart is.
static void beside(void) {
    make_both();
    struct end gone = a;
    make_qp(&gone);
    Z(go_to(&gone, IBV_QPS_ERR));
    works();
    EQ(state(&gone), IBV_QPS_ERR);
    Z(ibv_destroy_qp(gone.qp));
    drop_end(&a);
    drop_end(&b);
}

// The event of a queue that goes goes with it, and that of another stays.
static void silent(void) {
    make_both();
    for (int other = 0; other < 2; other++) {
        struct ibv_cq *first = V(ibv_create_cq(a.port.context, 4, NULL, a.port.channel, 0)), *event;
        Z(ibv_req_notify_cq(first, 0));
        if (other) Z(ibv_req_notify_cq(a.cq, 0));
        // A restart.
        await_harness();
        Z(ibv_destroy_cq(first));
        struct pollfd f = {a.port.channel->fd, POLLIN, 0};
        EQ(poll(&f, 1, 0), other);
        void *user;
        EQ(ibv_get_cq_event(a.port.channel, &event, &user), other - 1);
        if (!other) continue;
        CHECK(event == a.cq && user == &a);
        ibv_ack_cq_events(event, 1);
    }
    works();
}

// Queues give their events as seldom as the program has asked for.
static void moderated(void) {
    struct ibv_modify_cq_attr attr = {IBV_CQ_ATTR_MODERATE, {7, 50}};
    make_both();
    Z(ibv_modify_cq(a.cq, &attr));
    attr.moderate.cq_count = 3;
    Z(ibv_modify_cq(a.cq, &attr));
    Z(ibv_modify_cq(a.cq, &(struct ibv_modify_cq_attr){0}));
    attr.moderate = (struct ibv_moderate_cq){10, 1000};
    Z(ibv_modify_cq(b.cq, &attr));
    for (int restarts = 0; restarts < 3; restarts++) {
        await_harness();
        do_post(&a, IBV_WR_RDMA_WRITE, 1, 8);
        expect(&a, 1, IBV_WC_SUCCESS);
    }
    works();
}

// Writes a byte from `e`, with this key, to the other end's memory.
static void write_from(struct end *e, void *from, uint32_t lkey, void *to, uint32_t rkey) {
    struct ibv_sge sge = {(uintptr_t)from, 1, lkey};
    struct ibv_send_wr w = request(e, IBV_WR_RDMA_WRITE, 1, 1);
    w.sg_list = &sge;
    w.wr.rdma.remote_addr = (uintptr_t)to;
    w.wr.rdma.rkey = rkey;
    Z(post(e, &w));
    expect(e, 1, IBV_WC_SUCCESS);
    EQ(*(char *)to, *(char *)from);
}

// A region that is registered again gets no keys by which the program knows another one, whatever the adapter gives.
static void keyed(void) {
    static char more[2];
    char fault_words[64];
    make_both();
    struct ibv_mr *other = V(ibv_reg_mr(a.port.pd, more, sizeof more, all_access()));
    // A restart.
    await_harness();
    snprintf(fault_words, sizeof fault_words, "rereg_key=%u", a.mr->lkey);
    fault(fault_words);
    Z(ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, all_access()));
    CHECK(other->lkey != a.mr->lkey && other->rkey != a.mr->rkey);
    a.memory[0] = 3;
    write_from(&a, a.memory, a.mr->lkey, b.memory, b.mr->rkey);
    more[0] = 4;
    write_from(&a, more, other->lkey, b.memory, b.mr->rkey);
    write_from(&b, b.memory, b.mr->lkey, more + 1, other->rkey);
    b.memory[0] = 5;
    write_from(&b, b.memory, b.mr->lkey, a.memory, a.mr->rkey);
    Z(ibv_dereg_mr(other));
    works();
}


// Queue pairs for datagrams on one device, each with a queue of completions, and memory whose addresses are no pointers.
enum { ROOM = 64, ELSEWHERE = 0x10000, INTERRUPTED = 3000 };
static struct ibv_cq *queues[2];
static struct ibv_qp *pairs[2];
static struct ibv_mr *elsewhere;
static _Atomic unsigned int came[2];

static void receive_on(int i) {
    struct ibv_sge sge = {ELSEWHERE + (uint64_t)i * ROOM, ROOM, elsewhere->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    Z(ibv_post_recv(pairs[i], &wr, &bad));
}

static void make_pair(int i) {
    struct ibv_qp_init_attr init = {.send_cq = a.cq, .qp_type = IBV_QPT_UD};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = KEY};
    init.cap = (struct ibv_qp_cap){.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1};
    queues[i] = init.recv_cq = V(ibv_create_cq(a.port.context, 2 * DEPTH, NULL, NULL, 0));
    pairs[i] = V(ibv_create_qp(a.port.pd, &init));
    Z(ibv_modify_qp(pairs[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    attr.qp_state = IBV_QPS_RTR;
    Z(ibv_modify_qp(pairs[i], &attr, IBV_QP_STATE));
    attr.qp_state = IBV_QPS_RTS;
    Z(ibv_modify_qp(pairs[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
    for (int k = 0; k < DEPTH; k++) receive_on(i);
}

static void poll_pair(int i) {
    struct ibv_wc wc;
    if (!ibv_poll_cq(queues[i], 1, &wc)) return;
    CHECK(!wc.status && wc.src_qp == pairs[0]->qp_num && wc.slid == a.port.attr.lid);
    came[i]++;
}

static void on_timer(int signal) {
    (void)signal;
    poll_pair(1);
}

// A handler of a signal polls a queue while the thread that it has interrupted polls another one, or posts.
static void interrupted(void) {
    static char memory[2 * ROOM];
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    struct itimerval every = {.it_interval.tv_usec = 50, .it_value.tv_usec = 50}, never = {0};
    struct ibv_wc wc;
    unsigned int left[2] = {DEPTH, DEPTH}, seen[2] = {0, 0}, out = 0;
    make_both();
    elsewhere = V(ibv_reg_mr_iova(a.port.pd, memory, sizeof memory, ELSEWHERE, all_access()));
    make_pair(0);
    make_pair(1);
    struct address own = address_of(&a.port, pairs[0], 0);
    struct ibv_ah_attr attr = ah_attr_to(&a.port, &own);
    struct ibv_ah *ah = V(ibv_create_ah(a.port.pd, &attr));
    // A restart.
    await_harness();
    OK(sigaction(SIGALRM, &action, NULL));
    OK(setitimer(ITIMER_REAL, &every, NULL));
    for (int i = 0; came[1] < INTERRUPTED; i = !i) {
        poll_pair(0);
        for (; seen[i] != came[i]; seen[i]++, left[i]++) receive_on(i);
        for (; ibv_poll_cq(a.cq, 1, &wc); out--) CHECK(!wc.status);
        if (!left[i] || out == DEPTH) continue;
        left[i]--;
        out++;
        struct ibv_send_wr w = request(&a, IBV_WR_SEND, 1, 8), *bad;
        w.wr.ud.ah = ah;
        w.wr.ud.remote_qpn = pairs[i]->qp_num;
        w.wr.ud.remote_qkey = KEY;
        Z(ibv_post_send(pairs[0], &w, &bad));
    }
    OK(setitimer(ITIMER_REAL, &never, NULL));
    for (; out; out--) EQ(next(&a).status, IBV_WC_SUCCESS);
    works();
}

// A queue pair for datagrams that goes on after a request has failed has all its places, whatever numbers the requests had,
// and comes to rest before a checkpoint, also while it has not gone on.
static void failed(void) {
    struct ibv_qp_attr again_attr = {.qp_state = IBV_QPS_RTS};
    make_end(&a, "rules0", 64);
    make_end(&b, "rules1", 64);
    make_datagrams(&a);
    make_datagrams(&b);
    struct target to = target_at(&b, 0);
    for (int restart = 0; restart < 2; restart++) {
        for (int i = 0; i < 4; i++) {
            // The third is larger than a datagram.
            struct ibv_send_wr w = request(&a, IBV_WR_SEND, 0, i == 2 ? 8192 : 8);
            if (i < 2) w.send_flags = 0;
            w.wr.ud.ah = to.ah;
            w.wr.ud.remote_qpn = to.number;
            w.wr.ud.remote_qkey = KEY;
            Z(post(&a, &w));
        }
        // A checkpoint.
        await_harness();
        expect(&a, 0, IBV_WC_LOC_LEN_ERR);
        expect(&a, 0, IBV_WC_WR_FLUSH_ERR);
        Z(ibv_modify_qp(a.qp, &again_attr, IBV_QP_STATE));
        for (int k = 0; k < 3; k++) {
            for (int i = 0; i < DEPTH; i++) Z(post_to(&to, 0));
            for (int i = 0; i < DEPTH; i++) expect(&a, 0, IBV_WC_SUCCESS);
        }
    }
    // A restart.
    await_harness();
    Z(post_to(&to, 0));
    expect(&a, 0, IBV_WC_SUCCESS);
    Z(ibv_destroy_ah(to.ah));
    drop_end(&a);
    drop_end(&b);
    make_both();
    works();
}

static int has_come(struct end *e) {
    struct ibv_wc wc;
    nap_us(1000);
    int n = ibv_poll_cq(e->cq, 1, &wc);
    if (n) EQ(wc.status, IBV_WC_SUCCESS);
    return n;
}

// A queue pair for datagrams that holds back does so after a restart too.
static void held(void) {
    make_both();
    make_datagrams(&a);
    make_datagrams(&b);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD};
    Z(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE));
    // A restart.
    await_harness();
    EQ(state(&a), IBV_QPS_SQD);
    struct target to = target_at(&b, 0);
    Z(give(&b, 10, 64));
    Z(post_to(&to, 1));
    nap_us(20000);
    nothing(&a);
    nothing(&b);
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 1, IBV_WC_SUCCESS);
    expect(&b, 10, IBV_WC_SUCCESS);
    while (running()) {
        Z(give(&b, 11, 64));
        Z(post_to(&to, 2));
        expect(&a, 2, IBV_WC_SUCCESS);
        expect(&b, 11, IBV_WC_SUCCESS);
    }
}

// Datagrams to a host that is gone are lost, as they were before a restart, after which no handle can be made that leads
// there. Those to a host that is not found for the moment come when it is.
static void nowhere(void) {
    struct end c = {0};
    make_end(&a, "rules0", 64);
    make_end(&b, "rules1", 64);
    make_end(&c, "rules2", 64);
    make_datagrams(&a);
    make_datagrams(&b);
    make_datagrams(&c);
    struct target gone = target_at(&b, 3), lives = target_at(&c, 3), all[] = {lives, gone, lives};
    drop_end(&b);
    // A restart.
    await_harness();
    for (uint64_t i = 0; i < 3; i++) {
        Z(post_to(&gone, i));
        expect(&a, i, IBV_WC_SUCCESS);
    }
    // It is not looked for each time.
    await_harness();
    for (uint64_t i = 0; i < 3; i++) Z(give(&c, i, 64));
    Z(post_all(&a, all, 3));
    for (uint64_t i = 0; i < 3; i++) expect(&a, i, IBV_WC_SUCCESS);
    for (uint64_t i = 0; i < 2; i++) expect(&c, i, IBV_WC_SUCCESS);
    // Nobody is found.
    fault("no_ah=3");
    struct target later = target_at(&c, 0), some[] = {lives, later};
    CHECK(post_all(&a, some, 2));
    CHECK(post_to(&later, 1));
    nothing(&a);
    nothing(&c);
    // By the other address of its port.
    fault("no_ah=2");
    Z(post_to(&later, 7));
    expect(&a, 7, IBV_WC_SUCCESS);
    nothing(&c);
    fault("no_ah=1");
    int64_t t0 = now_ns();
    do {
        if (now_ns() - t0 > STUCK_NS) fail("it is not looked for again");
        Z(post_to(&later, 8));
        expect(&a, 8, IBV_WC_SUCCESS);
    } while (!has_come(&c));
    Z(ibv_destroy_ah(gone.ah));
    Z(ibv_destroy_ah(lives.ah));
    Z(ibv_destroy_ah(later.ah));
    drop_end(&a);
    drop_end(&c);
    make_both();
    works();
}

// Somebody who is gone had the number that somebody has today at the same port. What is sent to him is lost, and whoever lives
// there is found, also when nobody could be for a moment.
static void namesake(void) {
    enum { SAME = 0x123456 };
    make_end(&a, "rules0", 64);
    make_datagrams(&a);
    struct target lives = target_at(&a, 0), gone = {lives.ah, SAME};
    // A restart, after which the queue pair has that number.
    await_harness();
    fault("no_ah=2");
    Z(post_to(&gone, 1));
    expect(&a, 1, IBV_WC_SUCCESS);
    fault("no_ah=1");
    Z(give(&a, 2, 64));
    Z(post_to(&lives, 3));
    struct ibv_wc one = next(&a), other = next(&a);
    CHECK(!one.status && !other.status && one.wr_id + other.wr_id == 5);
    Z(ibv_destroy_ah(lives.ah));
    drop_end(&a);
    make_both();
    works();
}

static const struct check checks[] = {
    {"renewed", renewed},
    {"crowded", crowded},
    {"heard", heard},
    {"drained", drained},
    {"beside", beside},
    {"silent", silent},
    {"keyed", keyed},
    {"interrupted", interrupted},
    {"moderated", moderated},
    {"held", held},
    {"nowhere", nowhere},
    {"failed", failed},
    {"namesake", namesake},
};

int main(int argc, char **argv) {
    begin("verbs_back");
    return run_check(argc > 1 ? argv[1] : NULL, checks, sizeof checks / sizeof *checks);
}
