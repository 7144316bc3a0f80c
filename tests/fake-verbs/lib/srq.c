// Shared receive queues.
#include "fv.h"
#include <sys/mman.h>

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init) {
    struct fv_ctx *c = to_ctx(pd->context);
    struct fv_request q = {.op = FV_CREATE_SRQ};
    struct fv_reply a;
    int fd, error = 0;
    if (!init->attr.max_wr || init->attr.max_wr > c->limits.max_qp_wr || init->attr.max_sge > FV_MAX_SGE)
        error = EINVAL;
    struct fv_srq *s = error ? NULL : calloc(1, sizeof *s);
    if (!s) {
        errno = error ? error : ENOMEM;
        return NULL;
    }
    // Room for the largest, so that a change of its size changes nothing else.
    s->slots = fv_slots(c->limits.max_qp_wr);
    s->stride = (uint32_t)fv_recv_stride(init->attr.max_sge);
    s->bytes = sizeof *s->ring + (size_t)s->slots * s->stride;
    s->ring = fv_share(s->bytes, &fd);
    if (!s->ring) {
        free(s);
        return NULL;
    }
    q.srq.pd = pd->handle;
    q.srq.slots = s->slots;
    q.srq.stride = s->stride;
    q.srq.attr = init->attr;
    error = fv_ask(c, &q, &fd, 1, &a);
    close(fd);
    if (!error) error = fv_remember(c, a.handle, s);
    if (error) {
        munmap(s->ring, s->bytes);
        free(s);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->base.mutex, NULL);
    pthread_cond_init(&s->base.cond, NULL);
    s->attr = init->attr;
    s->number = a.srq.number;
    s->base.context = pd->context;
    s->base.srq_context = init->srq_context;
    s->base.pd = pd;
    s->base.handle = a.handle;
    return &s->base;
}

struct ibv_srq *fv_create_srq_ex(struct ibv_context *c, struct ibv_srq_init_attr_ex *a) {
    (void)c, (void)a;
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask) {
    struct fv_srq *s = to_srq(srq);
    struct fv_request q = {.op = FV_MODIFY_SRQ, .handle = srq->handle};
    struct fv_reply a;
    if (mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT)) return EINVAL;
    if (mask & IBV_SRQ_MAX_WR && (attr->max_wr > s->slots || attr->max_wr < atomic_load(&s->outstanding)))
        return EINVAL;
    q.srq.attr = *attr;
    q.srq.mask = (uint32_t)mask;
    int error = fv_ask(to_ctx(srq->context), &q, NULL, 0, &a);
    if (!error && mask & IBV_SRQ_MAX_WR) s->attr.max_wr = attr->max_wr;
    return error;
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr) {
    struct fv_request q = {.op = FV_QUERY_SRQ, .handle = srq->handle};
    struct fv_reply a;
    int error = fv_ask(to_ctx(srq->context), &q, NULL, 0, &a);
    if (!error) *attr = a.srq.attr;
    return error;
}

int fv_get_srq_num(struct ibv_srq *srq, uint32_t *number) {
    *number = to_srq(srq)->number;
    return 0;
}

int ibv_destroy_srq(struct ibv_srq *srq) {
    struct fv_srq *s = to_srq(srq);
    struct fv_ctx *c = to_ctx(srq->context);
    struct fv_request q = {.op = FV_DESTROY_SRQ, .handle = srq->handle};
    struct fv_reply a;
    int error = fv_ask(c, &q, NULL, 0, &a);
    if (error) return error;
    fv_forget(c, srq->handle);
    pthread_mutex_lock(&srq->mutex);
    while (srq->events_completed != s->async_got) pthread_cond_wait(&srq->cond, &srq->mutex);
    pthread_mutex_unlock(&srq->mutex);
    munmap(s->ring, s->bytes);
    free(s);
    return 0;
}
