// Work requests into the rings.
#include "fv.h"

// The place of the work request `ahead` of the tail, or NULL when the queue is full. The lock is held.
struct fv_send *fv_send_place(struct fv_qp *qp, uint32_t ahead) {
    uint32_t at = qp->sq_tail + ahead;
    if (at - atomic_load(&qp->sq_done) >= qp->cap.max_send_wr) return NULL;
    return (struct fv_send *)(void *)(qp->ring->place + (size_t)(at & (qp->sq_slots - 1)) * qp->sq_stride);
}

int fv_set_address(struct fv_send *s, struct ibv_ah *ah) {
    if (!ah) return EINVAL;
    const struct ibv_ah_attr *a = &((struct fv_ah *)ah)->attr;
    s->address = (struct fv_address){
        .dgid = a->grh.dgid,
        .flow_label = a->grh.flow_label,
        .dlid = a->dlid,
        .is_global = a->is_global,
        .sgid_index = a->grh.sgid_index,
        .hop_limit = a->grh.hop_limit,
        .traffic_class = a->grh.traffic_class,
        .sl = a->sl,
    };
    return 0;
}

static bool allowed(enum ibv_qp_type type, enum ibv_wr_opcode op) {
    switch (op) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM: return true;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: return type != IBV_QPT_UD;
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD: return type == IBV_QPT_RC;
    default: return false;
    }
}

static int put_data(const struct fv_qp *qp, struct fv_send *s, const struct ibv_send_wr *wr) {
    if (!(wr->send_flags & IBV_SEND_INLINE)) {
        if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge) return EINVAL;
        s->num_sge = (uint32_t)wr->num_sge;
        s->inline_len = 0;
        if (wr->num_sge) memcpy(s->sge, wr->sg_list, (size_t)wr->num_sge * sizeof *s->sge);
        return 0;
    }
    size_t n = 0;
    for (int i = 0; i < wr->num_sge; i++) {
        if (n + wr->sg_list[i].length > qp->cap.max_inline_data) return EINVAL;
        memcpy(s->data + n, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        n += wr->sg_list[i].length;
    }
    s->num_sge = 0;
    s->inline_len = (uint32_t)n;
    return 0;
}

static size_t length_of(const struct ibv_send_wr *wr) {
    size_t n = 0;
    for (int i = 0; i < wr->num_sge; i++) n += wr->sg_list[i].length;
    return n;
}

static int put_send(struct fv_qp *qp, struct fv_send *s, const struct ibv_send_wr *wr) {
    const struct fv_limits *l = &to_ctx(qp->base.context)->limits;
    if (!allowed(qp->base.qp_type, wr->opcode)) return EINVAL;
    if (l->zero_write == FV_ZERO_REFUSED && wr->opcode == IBV_WR_RDMA_WRITE && !length_of(wr)) return EINVAL;
    s->wr_id = wr->wr_id;
    s->opcode = wr->opcode;
    s->flags = wr->send_flags;
    s->imm = wr->imm_data;
    if (qp->base.qp_type == IBV_QPT_UD) {
        s->remote_qpn = wr->wr.ud.remote_qpn;
        s->remote_qkey = wr->wr.ud.remote_qkey;
        if (fv_set_address(s, wr->wr.ud.ah)) return EINVAL;
    } else if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        s->remote_addr = wr->wr.atomic.remote_addr;
        s->rkey = wr->wr.atomic.rkey;
        s->compare_add = wr->wr.atomic.compare_add;
        s->swap = wr->wr.atomic.swap;
    } else {
        s->remote_addr = wr->wr.rdma.remote_addr;
        s->rkey = wr->wr.rdma.rkey;
    }
    return put_data(qp, s, wr);
}

int fv_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct fv_qp *qp = to_qp(ibqp);
    int error = 0;
    uint32_t n = 0;
    pthread_mutex_lock(&qp->sq_lock);
    if (ibqp->state < IBV_QPS_RTS) error = EINVAL;
    for (; wr && !error; n += !error) {
        struct fv_send *s = fv_send_place(qp, n);
        error = s ? put_send(qp, s, wr) : ENOMEM;
        if (!error) wr = wr->next;
    }
    if (error) *bad = wr;
    qp->sq_tail += n;
    if (n) atomic_store(&qp->ring->sq.tail, qp->sq_tail);
    pthread_mutex_unlock(&qp->sq_lock);
    if (n) fv_ring(to_ctx(ibqp->context), ibqp->handle, &qp->ring->sq);
    return error;
}

static void put_recv(struct fv_recv *r, const struct ibv_recv_wr *wr) {
    r->wr_id = wr->wr_id;
    r->num_sge = (uint32_t)wr->num_sge;
    if (wr->num_sge) memcpy(r->sge, wr->sg_list, (size_t)wr->num_sge * sizeof *r->sge);
}

int fv_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct fv_qp *qp = to_qp(ibqp);
    const uint8_t *base = qp->ring->place + (size_t)qp->sq_slots * qp->sq_stride;
    int error = 0;
    uint32_t n = 0;
    pthread_mutex_lock(&qp->rq_lock);
    if (ibqp->srq || ibqp->state == IBV_QPS_RESET) error = EINVAL;
    for (; wr && !error; n += !error) {
        uint32_t at = qp->rq_tail + n;
        if (at - atomic_load(&qp->rq_done) >= qp->cap.max_recv_wr) error = ENOMEM;
        else if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_recv_sge) error = EINVAL;
        if (error) break;
        put_recv((struct fv_recv *)(void *)(base + (size_t)(at & (qp->rq_slots - 1)) * qp->rq_stride), wr);
        wr = wr->next;
    }
    if (error) *bad = wr;
    qp->rq_tail += n;
    if (n) atomic_store(&qp->ring->rq.tail, qp->rq_tail);
    pthread_mutex_unlock(&qp->rq_lock);
    if (n) fv_ring(to_ctx(ibqp->context), ibqp->handle, &qp->ring->rq);
    return error;
}

int fv_post_srq_recv(struct ibv_srq *ibsrq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct fv_srq *s = to_srq(ibsrq);
    int error = 0;
    uint32_t n = 0;
    pthread_mutex_lock(&s->lock);
    uint32_t tail = atomic_load_explicit(&s->ring->rq.tail, memory_order_relaxed);
    for (; wr; n++, wr = wr->next) {
        if (atomic_load(&s->outstanding) >= s->attr.max_wr) error = ENOMEM;
        else if (wr->num_sge < 0 || (uint32_t)wr->num_sge > s->attr.max_sge) error = EINVAL;
        if (error) break;
        put_recv((struct fv_recv *)(void *)(s->ring->place + (size_t)((tail + n) & (s->slots - 1)) * s->stride), wr);
        atomic_fetch_add(&s->outstanding, 1);
    }
    if (error) *bad = wr;
    if (n) atomic_store(&s->ring->rq.tail, tail + n);
    pthread_mutex_unlock(&s->lock);
    if (n) fv_ring(to_ctx(ibsrq->context), ibsrq->handle, &s->ring->rq);
    return error;
}
