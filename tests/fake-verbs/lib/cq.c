// Completion queues: making, resizing, notification.
#include "fv.h"
#include <stdio.h>
#include <sys/mman.h>

static size_t ring_bytes(uint32_t slots) { return sizeof(struct fv_cq_ring) + slots * sizeof(struct fv_cqe); }

static struct fv_cq *make(struct ibv_context *context, uint32_t cqe, void *user, struct ibv_comp_channel *channel,
                          uint32_t vector) {
    struct fv_ctx *c = to_ctx(context);
    struct fv_request q = {.op = FV_CREATE_CQ};
    struct fv_reply a;
    int fd, error = 0;
    if (!cqe || cqe > c->limits.max_cqe || vector >= (uint32_t)context->num_comp_vectors) error = EINVAL;
    struct fv_cq *cq = error ? NULL : calloc(1, sizeof *cq);
    if (!cq) {
        errno = error ? error : ENOMEM;
        return NULL;
    }
    uint32_t slots = fv_slots(cqe);
    cq->bytes = ring_bytes(slots);
    cq->ring = fv_share(cq->bytes, &fd);
    if (!cq->ring) {
        free(cq);
        return NULL;
    }
    q.cq.channel = channel ? ((struct fv_channel *)channel)->handle : 0;
    q.cq.cqe = cqe;
    q.cq.slots = slots;
    error = fv_ask(c, &q, &fd, 1, &a);
    close(fd);
    if (!error) error = fv_remember(c, a.handle, cq);
    if (error) {
        munmap(cq->ring, cq->bytes);
        free(cq);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&cq->lock, NULL);
    pthread_mutex_init(&cq->base.mutex, NULL);
    pthread_cond_init(&cq->base.cond, NULL);
    cq->mask = slots - 1;
    cq->base.context = context;
    cq->base.channel = channel;
    cq->base.cq_context = user;
    cq->base.handle = a.handle;
    cq->base.cqe = (int)cqe;
    if (channel) {
        pthread_mutex_lock(&context->mutex);
        channel->refcnt++;
        pthread_mutex_unlock(&context->mutex);
    }
    return cq;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *user, struct ibv_comp_channel *channel,
                             int vector) {
    struct fv_cq *cq = make(context, cqe < 0 ? 0 : (uint32_t)cqe, user, channel, (uint32_t)vector);
    return cq ? &cq->base : NULL;
}

struct ibv_cq_ex *fv_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *a) {
    const uint64_t known = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                           IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    const uint32_t masks = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const uint32_t flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    if (a->comp_mask & ~masks || a->wc_flags & ~known ||
        (a->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS && a->flags & ~flags)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    struct fv_cq *cq = make(context, a->cqe, a->cq_context, a->channel, a->comp_vector);
    if (!cq) return NULL;
    fv_extend_cq(cq, a->wc_flags);
    return &cq->ex;
}

int fv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *a) {
    struct fv_request q = {.op = FV_MODERATE_CQ,
                           .handle = cq->handle,
                           .moderation = {a->moderate.cq_count, a->moderate.cq_period}};
    struct fv_reply r;
    if (a->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE) return EINVAL;
    return a->attr_mask ? fv_ask(to_ctx(cq->context), &q, NULL, 0, &r) : 0;
}

// While the lock is held nothing is taken out, so that the daemon can carry the entries over.
int ibv_resize_cq(struct ibv_cq *ibcq, int cqe) {
    struct fv_cq *cq = to_cq(ibcq);
    struct fv_ctx *c = to_ctx(ibcq->context);
    struct fv_request q = {.op = FV_RESIZE_CQ, .handle = ibcq->handle};
    struct fv_reply a;
    int fd;
    if (cqe <= 0 || (uint32_t)cqe > c->limits.max_cqe) return EINVAL;
    uint32_t slots = fv_slots((uint32_t)cqe);
    size_t bytes = ring_bytes(slots);
    struct fv_cq_ring *ring = fv_share(bytes, &fd);
    if (!ring) return errno;
    q.cq.cqe = (uint32_t)cqe;
    q.cq.slots = slots;
    pthread_mutex_lock(&cq->lock);
    int error = fv_ask(c, &q, &fd, 1, &a);
    if (error) {
        munmap(ring, bytes);
    } else {
        munmap(cq->ring, cq->bytes);
        cq->ring = ring;
        cq->bytes = bytes;
        cq->mask = slots - 1;
        ibcq->cqe = cqe;
    }
    pthread_mutex_unlock(&cq->lock);
    close(fd);
    return error;
}

// Waits until all events that were handed out are acknowledged, as the interface asks.
int ibv_destroy_cq(struct ibv_cq *ibcq) {
    struct fv_cq *cq = to_cq(ibcq);
    struct fv_ctx *c = to_ctx(ibcq->context);
    struct fv_request q = {.op = FV_DESTROY_CQ, .handle = ibcq->handle};
    struct fv_reply a;
    int error = fv_ask(c, &q, NULL, 0, &a);
    if (error) return error;
    fv_forget(c, ibcq->handle);
    pthread_mutex_lock(&ibcq->mutex);
    while (ibcq->comp_events_completed != cq->events_got || ibcq->async_events_completed != cq->async_got)
        pthread_cond_wait(&ibcq->cond, &ibcq->mutex);
    pthread_mutex_unlock(&ibcq->mutex);
    if (ibcq->channel) {
        pthread_mutex_lock(&ibcq->context->mutex);
        ibcq->channel->refcnt--;
        pthread_mutex_unlock(&ibcq->context->mutex);
    }
    munmap(cq->ring, cq->bytes);
    free(cq);
    return 0;
}

int fv_req_notify_cq(struct ibv_cq *ibcq, int solicited_only) {
    struct fv_cq_ring *r = to_cq(ibcq)->ring;
    uint32_t want = solicited_only ? FV_ARMED_SOLICITED : FV_ARMED_ANY, now = atomic_load(&r->armed);
    // Who has asked for every completion gets every completion, also if the next one to ask wants fewer.
    while (now < want && !atomic_compare_exchange_weak(&r->armed, &now, want));
    return 0;
}
