// Taking completions out, in the plain way and in the extended one.
#include "fv.h"
#include <sched.h>
#include <time.h>

// A completion that has been polled gives places in the queues back.
static void account(const struct fv_cqe *e) {
    struct fv_qp *qp = (struct fv_qp *)(uintptr_t)e->owner;
    if (e->owner == FV_GONE) return;
    if (e->is_srq) atomic_fetch_sub(&to_srq(qp->base.srq)->outstanding, 1);
    else atomic_store(e->is_send ? &qp->sq_done : &qp->rq_done, e->wqe + 1);
}

// The next entry of a queue pair that still is there. The lock is held.
static bool take(struct fv_cq *cq, struct fv_cqe *out) {
    struct fv_cq_ring *r = cq->ring;
    uint32_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    while (head != atomic_load_explicit(&r->tail, memory_order_acquire)) {
        *out = r->entry[head & cq->mask];
        atomic_store_explicit(&r->head, ++head, memory_order_release);
        if (out->owner == FV_NOBODY) continue;
        account(out);
        return true;
    }
    return false;
}

// Who polls in vain lets others run now and then: the daemon may wait for this processor.
static void found_nothing(struct fv_cq *cq) {
    if (++cq->idle % 32 == 0) sched_yield();
}

int fv_poll_cq(struct ibv_cq *ibcq, int n, struct ibv_wc *wc) {
    struct fv_cq *cq = to_cq(ibcq);
    struct fv_cqe e;
    int got = 0;
    pthread_mutex_lock(&cq->lock);
    for (; got < n && take(cq, &e); got++) {
        wc[got] = (struct ibv_wc){
            .wr_id = e.wr_id,
            .status = e.status,
            .opcode = e.opcode,
            .vendor_err = e.vendor_err,
            .byte_len = e.byte_len,
            .imm_data = e.imm,
            .qp_num = e.qp_num,
            .src_qp = e.src_qp,
            .wc_flags = e.wc_flags,
            .pkey_index = e.pkey_index,
            .slid = e.slid,
            .sl = e.sl,
            .dlid_path_bits = e.dlid_path_bits,
        };
    }
    pthread_mutex_unlock(&cq->lock);
    if (!got) found_nothing(cq);
    return got;
}

// Forgets the completions of a queue pair that goes or is reset, unless they are to stay, as with rxe and siw. What its shared receive queue has lent it comes back.
void fv_purge(struct fv_cq *cq, void *owner) {
    pthread_mutex_lock(&cq->lock);
    uint32_t tail = atomic_load_explicit(&cq->ring->tail, memory_order_acquire);
    for (uint32_t i = atomic_load(&cq->ring->head); i != tail; i++) {
        struct fv_cqe *e = &cq->ring->entry[i & cq->mask];
        if (e->owner != (uintptr_t)owner) continue;
        if (e->is_srq) account(e);
        e->owner = to_ctx(cq->base.context)->limits.keep_cqes ? FV_GONE : FV_NOBODY;
    }
    // Their places are free again, as far as nothing is in front of them.
    uint32_t head = atomic_load_explicit(&cq->ring->head, memory_order_relaxed);
    while (head != tail && cq->ring->entry[head & cq->mask].owner == FV_NOBODY) head++;
    atomic_store_explicit(&cq->ring->head, head, memory_order_release);
    pthread_mutex_unlock(&cq->lock);
}

static void show(struct fv_cq *cq) {
    cq->ex.status = cq->cur.status;
    cq->ex.wr_id = cq->cur.wr_id;
}

// The lock is held until end_poll, unless there is nothing.
static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *a) {
    struct fv_cq *cq = to_cq(ibv_cq_ex_to_cq(ex));
    if (a->comp_mask) return EINVAL;
    pthread_mutex_lock(&cq->lock);
    if (take(cq, &cq->cur)) {
        show(cq);
        return 0;
    }
    pthread_mutex_unlock(&cq->lock);
    found_nothing(cq);
    return ENOENT;
}

static int next_poll(struct ibv_cq_ex *ex) {
    struct fv_cq *cq = to_cq(ibv_cq_ex_to_cq(ex));
    if (!take(cq, &cq->cur)) return ENOENT;
    show(cq);
    return 0;
}

static void end_poll(struct ibv_cq_ex *ex) { pthread_mutex_unlock(&to_cq(ibv_cq_ex_to_cq(ex))->lock); }

static const struct fv_cqe *cur(struct ibv_cq_ex *ex) { return &to_cq(ibv_cq_ex_to_cq(ex))->cur; }
static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex) { return cur(ex)->opcode; }
static uint32_t read_vendor_err(struct ibv_cq_ex *ex) { return cur(ex)->vendor_err; }
static uint32_t read_byte_len(struct ibv_cq_ex *ex) { return cur(ex)->byte_len; }
static __be32 read_imm_data(struct ibv_cq_ex *ex) { return cur(ex)->imm; }
static uint32_t read_qp_num(struct ibv_cq_ex *ex) { return cur(ex)->qp_num; }
static uint32_t read_src_qp(struct ibv_cq_ex *ex) { return cur(ex)->src_qp; }
static unsigned int read_wc_flags(struct ibv_cq_ex *ex) { return cur(ex)->wc_flags; }
static uint32_t read_slid(struct ibv_cq_ex *ex) { return cur(ex)->slid; }
static uint8_t read_sl(struct ibv_cq_ex *ex) { return cur(ex)->sl; }
static uint8_t read_dlid_path_bits(struct ibv_cq_ex *ex) { return cur(ex)->dlid_path_bits; }
static uint64_t read_completion_ts(struct ibv_cq_ex *ex) { return cur(ex)->time_ns; }

static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *ex) {
    struct timespec mono, wall;
    clock_gettime(CLOCK_MONOTONIC, &mono);
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t ahead = (wall.tv_sec - mono.tv_sec) * 1000000000LL + wall.tv_nsec - mono.tv_nsec;
    return cur(ex)->time_ns + (uint64_t)ahead;
}

// Only what was asked for can be read, as with the providers of adapters.
void fv_extend_cq(struct fv_cq *cq, uint64_t asked) {
    struct ibv_cq_ex *ex = &cq->ex;
    ex->start_poll = start_poll;
    ex->next_poll = next_poll;
    ex->end_poll = end_poll;
    ex->read_opcode = read_opcode;
    ex->read_vendor_err = read_vendor_err;
    ex->read_wc_flags = read_wc_flags;
    if (asked & IBV_WC_EX_WITH_BYTE_LEN) ex->read_byte_len = read_byte_len;
    if (asked & IBV_WC_EX_WITH_IMM) ex->read_imm_data = read_imm_data;
    if (asked & IBV_WC_EX_WITH_QP_NUM) ex->read_qp_num = read_qp_num;
    if (asked & IBV_WC_EX_WITH_SRC_QP) ex->read_src_qp = read_src_qp;
    if (asked & IBV_WC_EX_WITH_SLID) ex->read_slid = read_slid;
    if (asked & IBV_WC_EX_WITH_SL) ex->read_sl = read_sl;
    if (asked & IBV_WC_EX_WITH_DLID_PATH_BITS) ex->read_dlid_path_bits = read_dlid_path_bits;
    if (asked & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) ex->read_completion_ts = read_completion_ts;
    if (asked & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) ex->read_completion_wallclock_ns = read_completion_wallclock_ns;
}
