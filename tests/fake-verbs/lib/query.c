// What a program may ask about the device and its port.
#include "fv.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <time.h>

#undef ibv_query_port

static int limits(struct fv_ctx *c, struct fv_limits *l) {
    struct fv_request q = {.op = FV_DEVICE};
    struct fv_reply a;
    int error = fv_ask(c, &q, NULL, 0, &a);
    *l = a.limits;
    return error;
}

static int port(struct fv_ctx *c, uint32_t number, struct fv_port *p) {
    struct fv_request q = {.op = FV_PORT};
    struct fv_reply a;
    if (number != 1) return EINVAL;
    int error = fv_ask(c, &q, NULL, 0, &a);
    *p = a.port;
    return error;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a) {
    struct fv_ctx *c = to_ctx(context);
    struct fv_limits l;
    int error = limits(c, &l);
    if (error) return error;
    *a = (struct ibv_device_attr){
        .fw_ver = "1.0.0",
        .node_guid = ibv_get_device_guid(context->device),
        .sys_image_guid = ibv_get_device_guid(context->device),
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 4096,
        .vendor_id = 0xbe1a,
        .vendor_part_id = 1,
        .max_qp = (int)l.max_qp,
        .max_qp_wr = (int)l.max_qp_wr,
        .device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN |
                            IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_XRC | IBV_DEVICE_MEM_WINDOW |
                            IBV_DEVICE_MANAGED_FLOW_STEERING,
        .max_mw = 1024,
        .max_sge = FV_MAX_SGE,
        .max_sge_rd = FV_MAX_SGE,
        .max_cq = 16384,
        .max_cqe = (int)l.max_cqe,
        .max_mr = 1 << 18,
        .max_pd = 16384,
        .max_qp_rd_atom = 16,
        .max_res_rd_atom = 16 * (int)l.max_qp,
        .max_qp_init_rd_atom = 16,
        .atomic_cap = IBV_ATOMIC_HCA,
        .max_mcast_grp = 1024,
        .max_mcast_qp_attach = 1024,
        .max_total_mcast_qp_attach = 1024 * 1024,
        .max_ah = 1 << 20,
        .max_srq = 4096,
        .max_srq_wr = (int)l.max_qp_wr,
        .max_srq_sge = FV_MAX_SGE,
        .max_pkeys = 1,
        .local_ca_ack_delay = 15,
        .phys_port_cnt = 1,
    };
    return 0;
}

int fv_query_device_ex(struct ibv_context *c, const struct ibv_query_device_ex_input *in, struct ibv_device_attr_ex *a,
                       size_t size) {
    (void)in;
    if (size < sizeof a->orig_attr) return EINVAL;
    memset(a, 0, size);
    int error = ibv_query_device(c, &a->orig_attr);
    if (error) return error;
    if (vext_field_avail(struct ibv_device_attr_ex, device_cap_flags_ex, size)) {
        a->completion_timestamp_mask = UINT64_MAX;
        a->hca_core_clock = 1000000; // kHz
        a->device_cap_flags_ex = a->orig_attr.device_cap_flags;
    }
    if (vext_field_avail(struct ibv_device_attr_ex, phys_port_cnt_ex, size)) {
        a->pci_atomic_caps.fetch_add = a->pci_atomic_caps.compare_swap = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP;
        a->phys_port_cnt_ex = 1;
        a->max_dm_size = 1 << 20;
        a->max_wq_type_rq = 64;
        a->tm_caps.max_num_tags = 64;
    }
    return 0;
}

int fv_query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *a, size_t size) {
    struct fv_port p;
    int error = port(to_ctx(context), number, &p);
    if (error) return error;
    struct ibv_port_attr full = {
        .state = IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = FV_GIDS,
        .port_cap_flags = p.link_layer == IBV_LINK_LAYER_ETHERNET ? IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS
                                                                  : IBV_PORT_CM_SUP,
        .max_msg_sz = FV_MAX_MESSAGE,
        .pkey_tbl_len = 1,
        .lid = p.lid,
        .sm_lid = p.sm_lid,
        .max_vl_num = 1,
        .active_width = 2,
        .active_speed = 16,
        .phys_state = 5,
        .link_layer = (uint8_t)p.link_layer,
    };
    memset(a, 0, size);
    memcpy(a, &full, size < sizeof full ? size : sizeof full);
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t number, struct _compat_ibv_port_attr *a) {
    return fv_query_port(context, number, (struct ibv_port_attr *)a, offsetof(struct ibv_port_attr, port_cap_flags2));
}

// A real device's clock: raw_clock counts cycles in its nanoseconds.
int fv_query_rt_values(struct ibv_context *c, struct ibv_values_ex *v) {
    (void)c;
    if (v->comp_mask & ~(uint32_t)IBV_VALUES_MASK_RAW_CLOCK) return EINVAL;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    v->raw_clock.tv_sec = 0;
    v->raw_clock.tv_nsec = t.tv_sec * 1000000000L + t.tv_nsec;
    return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t number, int index, union ibv_gid *gid) {
    struct fv_port p;
    if (index < 0 || index >= FV_GIDS || port(to_ctx(context), number, &p)) {
        errno = EINVAL;
        return -1;
    }
    *gid = p.gid[index];
    return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t number, uint32_t index, struct ibv_gid_entry *e,
                      uint32_t flags, size_t size) {
    struct fv_port p;
    if (flags) return EOPNOTSUPP;
    if (size < sizeof *e || index >= FV_GIDS || port(to_ctx(context), number, &p)) return EINVAL;
    if (index >= p.gid_count) return ENODATA;
    *e = (struct ibv_gid_entry){.gid = p.gid[index], .gid_index = index, .port_num = 1, .gid_type = p.gid_type[index]};
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *e, size_t max, uint32_t flags,
                             size_t size) {
    struct fv_port p;
    if (flags) return -EOPNOTSUPP;
    if (size < sizeof *e || port(to_ctx(context), 1, &p)) return -EINVAL;
    size_t n = p.gid_count < max ? p.gid_count : max;
    for (size_t i = 0; i < n; i++) {
        struct ibv_gid_entry one = {
            .gid = p.gid[i], .gid_index = (uint32_t)i, .port_num = 1, .gid_type = p.gid_type[i]};
        memcpy((char *)e + i * size, &one, sizeof one);
    }
    return (ssize_t)n;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t number, int index, __be16 *pkey) {
    (void)context;
    if (number != 1 || index != 0) {
        errno = EINVAL;
        return -1;
    }
    *pkey = htons(0xffff);
    return 0;
}

int ibv_get_pkey_index(struct ibv_context *context, uint8_t number, __be16 pkey) {
    (void)context;
    if (number == 1 && pkey == htons(0xffff)) return 0;
    errno = EINVAL;
    return -1;
}

const char *ibv_get_sysfs_path(void) {
    const char *p = getenv("SYSFS_PATH");
    return p ? p : "/sys";
}

int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size) {
    char path[512];
    if (snprintf(path, sizeof path, "%s/%s", dir, file) >= (int)sizeof path) return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, buf, size);
    close(fd);
    if (n < 0) return -1;
    if (n > 0 && buf[n - 1] == '\n') buf[--n] = 0;
    else if ((size_t)n < size) buf[n] = 0;
    return (int)n;
}

// ibv_devinfo and librdmacm ask in this way, in which a GID is of RoCE v2 (1) or of any other kind (0).
int ibv_query_gid_type(struct ibv_context *context, uint8_t number, unsigned int index, unsigned int *type);
int ibv_query_gid_type(struct ibv_context *context, uint8_t number, unsigned int index, unsigned int *type) {
    struct fv_port p;
    if (index >= FV_GIDS || port(to_ctx(context), number, &p)) {
        errno = EINVAL;
        return -1;
    }
    *type = index < p.gid_count && p.gid_type[index] == IBV_GID_TYPE_ROCE_V2;
    return 0;
}
