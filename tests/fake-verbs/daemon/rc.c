// What a work request does at the other end, for connected queue pairs.
#include "fvd.h"
#include <stdlib.h>

// Patience with a peer that does not answer, between tries.
#define TRY_NS 10000000u

// Times of the code in min_rnr_timer, in units of 10 microseconds.
static const uint16_t rnr_times[32] = {0,    1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                       48,   64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                       2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

static uint64_t rnr_ns(uint8_t code) { return (code ? rnr_times[code] : 65536u) * 10000ull; }

static uint64_t timeout_ns(const struct qp *q) {
    if (faults.retry_us) return faults.retry_us * 1000ull;
    return q->attr.timeout ? 4096ull << (q->attr.timeout & 31) : TRY_NS;
}

uint64_t length_of(const struct fv_send *s) {
    uint64_t n = s->inline_len;
    for (uint32_t i = 0; i < s->num_sge && i < FV_MAX_SGE; i++) n += s->sge[i].length;
    return n;
}

static enum done finish(struct qp *q, struct sent *sent, uint64_t now) {
    q->stall = S_NONE;
    sated(q);
    sent->ack_at = now;
    if (q->type != IBV_QPT_RC) return D_DONE;
    sent->ack_at += (faults.latency_us + (uint64_t)faults.ack_us) * 1000;
    if (chance(faults.ack_drop)) {
        stats.acks_lost++;
        sent->lost = true;
        sent->ack_at += timeout_ns(q);
    }
    return D_DONE;
}

// It fails when everything before it has been acknowledged; nothing after it is executed.
static enum done fail(struct qp *q, struct sent *sent, enum ibv_wc_status status, uint64_t now) {
    q->stall = S_NONE;
    sated(q);
    sent->status = status;
    sent->ack_at = now;
    q->broken = true;
    return D_DONE;
}

static enum done nobody(struct qp *q, struct sent *sent, uint64_t now) {
    uint64_t wait = timeout_ns(q);
    if (q->type == IBV_QPT_UC) return finish(q, sent, now);
    if (q->stall != S_PEER) {
        stats.no_peer++;
        q->stall = S_PEER;
        q->give_up_at = q->attr.timeout ? now + wait * (q->attr.retry_cnt + 1u) : UINT64_MAX;
    } else if (now >= q->give_up_at) {
        return fail(q, sent, IBV_WC_RETRY_EXC_ERR, now);
    }
    q->stall_until = now + (wait < TRY_NS ? wait : TRY_NS);
    if (q->stall_until > q->give_up_at) q->stall_until = q->give_up_at;
    return D_LATER;
}

// The receiver is not ready. Its timer says when to come again; who is woken before by a new receive that another took
// has not tried.
static enum done not_ready(struct qp *q, struct qp *p, struct sent *sent, uint64_t now) {
    if (q->type == IBV_QPT_UC) return finish(q, sent, now);
    if (q->stall != S_RNR) {
        q->stall = S_RNR;
        q->rnr_left = q->attr.rnr_retry;
        q->give_up_at = now;
    }
    if (now >= q->give_up_at) {
        stats.rnr++;
        if (q->attr.rnr_retry != 7 && q->rnr_left-- == 0) return fail(q, sent, IBV_WC_RNR_RETRY_EXC_ERR, now);
        q->give_up_at = now + rnr_ns(p->attr.min_rnr_timer);
    }
    q->stall_until = q->give_up_at;
    if (p->srq) starve(q, p->srq);
    return D_LATER;
}

// The responder will not have it, and goes into error itself.
static enum done nak(struct qp *q, struct qp *p, struct sent *sent, enum ibv_wc_status status, uint64_t now) {
    if (q->type == IBV_QPT_UC) return finish(q, sent, now);
    if (p->attr.qp_state != IBV_QPS_ERR) {
        tell(p->o.ctx, status == IBV_WC_REM_ACCESS_ERR ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR, p->o.handle);
        fail_qp(p);
    }
    return fail(q, sent, status, now);
}

static bool source(struct qp *q, const struct fv_send *w, struct side *s) {
    if (!w->inline_len) return side_of_sges(s, q->o.ctx, q->pd, w->sge, w->num_sge, 0);
    side_of_buffer(s, (void *)w->data, w->inline_len);
    return true;
}

static void meet(struct qp *p) {
    if (p->established || p->attr.qp_state != IBV_QPS_RTR) return;
    p->established = true;
    tell(p->o.ctx, IBV_EVENT_COMM_EST, p->o.handle);
}

static bool has_imm(const struct fv_send *w) {
    return w->opcode == IBV_WR_SEND_WITH_IMM || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static struct fv_cqe arrival(const struct qp *q, const struct fv_send *w, uint64_t length) {
    struct fv_cqe e = {
        .opcode = IBV_WC_RECV, .byte_len = (uint32_t)length, .src_qp = q->number, .slid = q->o.ctx->host->port.lid};
    if (w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) e.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    if (has_imm(w)) {
        e.imm = w->imm;
        e.wc_flags = IBV_WC_WITH_IMM;
    }
    return e;
}

static enum done spoiled_receive(struct qp *q, struct qp *p, struct sent *sent, const struct fv_recv *r,
                                 enum ibv_wc_status status, uint64_t now) {
    struct fv_cqe e = {.status = status, .opcode = IBV_WC_RECV};
    complete_receive(p, r, &e, true);
    return nak(q, p, sent, status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR, now);
}

static enum done do_send(struct qp *q, struct qp *p, const struct fv_send *w, struct sent *sent, uint64_t now) {
    struct side from, to;
    struct fv_recv r;
    if (!source(q, w, &from)) return fail(q, sent, IBV_WC_LOC_PROT_ERR, now);
    if (chance(faults.rnr) || !rq_peek(rq_of(p), &r)) return not_ready(q, p, sent, now);
    if (!side_of_sges(&to, p->o.ctx, p->srq ? p->srq->pd : p->pd, r.sge, r.num_sge, IBV_ACCESS_LOCAL_WRITE))
        return spoiled_receive(q, p, sent, &r, IBV_WC_LOC_PROT_ERR, now);
    if (from.total > to.total) return spoiled_receive(q, p, sent, &r, IBV_WC_LOC_LEN_ERR, now);
    enum moved m = move(&from, &to, from.total);
    if (m == M_SOURCE) return fail(q, sent, IBV_WC_LOC_PROT_ERR, now);
    if (m == M_SINK) return spoiled_receive(q, p, sent, &r, IBV_WC_LOC_PROT_ERR, now);
    struct fv_cqe e = arrival(q, w, from.total);
    complete_receive(p, &r, &e, w->flags & IBV_SEND_SOLICITED);
    return finish(q, sent, now);
}

static enum done do_write(struct qp *q, struct qp *p, const struct fv_send *w, struct sent *sent, uint64_t now) {
    struct side from, to;
    struct fv_recv r;
    bool imm = w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    if (!source(q, w, &from)) return fail(q, sent, IBV_WC_LOC_PROT_ERR, now);
    if (!from.total && !imm && faults.limits.zero_write == FV_ZERO_FAILS)
        return nak(q, p, sent, IBV_WC_REM_INV_REQ_ERR, now);
    if (!(p->attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE)) return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    if (!side_of_key(&to, p->o.ctx, p->pd, w->rkey, w->remote_addr, from.total, IBV_ACCESS_REMOTE_WRITE))
        return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    if (imm && (chance(faults.rnr) || !rq_peek(rq_of(p), &r))) return not_ready(q, p, sent, now);
    enum moved m = move(&from, &to, from.total);
    if (m == M_SOURCE) return fail(q, sent, IBV_WC_LOC_PROT_ERR, now);
    if (m == M_SINK) return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    if (imm) {
        struct fv_cqe e = arrival(q, w, from.total);
        complete_receive(p, &r, &e, w->flags & IBV_SEND_SOLICITED);
    }
    return finish(q, sent, now);
}

// Takes the data out now; it comes home with the acknowledgement.
static enum done do_read(struct qp *q, struct qp *p, const struct fv_send *w, struct sent *sent, uint64_t now) {
    struct side from, to, buffer;
    if (!side_of_sges(&to, q->o.ctx, q->pd, w->sge, w->num_sge, IBV_ACCESS_LOCAL_WRITE))
        return fail(q, sent, IBV_WC_LOC_PROT_ERR, now);
    if (!(p->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ) ||
        !side_of_key(&from, p->o.ctx, p->pd, w->rkey, w->remote_addr, to.total, IBV_ACCESS_REMOTE_READ))
        return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    sent->bytes = (uint32_t)to.total;
    sent->data = to.total ? malloc(to.total) : NULL;
    side_of_buffer(&buffer, sent->data, to.total);
    if (move(&from, &buffer, to.total) != M_OK) return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    return finish(q, sent, now);
}

static enum done do_atomic(struct qp *q, struct qp *p, const struct fv_send *w, struct sent *sent, uint64_t now) {
    struct side there, here;
    uint64_t old, new;
    if (w->remote_addr % 8) return nak(q, p, sent, IBV_WC_REM_INV_REQ_ERR, now);
    if (!(p->attr.qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC) ||
        !side_of_key(&there, p->o.ctx, p->pd, w->rkey, w->remote_addr, 8, IBV_ACCESS_REMOTE_ATOMIC))
        return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    side_of_buffer(&here, &old, 8);
    if (move(&there, &here, 8) != M_OK) return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    new = w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? old + w->compare_add : old == w->compare_add ? w->swap : old;
    side_of_buffer(&here, &new, 8);
    if (move(&here, &there, 8) != M_OK) return nak(q, p, sent, IBV_WC_REM_ACCESS_ERR, now);
    sent->bytes = 8;
    sent->data = malloc(8);
    if (!sent->data) abort();
    memcpy(sent->data, &old, 8);
    return finish(q, sent, now);
}

// The work request at `index`, whose time has come.
enum done execute(struct qp *q, uint32_t index, uint64_t now) {
    struct sent *sent = &q->sent[index & (q->sq_slots - 1)];
    struct fv_send w;
    memcpy(&w, send_at(q, index), q->sq_stride < sizeof w ? q->sq_stride : sizeof w);
    if (q->type == IBV_QPT_UD) {
        send_datagram(q, index, now);
        return D_DONE;
    }
    if (length_of(&w) > FV_MAX_MESSAGE) return fail(q, sent, IBV_WC_LOC_LEN_ERR, now);
    struct qp *p = peer_of(q, true);
    if (!p || (q->type == IBV_QPT_UC && chance(faults.ud_drop))) return nobody(q, sent, now);
    meet(p);
    enum done d;
    switch (w.opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM: d = do_send(q, p, &w, sent, now); break;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: d = do_write(q, p, &w, sent, now); break;
    case IBV_WR_RDMA_READ: d = do_read(q, p, &w, sent, now); break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD: d = do_atomic(q, p, &w, sent, now); break;
    default: return fail(q, sent, IBV_WC_LOC_QP_OP_ERR, now);
    }
    if (d == D_DONE && !sent->status) {
        stats.messages++;
        stats.bytes += length_of(&w);
    }
    return d;
}
