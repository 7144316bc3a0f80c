// Datagrams between all ranks: each may be lost, none comes twice, changed, or to the wrong one.
//
// verbs_ud [RANKS] [event] [mcast] [lossless] [renew]: with completion events, also to a multicast group, on a fabric
// that loses nothing as long as there are receives, with a new queue pair after some rounds. In each round every rank
// asks every other, over and over until it has an answer; answers go to where the question came from.
#include "verbscheck.h"

enum { RECEIVES = 128, ROOM = 4096, GRH = 40, SENDS = 64, QKEY = 0x11223344, AGAIN_NS = 20000000 };
// The memory for what comes is registered under addresses that are no pointers.
#define ELSEWHERE 0x10000
enum kind { QUESTION = 1, ANSWER, TO_ALL };

struct datagram {
    uint64_t round, serial, seed;
    uint32_t from, to, kind, words; // Words of the pattern behind it.
    uint64_t asked;                 // Of an answer: the serial number of the question.
};

struct told {
    struct address at;
};

static struct port port;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *in_mr, *out_mr;
static char *in, *out;
static struct told told[MOST_RANKS];
static struct ibv_ah *to[MOST_RANKS];
static uint64_t round_number, serial, posted, completed, asked[MOST_RANKS];
static int lossless, answered[MOST_RANKS], questions[MOST_RANKS], heard_all[MOST_RANKS];
static int64_t asked_at[MOST_RANKS];
static struct ibv_ah *reply_to[SENDS];
static union ibv_gid group = {.raw = {0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, [15] = 0x77}};
static struct ibv_ah *group_ah;

// Serial numbers seen from each rank: the last SEEN of them, so that what overtakes is told from what comes twice.
enum { SEEN = 1 << 16 };
static uint64_t seen[MOST_RANKS][SEEN];

static void post_receive(int slot) {
    struct ibv_sge sge = {ELSEWHERE + (size_t)slot * (ROOM + GRH), ROOM + GRH, in_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uint64_t)slot, .sg_list = &sge, .num_sge = 1}, *bad;
    Z(ibv_post_recv(qp, &wr, &bad));
}

static void *pages(size_t n) {
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("mmap: %s", strerror(errno));
    return p;
}

static void make_queue_pair(void) {
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = SENDS,
                .max_recv_wr = RECEIVES,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = 64},
        .qp_type = IBV_QPT_UD,
        .sq_sig_all = 1,
    };
    qp = V(ibv_create_qp(port.pd, &init));
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    Z(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    for (int i = 0; i < RECEIVES; i++) post_receive(i);
    a.qp_state = IBV_QPS_RTR;
    Z(ibv_modify_qp(qp, &a, IBV_QP_STATE));
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = 1;
    Z(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

// Tells the others of the queue pair, and hears of theirs.
static void meet(void) {
    struct told mine = {address_of(&port, qp, 0)};
    gather(&mine, sizeof mine, told);
    for (int r = 0; r < size; r++) {
        struct ibv_ah_attr a = ah_attr_to(&port, &told[r].at);
        to[r] = V(ibv_create_ah(port.pd, &a));
    }
}

static void set_up(int events, int mcast) {
    open_port(&port, events);
    cq = V(ibv_create_cq(port.context, SENDS + RECEIVES, NULL, port.channel, 0));
    in = pages(RECEIVES * (ROOM + GRH));
    out = pages(SENDS * ROOM);
    in_mr = V(ibv_reg_mr_iova(port.pd, in, RECEIVES * (ROOM + GRH), ELSEWHERE, IBV_ACCESS_LOCAL_WRITE));
    out_mr = V(ibv_reg_mr(port.pd, out, SENDS * ROOM, 0));
    make_queue_pair();
    meet();
    if (!mcast) return;
    struct ibv_ah_attr a = {.dlid = 0xc001, .port_num = 1, .is_global = 1, .grh = {.dgid = group, .hop_limit = 1}};
    group_ah = V(ibv_create_ah(port.pd, &a));
    Z(ibv_attach_mcast(qp, &group, 0xc001));
    barrier();
}

// Sends and returns the serial number. `own` is destroyed when the datagram has left.
static uint64_t send_to(int r, enum kind kind, struct ibv_ah *ah, uint32_t qpn, uint64_t about, struct ibv_ah *own) {
    int slot = (int)(posted % SENDS);
    char *at = out + (size_t)slot * ROOM;
    struct datagram *d = (struct datagram *)at;
    uint64_t h = mix(round_number * 991 + ++serial + (uint64_t)rank);
    *d = (struct datagram){
        round_number, serial, h, (uint32_t)rank, (uint32_t)r, kind, (uint32_t)(h % ((ROOM - sizeof *d) / 8)), about};
    if (h % 4 == 0) d->words = 0;
    fill(d + 1, d->words * 8, h);
    struct ibv_sge sge = {(uintptr_t)at, (uint32_t)(sizeof *d + d->words * 8), out_mr->lkey};
    struct ibv_send_wr w = {.wr_id = posted,
                            .sg_list = &sge,
                            .num_sge = 1,
                            .opcode = IBV_WR_SEND_WITH_IMM,
                            .imm_data = htonl((uint32_t)serial)};
    struct ibv_send_wr *bad;
    if (sge.length <= 64) w.send_flags = IBV_SEND_INLINE;
    w.wr.ud.ah = ah;
    w.wr.ud.remote_qpn = qpn;
    w.wr.ud.remote_qkey = QKEY;
    Z(ibv_post_send(qp, &w, &bad));
    reply_to[slot] = own;
    posted++;
    return serial;
}

static int room(void) { return posted - completed < SENDS; }

static void sent(const struct ibv_wc *wc) {
    if (wc->status) fail("send: %s", ibv_wc_status_str(wc->status));
    EQ(wc->wr_id, completed);
    int slot = (int)(completed++ % SENDS);
    if (reply_to[slot]) Z(ibv_destroy_ah(reply_to[slot]));
    reply_to[slot] = NULL;
}

// A header of IPv4, with the right checksum, in the last 20 bytes.
static int is_ipv4(const uint8_t *raw) {
    uint32_t sum = 0;
    for (int i = 20; i < GRH; i += 2) sum += (uint32_t)raw[i] << 8 | raw[i + 1];
    return raw[20] == 0x45 && ((sum & 0xffff) + (sum >> 16)) == 0xffff;
}

// The header of 40 bytes is there when the completion says so, and names both ends.
static void check_header(const struct ibv_wc *wc, const struct ibv_grh *grh, const struct datagram *d) {
    if (port.gid_index < 0 && d->kind != TO_ALL) {
        CHECK(!(wc->wc_flags & IBV_WC_GRH));
        EQ(wc->slid, told[d->from].at.lid);
        return;
    }
    CHECK(wc->wc_flags & IBV_WC_GRH);
    if (d->kind == TO_ALL) return;
    const uint8_t *raw = (const uint8_t *)grh;
    int ipv4 = is_ipv4(raw);
    CHECK(!memcmp(ipv4 ? raw + 32 : grh->sgid.raw, told[d->from].at.gid.raw + (ipv4 ? 12 : 0), ipv4 ? 4 : 16));
    CHECK(!memcmp(ipv4 ? raw + 36 : grh->dgid.raw, port.gid.raw + (ipv4 ? 12 : 0), ipv4 ? 4 : 16));
}

static void check_datagram(const struct ibv_wc *wc, const struct ibv_grh *grh, const struct datagram *d) {
    EQ(wc->byte_len, GRH + sizeof *d + d->words * 8);
    CHECK(d->from < (unsigned)size && wc->wc_flags & IBV_WC_WITH_IMM);
    EQ(ntohl(wc->imm_data), (uint32_t)d->serial);
    EQ(wc->src_qp, told[d->from].at.qpn);
    EQ(wc->qp_num, qp->qp_num);
    if (d->kind != TO_ALL) EQ(d->to, rank);
    verify(d + 1, d->words * 8, d->seed, "a datagram");
    check_header(wc, grh, d);
    uint64_t *mark = &seen[d->from][d->serial % SEEN];
    if (*mark >= d->serial) fail("datagram %llu of rank %u came twice", (unsigned long long)d->serial, d->from);
    *mark = d->serial;
}

static void received(struct ibv_wc *wc) {
    if (wc->status) fail("receive: %s", ibv_wc_status_str(wc->status));
    struct ibv_grh *grh = (struct ibv_grh *)(void *)(in + wc->wr_id * (ROOM + GRH));
    const struct datagram *d = (const struct datagram *)(grh + 1);
    check_datagram(wc, grh, d);
    if (d->kind == QUESTION && room()) {
        questions[d->from]++;
        struct ibv_ah *back = V(ibv_create_ah_from_wc(port.pd, wc, grh, 1));
        send_to((int)d->from, ANSWER, back, wc->src_qp, d->serial, back);
    }
    if (d->kind == ANSWER && d->round <= round_number && d->asked == asked[d->from]) answered[d->from] = 1;
    if (d->kind == TO_ALL && d->round == round_number) heard_all[d->from]++;
    post_receive((int)wc->wr_id);
}

static int poll_once(void) {
    struct ibv_wc wc[8];
    int n = ibv_poll_cq(cq, 8, wc);
    if (n < 0) fail("ibv_poll_cq returned %d", n);
    for (int i = 0; i < n; i++) {
        if (wc[i].opcode & IBV_WC_RECV) received(&wc[i]);
        else sent(&wc[i]);
    }
    return n;
}

// Waits a little for something to come. What does not come is asked for again.
static void wait_some(void) {
    if (poll_once()) return;
    if (!port.channel) {
        sched_yield();
        return;
    }
    Z(ibv_req_notify_cq(cq, 0));
    if (poll_once()) return;
    struct pollfd f = {port.channel->fd, POLLIN, 0};
    if (poll(&f, 1, 10) != 1) return;
    struct ibv_cq *which;
    void *context;
    Z(ibv_get_cq_event(port.channel, &which, &context));
    ibv_ack_cq_events(which, 1);
}

static int ask_missing(void) {
    int missing = 0;
    for (int r = 0; r < size; r++) {
        if (answered[r]) continue;
        missing++;
        if (asked_at[r] && now_ns() - asked_at[r] < (lossless ? STUCK_NS : AGAIN_NS)) continue;
        if (!room()) continue;
        if (asked_at[r] && lossless) fail("no answer from rank %d", r);
        asked[r] = send_to(r, QUESTION, to[r], told[r].at.qpn, 0, NULL);
        asked_at[r] = now_ns();
    }
    return missing;
}

// Until everybody has all answers one answers the others' questions: the barrier has no room for that, so it is one of
// datagrams too.
static void go_round(void) {
    int64_t t0 = now_ns();
    int32_t mine = 0, all[MOST_RANKS];
    round_number++;
    memset(answered, 0, sizeof answered);
    memset(asked_at, 0, sizeof asked_at);
    memset(heard_all, 0, sizeof heard_all);
    if (group_ah) {
        barrier();
        send_to(0, TO_ALL, group_ah, 0xffffff, 0, NULL);
    }
    for (int open = 1; open;) {
        while (ask_missing() && now_ns() - t0 < STUCK_NS) {
            wait_some();
            if (now_ns() - t0 > 2000000) break;
        }
        mine = ask_missing();
        gather(&mine, sizeof mine, all);
        open = 0;
        for (int r = 0; r < size; r++) open |= all[r];
        if (now_ns() - t0 > STUCK_NS) fail("no answers for %d ranks", mine);
        while (poll_once()) {}
    }
    for (int r = 0; group_ah && lossless && r < size; r++) {
        while (!heard_all[r] && now_ns() - t0 < STUCK_NS) wait_some();
        EQ(heard_all[r], 1);
    }
}

// Another queue pair, in the middle of it. Answers to those of before are lost.
static void renew(void) {
    barrier();
    while (completed != posted) wait_some();
    if (group_ah) Z(ibv_detach_mcast(qp, &group, 0xc001));
    Z(ibv_destroy_qp(qp));
    for (int r = 0; r < size; r++) Z(ibv_destroy_ah(to[r]));
    barrier();
    make_queue_pair();
    if (group_ah) Z(ibv_attach_mcast(qp, &group, 0xc001));
    meet();
}

static void give_back(void) {
    barrier();
    while (completed != posted) wait_some();
    if (group_ah) {
        Z(ibv_detach_mcast(qp, &group, 0xc001));
        Z(ibv_destroy_ah(group_ah));
    }
    for (int r = 0; r < size; r++) Z(ibv_destroy_ah(to[r]));
    Z(ibv_destroy_qp(qp));
    Z(ibv_dereg_mr(in_mr));
    Z(ibv_dereg_mr(out_mr));
    Z(ibv_destroy_cq(cq));
    close_port(&port);
}

int main(int argc, char **argv) {
    world_begin("verbs_ud", number_of_ranks(argc, argv, 3));
    lossless = given(argc, argv, "lossless");
    set_up(given(argc, argv, "event"), given(argc, argv, "mcast"));
    while (world_running()) {
        go_round();
        if (given(argc, argv, "renew") && round_number % 16 == 0) renew();
    }
    give_back();
    return world_finish();
}
