// Queue pairs for datagrams in place of the reliable ones.
#ifndef VERBSGRAMS_H
#define VERBSGRAMS_H
#include "verbsends.h"

enum { KEY = 0x1234 };

// A queue pair for datagrams in place of a reliable one, which is ready.
static void make_datagrams(struct end *e) {
    struct ibv_qp_init_attr_ex init = {.send_cq = e->cq,
                                       .recv_cq = e->cq,
                                       .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
                                       .qp_type = IBV_QPT_UD,
                                       .pd = e->port.pd,
                                       .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                       .send_ops_flags = IBV_QP_EX_WITH_SEND};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = KEY};
    Z(ibv_destroy_qp(e->qp));
    e->qp = V(ibv_create_qp_ex(e->port.context, &init));
    Z(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    Z(go_to(e, IBV_QPS_RTR));
    attr.qp_state = IBV_QPS_RTS;
    Z(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

// Whom a datagram is sent to.
struct target {
    struct ibv_ah *ah;
    uint32_t number;
};

// By the address in this place of its port.
static struct target target_at(struct end *e, int place) {
    struct address at = address_of(&e->port, e->qp, 0);
    Z(ibv_query_gid(e->port.context, 1, place, &at.gid));
    struct ibv_ah_attr attr = ah_attr_to(&a.port, &at);
    return (struct target){V(ibv_create_ah(a.port.pd, &attr)), at.qpn};
}

static int post_to(const struct target *to, uint64_t id) {
    struct ibv_send_wr w = request(&a, IBV_WR_SEND, id, 8);
    w.wr.ud.ah = to->ah;
    w.wr.ud.remote_qpn = to->number;
    w.wr.ud.remote_qkey = KEY;
    return post(&a, &w);
}

// One after the other, all or none.
static int post_all(struct end *e, const struct target *to, int count) {
    struct ibv_qp_ex *q = V(ibv_qp_to_qp_ex(e->qp));
    ibv_wr_start(q);
    for (int i = 0; i < count; i++) {
        q->wr_id = (uint64_t)i;
        q->wr_flags = IBV_SEND_SIGNALED;
        ibv_wr_send(q);
        ibv_wr_set_ud_addr(q, to[i].ah, to[i].number, KEY);
        ibv_wr_set_sge(q, a.mr->lkey, (uintptr_t)a.memory, 8);
    }
    return ibv_wr_complete(q);
}
#endif
