// A provider of the verbs that does nothing: what is posted is done when it is next polled. It has what
// verbs_loop.c calls, and what belay's library asks of a device and of its objects.
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_query_port
#undef ibv_reg_mr

enum { ROOM = 64 };

struct queue {
    struct ibv_cq base;
    uint64_t done[ROOM];
    uint32_t head, tail;
};

struct pair {
    struct ibv_qp base;
};

static struct ibv_device device = {.name = "null0", .dev_name = "null0"};

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct queue *q = (struct queue *)qp->send_cq;
    for (; wr; wr = wr->next) {
        if (q->tail - q->head == ROOM) {
            *bad = wr;
            return 12;
        }
        q->done[q->tail++ % ROOM] = wr->wr_id;
    }
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    (void)qp, (void)wr, (void)bad;
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
    struct queue *q = (struct queue *)cq;
    int got = 0;
    for (; got < n && q->head != q->tail; got++) {
        wc[got].wr_id = q->done[q->head++ % ROOM];
        wc[got].status = IBV_WC_SUCCESS;
        wc[got].opcode = IBV_WC_RDMA_WRITE;
        wc[got].qp_num = 7;
        wc[got].wc_flags = 0;
    }
    return got;
}

static int req_notify(struct ibv_cq *cq, int solicited) {
    (void)cq, (void)solicited;
    return 0;
}

struct ibv_device **ibv_get_device_list(int *n) {
    struct ibv_device **list = calloc(2, sizeof *list);
    if (n) *n = 1;
    list[0] = &device;
    return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
__be64 ibv_get_device_guid(struct ibv_device *d) { return d ? 1 : 0; }
int ibv_get_device_index(struct ibv_device *d) { return d ? 0 : -1; }

struct ibv_context *ibv_open_device(struct ibv_device *d) {
    struct verbs_context *v = calloc(1, sizeof *v);
    v->sz = sizeof *v;
    v->context.device = d;
    v->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    v->context.async_fd = v->context.cmd_fd = -1;
    v->context.ops.post_send = post_send;
    v->context.ops.post_recv = post_recv;
    v->context.ops.poll_cq = poll_cq;
    v->context.ops.req_notify_cq = req_notify;
    // A descriptor on which nothing ever comes.
    int ends[2];
    extern int pipe(int *);
    if (!pipe(ends)) v->context.async_fd = ends[0];
    return &v->context;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a) {
    (void)c;
    memset(a, 0, sizeof *a);
    a->phys_port_cnt = 1;
    return 0;
}

int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *a) {
    (void)c, (void)port;
    memset(a, 0, offsetof(struct ibv_port_attr, port_cap_flags2));
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *all, size_t n, uint32_t flags, size_t size) {
    (void)c, (void)all, (void)n, (void)flags, (void)size;
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    pd->context = c;
    return pd;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    (void)access;
    *mr = (struct ibv_mr){pd->context, pd, addr, length, 0, 5, 6};
    return mr;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *user, struct ibv_comp_channel *channel, int vector) {
    struct queue *q = calloc(1, sizeof *q);
    (void)vector;
    q->base.context = c;
    q->base.cq_context = user;
    q->base.channel = channel;
    q->base.cqe = cqe;
    return &q->base;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
    struct pair *p = calloc(1, sizeof *p);
    p->base.context = pd->context;
    p->base.pd = pd;
    p->base.qp_context = init->qp_context;
    p->base.send_cq = init->send_cq;
    p->base.recv_cq = init->recv_cq;
    p->base.qp_num = 7;
    p->base.qp_type = init->qp_type;
    return &p->base;
}
