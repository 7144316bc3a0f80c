// What the stand-in for libibverbs and its daemon say to each other. The daemon is the adapters, the switch and the
// kernel's part of them: the library asks it over a socket, as a provider asks the kernel over /dev/infiniband/uverbs0,
// and puts work into rings that both have mapped.
#ifndef FAKE_VERBS_WIRE_H
#define FAKE_VERBS_WIRE_H
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdint.h>

#define FV_VERSION 1
#define FV_HOST_MAX 64
#define FV_GIDS 8
#define FV_DEVICES_MAX 2
#define FV_MAX_SGE 30
#define FV_MAX_INLINE 512
#define FV_GRH 40
#define FV_MTU 4096
#define FV_MAX_MESSAGE (1u << 30)
// Places of a context's ring of bells: more than it can have of queues that ring.
#define FV_BELLS (1u << 16)
#define FV_SOCKET "fabric"

enum fv_op {
    FV_LIST = 1,
    FV_OPEN,
    FV_PORT,
    FV_DEVICE,
    FV_ALLOC_PD,
    FV_DEALLOC_PD,
    FV_REG_MR,
    FV_REREG_MR,
    FV_DEREG_MR,
    FV_CREATE_CHANNEL,
    FV_DESTROY_CHANNEL,
    FV_CREATE_CQ,
    FV_RESIZE_CQ,
    FV_MODERATE_CQ,
    FV_DESTROY_CQ,
    FV_CREATE_SRQ,
    FV_MODIFY_SRQ,
    FV_QUERY_SRQ,
    FV_DESTROY_SRQ,
    FV_CREATE_QP,
    FV_MODIFY_QP,
    FV_QUERY_QP,
    FV_DESTROY_QP,
    FV_ATTACH,
    FV_DETACH,
    FV_FIND,
    // Only from the daemon's own commands.
    FV_SET,
    FV_RESTART,
    FV_MOVE,
    FV_READDRESS,
    FV_STATS,
    FV_OPS
};

// A provider that will not have a WRITE without bytes.
enum fv_zero_write { FV_ZERO_TAKEN, FV_ZERO_REFUSED, FV_ZERO_FAILS };

struct fv_device {
    char name[IBV_SYSFS_NAME_MAX];
    uint64_t guid; // Network byte order, as the verbs have it.
};

struct fv_port {
    uint16_t lid, sm_lid;
    uint32_t link_layer, gid_count, epoch;
    union ibv_gid gid[FV_GIDS];
    uint32_t gid_type[FV_GIDS];
};

// Limits and manners that the faults set.
struct fv_limits {
    uint32_t max_cqe, max_qp_wr, max_qp, zero_write, keep_cqes, any_qp;
};

struct fv_qp_make {
    uint32_t pd, send_cq, recv_cq, srq, type, sq_sig_all, create_flags;
    uint32_t sq_slots, sq_stride, rq_slots, rq_stride;
    struct ibv_qp_cap cap;
    uint64_t owner;
};

struct fv_request {
    uint32_t op, handle;
    union {
        struct {
            uint32_t version, device;
            char host[FV_HOST_MAX];
        } open;
        struct {
            uint32_t pd, access, flags, pad;
            uint64_t addr, length, iova;
        } mr;
        struct {
            uint32_t channel, cqe, slots;
            uint64_t owner;
        } cq;
        struct {
            uint32_t count, period;
        } moderation;
        struct {
            uint32_t pd, slots, stride, mask;
            struct ibv_srq_attr attr;
            uint64_t owner;
        } srq;
        struct fv_qp_make qp;
        struct {
            uint32_t mask;
            struct ibv_qp_attr attr;
        } modify;
        struct {
            union ibv_gid gid;
            uint16_t lid;
        } group;
        char text[512];
    };
};

struct fv_reply {
    int32_t error;
    uint32_t handle;
    union {
        struct {
            uint32_t count;
            struct fv_device device[FV_DEVICES_MAX];
        } list;
        struct fv_port port;
        struct fv_limits limits;
        struct {
            uint32_t lkey, rkey;
        } mr;
        struct {
            uint32_t number;
            struct ibv_srq_attr attr;
        } srq;
        struct {
            uint32_t number;
            struct ibv_qp_attr attr;
        } qp;
        char text[1024];
    };
};

// One page of each context: which queues have new work. `bell` is set while a message that says so is under way.
struct fv_bells {
    _Atomic uint32_t bell, head;
    _Atomic uint32_t tail;
    uint32_t ring[FV_BELLS];
};

// Of a completion whose queue pair is gone or was reset: nobody gets it, or who polls does all the same.
enum fv_owner { FV_NOBODY, FV_GONE };

struct fv_cqe {
    uint64_t owner; // The library's object, or one of fv_owner once that is gone.
    uint64_t wr_id, time_ns;
    uint32_t status, opcode, vendor_err, byte_len, imm, qp_num, src_qp, wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits, is_send, is_srq;
    uint32_t wqe;
};

enum fv_armed { FV_UNARMED, FV_ARMED_SOLICITED, FV_ARMED_ANY };

// The daemon puts entries in at the tail, the library takes them out at the head.
struct fv_cq_ring {
    _Atomic uint32_t tail;
    uint32_t pad0[15];
    _Atomic uint32_t head;
    _Atomic uint32_t armed;
    uint32_t pad1[14];
    struct fv_cqe entry[];
};

// The library puts work in at the tail. The daemon never writes but `belled`, `head` (for who looks) and at a reset.
struct fv_queue {
    _Atomic uint32_t tail;
    _Atomic uint32_t belled;
    _Atomic uint32_t head;
    uint32_t pad[13];
};

struct fv_address {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint16_t dlid;
    uint8_t is_global, sgid_index, hop_limit, traffic_class, sl, pad;
};

struct fv_send {
    uint64_t wr_id, remote_addr, compare_add, swap;
    uint32_t opcode, flags, imm, rkey;
    uint32_t num_sge, inline_len, remote_qpn, remote_qkey;
    struct fv_address address;
    union {
        struct ibv_sge sge[FV_MAX_SGE];
        uint8_t data[FV_MAX_INLINE];
    };
};

struct fv_recv {
    uint64_t wr_id;
    uint32_t num_sge, pad;
    struct ibv_sge sge[FV_MAX_SGE];
};

// A QP's rings: the two heads, then the places of the send queue, then those of the receive queue.
struct fv_qp_ring {
    struct fv_queue sq, rq;
    uint8_t place[];
};

struct fv_srq_ring {
    struct fv_queue rq;
    uint8_t place[];
};

struct fv_async {
    uint32_t type, handle;
};

static inline size_t fv_send_stride(uint32_t sge, uint32_t inl) {
    size_t body = sge * sizeof(struct ibv_sge) > inl ? sge * sizeof(struct ibv_sge) : inl;
    return (offsetof(struct fv_send, sge) + body + 63) & ~(size_t)63;
}

static inline size_t fv_recv_stride(uint32_t sge) {
    return (offsetof(struct fv_recv, sge) + sge * sizeof(struct ibv_sge) + 63) & ~(size_t)63;
}

// The next power of two: indices run on over the end of 32 bits.
static inline uint32_t fv_slots(uint32_t n) {
    uint32_t s = 1;
    while (s < n) s *= 2;
    return s;
}
#endif
