// Queue pairs: making, the states and what each change must bring, multicast groups.
#include "fvd.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

int create_qp(struct ctx *c, const struct fv_request *r, int *fds, struct fv_reply *a) {
    const struct fv_qp_make *m = &r->qp;
    struct pd *pd = obj_get(c, K_PD, m->pd);
    struct cq *scq = obj_get(c, K_CQ, m->send_cq), *rcq = obj_get(c, K_CQ, m->recv_cq);
    struct srq *srq = m->srq ? obj_get(c, K_SRQ, m->srq) : NULL;
    size_t sends = (size_t)m->sq_slots * m->sq_stride,
           bytes = sizeof(struct fv_qp_ring) + sends + (size_t)m->rq_slots * m->rq_stride;
    if (!pd || !scq || !rcq || (m->srq && !srq) || m->cap.max_send_wr > faults.limits.max_qp_wr) return EINVAL;
    if (m->sq_stride < fv_send_stride(m->cap.max_send_sge, m->cap.max_inline_data)) return EINVAL;
    if (c->host->qps.used >= faults.limits.max_qp) return ENOMEM;
    struct fv_qp_ring *ring = map_shared(fds[0], bytes);
    if (!ring) return EINVAL;
    struct qp *q = obj_new(c, K_QP, sizeof *q);
    q->pd = pd;
    q->scq = scq;
    q->rcq = rcq;
    q->srq = srq;
    pd->o.users++;
    scq->o.users++;
    rcq->o.users++;
    if (srq) srq->o.users++;
    q->ring = ring;
    q->bytes = bytes;
    q->owner = m->owner;
    q->create_flags = m->create_flags;
    q->sq_slots = m->sq_slots;
    q->sq_stride = m->sq_stride;
    q->type = m->type;
    q->sig_all = m->sq_sig_all;
    q->sent = calloc(m->sq_slots, sizeof *q->sent);
    if (!q->sent) abort();
    if (!srq) q->rq = (struct rq){&ring->rq, ring->place + sends, m->rq_slots, m->rq_stride, 0};
    q->timer.fire = wake_timer;
    q->number = take_qpn(c->host, q);
    a->handle = q->o.handle;
    a->qp.number = q->number;
    return 0;
}

// What a change of state must bring and what it may.
static const struct change {
    enum ibv_qp_type type; // 0: any.
    enum ibv_qp_state from, to;
    int must, may;
} changes[] = {
    {IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPT_UC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPT_UD, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPT_UC, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPT_UC, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE},
    {IBV_QPT_UC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN,
     IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE},
    {IBV_QPT_UD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPT_UC, IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {0, IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPT_UC, IBV_QPS_SQD, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE},
    {IBV_QPT_UD, IBV_QPS_SQD, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC |
         IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_PATH_MIG_STATE},
    {IBV_QPT_UC, IBV_QPS_SQD, IBV_QPS_SQD, 0,
     IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PATH_MIG_STATE},
    {IBV_QPT_UD, IBV_QPS_SQD, IBV_QPS_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPT_UC, IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS},
    {IBV_QPT_UD, IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

static bool allowed(const struct qp *q, enum ibv_qp_state to, int mask) {
    int given = mask & ~IBV_QP_STATE;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && q->attr.qp_state != IBV_QPS_RESET)) return given == 0;
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        const struct change *c = &changes[i];
        if ((c->type && c->type != q->type) || c->from != q->attr.qp_state || c->to != to) continue;
        return (given & c->must) == c->must && !(given & ~(c->must | c->may));
    }
    return false;
}

// Values that no port here has.
static bool sensible(const struct qp *q, const struct ibv_qp_attr *a, int mask) {
    const struct fv_port *p = &q->o.ctx->host->port;
    if (mask & IBV_QP_PORT && a->port_num != 1) return false;
    if (mask & IBV_QP_PKEY_INDEX && a->pkey_index) return false;
    if (mask & IBV_QP_PATH_MTU && (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096)) return false;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC && a->max_rd_atomic > 16) return false;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC && a->max_dest_rd_atomic > 16) return false;
    if (mask & IBV_QP_DEST_QPN && a->dest_qp_num > 0xffffff) return false;
    if (!(mask & IBV_QP_AV)) return true;
    if (a->ah_attr.port_num != 1 || (a->ah_attr.is_global && a->ah_attr.grh.sgid_index >= p->gid_count)) return false;
    return a->ah_attr.is_global || p->link_layer == IBV_LINK_LAYER_INFINIBAND;
}

static void take_values(struct ibv_qp_attr *to, const struct ibv_qp_attr *from, int mask) {
    if (mask & IBV_QP_ACCESS_FLAGS) to->qp_access_flags = from->qp_access_flags;
    if (mask & IBV_QP_PKEY_INDEX) to->pkey_index = from->pkey_index;
    if (mask & IBV_QP_PORT) to->port_num = from->port_num;
    if (mask & IBV_QP_QKEY) to->qkey = from->qkey;
    if (mask & IBV_QP_AV) to->ah_attr = from->ah_attr;
    if (mask & IBV_QP_PATH_MTU) to->path_mtu = from->path_mtu;
    if (mask & IBV_QP_TIMEOUT) to->timeout = from->timeout;
    if (mask & IBV_QP_RETRY_CNT) to->retry_cnt = from->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY) to->rnr_retry = from->rnr_retry;
    if (mask & IBV_QP_RQ_PSN) to->rq_psn = from->rq_psn & 0xffffff;
    if (mask & IBV_QP_SQ_PSN) to->sq_psn = from->sq_psn & 0xffffff;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC) to->max_rd_atomic = from->max_rd_atomic;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) to->max_dest_rd_atomic = from->max_dest_rd_atomic;
    if (mask & IBV_QP_MIN_RNR_TIMER) to->min_rnr_timer = from->min_rnr_timer & 31;
    if (mask & IBV_QP_DEST_QPN) to->dest_qp_num = from->dest_qp_num;
    if (mask & IBV_QP_PATH_MIG_STATE) to->path_mig_state = from->path_mig_state;
    if (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) to->en_sqd_async_notify = from->en_sqd_async_notify;
    if (mask & IBV_QP_ALT_PATH) {
        to->alt_ah_attr = from->alt_ah_attr;
        to->alt_pkey_index = from->alt_pkey_index;
        to->alt_port_num = from->alt_port_num;
        to->alt_timeout = from->alt_timeout;
    }
}

// Back to the beginning: nothing posted, nothing known.
static void reset(struct qp *q) {
    for (uint32_t i = 0; i < q->sq_slots; i++) free(q->sent[i].data);
    memset(q->sent, 0, q->sq_slots * sizeof *q->sent);
    sated(q);
    timer_stop(&q->timer);
    q->attr = (struct ibv_qp_attr){0};
    q->una = q->next = q->seen = q->rq.head = 0;
    q->broken = q->established = q->last_said = false;
    q->stall = S_NONE;
    q->last_exec = 0;
    atomic_store(&q->ring->sq.tail, 0);
    atomic_store(&q->ring->rq.tail, 0);
    atomic_store(&q->ring->rq.head, 0);
}

int modify_qp(struct ctx *c, const struct fv_request *r, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    struct qp *q = obj_get(c, K_QP, r->handle);
    int mask = (int)r->modify.mask;
    if (!q) return EINVAL;
    if (mask & IBV_QP_CUR_STATE && r->modify.attr.cur_qp_state != q->attr.qp_state) return EINVAL;
    enum ibv_qp_state to = mask & IBV_QP_STATE ? r->modify.attr.qp_state : q->attr.qp_state;
    if (!allowed(q, to, mask) || !sensible(q, &r->modify.attr, mask)) return EINVAL;
    if (to == IBV_QPS_RESET) {
        reset(q);
        return 0;
    }
    take_values(&q->attr, &r->modify.attr, mask);
    if (to == IBV_QPS_SQD && q->attr.qp_state == IBV_QPS_RTS) q->attr.sq_draining = 1;
    bool ready = to == IBV_QPS_RTR && q->attr.qp_state == IBV_QPS_INIT;
    if (to == IBV_QPS_RTS && q->attr.qp_state == IBV_QPS_SQE) q->broken = false;
    if (to == IBV_QPS_ERR) {
        fail_qp(q);
        flush(q);
    }
    q->attr.qp_state = to;
    if (ready) receives_posted(q);
    wake(q);
    return 0;
}

int query_qp(struct ctx *c, const struct fv_request *r, int *fds, struct fv_reply *a) {
    (void)fds;
    struct qp *q = obj_get(c, K_QP, r->handle);
    if (!q) return EINVAL;
    a->qp.attr = q->attr;
    a->qp.attr.cur_qp_state = q->attr.qp_state;
    return 0;
}

int destroy_qp(struct ctx *c, const struct fv_request *r, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    struct qp *q = obj_get(c, K_QP, r->handle);
    if (!q) return EINVAL;
    obj_free(q);
    return 0;
}
