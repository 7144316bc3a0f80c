// Reliable connections between all ranks: random operations, everything compared, exactly once and in order.
//
// verbs_rc [RANKS] [event] [ex] [srq] [renew]: with completion events, with extended queue pairs and completion queues,
// with a shared receive queue, with new queue pairs and regions after some rounds. In each round every rank sends every
// other a number of messages that both know beforehand; both sides compare all that comes.
#include "verbscheck.h"

enum { MESSAGES = 24, LARGEST = 16384, RECEIVES = 8, INLINE = 128, READABLE = 32768, SENDS = 32 };
enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, ADD, ADD_SHARED, SWAP };

struct plan {
    enum kind kind;
    uint32_t length, imm, offset;
    int signalled, fenced;
};

// What a rank tells the others.
struct told {
    struct address to[MOST_RANKS];
    uint64_t area, readable, counters;
    uint32_t area_key, readable_key, counters_key;
};

struct peer {
    struct ibv_qp *qp;
    uint32_t psn;
    char *out;               // What this rank sends: a place for each message.
    char *in;                // What is received, a place for each receive.
    uint64_t *results;       // Old values of atomic operations.
    int posted, done, heard; // Messages of this round: sent, completed, received.
    uint64_t counter, expected_old[MESSAGES];
};

static struct port port;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *failed;
static struct ibv_mr *out_mr, *in_mr, *area_mr, *readable_mr, *counters_mr, *results_mr, *gone_mr;
static char *outs, *ins, *area, *readable;
static uint64_t *counters, *results; // counters[0] is everybody's, then one of each rank.
static struct peer peers[MOST_RANKS];
static struct told told[MOST_RANKS];
static uint64_t round_number, shared_added[MOST_RANKS];
static int extended;

// Message `m` from `a` to `b` in this round.
static struct plan plan_of(int a, int b, int m) {
    uint64_t h = mix(round_number * 1000003 + (uint64_t)(a * MOST_RANKS + b) * 131 + (uint64_t)m);
    static const enum kind kinds[] = {SEND,      SEND, SEND, SEND_IMM,   WRITE, WRITE,
                                      WRITE_IMM, READ, ADD,  ADD_SHARED, SWAP,  SEND};
    static const uint32_t sizes[] = {0, 8, INLINE, 1024, 4096, LARGEST};
    struct plan p = {.kind = kinds[h % 12], .imm = (uint32_t)(h >> 32)};
    uint32_t most = sizes[(h >> 8) % 6];
    p.length = most ? (uint32_t)((h >> 16) % (most / 8 + 1)) * 8 : 0;
    if (p.kind >= ADD) p.length = 8;
    p.offset = (uint32_t)((h >> 40) % ((READABLE - p.length) / 8 + 1)) * 8;
    p.signalled = (h >> 12) % 3 == 0;
    p.fenced = (h >> 14) % 8 == 0;
    return p;
}

static int messages(int a, int b) {
    int n = 1 + (int)(mix(round_number * 7919 + (uint64_t)(a * MOST_RANKS + b)) % MESSAGES);
    return a == b ? 0 : n;
}

static int takes_receive(enum kind k) { return k == SEND || k == SEND_IMM || k == WRITE_IMM; }

static uint64_t seed_of(int a, int b, int m) {
    return mix(round_number * 31 + (uint64_t)m) ^ (uint64_t)(a * MOST_RANKS + b);
}

static char *out_of(int peer, int m) { return peers[peer].out + (size_t)m * LARGEST; }
static char *area_of(int from, int m) { return area + ((size_t)from * MESSAGES + (size_t)m) * LARGEST; }

static void post_receive(int peer, int slot) {
    struct ibv_sge sge = {(uintptr_t)(peers[peer].in + (size_t)slot * LARGEST), LARGEST, in_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uint64_t)(peer * RECEIVES + slot), .sg_list = &sge, .num_sge = 1}, *bad;
    if (srq) Z(ibv_post_srq_recv(srq, &wr, &bad));
    else Z(ibv_post_recv(peers[peer].qp, &wr, &bad));
}

static void make_queue_pair(int r) {
    struct ibv_qp_init_attr_ex init = {
        .send_cq = cq,
        .recv_cq = cq,
        .srq = srq,
        .cap = {.max_send_wr = SENDS,
                .max_recv_wr = RECEIVES,
                .max_send_sge = 2,
                .max_recv_sge = 1,
                .max_inline_data = INLINE},
        .qp_type = IBV_QPT_RC,
        .comp_mask = IBV_QP_INIT_ATTR_PD,
        .pd = port.pd,
        .qp_context = &peers[r],
    };
    if (extended) {
        init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
                              IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                              IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    }
    peers[r].qp = V(ibv_create_qp_ex(port.context, &init));
    peers[r].psn = (uint32_t)mix((uint64_t)(rank * MOST_RANKS + r)) & 0xffffff;
    rc_init(peers[r].qp);
}

static void *pages(size_t n) {
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("mmap: %s", strerror(errno));
    return p;
}

static struct ibv_mr *pinned(void *p, size_t n) { return V(ibv_reg_mr(port.pd, p, n, all_access())); }

static void make_memory(void) {
    size_t n = (size_t)size, out_bytes = n * MESSAGES * LARGEST, in_bytes = n * RECEIVES * LARGEST;
    outs = pages(out_bytes);
    ins = pages(in_bytes);
    area = pages(out_bytes);
    readable = pages(READABLE);
    counters = pages((n + 1) * 8);
    results = pages(n * MESSAGES * 8);
    out_mr = pinned(outs, out_bytes);
    in_mr = pinned(ins, in_bytes);
    area_mr = pinned(area, out_bytes);
    readable_mr = pinned(readable, READABLE);
    counters_mr = pinned(counters, (n + 1) * 8);
    results_mr = pinned(results, n * MESSAGES * 8);
    fill(readable, READABLE, (uint64_t)rank + 77);
    for (int r = 0; r < size; r++) {
        peers[r].out = outs + (size_t)r * MESSAGES * LARGEST;
        peers[r].in = ins + (size_t)r * RECEIVES * LARGEST;
        peers[r].results = results + (size_t)r * MESSAGES;
    }
}

// What programs leave behind, on purpose or not: a device that was closed with all that was on it, and a region whose
// memory is gone, in the middle and at its end.
static void leave_something(void) {
    struct port left;
    open_port(&left, 1);
    struct ibv_cq *of = V(ibv_create_cq(left.context, 4, NULL, left.channel, 0));
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_qp_init_attr init = {.send_cq = of,
                                    .recv_cq = of,
                                    .srq = V(ibv_create_srq(left.pd, &shared)),
                                    .cap = {.max_send_wr = 4, .max_send_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    rc_init(V(ibv_create_qp(left.pd, &init)));
    V(ibv_reg_mr(left.pd, pages(4096), 4096, all_access()));
    Z(ibv_close_device(left.context));
    char *gone = pages(5 * 4096);
    gone_mr = pinned(gone + 8, 5 * 4096 - 16);
    OK(munmap(gone + 4096, 4096));
    OK(munmap(gone + 3 * 4096, 2 * 4096));
}

// A queue pair of which nothing is wanted any more, as of a connection that has ended.
static void fail_one(void) {
    struct ibv_qp_init_attr init = {.send_cq = cq,
                                    .recv_cq = cq,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
    failed = V(ibv_create_qp(port.pd, &init));
    rc_init(failed);
    Z(ibv_modify_qp(failed, &error, IBV_QP_STATE));
}

static void make_queues(int events, int shared) {
    int room = size * (SENDS + RECEIVES);
    open_port(&port, events);
    if (extended) {
        struct ibv_cq_init_attr_ex init = {
            .cqe = (uint32_t)room, .channel = port.channel, .wc_flags = IBV_WC_STANDARD_FLAGS};
        cq = ibv_cq_ex_to_cq(V(ibv_create_cq_ex(port.context, &init)));
    } else {
        cq = V(ibv_create_cq(port.context, room, NULL, port.channel, 0));
    }
    struct ibv_srq_init_attr init = {.attr = {.max_wr = (uint32_t)(size * RECEIVES), .max_sge = 1}};
    if (shared) srq = V(ibv_create_srq(port.pd, &init));
}

static void connect_all(void) {
    struct told mine = {
        .area = (uintptr_t)area,
        .readable = (uintptr_t)readable,
        .counters = (uintptr_t)counters,
        .area_key = area_mr->rkey,
        .readable_key = readable_mr->rkey,
        .counters_key = counters_mr->rkey,
    };
    for (int r = 0; r < size; r++) {
        if (r == rank) continue;
        make_queue_pair(r);
        mine.to[r] = address_of(&port, peers[r].qp, peers[r].psn);
        // Those of a shared queue outlive the queue pairs.
        for (int i = 0; i < RECEIVES && !(srq && round_number); i++) post_receive(r, i);
    }
    gather(&mine, sizeof mine, told);
    for (int r = 0; r < size; r++) {
        if (r == rank) continue;
        rc_ready(&port, peers[r].qp, &told[r].to[rank]);
        rc_send(peers[r].qp, peers[r].psn, 7, 7);
    }
    barrier();
}

static enum ibv_wr_opcode opcode_of(enum kind k) {
    static const enum ibv_wr_opcode ops[] = {
        [SEND] = IBV_WR_SEND,
        [SEND_IMM] = IBV_WR_SEND_WITH_IMM,
        [WRITE] = IBV_WR_RDMA_WRITE,
        [WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
        [READ] = IBV_WR_RDMA_READ,
        [ADD] = IBV_WR_ATOMIC_FETCH_AND_ADD,
        [ADD_SHARED] = IBV_WR_ATOMIC_FETCH_AND_ADD,
        [SWAP] = IBV_WR_ATOMIC_CMP_AND_SWP,
    };
    return ops[k];
}

static void post_extended(struct ibv_qp *qp, const struct ibv_send_wr *w) {
    struct ibv_qp_ex *q = V(ibv_qp_to_qp_ex(qp));
    ibv_wr_start(q);
    q->wr_id = w->wr_id;
    q->wr_flags = w->send_flags & ~(unsigned)IBV_SEND_INLINE;
    switch (w->opcode) {
    case IBV_WR_SEND: ibv_wr_send(q); break;
    case IBV_WR_SEND_WITH_IMM: ibv_wr_send_imm(q, w->imm_data); break;
    case IBV_WR_RDMA_WRITE: ibv_wr_rdma_write(q, w->wr.rdma.rkey, w->wr.rdma.remote_addr); break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        ibv_wr_rdma_write_imm(q, w->wr.rdma.rkey, w->wr.rdma.remote_addr, w->imm_data);
        break;
    case IBV_WR_RDMA_READ: ibv_wr_rdma_read(q, w->wr.rdma.rkey, w->wr.rdma.remote_addr); break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        ibv_wr_atomic_fetch_add(q, w->wr.atomic.rkey, w->wr.atomic.remote_addr, w->wr.atomic.compare_add);
        break;
    default:
        ibv_wr_atomic_cmp_swp(q, w->wr.atomic.rkey, w->wr.atomic.remote_addr, w->wr.atomic.compare_add,
                              w->wr.atomic.swap);
    }
    if (w->send_flags & IBV_SEND_INLINE)
        ibv_wr_set_inline_data(q, (void *)(uintptr_t)w->sg_list[0].addr, w->sg_list[0].length);
    else ibv_wr_set_sge_list(q, (size_t)w->num_sge, w->sg_list);
    Z(ibv_wr_complete(q));
}

// The two halves of a message, so that more than one segment is used.
static int halves(struct ibv_sge *sge, char *at, uint32_t length, uint32_t lkey) {
    uint32_t half = length / 16 * 8;
    sge[0] = (struct ibv_sge){(uintptr_t)at, half, lkey};
    sge[1] = (struct ibv_sge){(uintptr_t)(at + half), length - half, lkey};
    return 2;
}

static void aim_atomic(int r, int m, const struct plan *p, struct ibv_send_wr *w, struct ibv_sge *sge) {
    struct peer *q = &peers[r];
    int own = p->kind != ADD_SHARED;
    *sge = (struct ibv_sge){(uintptr_t)&q->results[m], 8, results_mr->lkey};
    w->wr.atomic.rkey = told[r].counters_key;
    w->wr.atomic.remote_addr = told[r].counters + (own ? 8u * (unsigned)(rank + 1) : 0);
    w->wr.atomic.compare_add = p->kind == SWAP ? q->counter : p->imm;
    w->wr.atomic.swap = q->counter ^ p->imm;
    q->expected_old[m] = q->counter;
    if (p->kind == ADD) q->counter += p->imm;
    if (p->kind == SWAP) q->counter ^= p->imm;
    if (!own) shared_added[r] += p->imm;
}

static void send_message(int r, int m, int is_last) {
    struct plan p = plan_of(rank, r, m);
    struct ibv_sge sge[2];
    struct ibv_send_wr w = {.wr_id = (uint64_t)r << 32 | (uint64_t)m,
                            .sg_list = sge,
                            .num_sge = 1,
                            .opcode = opcode_of(p.kind)},
                       *bad;
    if (p.signalled || is_last) w.send_flags |= IBV_SEND_SIGNALED;
    if (p.fenced) w.send_flags |= IBV_SEND_FENCE;
    if (p.kind >= ADD) {
        aim_atomic(r, m, &p, &w, sge);
    } else if (p.kind == READ) {
        memset(out_of(r, m), 0xee, p.length);
        w.num_sge = halves(sge, out_of(r, m), p.length, out_mr->lkey);
        w.wr.rdma.rkey = told[r].readable_key;
        w.wr.rdma.remote_addr = told[r].readable + p.offset;
    } else {
        fill(out_of(r, m), p.length, seed_of(rank, r, m));
        w.imm_data = htonl(p.imm);
        w.wr.rdma.rkey = told[r].area_key;
        w.wr.rdma.remote_addr = told[r].area + (uint64_t)(area_of(rank, m) - area);
        if (p.length <= INLINE && p.imm % 2) {
            w.send_flags |= IBV_SEND_INLINE;
            sge[0] = (struct ibv_sge){(uintptr_t)out_of(r, m), p.length, 0};
        } else {
            w.num_sge = halves(sge, out_of(r, m), p.length, out_mr->lkey);
        }
    }
    if (extended) post_extended(peers[r].qp, &w);
    else Z(ibv_post_send(peers[r].qp, &w, &bad));
    // What goes inline may be changed at once.
    if (w.send_flags & IBV_SEND_INLINE) memset(out_of(r, m), 0x55, p.length);
}

// A completion of this rank's own: the next signalled one of that peer.
static void sent(const struct ibv_wc *wc) {
    int r = (int)(wc->wr_id >> 32), m = (int)(uint32_t)wc->wr_id, total = messages(rank, r);
    if (wc->status) fail("send %d to rank %d: %s", m, r, ibv_wc_status_str(wc->status));
    EQ(wc->qp_num, peers[r].qp->qp_num);
    CHECK(m < total);
    for (; peers[r].done < m; peers[r].done++)
        if (plan_of(rank, r, peers[r].done).signalled)
            fail("completion %d of rank %d is missing, %d came", peers[r].done, r, m);
    EQ(m, peers[r].done);
    peers[r].done++;
    enum kind k = plan_of(rank, r, m).kind;
    static const enum ibv_wc_opcode ops[] = {IBV_WC_SEND,      IBV_WC_SEND,      IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE,
                                             IBV_WC_RDMA_READ, IBV_WC_FETCH_ADD, IBV_WC_FETCH_ADD,  IBV_WC_COMP_SWAP};
    EQ(wc->opcode, ops[k]);
}

static int sender_of(uint32_t qp_num) {
    for (int r = 0; r < size; r++)
        if (r != rank && peers[r].qp->qp_num == qp_num) return r;
    fail("a completion of queue pair %x, which is none of ours", qp_num);
}

// The next message of a peer that takes a receive. Everything that the peer wrote before it has come too.
static void received(const struct ibv_wc *wc) {
    int r = sender_of(wc->qp_num), slot = (int)wc->wr_id, from = slot / RECEIVES;
    if (wc->status) fail("receive from rank %d: %s", r, ibv_wc_status_str(wc->status));
    if (!srq) EQ(from, r);
    int total = messages(r, rank);
    while (peers[r].heard < total && !takes_receive(plan_of(r, rank, peers[r].heard).kind)) {
        int m = peers[r].heard++;
        struct plan w = plan_of(r, rank, m);
        if (w.kind == WRITE) verify(area_of(r, m), w.length, seed_of(r, rank, m), "a write before a receive");
    }
    if (peers[r].heard == total) fail("rank %d has sent more than it should", r);
    int m = peers[r].heard++;
    struct plan p = plan_of(r, rank, m);
    EQ(wc->opcode, p.kind == WRITE_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
    EQ(wc->byte_len, p.length);
    EQ(wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : 0, p.kind == SEND ? 0 : p.imm);
    char *at = p.kind == WRITE_IMM ? area_of(r, m) : ins + (size_t)slot * LARGEST;
    verify(at, p.length, seed_of(r, rank, m), "a message");
    post_receive(from, slot % RECEIVES);
}

static void completion(const struct ibv_wc *wc) {
    // The opcode of what failed is not told.
    if (wc->status || !(wc->opcode & IBV_WC_RECV)) sent(wc);
    else received(wc);
}

static int poll_plain(void) {
    struct ibv_wc wc[16];
    int n = ibv_poll_cq(cq, 16, wc);
    if (n < 0) fail("ibv_poll_cq returned %d", n);
    for (int i = 0; i < n; i++) completion(&wc[i]);
    return n;
}

static struct ibv_wc read_extended(struct ibv_cq_ex *ex) {
    struct ibv_wc wc = {.wr_id = ex->wr_id, .status = ex->status};
    if (wc.status) return wc;
    wc.opcode = ibv_wc_read_opcode(ex);
    wc.byte_len = ibv_wc_read_byte_len(ex);
    wc.wc_flags = ibv_wc_read_wc_flags(ex);
    wc.imm_data = wc.wc_flags & IBV_WC_WITH_IMM ? ibv_wc_read_imm_data(ex) : 0;
    wc.qp_num = ibv_wc_read_qp_num(ex);
    return wc;
}

static int poll_extended(void) {
    struct ibv_cq_ex *ex = (struct ibv_cq_ex *)cq;
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_wc wc[16];
    int n = 0, r = ibv_start_poll(ex, &attr);
    if (r == ENOENT) return 0;
    while (!r) {
        wc[n++] = read_extended(ex);
        r = n < 16 ? ibv_next_poll(ex) : ENOENT;
    }
    EQ(r, ENOENT);
    ibv_end_poll(ex);
    for (int i = 0; i < n; i++) completion(&wc[i]);
    return n;
}

static int poll_once(void) { return extended ? poll_extended() : poll_plain(); }

// Everything that this rank sends is done, and all that takes a receive has come.
static int round_over(void) {
    for (int r = 0; r < size; r++) {
        if (r == rank) continue;
        if (peers[r].done < messages(rank, r)) return 0;
        for (int m = peers[r].heard; m < messages(r, rank); m++)
            if (takes_receive(plan_of(r, rank, m).kind)) return 0;
    }
    return 1;
}

static void send_all(void) {
    for (int m = 0; m < MESSAGES; m++)
        for (int r = 0; r < size; r++)
            if (m < messages(rank, r)) {
                send_message(r, m, m == messages(rank, r) - 1);
                if (mix(round_number + (uint64_t)(m * 64 + r)) % 4 == 0) poll_once();
            }
}

// What came back, and what others have done here without a receive.
static void compare_rest(void) {
    for (int r = 0; r < size; r++) {
        for (int m = 0; m < messages(rank, r); m++) {
            struct plan p = plan_of(rank, r, m);
            if (p.kind == READ)
                for (uint32_t i = 0; i < p.length / 8; i++)
                    if (((uint64_t *)out_of(r, m))[i] != mix(((uint64_t)r + 77) * 1000003 + p.offset / 8 + i))
                        fail("READ %d from rank %d: word %u is wrong", m, r, i);
            if (p.kind == ADD || p.kind == SWAP) EQ(peers[r].results[m], peers[r].expected_old[m]);
        }
        for (int m = 0; m < messages(r, rank); m++) {
            struct plan p = plan_of(r, rank, m);
            if (p.kind == WRITE) verify(area_of(r, m), p.length, seed_of(r, rank, m), "a write");
        }
    }
    uint64_t all[MOST_RANKS][MOST_RANKS], total = 0, own[MOST_RANKS], theirs[MOST_RANKS][MOST_RANKS];
    gather(shared_added, sizeof shared_added, all);
    for (int r = 0; r < size; r++) total += all[r][rank];
    EQ(counters[0], total);
    for (int r = 0; r < size; r++) own[r] = peers[r].counter;
    gather(own, sizeof own, theirs);
    for (int r = 0; r < size; r++) EQ(counters[r + 1], theirs[r][rank]);
}

static void go_round(void) {
    int64_t t0 = now_ns();
    round_number++;
    for (int r = 0; r < size; r++) peers[r].done = peers[r].heard = 0;
    barrier();
    send_all();
    while (!round_over()) wait_cq(&port, cq, poll_once, t0, "verbs_rc");
    barrier();
    compare_rest();
}

// Other queue pairs and other keys, in the middle of it.
static void renew(void) {
    struct ibv_mr **regions[] = {&area_mr, &readable_mr, &counters_mr};
    barrier();
    for (int r = 0; r < size; r++)
        if (r != rank) Z(ibv_destroy_qp(peers[r].qp));
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        void *at = (*regions[i])->addr;
        size_t n = (*regions[i])->length;
        Z(ibv_dereg_mr(*regions[i]));
        *regions[i] = pinned(at, n);
    }
    connect_all();
}

static void give_back(void) {
    struct ibv_mr *regions[] = {out_mr, in_mr, area_mr, readable_mr, counters_mr, results_mr, gone_mr};
    barrier();
    for (int r = 0; r < size; r++)
        if (r != rank) Z(ibv_destroy_qp(peers[r].qp));
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    Z(ibv_query_qp(failed, &attr, IBV_QP_STATE, &init));
    EQ(attr.qp_state, IBV_QPS_ERR);
    Z(ibv_destroy_qp(failed));
    if (srq) Z(ibv_destroy_srq(srq));
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) Z(ibv_dereg_mr(regions[i]));
    Z(ibv_destroy_cq(cq));
    close_port(&port);
}

int main(int argc, char **argv) {
    world_begin("verbs_rc", number_of_ranks(argc, argv, 3));
    extended = given(argc, argv, "ex");
    int renews = given(argc, argv, "renew");
    make_queues(given(argc, argv, "event"), given(argc, argv, "srq"));
    leave_something();
    fail_one();
    make_memory();
    connect_all();
    while (world_running()) {
        go_round();
        if (renews && round_number % 16 == 0) renew();
    }
    give_back();
    return world_finish();
}
