// Protection domains, memory regions, channels, completion queues, shared receive queues.
#include "fvd.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

void *obj_new(struct ctx *c, enum kind kind, size_t size) {
    struct obj *o = calloc(1, size);
    if (!o) abort();
    o->kind = kind;
    o->ctx = c;
    // Regions have handles of their own: there may be very many in a process's life.
    o->handle = kind == K_MR ? ++c->next_mr : ++c->next_handle;
    map_put(kind == K_MR ? &c->mrs : &c->objs, o->handle, o);
    o->next = c->list;
    if (c->list) c->list->prev = o;
    c->list = o;
    return o;
}

void *obj_get(struct ctx *c, enum kind kind, uint32_t handle) {
    struct obj *o = map_get(kind == K_MR ? &c->mrs : &c->objs, handle);
    return o && o->kind == kind ? o : NULL;
}

static void free_qp(struct qp *q) {
    groups_forget(q);
    forget_running(q);
    timer_stop(&q->timer);
    map_drop(&q->o.ctx->host->qps, q->number);
    for (uint32_t i = 0; i < q->sq_slots; i++) free(q->sent[i].data);
    free(q->sent);
    munmap(q->ring, q->bytes);
    q->pd->o.users--;
    q->scq->o.users--;
    q->rcq->o.users--;
    if (q->srq) q->srq->o.users--;
}

static void free_srq(struct srq *s) {
    map_drop(&s->o.ctx->host->srqs, s->number);
    while (s->starved) sated(s->starved);
    munmap(s->ring, s->bytes);
    s->pd->o.users--;
}

static void free_mr(struct mr *mr) {
    map_drop(&mr->o.ctx->host->lkeys, mr->lkey);
    map_drop(&mr->o.ctx->host->rkeys, mr->rkey);
    mr->pd->o.users--;
}

static void free_channel(struct channel *ch) {
    timer_stop(&ch->timer);
    free(ch->waiting);
    close(ch->fd);
}

static void free_cq(struct cq *cq) {
    if (cq->channel) cq->channel->o.users--;
    munmap(cq->ring, cq->bytes);
}

void obj_free(void *object) {
    struct obj *o = object;
    struct ctx *c = o->ctx;
    switch (o->kind) {
    case K_QP: free_qp(object); break;
    case K_SRQ: free_srq(object); break;
    case K_CQ: free_cq(object); break;
    case K_CHANNEL: free_channel(object); break;
    case K_MR: free_mr(object); break;
    case K_PD: break;
    }
    map_drop(o->kind == K_MR ? &c->mrs : &c->objs, o->handle);
    if (o->prev) o->prev->next = o->next;
    else c->list = o->next;
    if (o->next) o->next->prev = o->prev;
    free(o);
}

void *map_shared(int fd, size_t bytes) {
    struct stat st;
    if (fd < 0 || fstat(fd, &st) || (size_t)st.st_size < bytes) return NULL;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

static int destroy(struct ctx *c, enum kind kind, uint32_t handle) {
    struct obj *o = obj_get(c, kind, handle);
    if (!o) return EINVAL;
    if (o->users) return EBUSY;
    obj_free(o);
    return 0;
}

int alloc_pd(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)q, (void)fds;
    struct pd *pd = obj_new(c, K_PD, sizeof *pd);
    a->handle = pd->o.handle;
    return 0;
}

int dealloc_pd(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    return destroy(c, K_PD, q->handle);
}

// Is all of it there, and writable where it is to be written? A byte of each end is enough to know of most mistakes.
static bool reachable(const struct ctx *c, uint64_t addr, uint64_t length) {
    char byte;
    if (addr + length < addr) return false;
    return !length || (pread(c->memory, &byte, 1, (off_t)addr) == 1 &&
                       pread(c->memory, &byte, 1, (off_t)(addr + length - 1)) == 1);
}

static int fill_mr(struct ctx *c, const struct fv_request *q, struct mr *mr) {
    struct pd *pd = obj_get(c, K_PD, q->mr.pd);
    if (!pd) return EINVAL;
    if (!reachable(c, q->mr.addr, q->mr.length)) return EFAULT;
    if (mr->pd) mr->pd->o.users--;
    pd->o.users++;
    mr->pd = pd;
    mr->addr = q->mr.addr;
    mr->length = q->mr.length;
    mr->iova = q->mr.iova;
    mr->access = q->mr.access;
    return 0;
}

int reg_mr(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds;
    struct mr filled = {0};
    int error = fill_mr(c, q, &filled);
    if (error) return error;
    struct mr *mr = obj_new(c, K_MR, sizeof *mr);
    filled.o = mr->o;
    *mr = filled;
    take_keys(c->host, mr);
    a->handle = mr->o.handle;
    a->mr.lkey = mr->lkey;
    a->mr.rkey = mr->rkey;
    return 0;
}

int rereg_mr(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds;
    struct mr *mr = obj_get(c, K_MR, q->handle);
    int error = mr ? fill_mr(c, q, mr) : EINVAL;
    if (error) return error;
    take_other_keys(c->host, mr);
    a->mr.lkey = mr->lkey;
    a->mr.rkey = mr->rkey;
    return 0;
}

int dereg_mr(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    return destroy(c, K_MR, q->handle);
}

int create_channel(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)q;
    if (fds[0] < 0 || fcntl(fds[0], F_SETFL, O_NONBLOCK)) return EINVAL;
    struct channel *ch = obj_new(c, K_CHANNEL, sizeof *ch);
    ch->fd = fds[0];
    fds[0] = -1;
    ch->timer.fire = channel_retry;
    a->handle = ch->o.handle;
    return 0;
}

int destroy_channel(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    return destroy(c, K_CHANNEL, q->handle);
}

static bool power_of_two(uint32_t n) { return n && !(n & (n - 1)); }

static int map_cq(const struct fv_request *q, int fd, struct cq *cq) {
    if (!q->cq.cqe || q->cq.cqe > faults.limits.max_cqe || q->cq.cqe > q->cq.slots || !power_of_two(q->cq.slots))
        return EINVAL;
    size_t bytes = sizeof *cq->ring + (size_t)q->cq.slots * sizeof *cq->ring->entry;
    struct fv_cq_ring *ring = map_shared(fd, bytes);
    if (!ring) return EINVAL;
    cq->ring = ring;
    cq->bytes = bytes;
    cq->cqe = q->cq.cqe;
    cq->mask = q->cq.slots - 1;
    return 0;
}

int create_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    struct channel *ch = q->cq.channel ? obj_get(c, K_CHANNEL, q->cq.channel) : NULL;
    struct cq made = {0};
    if (q->cq.channel && !ch) return EINVAL;
    int error = map_cq(q, fds[0], &made);
    if (error) return error;
    struct cq *cq = obj_new(c, K_CQ, sizeof *cq);
    made.o = cq->o;
    *cq = made;
    cq->channel = ch;
    if (ch) ch->o.users++;
    a->handle = cq->o.handle;
    return 0;
}

int resize_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)a;
    struct cq *cq = obj_get(c, K_CQ, q->handle), bigger = {0};
    if (!cq) return EINVAL;
    uint32_t head = atomic_load(&cq->ring->head), tail = atomic_load(&cq->ring->tail);
    if (tail - head > q->cq.cqe) return EINVAL;
    int error = map_cq(q, fds[0], &bigger);
    if (error) return error;
    for (uint32_t i = head; i != tail; i++) bigger.ring->entry[i & bigger.mask] = cq->ring->entry[i & cq->mask];
    atomic_store(&bigger.ring->head, head);
    atomic_store(&bigger.ring->tail, tail);
    atomic_store(&bigger.ring->armed, atomic_load(&cq->ring->armed));
    munmap(cq->ring, cq->bytes);
    cq->ring = bigger.ring;
    cq->bytes = bigger.bytes;
    cq->cqe = bigger.cqe;
    cq->mask = bigger.mask;
    return 0;
}

int moderate_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    struct cq *cq = obj_get(c, K_CQ, q->handle);
    if (!cq) return EINVAL;
    cq->count = q->moderation.count;
    cq->period = q->moderation.period;
    return 0;
}

int destroy_cq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    return destroy(c, K_CQ, q->handle);
}

int create_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    struct pd *pd = obj_get(c, K_PD, q->srq.pd);
    size_t bytes = sizeof(struct fv_srq_ring) + (size_t)q->srq.slots * q->srq.stride;
    if (!pd || !power_of_two(q->srq.slots) || q->srq.stride < fv_recv_stride(q->srq.attr.max_sge)) return EINVAL;
    struct fv_srq_ring *ring = map_shared(fds[0], bytes);
    if (!ring) return EINVAL;
    struct srq *s = obj_new(c, K_SRQ, sizeof *s);
    s->pd = pd;
    pd->o.users++;
    s->ring = ring;
    s->bytes = bytes;
    s->attr = q->srq.attr;
    s->attr.srq_limit = 0;
    s->rq = (struct rq){&ring->rq, ring->place, q->srq.slots, q->srq.stride, 0};
    s->number = take_srqn(c->host, s);
    a->handle = s->o.handle;
    a->srq.number = s->number;
    return 0;
}

int modify_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    struct srq *s = obj_get(c, K_SRQ, q->handle);
    if (!s) return EINVAL;
    if (q->srq.mask & IBV_SRQ_LIMIT && q->srq.attr.srq_limit > s->attr.max_wr) return EINVAL;
    if (q->srq.mask & IBV_SRQ_MAX_WR) s->attr.max_wr = q->srq.attr.max_wr;
    if (q->srq.mask & IBV_SRQ_LIMIT) s->attr.srq_limit = q->srq.attr.srq_limit;
    return 0;
}

int query_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds;
    struct srq *s = obj_get(c, K_SRQ, q->handle);
    if (!s) return EINVAL;
    a->srq.attr = s->attr;
    return 0;
}

int destroy_srq(struct ctx *c, const struct fv_request *q, int *fds, struct fv_reply *a) {
    (void)fds, (void)a;
    return destroy(c, K_SRQ, q->handle);
}
