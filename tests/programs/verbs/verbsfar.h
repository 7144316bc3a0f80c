// Checks of verbs_rules whose other end is in a child, which is stopped or killed.
#ifndef VERBSFAR_H
#define VERBSFAR_H
#include "verbsends.h"
// The other end in a child: it tells its address and keys, and then does `then`.
struct far {
    struct address at;
    uint64_t memory;
    uint32_t rkey;
};
static struct far there;
// To a child, or to a thread.
static int lines[2];

static pid_t child_end(void (*then)(void), struct far *far) {
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, lines));
    pid_t p = (pid_t)OK(fork());
    if (!p) {
        begin_child();
        make_end(&b, "rules1", 64);
        struct far mine = {address_of(&b.port, b.qp, b.psn), (uintptr_t)b.memory, b.mr->rkey}, theirs;
        full_write(lines[1], &mine, sizeof mine);
        full_read(lines[1], &theirs, sizeof theirs);
        for (uint64_t i = 0; i < 4; i++) Z(give(&b, i, 64));
        connect_to(&b, &theirs.at);
        there = theirs;
        full_write(lines[1], "r", 1);
        then();
        _exit(0);
    }
    make_end(&a, "rules0", 64);
    struct far mine = {address_of(&a.port, a.qp, a.psn), (uintptr_t)a.memory, a.mr->rkey};
    full_read(lines[0], far, sizeof *far);
    full_write(lines[0], &mine, sizeof mine);
    char ready;
    full_read(lines[0], &ready, 1);
    connect_to(&a, &far->at);
    return p;
}

static void stop(pid_t p) {
    int st;
    OK(kill(p, SIGSTOP));
    EQ(waitpid(p, &st, WUNTRACED), p);
    CHECK(WIFSTOPPED(st));
}

static void stopped_child(void) {
    // Sends, with receives that come only when it is stopped.
    for (uint64_t i = 0; i < 3; i++) do_post(&b, IBV_WR_SEND, 10 + i, 8);
    full_write(lines[1], "s", 1);
    for (uint64_t i = 0, sends = 10, receives = 0; i < 7; i++) {
        struct ibv_wc wc = next(&b);
        CHECK(!wc.status);
        EQ(wc.wr_id, wc.opcode & IBV_WC_RECV ? receives++ : sends++);
    }
    EQ(*(uint64_t *)(b.memory + 4096), 7);
}

static void aim(struct ibv_send_wr *w, const struct far *far) {
    w->wr.rdma.remote_addr = far->memory + 4096;
    w->wr.rdma.rkey = far->rkey;
}

static void stopped(void) {
    struct far far;
    char ready;
    pid_t p = child_end(stopped_child, &far);
    full_read(lines[0], &ready, 1);
    stop(p);
    for (uint64_t i = 0; i < 4; i++) do_post(&a, IBV_WR_SEND, i, 8);
    *(uint64_t *)a.memory = 7;
    struct ibv_send_wr w = request(&a, IBV_WR_RDMA_WRITE, 4, 8);
    aim(&w, &far);
    Z(post(&a, &w));
    w = request(&a, IBV_WR_RDMA_READ, 5, 8);
    aim(&w, &far);
    one_sge.addr += 64;
    Z(post(&a, &w));
    for (uint64_t i = 0; i < 6; i++) expect(&a, i, IBV_WC_SUCCESS);
    EQ(*(uint64_t *)(a.memory + 64), 7);
    for (uint64_t i = 0; i < 3; i++) Z(give(&a, 20 + i, 64));
    for (uint64_t i = 0; i < 3; i++) expect(&a, 20 + i, IBV_WC_SUCCESS);
    OK(kill(p, SIGCONT));
    reap(p, 0);
}

static void endless_child(void) {
    for (;;) {
        struct ibv_send_wr w = request(&b, IBV_WR_RDMA_WRITE, 1, 4096);
        aim(&w, &there);
        Z(post(&b, &w));
        next(&b);
    }
}

// Whoever is killed in the middle of it holds nobody up.
static void killed(void) {
    struct far far;
    rnr_retries = 7;
    pid_t p = child_end(endless_child, &far);
    for (uint64_t i = 0; i < 4; i++) do_post(&a, IBV_WR_SEND, i, 8);
    for (uint64_t i = 0; i < 4; i++) expect(&a, i, IBV_WC_SUCCESS);
    nap_us(5000 + (long)(now_ns() % 5000));
    OK(kill(p, SIGKILL));
    reap(p, SIGKILL);
    do_post(&a, IBV_WR_SEND, 9, 8);
    expect(&a, 9, IBV_WC_RETRY_EXC_ERR);
    EQ(state(&a), IBV_QPS_ERR);
    drop_end(&a);
    make_both();
    do_post(&a, IBV_WR_RDMA_WRITE, 1, 8);
    expect(&a, 1, IBV_WC_SUCCESS);
}
#endif
