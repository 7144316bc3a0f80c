// The engine: queue pairs that have something to do take turns.
#include "fvd.h"
#include <stdlib.h>

// Work requests of one queue pair in a turn, and turns before the sockets are looked at again.
#define BUDGET 32
#define TURNS 64

static struct qp *first, **last = &first;

void wake(struct qp *q) {
    if (q->queued) return;
    q->queued = true;
    q->run_next = NULL;
    *last = q;
    last = &q->run_next;
}

void wake_timer(struct timer *t) { wake((struct qp *)(void *)((char *)t - offsetof(struct qp, timer))); }

void forget_running(struct qp *q) {
    sated(q);
    if (!q->queued) return;
    for (struct qp **at = &first; *at; at = &(*at)->run_next)
        if (*at == q) {
            *at = q->run_next;
            if (!q->run_next) last = at;
            break;
        }
    q->queued = false;
}

// A sender waits for a receive in a shared queue.
void starve(struct qp *q, struct srq *s) {
    if (q->starved_at) return;
    q->starved_at = s;
    struct qp **at = &s->starved;
    while (*at) at = &(*at)->starved_next;
    q->starved_next = NULL;
    *at = q;
}

void sated(struct qp *q) {
    if (!q->starved_at) return;
    for (struct qp **at = &q->starved_at->starved; *at; at = &(*at)->starved_next)
        if (*at == q) {
            *at = q->starved_next;
            break;
        }
    q->starved_at = NULL;
}

struct host *host_of(const struct ibv_ah_attr *a) {
    return a->is_global ? host_by_gid(&a->grh.dgid) : host_by_lid(a->dlid);
}

// The queue pair at the other end, which must know of this one when `established` is asked.
struct qp *peer_of(const struct qp *q, bool established) {
    struct host *h = host_of(&q->attr.ah_attr);
    struct qp *p = h ? map_get(&h->qps, q->attr.dest_qp_num) : NULL;
    if (!p || p->type != q->type || !established) return p;
    bool ready = p->attr.qp_state == IBV_QPS_RTR || p->attr.qp_state == IBV_QPS_RTS || p->attr.qp_state == IBV_QPS_SQD;
    if (!ready || p->attr.dest_qp_num != q->number || host_of(&p->attr.ah_attr) != q->o.ctx->host) return NULL;
    return p->attr.rq_psn == q->attr.sq_psn ? p : NULL;
}

static void try_again(struct qp *q) {
    q->stall_until = 0;
    wake(q);
}

// Somebody may wait for a receive of this queue pair, or for it to be ready.
void receives_posted(struct qp *q) {
    if (q->type == IBV_QPT_UD || q->attr.qp_state < IBV_QPS_RTR || q->attr.qp_state == IBV_QPS_ERR) return;
    struct qp *p = peer_of(q, false);
    if (p && p->stall != S_NONE) try_again(p);
}

void receives_posted_srq(struct srq *s) {
    atomic_store(&s->rq.shared->belled, 0);
    while (s->starved) {
        struct qp *q = s->starved;
        sated(q);
        try_again(q);
    }
}

void work_in_qp(struct qp *q) {
    if (atomic_exchange(&q->ring->rq.belled, 0)) receives_posted(q);
    atomic_store(&q->ring->sq.belled, 0);
    wake(q);
}

static uint64_t us(uint64_t n) { return n * 1000; }

// Gives what is new in the send queue its time of arrival at the other end: in order within a queue pair, in any among
// several.
static void look(struct qp *q, uint64_t now) {
    uint32_t tail = atomic_load_explicit(&q->ring->sq.tail, memory_order_acquire);
    for (; q->seen != tail; q->seen++) {
        uint64_t at = now + us(faults.latency_us) + some(us(faults.jitter_us));
        if (faults.bandwidth_mb) {
            uint64_t start = q->last_exec > now ? q->last_exec : now;
            at = start + us(faults.latency_us) + length_of(send_at(q, q->seen)) * 1000 / faults.bandwidth_mb;
        }
        if (at < q->last_exec) at = q->last_exec;
        q->sent[q->seen & (q->sq_slots - 1)] = (struct sent){.exec_at = q->last_exec = at};
    }
}

static struct sent *sent_at(struct qp *q, uint32_t index) { return &q->sent[index & (q->sq_slots - 1)]; }

// What came back of a READ or an atomic operation goes where it was wanted.
static enum ibv_wc_status bring_home(struct qp *q, uint32_t index) {
    struct sent *s = sent_at(q, index);
    const struct fv_send *w = send_at(q, index);
    struct side from, to;
    side_of_buffer(&from, s->data, s->bytes);
    if (!side_of_sges(&to, q->o.ctx, q->pd, w->sge, w->num_sge, IBV_ACCESS_LOCAL_WRITE) || to.total < s->bytes)
        return IBV_WC_LOC_PROT_ERR;
    return move(&from, &to, s->bytes) == M_OK ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR;
}

static void complete_one(struct qp *q) {
    struct sent *s = sent_at(q, q->una);
    enum ibv_wc_status status = s->status;
    if (!status && s->data) status = bring_home(q, q->una);
    free(s->data);
    s->data = NULL;
    complete_send(q, q->una++, status);
    if (!status || q->attr.qp_state == IBV_QPS_ERR) return;
    if (q->type == IBV_QPT_RC) {
        fail_qp(q);
    } else {
        q->attr.qp_state = IBV_QPS_SQE;
        wake(q);
    }
}

// Completes what is acknowledged: an acknowledgement is one for all that came before it, unless that has to bring
// something back. Returns when the next one is due.
static uint64_t take_acks(struct qp *q, uint64_t now) {
    uint64_t due = UINT64_MAX;
    uint32_t reach = q->una;
    if (faults.hold_acks && q->type == IBV_QPT_RC) return due;
    for (uint32_t i = q->una; i != q->next; i++) {
        const struct sent *s = sent_at(q, i);
        if (s->ack_at <= now) {
            reach = i + 1;
            due = UINT64_MAX;
            continue;
        }
        if (s->ack_at < due) due = s->ack_at;
        if (!s->lost || s->data) break;
    }
    while (q->una != reach && q->attr.qp_state != IBV_QPS_ERR && q->attr.qp_state != IBV_QPS_SQE) complete_one(q);
    return due;
}

static void drained(struct qp *q) {
    if (!q->attr.sq_draining || q->una != q->next) return;
    q->attr.sq_draining = 0;
    if (q->attr.en_sqd_async_notify) tell(q->o.ctx, IBV_EVENT_SQ_DRAINED, q->o.handle);
}

static void run(struct qp *q) {
    uint64_t now = now_ns(), due = UINT64_MAX;
    if (q->attr.qp_state < IBV_QPS_RTS) return;
    if (q->attr.qp_state <= IBV_QPS_SQD) look(q, now);
    for (int budget = BUDGET;; budget--) {
        due = take_acks(q, now);
        if (q->attr.qp_state == IBV_QPS_ERR || q->attr.qp_state == IBV_QPS_SQE) {
            timer_stop(&q->timer);
            flush(q);
            return;
        }
        // What has begun, and waits for its peer, goes on.
        if (q->attr.qp_state == IBV_QPS_SQD && q->stall == S_NONE) {
            drained(q);
            break;
        }
        if (q->next == q->seen || q->broken || faults.hold_messages) break;
        uint64_t at = sent_at(q, q->next)->exec_at;
        if (q->stall != S_NONE && q->stall_until > at) at = q->stall_until;
        if (at <= now && budget == 0) {
            wake(q);
            return;
        }
        if (at <= now && execute(q, q->next, now) == D_DONE) {
            q->next++;
            continue;
        }
        if (at <= now) at = q->stall_until;
        if (at < due) due = at;
        break;
    }
    if (due == UINT64_MAX) timer_stop(&q->timer);
    else timer_set(&q->timer, due);
}

// Some turns. True when there are more to be had.
bool run_some(void) {
    for (int n = 0; n < TURNS && first; n++) {
        struct qp *q = first;
        first = q->run_next;
        if (!first) last = &first;
        q->queued = false;
        run(q);
    }
    return first != NULL;
}

// Other faults: everybody looks again.
void restart_all(void) {
    for (struct ctx *c = contexts; c; c = c->next)
        for (struct obj *o = c->dead ? NULL : c->list; o; o = o->next)
            if (o->kind == K_QP) wake((struct qp *)o);
}
