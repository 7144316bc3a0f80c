// The library's own objects. Each begins with the public structure.
#ifndef FAKE_VERBS_LIB_H
#define FAKE_VERBS_LIB_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../wire.h"
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#define container(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

struct fv_dev {
    struct ibv_device base;
    uint64_t guid;
    uint32_t index;
    _Atomic int users;
};

struct fv_ctx {
    pthread_mutex_t asking; // One question at a time, and the table of objects.
    pthread_mutex_t ringing;
    struct fv_bells *bells;
    struct fv_limits limits;
    struct fv_port port; // As it was at the opening: whoever asks gets today's.
    void **objects;      // By handle: those that events name.
    uint32_t object_count;
    struct verbs_context verbs;
};

struct fv_pd {
    struct ibv_pd base;
    struct ibv_pd *parent; // Of a parent domain.
};

struct fv_mr {
    struct ibv_mr base;
    unsigned int access;
};

struct fv_ah {
    struct ibv_ah base;
    struct ibv_ah_attr attr;
};

struct fv_channel {
    struct ibv_comp_channel base;
    uint32_t handle;
};

struct fv_cq {
    union {
        struct ibv_cq base;
        struct ibv_cq_ex ex;
    };
    pthread_mutex_t lock;
    struct fv_cq_ring *ring;
    size_t bytes;
    uint32_t mask, idle, events_got, async_got;
    struct fv_cqe cur; // What ibv_start_poll and ibv_next_poll show.
};

struct fv_srq {
    struct ibv_srq base;
    pthread_mutex_t lock;
    struct fv_srq_ring *ring;
    size_t bytes;
    uint32_t slots, stride, number, async_got;
    struct ibv_srq_attr attr;
    _Atomic uint32_t outstanding; // Posted, and their completions not polled.
};

struct fv_qp {
    union {
        struct ibv_qp base;
        struct ibv_qp_ex ex;
    };
    pthread_mutex_t sq_lock, rq_lock;
    struct fv_qp_ring *ring;
    size_t bytes;
    uint32_t sq_slots, sq_stride, rq_slots, rq_stride, async_got;
    struct ibv_qp_cap cap;
    int sq_sig_all;
    bool extended; // Made with ibv_wr_* functions.
    uint32_t sq_tail, rq_tail;
    _Atomic uint32_t sq_done, rq_done; // Up to here a completion has been polled.
    uint32_t building;                 // Work requests since ibv_wr_start.
    int build_error;
};

static inline struct fv_ctx *to_ctx(struct ibv_context *c) { return container(c, struct fv_ctx, verbs.context); }
static inline struct fv_cq *to_cq(struct ibv_cq *c) { return (struct fv_cq *)c; }
static inline struct fv_qp *to_qp(struct ibv_qp *q) { return (struct fv_qp *)q; }
static inline struct fv_srq *to_srq(struct ibv_srq *s) { return (struct fv_srq *)s; }

// ask.c: questions to the daemon. Both return 0 or an errno value; descriptors are not closed.
int fv_connect(void);
int fv_ask_on(int sock, const struct fv_request *q, const int *fds, int count, struct fv_reply *a);
int fv_ask(struct fv_ctx *c, const struct fv_request *q, const int *fds, int count, struct fv_reply *a);
void *fv_share(size_t bytes, int *fd);
void fv_ring(struct fv_ctx *c, uint32_t handle, struct fv_queue *q);
int fv_remember(struct fv_ctx *c, uint32_t handle, void *object);
void fv_forget(struct fv_ctx *c, uint32_t handle);
const char *fv_host(void);

// query.c
int fv_query_device_ex(struct ibv_context *c, const struct ibv_query_device_ex_input *in, struct ibv_device_attr_ex *a,
                       size_t size);
int fv_query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *a, size_t size);
int fv_query_rt_values(struct ibv_context *c, struct ibv_values_ex *v);

// memory.c
struct ibv_td *fv_alloc_td(struct ibv_context *c, struct ibv_td_init_attr *a);
int fv_dealloc_td(struct ibv_td *td);
struct ibv_pd *fv_alloc_parent_domain(struct ibv_context *c, struct ibv_parent_domain_init_attr *a);
int fv_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sg, uint32_t n);

// cq.c, poll.c
struct ibv_cq_ex *fv_create_cq_ex(struct ibv_context *c, struct ibv_cq_init_attr_ex *a);
int fv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *a);
int fv_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int fv_req_notify_cq(struct ibv_cq *cq, int solicited_only);
void fv_extend_cq(struct fv_cq *cq, uint64_t asked);
void fv_purge(struct fv_cq *cq, void *owner);

// srq.c
int fv_get_srq_num(struct ibv_srq *srq, uint32_t *number);
struct ibv_srq *fv_create_srq_ex(struct ibv_context *c, struct ibv_srq_init_attr_ex *a);

// qp.c
struct ibv_qp *fv_create_qp_ex(struct ibv_context *c, struct ibv_qp_init_attr_ex *a);

// post.c, wr.c
int fv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int fv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int fv_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct fv_send *fv_send_place(struct fv_qp *qp, uint32_t ahead);
int fv_set_address(struct fv_send *s, struct ibv_ah *ah);
void fv_extend_qp(struct fv_qp *qp);

// device.c
void fv_release_device(struct fv_dev *d);
#endif
