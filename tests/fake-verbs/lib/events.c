// Completion channels and asynchronous events: pipes into which the daemon writes.
#include "fv.h"
#include <fcntl.h>

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    struct fv_request q = {.op = FV_CREATE_CHANNEL};
    struct fv_reply a;
    int fds[2];
    struct fv_channel *ch = calloc(1, sizeof *ch);
    if (!ch || pipe2(fds, O_CLOEXEC)) {
        free(ch);
        return NULL;
    }
    int error = fv_ask(to_ctx(context), &q, &fds[1], 1, &a);
    close(fds[1]);
    if (error) {
        close(fds[0]);
        free(ch);
        errno = error;
        return NULL;
    }
    ch->base = (struct ibv_comp_channel){context, fds[0], 0};
    ch->handle = a.handle;
    return &ch->base;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *base) {
    struct fv_channel *ch = (struct fv_channel *)base;
    struct fv_request q = {.op = FV_DESTROY_CHANNEL, .handle = ch->handle};
    struct fv_reply a;
    pthread_mutex_lock(&base->context->mutex);
    int error = base->refcnt ? EBUSY : fv_ask(to_ctx(base->context), &q, NULL, 0, &a);
    pthread_mutex_unlock(&base->context->mutex);
    if (error) return error;
    close(base->fd);
    free(ch);
    return 0;
}

// Events of queues that have been destroyed in the meantime are passed over.
int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **out, void **user) {
    struct fv_ctx *c = to_ctx(ch->context);
    for (;;) {
        uint32_t handle;
        if (read(ch->fd, &handle, sizeof handle) != (ssize_t)sizeof handle) return -1;
        pthread_mutex_lock(&c->asking);
        struct fv_cq *cq = handle < c->object_count ? c->objects[handle] : NULL;
        if (cq) {
            pthread_mutex_lock(&cq->base.mutex);
            cq->events_got++;
            pthread_mutex_unlock(&cq->base.mutex);
            *out = &cq->base;
            *user = cq->base.cq_context;
        }
        pthread_mutex_unlock(&c->asking);
        if (cq) return 0;
    }
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n) {
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += n;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

enum kind { OF_CQ, OF_QP, OF_SRQ, OF_PORT };

static enum kind kind_of(enum ibv_event_type t) {
    switch (t) {
    case IBV_EVENT_CQ_ERR: return OF_CQ;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED: return OF_QP;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED: return OF_SRQ;
    default: return OF_PORT;
    }
}

// Counts the event as handed out, for whoever destroys the object.
static void hand_out(void *object, struct ibv_async_event *e) {
    pthread_mutex_t *m;
    uint32_t *count;
    switch (kind_of(e->event_type)) {
    case OF_CQ:
        e->element.cq = object;
        m = &e->element.cq->mutex;
        count = &to_cq(object)->async_got;
        break;
    case OF_QP:
        e->element.qp = object;
        m = &e->element.qp->mutex;
        count = &to_qp(object)->async_got;
        break;
    default:
        e->element.srq = object;
        m = &e->element.srq->mutex;
        count = &to_srq(object)->async_got;
    }
    pthread_mutex_lock(m);
    ++*count;
    pthread_mutex_unlock(m);
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *e) {
    struct fv_ctx *c = to_ctx(context);
    for (;;) {
        struct fv_async a;
        if (read(context->async_fd, &a, sizeof a) != (ssize_t)sizeof a) return -1;
        e->event_type = a.type;
        if (kind_of(a.type) == OF_PORT) {
            e->element.port_num = (int)a.handle;
            return 0;
        }
        pthread_mutex_lock(&c->asking);
        void *object = a.handle < c->object_count ? c->objects[a.handle] : NULL;
        if (object) hand_out(object, e);
        pthread_mutex_unlock(&c->asking);
        if (object) return 0;
    }
}

static void ack(pthread_mutex_t *m, pthread_cond_t *cond, uint32_t *completed) {
    pthread_mutex_lock(m);
    ++*completed;
    pthread_cond_signal(cond);
    pthread_mutex_unlock(m);
}

void ibv_ack_async_event(struct ibv_async_event *e) {
    switch (kind_of(e->event_type)) {
    case OF_CQ: return ack(&e->element.cq->mutex, &e->element.cq->cond, &e->element.cq->async_events_completed);
    case OF_QP: return ack(&e->element.qp->mutex, &e->element.qp->cond, &e->element.qp->events_completed);
    case OF_SRQ: return ack(&e->element.srq->mutex, &e->element.srq->cond, &e->element.srq->events_completed);
    case OF_PORT: return;
    }
}
