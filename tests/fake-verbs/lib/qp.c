// Queue pairs: making, states, multicast groups.
#include "fv.h"
#include <sys/mman.h>

static bool too_much(const struct fv_ctx *c, const struct ibv_qp_cap *cap) {
    return cap->max_send_wr > c->limits.max_qp_wr || cap->max_recv_wr > c->limits.max_qp_wr ||
           cap->max_send_sge > FV_MAX_SGE || cap->max_recv_sge > FV_MAX_SGE || cap->max_inline_data > FV_MAX_INLINE;
}

static int make(struct fv_qp *qp, struct ibv_pd *pd, struct ibv_qp_init_attr_ex *init) {
    struct fv_ctx *c = to_ctx(pd->context);
    struct fv_request q = {.op = FV_CREATE_QP};
    struct fv_reply a;
    int fd;
    if (too_much(c, &init->cap) || !init->send_cq || !init->recv_cq) return EINVAL;
    if (init->qp_type != IBV_QPT_RC && init->qp_type != IBV_QPT_UC && init->qp_type != IBV_QPT_UD && !c->limits.any_qp)
        return EOPNOTSUPP;
    if (init->srq) init->cap.max_recv_wr = init->cap.max_recv_sge = 0;
    qp->sq_slots = fv_slots(init->cap.max_send_wr);
    qp->rq_slots = fv_slots(init->cap.max_recv_wr);
    qp->sq_stride = (uint32_t)fv_send_stride(init->cap.max_send_sge, init->cap.max_inline_data);
    qp->rq_stride = (uint32_t)fv_recv_stride(init->cap.max_recv_sge);
    qp->bytes = sizeof *qp->ring + (size_t)qp->sq_slots * qp->sq_stride + (size_t)qp->rq_slots * qp->rq_stride;
    qp->ring = fv_share(qp->bytes, &fd);
    if (!qp->ring) return errno;
    q.qp = (struct fv_qp_make){
        .pd = pd->handle,
        .send_cq = init->send_cq->handle,
        .recv_cq = init->recv_cq->handle,
        .srq = init->srq ? init->srq->handle : 0,
        .type = init->qp_type,
        .sq_sig_all = init->sq_sig_all != 0,
        .create_flags = init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS ? init->create_flags : 0,
        .sq_slots = qp->sq_slots,
        .sq_stride = qp->sq_stride,
        .rq_slots = qp->rq_slots,
        .rq_stride = qp->rq_stride,
        .cap = init->cap,
        .owner = (uintptr_t)qp,
    };
    int error = fv_ask(c, &q, &fd, 1, &a);
    close(fd);
    if (!error) error = fv_remember(c, a.handle, qp);
    if (error) {
        munmap(qp->ring, qp->bytes);
        return error;
    }
    qp->base.handle = a.handle;
    qp->base.qp_num = a.qp.number;
    return 0;
}

static struct ibv_qp *create(struct ibv_pd *pd, struct ibv_qp_init_attr_ex *init, bool extended) {
    struct fv_qp *qp = calloc(1, sizeof *qp);
    if (!qp) return NULL;
    int error = make(qp, pd, init);
    if (error) {
        free(qp);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&qp->sq_lock, NULL);
    pthread_mutex_init(&qp->rq_lock, NULL);
    pthread_mutex_init(&qp->base.mutex, NULL);
    pthread_cond_init(&qp->base.cond, NULL);
    qp->cap = init->cap;
    qp->sq_sig_all = init->sq_sig_all;
    qp->extended = extended;
    qp->base.context = pd->context;
    qp->base.qp_context = init->qp_context;
    qp->base.pd = pd;
    qp->base.send_cq = init->send_cq;
    qp->base.recv_cq = init->recv_cq;
    qp->base.srq = init->srq;
    qp->base.state = IBV_QPS_RESET;
    qp->base.qp_type = init->qp_type;
    if (extended) fv_extend_qp(qp);
    return &qp->base;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
    struct ibv_qp_init_attr_ex ex = {.comp_mask = 0};
    memcpy(&ex, init, sizeof *init);
    struct ibv_qp *qp = create(pd, &ex, false);
    if (qp) init->cap = ex.cap;
    return qp;
}

struct ibv_qp *fv_create_qp_ex(struct ibv_context *c, struct ibv_qp_init_attr_ex *init) {
    const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS;
    const uint64_t ops = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
                         IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                         IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    bool extended = init->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    bool flags = init->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS;
    if (!(init->comp_mask & IBV_QP_INIT_ATTR_PD) || init->comp_mask & ~known ||
        (extended && init->send_ops_flags & ~ops && !to_ctx(c)->limits.any_qp) ||
        (flags && init->create_flags & ~(uint32_t)IBV_QP_CREATE_BLOCK_SELF_MCAST_LB)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return create(init->pd, init, extended);
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp) { return to_qp(qp)->extended ? &to_qp(qp)->ex : NULL; }

// Both locks are held: a reset starts the queues anew, and no completion of their past may be polled after it.
static void start_anew(struct fv_qp *qp) {
    fv_purge(to_cq(qp->base.send_cq), qp);
    if (qp->base.recv_cq != qp->base.send_cq) fv_purge(to_cq(qp->base.recv_cq), qp);
    qp->sq_tail = qp->rq_tail = 0;
    qp->sq_done = qp->rq_done = 0;
}

int ibv_modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask) {
    struct fv_qp *qp = to_qp(ibqp);
    struct fv_request q = {.op = FV_MODIFY_QP, .handle = ibqp->handle};
    struct fv_reply a;
    q.modify.mask = (uint32_t)mask;
    q.modify.attr = *attr;
    pthread_mutex_lock(&qp->sq_lock);
    pthread_mutex_lock(&qp->rq_lock);
    int error = fv_ask(to_ctx(ibqp->context), &q, NULL, 0, &a);
    if (!error && mask & IBV_QP_STATE) {
        ibqp->state = attr->qp_state;
        if (attr->qp_state == IBV_QPS_RESET) start_anew(qp);
    }
    pthread_mutex_unlock(&qp->rq_lock);
    pthread_mutex_unlock(&qp->sq_lock);
    return error;
}

int ibv_query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    struct fv_qp *qp = to_qp(ibqp);
    struct fv_request q = {.op = FV_QUERY_QP, .handle = ibqp->handle};
    struct fv_reply a;
    (void)mask;
    int error = fv_ask(to_ctx(ibqp->context), &q, NULL, 0, &a);
    if (error) return error;
    *attr = a.qp.attr;
    attr->cap = qp->cap;
    ibqp->state = attr->qp_state;
    *init = (struct ibv_qp_init_attr){
        .qp_context = ibqp->qp_context,
        .send_cq = ibqp->send_cq,
        .recv_cq = ibqp->recv_cq,
        .srq = ibqp->srq,
        .cap = qp->cap,
        .qp_type = ibqp->qp_type,
        .sq_sig_all = qp->sq_sig_all,
    };
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibqp) {
    struct fv_qp *qp = to_qp(ibqp);
    struct fv_ctx *c = to_ctx(ibqp->context);
    struct fv_request q = {.op = FV_DESTROY_QP, .handle = ibqp->handle};
    struct fv_reply a;
    int error = fv_ask(c, &q, NULL, 0, &a);
    if (error) return error;
    fv_forget(c, ibqp->handle);
    fv_purge(to_cq(ibqp->send_cq), qp);
    if (ibqp->recv_cq != ibqp->send_cq) fv_purge(to_cq(ibqp->recv_cq), qp);
    pthread_mutex_lock(&ibqp->mutex);
    while (ibqp->events_completed != qp->async_got) pthread_cond_wait(&ibqp->cond, &ibqp->mutex);
    pthread_mutex_unlock(&ibqp->mutex);
    munmap(qp->ring, qp->bytes);
    free(qp);
    return 0;
}

static int group(struct ibv_qp *qp, enum fv_op op, const union ibv_gid *gid, uint16_t lid) {
    struct fv_request q = {.op = op, .handle = qp->handle, .group = {*gid, lid}};
    struct fv_reply a;
    return fv_ask(to_ctx(qp->context), &q, NULL, 0, &a);
}

int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) {
    return group(qp, FV_ATTACH, gid, lid);
}
int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) {
    return group(qp, FV_DETACH, gid, lid);
}

int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags) {
    (void)qp, (void)op, (void)flags;
    return 0;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    (void)qp;
    if (!ece->vendor_id) {
        errno = EOPNOTSUPP;
        return errno;
    }
    return EOPNOTSUPP;
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece) {
    (void)qp;
    memset(ece, 0, sizeof *ece);
    return EOPNOTSUPP;
}
