// Work requests of extended queue pairs, made step by step between ibv_wr_start and ibv_wr_complete.
#include "fv.h"

// The place of the work request that is being made.
static struct fv_send *last(struct fv_qp *qp) { return fv_send_place(qp, qp->building - 1); }

// Begins a work request; NULL when something has gone wrong since wr_start.
static struct fv_send *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode op) {
    struct fv_qp *qp = to_qp(&ex->qp_base);
    if (qp->build_error) return NULL;
    struct fv_send *s = fv_send_place(qp, qp->building);
    if (!s) {
        qp->build_error = ENOMEM;
        return NULL;
    }
    qp->building++;
    s->wr_id = ex->wr_id;
    s->opcode = op;
    s->flags = ex->wr_flags & ~(unsigned int)IBV_SEND_INLINE;
    s->imm = 0;
    s->num_sge = s->inline_len = 0;
    return s;
}

static void wr_start(struct ibv_qp_ex *ex) {
    struct fv_qp *qp = to_qp(&ex->qp_base);
    pthread_mutex_lock(&qp->sq_lock);
    qp->building = 0;
    qp->build_error = qp->base.state < IBV_QPS_RTS ? EINVAL : 0;
}

// Is there one among the new work requests that the device will not have?
static bool refused(struct fv_qp *qp) {
    if (to_ctx(qp->base.context)->limits.zero_write != FV_ZERO_REFUSED) return false;
    for (uint32_t i = 0; i < qp->building; i++) {
        const struct fv_send *s = fv_send_place(qp, i);
        size_t n = s->inline_len;
        for (uint32_t k = 0; k < s->num_sge; k++) n += s->sge[k].length;
        if (s->opcode == IBV_WR_RDMA_WRITE && !n) return true;
    }
    return false;
}

static int wr_complete(struct ibv_qp_ex *ex) {
    struct fv_qp *qp = to_qp(&ex->qp_base);
    int error = qp->build_error;
    if (!error && refused(qp)) error = EINVAL;
    uint32_t n = error ? 0 : qp->building;
    qp->sq_tail += n;
    if (n) atomic_store(&qp->ring->sq.tail, qp->sq_tail);
    pthread_mutex_unlock(&qp->sq_lock);
    if (n) fv_ring(to_ctx(qp->base.context), qp->base.handle, &qp->ring->sq);
    return error;
}

static void wr_abort(struct ibv_qp_ex *ex) { pthread_mutex_unlock(&to_qp(&ex->qp_base)->sq_lock); }

static void wr_send(struct ibv_qp_ex *ex) { begin(ex, IBV_WR_SEND); }

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm) {
    struct fv_send *s = begin(ex, IBV_WR_SEND_WITH_IMM);
    if (s) s->imm = imm;
}

static struct fv_send *rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode op, uint32_t rkey, uint64_t addr) {
    struct fv_send *s = begin(ex, op);
    if (!s) return NULL;
    s->rkey = rkey;
    s->remote_addr = addr;
    return s;
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr) {
    rdma(ex, IBV_WR_RDMA_WRITE, rkey, addr);
}
static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr) { rdma(ex, IBV_WR_RDMA_READ, rkey, addr); }

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, __be32 imm) {
    struct fv_send *s = rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr);
    if (s) s->imm = imm;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap) {
    struct fv_send *s = rdma(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr);
    if (!s) return;
    s->compare_add = compare;
    s->swap = swap;
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t addr, uint64_t add) {
    struct fv_send *s = rdma(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr);
    if (s) s->compare_add = add;
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey) {
    struct fv_qp *qp = to_qp(&ex->qp_base);
    if (qp->build_error) return;
    struct fv_send *s = last(qp);
    s->remote_qpn = qpn;
    s->remote_qkey = qkey;
    qp->build_error = fv_set_address(s, ah);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_sge *list) {
    struct fv_qp *qp = to_qp(&ex->qp_base);
    if (qp->build_error) return;
    if (n > qp->cap.max_send_sge) {
        qp->build_error = EINVAL;
        return;
    }
    struct fv_send *s = last(qp);
    s->num_sge = (uint32_t)n;
    memcpy(s->sge, list, n * sizeof *list);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length) {
    struct ibv_sge one = {addr, length, lkey};
    wr_set_sge_list(ex, 1, &one);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t n, const struct ibv_data_buf *list) {
    struct fv_qp *qp = to_qp(&ex->qp_base);
    if (qp->build_error) return;
    struct fv_send *s = last(qp);
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (at + list[i].length > qp->cap.max_inline_data) {
            qp->build_error = EINVAL;
            return;
        }
        memcpy(s->data + at, list[i].addr, list[i].length);
        at += list[i].length;
    }
    s->flags |= IBV_SEND_INLINE;
    s->inline_len = (uint32_t)at;
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length) {
    struct ibv_data_buf one = {addr, length};
    wr_set_inline_data_list(ex, 1, &one);
}

void fv_extend_qp(struct fv_qp *qp) {
    struct ibv_qp_ex *ex = &qp->ex;
    ex->wr_start = wr_start;
    ex->wr_complete = wr_complete;
    ex->wr_abort = wr_abort;
    ex->wr_send = wr_send;
    ex->wr_send_imm = wr_send_imm;
    ex->wr_set_sge = wr_set_sge;
    ex->wr_set_sge_list = wr_set_sge_list;
    ex->wr_set_inline_data = wr_set_inline_data;
    ex->wr_set_inline_data_list = wr_set_inline_data_list;
    if (qp->base.qp_type == IBV_QPT_UD) {
        ex->wr_set_ud_addr = wr_set_ud_addr;
        return;
    }
    ex->wr_rdma_write = wr_rdma_write;
    ex->wr_rdma_write_imm = wr_rdma_write_imm;
    if (qp->base.qp_type != IBV_QPT_RC) return;
    ex->wr_rdma_read = wr_rdma_read;
    ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
    ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
}
