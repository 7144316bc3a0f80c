// What queue pairs can be made of a device that makes every one: verbs_offers all, or verbs_offers known, where those are
// refused that cannot be made again after a restart.
#include "verbsends.h"

static int all;

static void try(enum ibv_qp_type type, uint64_t operations, int is_known) {
    struct ibv_qp_init_attr plain = {
        .send_cq = a.cq,
        .recv_cq = a.cq,
        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = type,
    };
    struct ibv_qp_init_attr_ex extended = {
        .send_cq = a.cq,
        .recv_cq = a.cq,
        .cap = plain.cap,
        .qp_type = type,
        .comp_mask = IBV_QP_INIT_ATTR_PD | (operations ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
        .pd = a.port.pd,
        .send_ops_flags = operations,
    };
    errno = 0;
    struct ibv_qp *qp = operations ? NULL : ibv_create_qp(a.port.pd, &plain);
    if (!operations) {
        EQ(qp != NULL, all || is_known);
        if (qp) Z(ibv_destroy_qp(qp));
        else EQ(errno, EOPNOTSUPP);
    }
    qp = ibv_create_qp_ex(a.port.context, &extended);
    EQ(qp != NULL, all || is_known);
    if (qp) Z(ibv_destroy_qp(qp));
    else EQ(errno, EOPNOTSUPP);
}

// A device tells of nothing that is refused.
static void tells(void) {
    uint64_t refused = IBV_DEVICE_XRC | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MANAGED_FLOW_STEERING;
    struct ibv_device_attr plain;
    struct ibv_device_attr_ex extended;
    Z(ibv_query_device(a.port.context, &plain));
    EQ(plain.device_cap_flags & refused, all ? refused : 0);
    EQ(plain.max_mw > 0, all);
    EQ(plain.max_srq, 4096);
    Z(ibv_query_device_ex(a.port.context, NULL, &extended));
    EQ(extended.device_cap_flags_ex & refused, all ? refused : 0);
    EQ(extended.max_dm_size > 0, all);
    EQ(extended.max_wq_type_rq > 0, all);
    EQ(extended.tm_caps.max_num_tags > 0, all);
    EQ(extended.hca_core_clock, 1000000);
    EQ(extended.phys_port_cnt_ex, 1);
}

int main(int argc, char **argv) {
    begin("verbs_offers");
    all = given(argc, argv, "all");
    fault("any_qp=1");
    make_end(&a, "offers", 64);
    tells();
    for (int type = IBV_QPT_RC; type <= IBV_QPT_UD; type++) try((enum ibv_qp_type)type, 0, 1);
    try(IBV_QPT_RAW_PACKET, 0, 0);
    try(IBV_QPT_XRC_SEND, 0, 0);
    try(IBV_QPT_XRC_RECV, 0, 0);
    try(IBV_QPT_DRIVER, 0, 0);
    for (int bit = 0; bit < 16; bit++) {
        uint64_t send = 3 << 2, write = send | 3, inv = 1 << 9;
        try(IBV_QPT_RC, 1 << bit, (0x7f | inv) >> bit & 1);
        try(IBV_QPT_UC, 1 << bit, write >> bit & 1);
        try(IBV_QPT_UD, 1 << bit, send >> bit & 1);
    }
    fault("any_qp=0");
    return finish();
}
