// Completions, and the events that tell of them.
#include "fvd.h"
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define RETRY_NS 1000000

// An event into a channel's pipe. Without room it waits: no process can hold the daemon up.
static void ring_channel(struct channel *ch, uint32_t handle) {
    if (!ch->count && write(ch->fd, &handle, sizeof handle) == (ssize_t)sizeof handle) return;
    if (!ch->count && errno != EAGAIN) return;
    uint32_t *more = realloc(ch->waiting, (ch->count + 1) * sizeof *more);
    if (!more) abort();
    ch->waiting = more;
    ch->waiting[ch->count++] = handle;
    if (ch->count == 1) timer_set(&ch->timer, now_ns() + RETRY_NS);
}

void channel_retry(struct timer *t) {
    struct channel *ch = (struct channel *)(void *)((char *)t - offsetof(struct channel, timer));
    uint32_t n = 0;
    while (n < ch->count && write(ch->fd, &ch->waiting[n], sizeof *ch->waiting) == (ssize_t)sizeof *ch->waiting) n++;
    bool gone = n < ch->count && errno != EAGAIN;
    ch->count = gone ? 0 : ch->count - n;
    memmove(ch->waiting, ch->waiting + n, ch->count * sizeof *ch->waiting);
    if (ch->count) timer_set(t, now_ns() + RETRY_NS);
}

void tell(struct ctx *c, enum ibv_event_type type, uint32_t handle) {
    struct fv_async a = {type, handle};
    // Who does not read 8192 of these events loses what follows, as with a real device's queue.
    if (c->async >= 0 && write(c->async, &a, sizeof a) < 0) return;
}

// False when the queue has no room: it is of no use from then on.
bool push_cqe(struct cq *cq, struct fv_cqe *e, bool solicited) {
    uint32_t tail = atomic_load_explicit(&cq->ring->tail, memory_order_relaxed);
    if (cq->overrun) return false;
    if (tail - atomic_load_explicit(&cq->ring->head, memory_order_acquire) >= cq->cqe) {
        cq->overrun = true;
        stats.overruns++;
        tell(cq->o.ctx, IBV_EVENT_CQ_ERR, cq->o.handle);
        return false;
    }
    e->time_ns = now_ns();
    cq->ring->entry[tail & cq->mask] = *e;
    atomic_store(&cq->ring->tail, tail + 1);
    uint32_t armed = atomic_load(&cq->ring->armed);
    bool wanted = armed == FV_ARMED_ANY || (armed == FV_ARMED_SOLICITED && (solicited || e->status));
    if (!wanted) return true;
    atomic_store(&cq->ring->armed, FV_UNARMED);
    if (cq->channel) ring_channel(cq->channel, cq->o.handle);
    return true;
}

struct fv_send *send_at(const struct qp *q, uint32_t index) {
    return (struct fv_send *)(void *)(q->ring->place + (size_t)(index & (q->sq_slots - 1)) * q->sq_stride);
}

static enum ibv_wc_opcode opcode_of(uint32_t op) {
    switch (op) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP: return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD: return IBV_WC_FETCH_ADD;
    default: return IBV_WC_SEND;
    }
}

void complete_send(struct qp *q, uint32_t index, enum ibv_wc_status status) {
    const struct fv_send *s = send_at(q, index);
    if (status == IBV_WC_SUCCESS && !q->sig_all && !(s->flags & IBV_SEND_SIGNALED)) return;
    struct fv_cqe e = {
        .owner = q->owner,
        .wr_id = s->wr_id,
        .status = status,
        .opcode = opcode_of(s->opcode),
        .vendor_err = status ? 0xbe000000 | status : 0,
        .byte_len = q->sent[index & (q->sq_slots - 1)].bytes,
        .qp_num = q->number,
        .is_send = 1,
        .wqe = index,
    };
    if (!push_cqe(q->scq, &e, false) && q->attr.qp_state != IBV_QPS_ERR) {
        tell(q->o.ctx, IBV_EVENT_QP_FATAL, q->o.handle);
        fail_qp(q);
    }
}

struct rq *rq_of(struct qp *q) { return q->srq ? &q->srq->rq : &q->rq; }

// The oldest receive, without taking it. The library's memory is not to be trusted to stay as it is.
bool rq_peek(const struct rq *rq, struct fv_recv *out) {
    if (!rq->shared || rq->head == atomic_load_explicit(&rq->shared->tail, memory_order_acquire)) return false;
    const uint8_t *at = rq->place + (size_t)(rq->head & (rq->slots - 1)) * rq->stride;
    memcpy(out, at, rq->stride < sizeof *out ? rq->stride : sizeof *out);
    return true;
}

static void srq_limit(struct srq *s) {
    uint32_t left = atomic_load(&s->rq.shared->tail) - s->rq.head;
    if (!s->attr.srq_limit || left >= s->attr.srq_limit) return;
    s->attr.srq_limit = 0;
    tell(s->o.ctx, IBV_EVENT_SRQ_LIMIT_REACHED, s->o.handle);
}

// Takes the oldest receive and completes it. `e` says what came.
bool complete_receive(struct qp *q, const struct fv_recv *r, struct fv_cqe *e, bool solicited) {
    struct rq *rq = rq_of(q);
    e->owner = q->owner;
    e->wr_id = r->wr_id;
    e->qp_num = q->number;
    e->is_srq = q->srq != NULL;
    e->wqe = rq->head++;
    atomic_store(&rq->shared->head, rq->head);
    if (q->srq) srq_limit(q->srq);
    if (push_cqe(q->rcq, e, solicited)) return true;
    tell(q->o.ctx, IBV_EVENT_QP_FATAL, q->o.handle);
    fail_qp(q);
    return false;
}

static void flush_receives(struct qp *q) {
    struct fv_recv r;
    while (!q->srq && rq_peek(&q->rq, &r)) {
        struct fv_cqe e = {.owner = q->owner,
                           .wr_id = r.wr_id,
                           .status = IBV_WC_WR_FLUSH_ERR,
                           .opcode = IBV_WC_RECV,
                           .qp_num = q->number};
        e.wqe = q->rq.head++;
        push_cqe(q->rcq, &e, true);
    }
}

// Completes all that is left in a queue pair in error.
void flush(struct qp *q) {
    uint32_t tail = atomic_load_explicit(&q->ring->sq.tail, memory_order_acquire);
    while (q->una != tail) {
        struct sent *s = &q->sent[q->una & (q->sq_slots - 1)];
        free(s->data);
        *s = (struct sent){0};
        complete_send(q, q->una++, IBV_WC_WR_FLUSH_ERR);
    }
    q->next = q->seen = tail;
    if (q->attr.qp_state != IBV_QPS_ERR) return;
    flush_receives(q);
    if (q->srq && !q->last_said) {
        q->last_said = true;
        tell(q->o.ctx, IBV_EVENT_QP_LAST_WQE_REACHED, q->o.handle);
    }
}

// The queue pair goes into error. A flush follows when it is next run, so that what called completes first.
void fail_qp(struct qp *q) {
    if (q->attr.qp_state == IBV_QPS_ERR) return;
    q->attr.qp_state = IBV_QPS_ERR;
    sated(q);
    wake(q);
}
