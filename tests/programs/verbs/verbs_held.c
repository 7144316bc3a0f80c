// What a queue pair holds back (SQD) it has not sent after a restart either, and sends when it is let: verbs_held CHECK, one
// of the table at the end.
#include "verbsends.h"

static void hold(struct end *e) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
    Z(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
}

static void hold_and_drain(struct end *e) {
    hold(e);
    expect_event(e, IBV_EVENT_SQ_DRAINED);
}

static void post_silent(enum ibv_wr_opcode op, uint64_t id) {
    struct ibv_send_wr w = request(&a, op, id, 8);
    w.send_flags = 0;
    Z(post(&a, &w));
}

// Requests of each kind, with completions of their own and without, after two restarts.
static void kinds(void) {
    static const enum ibv_wr_opcode ops[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
                                             IBV_WR_SEND};
    uint64_t in_a = 1, in_b = 2;
    make_both();
    for (size_t op = 0; op < sizeof ops / sizeof *ops; op++)
        for (int silent = 0; silent < 2; silent++) {
            hold_and_drain(&a);
            // As an address that was sent to before: all is done in front of what is held back.
            memcpy(a.memory, &in_a, 8);
            memcpy(b.memory, &in_b, 8);
            Z(give(&b, 20, 64));
            if (silent) post_silent(ops[op], 1);
            do_post(&a, ops[op], 2, 8);
            // A restart.
            await_harness();
            nothing(&a);
            nothing(&b);
            CHECK(!memcmp(a.memory, &in_a, 8) && !memcmp(b.memory, &in_b, 8));
            EQ(state(&a), IBV_QPS_SQD);
            if (silent && ops[op] == IBV_WR_SEND) Z(give(&b, 21, 64));
            Z(go_to(&a, IBV_QPS_RTS));
            expect(&a, 2, IBV_WC_SUCCESS);
            uint64_t here = *(uint64_t *)a.memory, there = *(uint64_t *)b.memory;
            if (ops[op] == IBV_WR_ATOMIC_FETCH_AND_ADD) CHECK(here == in_b && there == in_b);
            else CHECK(here == (ops[op] == IBV_WR_RDMA_READ ? in_b : in_a) && here == there);
            if (ops[op] != IBV_WR_SEND) {
                do_post(&a, IBV_WR_SEND, 3, 8);
                expect(&a, 3, IBV_WC_SUCCESS);
            }
            expect(&b, 20, IBV_WC_SUCCESS);
            if (silent && ops[op] == IBV_WR_SEND) expect(&b, 21, IBV_WC_SUCCESS);
        }
    works();
}

// Behind a request that waits for a receive, and goes on to wait.
static void behind(void) {
    make_both();
    b.memory[0] = 3;
    do_post(&a, IBV_WR_SEND, 1, 0);
    nap_us(20000);
    hold(&a);
    a.memory[0] = 4;
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 1);
    for (int restart = 0; restart < 2; restart++) {
        await_harness();
        if (restart) break;
        no_event(&a);
        Z(give(&b, 5, 64));
        expect(&b, 5, IBV_WC_SUCCESS);
        expect(&a, 1, IBV_WC_SUCCESS);
        expect_event(&a, IBV_EVENT_SQ_DRAINED);
        nothing(&a);
        EQ(b.memory[0], 3);
    }
    nothing(&a);
    EQ(b.memory[0], 3);
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 2, IBV_WC_SUCCESS);
    EQ(b.memory[0], 4);
    works();
}

// To a peer that was reset: it fails when it is let go.
static void astray(void) {
    make_both();
    hold_and_drain(&a);
    do_post(&a, IBV_WR_RDMA_WRITE, 1, 8);
    do_post(&a, IBV_WR_SEND, 2, 8);
    Z(go_to(&b, IBV_QPS_RESET));
    // A restart.
    await_harness();
    nothing(&a);
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 1, IBV_WC_RETRY_EXC_ERR);
    expect(&a, 2, IBV_WC_WR_FLUSH_ERR);
    EQ(state(&a), IBV_QPS_ERR);
    again();
    works();
}

// To a peer that is not connected yet at a checkpoint which goes on: the message counts when it is received.
static void counted(void) {
    make_end(&a, "rules0", room_a);
    make_end(&b, "rules1", 64);
    struct address to_a = address_of(&a.port, a.qp, a.psn), to_b = address_of(&b.port, b.qp, b.psn);
    connect_to(&a, &to_b);
    hold_and_drain(&a);
    do_post(&a, IBV_WR_SEND, 1, 8);
    // A checkpoint.
    await_harness();
    connect_to(&b, &to_a);
    Z(give(&b, 11, 64));
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 1, IBV_WC_SUCCESS);
    expect(&b, 11, IBV_WC_SUCCESS);
    // There is no receive for it yet.
    do_post(&a, IBV_WR_SEND, 2, 8);
    nap_us(20000);
    // A restart.
    await_harness();
    nothing(&a);
    Z(give(&b, 12, 64));
    expect(&a, 2, IBV_WC_SUCCESS);
    expect(&b, 12, IBV_WC_SUCCESS);
    works();
}

// Nothing tells whether a request without a completion of its own has begun, which was posted before the rest was held back:
// a checkpoint is put off until it is let go.
static void unknown(void) {
    make_both();
    post_silent(IBV_WR_RDMA_WRITE, 1);
    hold_and_drain(&a);
    do_post(&a, IBV_WR_RDMA_WRITE, 2, 8);
    await_harness();
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 2, IBV_WC_SUCCESS);
    works();
}

// The event that its requests are done is asked for once, whatever is changed meanwhile.
static void asked(void) {
    make_both();
    do_post(&a, IBV_WR_SEND, 1, 8);
    nap_us(20000);
    hold(&a);
    struct ibv_qp_attr later = {.qp_state = IBV_QPS_SQD, .timeout = 13}, wrong = {.qp_state = IBV_QPS_SQD, .pkey_index = 9};
    Z(ibv_modify_qp(a.qp, &later, IBV_QP_STATE | IBV_QP_TIMEOUT));
    CHECK(ibv_modify_qp(a.qp, &wrong, IBV_QP_STATE | IBV_QP_PKEY_INDEX));
    // A restart.
    await_harness();
    no_event(&a);
    Z(give(&b, 2, 64));
    expect_event(&a, IBV_EVENT_SQ_DRAINED);
    expect(&b, 2, IBV_WC_SUCCESS);
    Z(go_to(&a, IBV_QPS_RTS));
    expect(&a, 1, IBV_WC_SUCCESS);
    works();
}

static const struct check checks[] = {
    {"kinds", kinds},     {"behind", behind},   {"astray", astray},
    {"counted", counted}, {"unknown", unknown}, {"asked", asked},
};

int main(int argc, char **argv) {
    begin("verbs_held");
    return run_check(argc > 1 ? argv[1] : NULL, checks, sizeof checks / sizeof *checks);
}
