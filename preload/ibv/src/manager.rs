//! Types and constants of `rdma/rdma_cma.h`: the connection manager's.

use super::{AhAttr, CompChannel, Context, Cq, Gid, Int, Opaque, Pd, Qp, Srq};
use libc::{c_char, sockaddr, sockaddr_storage, socklen_t};

pub const PS_TCP: u32 = 0x0106;
pub const PS_UDP: u32 = 0x0111;
pub const PS_IB: u32 = 0x013f;

/// The Q_Key of datagrams between programs that connect by addresses.
pub const UDP_QKEY: u32 = 0x0123_4567;

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IbAddr {
    pub sgid: Gid,
    pub dgid: Gid,
    pub pkey: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Route {
    pub src: sockaddr_storage,
    pub dst: sockaddr_storage,
    pub ib: IbAddr,
    pub path_rec: *mut PathRecord,
    pub num_paths: Int,
}

/// `struct ibv_sa_path_rec`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PathRecord {
    pub dgid: Gid,
    pub sgid: Gid,
    pub dlid: u16,
    pub slid: u16,
    pub raw_traffic: Int,
    pub flow_label: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub reversible: Int,
    pub numb_path: u8,
    pub pkey: u16,
    pub sl: u8,
    pub mtu_selector: u8,
    pub mtu: u8,
    pub rate_selector: u8,
    pub rate: u8,
    pub packet_life_time_selector: u8,
    pub packet_life_time: u8,
    pub preference: u8,
}

#[repr(C)]
#[derive(Debug)]
pub struct EventChannel {
    pub fd: Int,
}

#[repr(C)]
pub struct CmId {
    pub verbs: *mut Context,
    pub channel: *mut EventChannel,
    pub context: *mut Opaque,
    pub qp: *mut Qp,
    pub route: Route,
    pub ps: u32,
    pub port_num: u8,
    pub event: *mut CmEvent,
    pub send_cq_channel: *mut CompChannel,
    pub send_cq: *mut Cq,
    pub recv_cq_channel: *mut CompChannel,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub pd: *mut Pd,
    pub qp_type: u32,
}

/// As many as the device can have.
pub const MAX_RESOURCES: u8 = 0xff;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ConnParam {
    pub private_data: *const Opaque,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UdParam {
    pub private_data: *const Opaque,
    pub private_data_len: u8,
    pub ah_attr: AhAttr,
    pub qp_num: u32,
    pub qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union CmParam {
    pub conn: ConnParam,
    pub ud: UdParam,
}

#[repr(C)]
pub struct CmEvent {
    pub id: *mut CmId,
    pub listen_id: *mut CmId,
    pub event: u32,
    pub status: Int,
    pub param: CmParam,
}

pub const CM_ADDR_RESOLVED: u32 = 0;
pub const CM_ADDR_ERROR: u32 = 1;
pub const CM_ROUTE_RESOLVED: u32 = 2;
pub const CM_CONNECT_REQUEST: u32 = 4;
pub const CM_CONNECT_RESPONSE: u32 = 5;
pub const CM_CONNECT_ERROR: u32 = 6;
pub const CM_UNREACHABLE: u32 = 7;
pub const CM_REJECTED: u32 = 8;
pub const CM_ESTABLISHED: u32 = 9;
pub const CM_DISCONNECTED: u32 = 10;
pub const CM_TIMEWAIT_EXIT: u32 = 15;

/// The names of all events, by their numbers.
pub const CM_EVENTS: [&std::ffi::CStr; 16] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
];

pub const RAI_PASSIVE: Int = 1;
pub const RAI_NUMERICHOST: Int = 2;
pub const RAI_FAMILY: Int = 8;

#[repr(C)]
pub struct AddrInfo {
    pub flags: Int,
    pub family: Int,
    pub qp_type: Int,
    pub port_space: Int,
    pub src_len: socklen_t,
    pub dst_len: socklen_t,
    pub src_addr: *mut sockaddr,
    pub dst_addr: *mut sockaddr,
    pub src_canonname: *mut c_char,
    pub dst_canonname: *mut c_char,
    pub route_len: usize,
    pub route: *mut Opaque,
    pub connect_len: usize,
    pub connect: *mut Opaque,
    pub next: *mut AddrInfo,
}

pub const OPTION_ID: Int = 0;
pub const OPTION_ID_TOS: Int = 0;
pub const OPTION_ID_REUSEADDR: Int = 1;
pub const OPTION_ID_AFONLY: Int = 2;
pub const OPTION_ID_ACK_TIMEOUT: Int = 3;

/// In an event of a connection that was rejected, why.
pub const REJ_TIMEOUT: Int = 4;
pub const REJ_INVALID_SERVICE: Int = 8;
pub const REJ_CONSUMER: Int = 28;
/// In one of datagrams that were.
pub const SIDR_REJECTED: Int = 2;

/// Bytes of the program's own in each message of the manager.
pub const REQUEST_DATA: usize = 56;
pub const REPLY_DATA: usize = 196;
pub const REJECT_DATA: usize = 148;
pub const SIDR_REQUEST_DATA: usize = 180;
pub const SIDR_REPLY_DATA: usize = 136;
