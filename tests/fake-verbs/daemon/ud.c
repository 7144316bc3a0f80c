// Datagrams: they leave at once, arrive later or never, and nobody hears of it.
#include "fvd.h"
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>

struct datagram {
    struct timer timer;
    struct fv_address to;
    uint32_t qpn, qkey, imm, src_qp, from_number, length;
    uint16_t slid;
    bool has_imm, solicited, global, block_self;
    const struct host *src;
    uint8_t bytes[FV_GRH + FV_MTU]; // The header and what was sent.
};

struct group {
    struct group *next;
    union ibv_gid gid;
    struct qp *qp;
};
static struct group *groups;

int attach(struct ctx *c, const struct fv_request *r, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    struct qp *q = obj_get(c, K_QP, r->handle);
    if (!q || q->type != IBV_QPT_UD || r->group.gid.raw[0] != 0xff) return EINVAL;
    for (struct group *g = groups; g; g = g->next)
        if (g->qp == q && !memcmp(&g->gid, &r->group.gid, sizeof g->gid)) return 0;
    struct group *g = calloc(1, sizeof *g);
    if (!g) return ENOMEM;
    g->gid = r->group.gid;
    g->qp = q;
    g->next = groups;
    groups = g;
    return 0;
}

static int leave(struct qp *q, const union ibv_gid *gid) {
    int error = EINVAL;
    for (struct group **at = &groups; *at;) {
        struct group *g = *at;
        if (g->qp != q || (gid && memcmp(&g->gid, gid, sizeof *gid))) {
            at = &g->next;
            continue;
        }
        *at = g->next;
        free(g);
        error = 0;
    }
    return error;
}

int detach(struct ctx *c, const struct fv_request *r, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    struct qp *q = obj_get(c, K_QP, r->handle);
    return q ? leave(q, &r->group.gid) : EINVAL;
}

void groups_forget(struct qp *q) { leave(q, NULL); }

static bool is_ipv4(const union ibv_gid *g) {
    static const uint8_t head[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return !memcmp(g->raw, head, sizeof head);
}

static void put_checksum(uint8_t *ip) {
    uint32_t sum = 0;
    for (int i = 0; i < 20; i += 2) sum += (uint32_t)ip[i] << 8 | ip[i + 1];
    sum = ~((sum & 0xffff) + (sum >> 16));
    ip[10] = (uint8_t)(sum >> 8);
    ip[11] = (uint8_t)sum;
}

// The header of 40 bytes that the receiver finds before the data. RoCE v2 over IPv4 puts that header into the last 20;
// what is before it is anything, here what looks like one of IPv6.
static void write_header(struct datagram *d, const union ibv_gid *sgid, bool v2) {
    memset(d->bytes, 0, FV_GRH);
    if (v2 && is_ipv4(sgid)) {
        uint8_t *ip = d->bytes + 20;
        memset(d->bytes, 0x66, 20);
        ip[0] = 0x45;
        ip[8] = d->to.hop_limit;
        ip[9] = 17;
        memcpy(ip + 12, sgid->raw + 12, 4);
        memcpy(ip + 16, d->to.dgid.raw + 12, 4);
        put_checksum(ip);
        return;
    }
    struct ibv_grh *g = (struct ibv_grh *)d->bytes;
    g->version_tclass_flow = htonl(6u << 28 | (uint32_t)d->to.traffic_class << 20 | (d->to.flow_label & 0xfffff));
    g->paylen = htons((uint16_t)d->length);
    g->next_hdr = v2 ? 17 : 0x1b;
    g->hop_limit = d->to.hop_limit;
    g->sgid = *sgid;
    g->dgid = d->to.dgid;
}

static void hand_over(struct datagram *d, struct qp *p) {
    struct fv_recv r;
    struct side from, to;
    bool ready = p->attr.qp_state == IBV_QPS_RTR || p->attr.qp_state == IBV_QPS_RTS || p->attr.qp_state == IBV_QPS_SQD;
    if (p->type != IBV_QPT_UD || !ready || p->attr.qkey != d->qkey || !rq_peek(rq_of(p), &r)) {
        stats.dropped++;
        return;
    }
    struct fv_cqe e = {
        .opcode = IBV_WC_RECV,
        .byte_len = FV_GRH + d->length,
        .imm = d->imm,
        .wc_flags = (d->has_imm ? IBV_WC_WITH_IMM : 0) | (d->global ? IBV_WC_GRH : 0),
        .src_qp = d->src_qp,
        .slid = d->slid,
        .sl = d->to.sl,
    };
    side_of_buffer(&from, d->bytes, FV_GRH + d->length);
    if (!side_of_sges(&to, p->o.ctx, p->srq ? p->srq->pd : p->pd, r.sge, r.num_sge, IBV_ACCESS_LOCAL_WRITE))
        e.status = IBV_WC_LOC_PROT_ERR;
    else if (to.total < from.total) e.status = IBV_WC_LOC_LEN_ERR;
    else if (move(&from, &to, from.total) != M_OK) e.status = IBV_WC_LOC_PROT_ERR;
    complete_receive(p, &r, &e, d->solicited);
    if (e.status) fail_qp(p);
    else stats.datagrams++;
}

static void arrive(struct timer *t) {
    struct datagram *d = (struct datagram *)(void *)t;
    if (d->to.is_global && d->to.dgid.raw[0] == 0xff) {
        for (struct group *g = groups, *next; g; g = next) {
            next = g->next;
            bool own = g->qp->number == d->src_qp && g->qp->o.ctx->host == d->src;
            if (!memcmp(&g->gid, &d->to.dgid, sizeof g->gid) && !(own && d->block_self)) hand_over(d, g->qp);
        }
    } else {
        struct host *h = d->to.is_global ? host_by_gid(&d->to.dgid) : host_by_lid(d->to.dlid);
        struct qp *p = h ? map_get(&h->qps, d->qpn) : NULL;
        if (p) hand_over(d, p);
        else stats.dropped++;
    }
    free(d);
}

static void fail(struct qp *q, struct sent *sent, enum ibv_wc_status status) {
    sent->status = status;
    q->broken = true;
}

// A key with the highest bit says: the queue pair's own.
static struct datagram *pack(const struct qp *q, const struct fv_send *w, uint64_t length) {
    const struct fv_port *port = &q->o.ctx->host->port;
    struct datagram *d = calloc(1, sizeof *d);
    if (!d) abort();
    d->timer.fire = arrive;
    d->to = w->address;
    d->qpn = w->remote_qpn;
    d->qkey = w->remote_qkey & 0x80000000 ? q->attr.qkey : w->remote_qkey;
    d->imm = w->imm;
    d->src_qp = q->number;
    d->length = (uint32_t)length;
    d->slid = port->lid;
    d->has_imm = w->opcode == IBV_WR_SEND_WITH_IMM;
    d->solicited = w->flags & IBV_SEND_SOLICITED;
    d->global = w->address.is_global;
    d->block_self = q->create_flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
    d->src = q->o.ctx->host;
    if (!d->global) return d;
    uint8_t index = w->address.sgid_index < port->gid_count ? w->address.sgid_index : 0;
    write_header(d, &port->gid[index], port->gid_type[index] == IBV_GID_TYPE_ROCE_V2);
    return d;
}

void send_datagram(struct qp *q, uint32_t index, uint64_t now) {
    struct sent *sent = &q->sent[index & (q->sq_slots - 1)];
    struct fv_send w;
    struct side from, to;
    memcpy(&w, send_at(q, index), q->sq_stride < sizeof w ? q->sq_stride : sizeof w);
    uint64_t length = length_of(&w);
    sent->ack_at = now;
    if (length > FV_MTU) return fail(q, sent, IBV_WC_LOC_LEN_ERR);
    if (w.inline_len) side_of_buffer(&from, w.data, length);
    else if (!side_of_sges(&from, q->o.ctx, q->pd, w.sge, w.num_sge, 0)) return fail(q, sent, IBV_WC_LOC_PROT_ERR);
    struct datagram *d = pack(q, &w, length);
    side_of_buffer(&to, d->bytes + FV_GRH, length);
    if (move(&from, &to, length) != M_OK) {
        free(d);
        return fail(q, sent, IBV_WC_LOC_PROT_ERR);
    }
    if (chance(faults.ud_drop)) {
        stats.dropped++;
        free(d);
        return;
    }
    uint64_t late = (faults.latency_us + some(faults.jitter_us)) * 1000ull;
    if (late) timer_set(&d->timer, now + late);
    else arrive(&d->timer);
}
