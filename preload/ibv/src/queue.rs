//! Queues, and what is told of them, as programs see them.

use super::{Ah, Context, Int, Opaque, Pd, RecvWr, SendWr, Sge};
use libc::{pthread_cond_t, pthread_mutex_t};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: Int,
    pub refcnt: Int,
}

#[repr(C)]
pub struct Srq {
    pub context: *mut Context,
    pub srq_context: *mut Opaque,
    pub pd: *mut Pd,
    pub handle: u32,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut Opaque,
    pub handle: u32,
    pub cqe: Int,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PollAttr {
    pub comp_mask: u32,
}

type Read<T> = Option<unsafe extern "C" fn(*mut CqEx) -> T>;

#[repr(C)]
pub struct CqEx {
    pub base: Cq,
    pub comp_mask: u32,
    pub status: u32,
    pub wr_id: u64,
    pub start_poll: Option<unsafe extern "C" fn(*mut CqEx, *mut PollAttr) -> Int>,
    pub next_poll: Read<Int>,
    pub end_poll: Read<()>,
    pub read_opcode: Read<u32>,
    pub read_vendor_err: Read<u32>,
    pub read_byte_len: Read<u32>,
    pub read_imm_data: Read<u32>,
    pub read_qp_num: Read<u32>,
    pub read_src_qp: Read<u32>,
    pub read_wc_flags: Read<u32>,
    pub read_slid: Read<u32>,
    pub read_sl: Read<u8>,
    pub read_dlid_path_bits: Read<u8>,
    pub read_completion_ts: Read<u64>,
    pub read_cvlan: Read<u16>,
    pub read_flow_tag: Read<u32>,
    pub read_tm_info: Option<unsafe extern "C" fn(*mut CqEx, *mut Opaque)>,
    pub read_completion_wallclock_ns: Read<u64>,
}

#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut Opaque,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: u32,
    pub qp_type: u32,
    pub mutex: pthread_mutex_t,
    pub cond: pthread_cond_t,
    pub events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct DataBuf {
    pub addr: *mut Opaque,
    pub length: usize,
}

/// The operations of an extended queue pair; those that are not there are not offered.
#[repr(C)]
pub struct QpEx {
    pub base: Qp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: u32,
    pub wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u64, u64)>,
    pub wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u64)>,
    pub wr_bind_mw: Option<unsafe extern "C" fn(*mut QpEx)>,
    pub wr_local_inv: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
    pub wr_rdma_read: Option<unsafe extern "C" fn(*mut QpEx, u32, u64)>,
    pub wr_rdma_write: Option<unsafe extern "C" fn(*mut QpEx, u32, u64)>,
    pub wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u32)>,
    pub wr_send: Option<unsafe extern "C" fn(*mut QpEx)>,
    pub wr_send_imm: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
    pub wr_send_inv: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
    pub wr_send_tso: Option<unsafe extern "C" fn(*mut QpEx)>,
    pub wr_set_ud_addr: Option<unsafe extern "C" fn(*mut QpEx, *mut Ah, u32, u32)>,
    pub wr_set_xrc_srqn: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
    pub wr_set_inline_data: Option<unsafe extern "C" fn(*mut QpEx, *mut Opaque, usize)>,
    pub wr_set_inline_data_list: Option<unsafe extern "C" fn(*mut QpEx, usize, *const DataBuf)>,
    pub wr_set_sge: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u32)>,
    pub wr_set_sge_list: Option<unsafe extern "C" fn(*mut QpEx, usize, *const Sge)>,
    pub wr_start: Option<unsafe extern "C" fn(*mut QpEx)>,
    pub wr_complete: Option<unsafe extern "C" fn(*mut QpEx) -> Int>,
    pub wr_abort: Option<unsafe extern "C" fn(*mut QpEx)>,
    pub wr_atomic_write: Option<unsafe extern "C" fn(*mut QpEx)>,
}

/// What an asynchronous event is about.
#[repr(C)]
#[derive(Clone, Copy)]
pub union EventElement {
    pub cq: *mut Cq,
    pub qp: *mut Qp,
    pub srq: *mut Srq,
    pub port_num: Int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    pub element: EventElement,
    pub event_type: u32,
}

pub const EVENT_CQ_ERR: u32 = 0;
pub const EVENT_QP_FATAL: u32 = 1;
pub const EVENT_SQ_DRAINED: u32 = 5;
pub const EVENT_PATH_MIG_ERR: u32 = 7;
pub const EVENT_DEVICE_FATAL: u32 = 8;
pub const EVENT_LID_CHANGE: u32 = 11;
pub const EVENT_SRQ_ERR: u32 = 14;
pub const EVENT_SRQ_LIMIT_REACHED: u32 = 15;
pub const EVENT_QP_LAST_WQE_REACHED: u32 = 16;
pub const EVENT_GID_CHANGE: u32 = 18;
pub const EVENT_WQ_FATAL: u32 = 19;

pub type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> Int;
pub type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> Int;
pub type PostSrqRecv = unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> Int;
