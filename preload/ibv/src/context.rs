//! The context, through whose tables inline functions of the header call the provider.

use super::*;

type Unused = *mut Opaque;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ContextOps {
    pub compat_query_device: Unused,
    pub compat_query_port: Unused,
    pub compat_pd_mr: [Unused; 5],
    pub alloc_mw: Unused,
    pub bind_mw: Unused,
    pub dealloc_mw: Unused,
    pub compat_create_cq: Unused,
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, Int, *mut Wc) -> Int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, Int) -> Int>,
    pub compat_cq_srq: [Unused; 7],
    pub post_srq_recv: Option<PostSrqRecv>,
    pub compat_qp: [Unused; 4],
    pub post_send: Option<PostSend>,
    pub post_recv: Option<PostRecv>,
    pub compat_rest: [Unused; 5],
}

#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: Int,
    pub async_fd: Int,
    pub num_comp_vectors: Int,
    pub mutex: libc::pthread_mutex_t,
    pub abi_compat: *mut Opaque,
}

/// `abi_compat` of a context that is the last part of a [`VerbsContext`].
pub const EXTENDED: *mut Opaque = usize::MAX as *mut Opaque;

/// Grows at its beginning: `sz` says how much is there.
#[repr(C)]
pub struct VerbsContext {
    pub query_port: Option<unsafe extern "C" fn(*mut Context, u8, *mut PortAttr, usize) -> Int>,
    pub advise_mr: Option<unsafe extern "C" fn(*mut Pd, u32, u32, *mut Sge, u32) -> Int>,
    pub alloc_null_mr: Unused,
    pub counters: [Unused; 4],
    pub device_memory: [Unused; 3],
    pub flow_action: [Unused; 3],
    pub modify_qp_rate_limit: Unused,
    pub alloc_parent_domain: Option<unsafe extern "C" fn(*mut Context, *mut ParentDomainInitAttr) -> *mut Pd>,
    pub dealloc_td: Option<unsafe extern "C" fn(*mut Td) -> Int>,
    pub alloc_td: Option<unsafe extern "C" fn(*mut Context, *mut Opaque) -> *mut Td>,
    pub modify_cq: Option<unsafe extern "C" fn(*mut Cq, *mut ModifyCqAttr) -> Int>,
    pub post_srq_ops: Unused,
    pub work_queues: [Unused; 5],
    pub query_rt_values: Option<unsafe extern "C" fn(*mut Context, *mut Opaque) -> Int>,
    pub create_cq_ex: Option<unsafe extern "C" fn(*mut Context, *mut CqInitAttrEx) -> *mut CqEx>,
    pub private: Unused,
    pub query_device_ex: Option<unsafe extern "C" fn(*mut Context, *const Opaque, *mut DeviceAttrEx, usize) -> Int>,
    pub flows: [Unused; 4],
    pub open_qp: Unused,
    pub create_qp_ex: Option<unsafe extern "C" fn(*mut Context, *mut QpInitAttrEx) -> *mut Qp>,
    pub get_srq_num: Option<unsafe extern "C" fn(*mut Srq, *mut u32) -> Int>,
    pub create_srq_ex: Unused,
    pub xrcd: [Unused; 2],
    pub placeholder: u64,
    pub sz: usize,
    pub context: Context,
}
