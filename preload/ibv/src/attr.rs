//! Attributes: what objects are made with, and what can be asked.

use super::{CompChannel, Cq, Gid, Opaque, Pd, Srq};

#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct QpInitAttr {
    pub qp_context: *mut Opaque,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RxHashConf {
    pub function: u8,
    pub key_len: u8,
    pub key: *mut u8,
    pub fields_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct QpInitAttrEx {
    pub qp_context: *mut Opaque,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: i32,
    pub comp_mask: u32,
    pub pd: *mut Pd,
    pub xrcd: *mut Opaque,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: *mut Opaque,
    pub rx_hash_conf: RxHashConf,
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

pub const QP_INIT_ATTR_PD: u32 = 1;
pub const QP_INIT_ATTR_CREATE_FLAGS: u32 = 1 << 2;
pub const QP_INIT_ATTR_SEND_OPS_FLAGS: u32 = 1 << 6;

pub const QP_EX_WITH_RDMA_WRITE: u64 = 1;
pub const QP_EX_WITH_RDMA_WRITE_WITH_IMM: u64 = 1 << 1;
pub const QP_EX_WITH_SEND: u64 = 1 << 2;
pub const QP_EX_WITH_SEND_WITH_IMM: u64 = 1 << 3;
pub const QP_EX_WITH_RDMA_READ: u64 = 1 << 4;
pub const QP_EX_WITH_ATOMIC_CMP_AND_SWP: u64 = 1 << 5;
pub const QP_EX_WITH_ATOMIC_FETCH_AND_ADD: u64 = 1 << 6;
pub const QP_EX_WITH_SEND_WITH_INV: u64 = 1 << 9;

pub const QPT_RC: u32 = 2;
pub const QPT_UC: u32 = 3;
pub const QPT_UD: u32 = 4;

pub const QPS_RESET: u32 = 0;
pub const QPS_INIT: u32 = 1;
pub const QPS_RTR: u32 = 2;
pub const QPS_RTS: u32 = 3;
pub const QPS_SQD: u32 = 4;
pub const QPS_SQE: u32 = 5;
pub const QPS_ERR: u32 = 6;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

pub const QP_STATE: i32 = 1;
pub const QP_CUR_STATE: i32 = 1 << 1;
pub const QP_EN_SQD_ASYNC_NOTIFY: i32 = 1 << 2;
pub const QP_ACCESS_FLAGS: i32 = 1 << 3;
pub const QP_PKEY_INDEX: i32 = 1 << 4;
pub const QP_PORT: i32 = 1 << 5;
pub const QP_QKEY: i32 = 1 << 6;
pub const QP_AV: i32 = 1 << 7;
pub const QP_PATH_MTU: i32 = 1 << 8;
pub const QP_TIMEOUT: i32 = 1 << 9;
pub const QP_RETRY_CNT: i32 = 1 << 10;
pub const QP_RNR_RETRY: i32 = 1 << 11;
pub const QP_RQ_PSN: i32 = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: i32 = 1 << 13;
pub const QP_ALT_PATH: i32 = 1 << 14;
pub const QP_MIN_RNR_TIMER: i32 = 1 << 15;
pub const QP_SQ_PSN: i32 = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: i32 = 1 << 17;
pub const QP_PATH_MIG_STATE: i32 = 1 << 18;
pub const QP_CAP: i32 = 1 << 19;
pub const QP_DEST_QPN: i32 = 1 << 20;
pub const QP_RATE_LIMIT: i32 = 1 << 25;

pub const ACCESS_LOCAL_WRITE: u32 = 1;
pub const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
pub const ACCESS_REMOTE_READ: u32 = 1 << 2;
pub const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;
pub const ACCESS_ZERO_BASED: u32 = 1 << 5;

pub const REREG_CHANGE_TRANSLATION: i32 = 1;
pub const REREG_CHANGE_PD: i32 = 1 << 1;
pub const REREG_CHANGE_ACCESS: i32 = 1 << 2;
pub const REREG_ERR_CMD: i32 = -4;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

pub const SRQ_MAX_WR: i32 = 1;
pub const SRQ_LIMIT: i32 = 1 << 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct SrqInitAttr {
    pub srq_context: *mut Opaque,
    pub attr: SrqAttr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CqInitAttrEx {
    pub cqe: u32,
    pub cq_context: *mut Opaque,
    pub channel: *mut CompChannel,
    pub comp_vector: u32,
    pub wc_flags: u64,
    pub comp_mask: u32,
    pub flags: u32,
    pub parent_domain: *mut Pd,
}

pub const CQ_INIT_ATTR_MASK_PD: u32 = 1 << 1;
pub const WC_EX_WITH_COMPLETION_TIMESTAMP: u64 = 1 << 7;
pub const WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK: u64 = 1 << 11;
/// What every completion carries.
pub const WC_STANDARD_FLAGS: u64 = 0x7f;
/// The same, and its time.
pub const WC_KNOWN_FLAGS: u64 = WC_STANDARD_FLAGS | WC_EX_WITH_COMPLETION_TIMESTAMP | WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ModifyCqAttr {
    pub attr_mask: u32,
    pub cq_count: u16,
    pub cq_period: u16,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PortAttr {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: i32,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

pub const LINK_LAYER_ETHERNET: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttr {
    pub fw_ver: [u8; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor: [u32; 3],
    pub max_qp: i32,
    pub max_qp_wr: i32,
    pub device_cap_flags: u32,
    pub max_sge: i32,
    pub max_sge_rd: i32,
    pub max_cq: i32,
    pub max_cqe: i32,
    /// From `max_mr` to `max_qp_rd_atom` and on to `max_ee_init_rd_atom`.
    pub limits: [i32; 7],
    pub atomic_cap: u32,
    pub max_ee: i32,
    pub max_rdd: i32,
    pub max_mw: i32,
    pub max_raw_ipv6_qp: i32,
    pub max_raw_ethy_qp: i32,
    /// From `max_mcast_grp` to `max_srq_sge`.
    pub more: [i32; 9],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

pub const DEVICE_MEM_WINDOW: u32 = 1 << 17;
pub const DEVICE_XRC: u32 = 1 << 20;
pub const DEVICE_MEM_WINDOW_TYPE_2A: u32 = 1 << 23;
pub const DEVICE_MEM_WINDOW_TYPE_2B: u32 = 1 << 24;
pub const DEVICE_RAW_IP_CSUM: u32 = 1 << 26;
pub const DEVICE_MANAGED_FLOW_STEERING: u32 = 1 << 29;
pub const DEVICE_RAW_SCATTER_FCS: u64 = 1 << 34;

/// `ibv_device_attr_ex`; a program may have been compiled with a shorter one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    /// `odp_caps`, `completion_timestamp_mask` and `hca_core_clock`.
    pub times: [u64; 5],
    pub device_cap_flags_ex: u64,
    pub tso_caps: [u32; 2],
    pub rss_caps: [u64; 4],
    pub max_wq_type_rq: u32,
    pub packet_pacing_caps: [u32; 3],
    pub raw_packet_caps: u32,
    pub tm_caps: [u32; 5],
    pub cq_mod_caps: [u16; 2],
    pub max_dm_size: u64,
    pub pci_atomic_caps: [u16; 3],
    pub xrc_odp_caps: u32,
    pub phys_port_cnt_ex: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ParentDomainInitAttr {
    pub pd: *mut Pd,
    pub td: *mut super::Td,
    pub comp_mask: u32,
    pub alloc: *mut Opaque,
    pub free: *mut Opaque,
    pub pd_context: *mut Opaque,
}
