//! libibverbs' own functions.
//!
//! They are looked up in the library itself and not in what comes next: a plugin of MPI may load libibverbs where the
//! names of this library are not looked for.

use belay_ibv::*;
use std::ffi::CStr;
use std::sync::OnceLock;

/// What a function returns that libibverbs does not have.
trait Absent {
    const ANSWER: Self;
}
impl Absent for Int {
    const ANSWER: Int = libc::ENOSYS;
}
impl Absent for isize {
    const ANSWER: isize = -(libc::ENOSYS as isize);
}
impl Absent for u64 {
    const ANSWER: u64 = 0;
}
impl Absent for () {
    const ANSWER: () = ();
}
impl<T> Absent for *mut T {
    const ANSWER: *mut T = std::ptr::null_mut();
}

extern "C" fn absent<T: Absent>() -> T {
    crate::set_errno(libc::ENOSYS);
    T::ANSWER
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $answer:ty;)*) => {
        /// The functions, by the names that they have.
        pub(crate) struct Real {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        fn load() -> Real {
            // SAFETY: a name that ends in a zero byte. The library's initialisers are those that the program expects.
            let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            Real {
                $($name: {
                    let name = concat!(stringify!($name), "\0");
                    match find(library, CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or(c"")) {
                        // SAFETY: a function of this name in this library has these arguments.
                        Some(f) => unsafe { std::mem::transmute::<*mut Opaque, unsafe extern "C" fn($($argument),*) -> $answer>(f) },
                        // SAFETY: a C function may be given arguments that it does not look at.
                        None => unsafe {
                            std::mem::transmute::<extern "C" fn() -> $answer, unsafe extern "C" fn($($argument),*) -> $answer>(
                                absent::<$answer>,
                            )
                        },
                    }
                },)*
            }
        }
    };
}

fn find(library: *mut Opaque, name: &CStr) -> Option<*mut Opaque> {
    if library.is_null() {
        return None;
    }
    // SAFETY: an open library and a name.
    let f = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!f.is_null()).then_some(f)
}

functions! {
    ibv_get_device_list(*mut Int) -> *mut *mut Device;
    ibv_free_device_list(*mut *mut Device) -> ();
    ibv_get_device_index(*mut Device) -> Int;
    ibv_get_device_guid(*mut Device) -> u64;
    ibv_open_device(*mut Device) -> *mut Context;
    ibv_close_device(*mut Context) -> Int;
    ibv_query_device(*mut Context, *mut DeviceAttr) -> Int;
    ibv_query_port(*mut Context, u8, *mut PortAttr) -> Int;
    ibv_query_gid(*mut Context, u8, Int, *mut Gid) -> Int;
    _ibv_query_gid_ex(*mut Context, u32, u32, *mut GidEntry, u32, usize) -> Int;
    _ibv_query_gid_table(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    ibv_query_gid_type(*mut Context, u8, u32, *mut u32) -> Int;
    ibv_query_pkey(*mut Context, u8, Int, *mut u16) -> Int;
    ibv_get_pkey_index(*mut Context, u8, u16) -> Int;
    ibv_resolve_eth_l2_from_gid(*mut Context, *mut AhAttr, *mut u8, *mut u16) -> Int;
    ibv_alloc_pd(*mut Context) -> *mut Pd;
    ibv_dealloc_pd(*mut Pd) -> Int;
    ibv_reg_mr(*mut Pd, *mut Opaque, usize, Int) -> *mut Mr;
    ibv_reg_mr_iova(*mut Pd, *mut Opaque, usize, u64, Int) -> *mut Mr;
    ibv_reg_mr_iova2(*mut Pd, *mut Opaque, usize, u64, u32) -> *mut Mr;
    ibv_rereg_mr(*mut Mr, Int, *mut Pd, *mut Opaque, usize, Int) -> Int;
    ibv_dereg_mr(*mut Mr) -> Int;
    ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel(*mut CompChannel) -> Int;
    ibv_create_cq(*mut Context, Int, *mut Opaque, *mut CompChannel, Int) -> *mut Cq;
    ibv_resize_cq(*mut Cq, Int) -> Int;
    ibv_destroy_cq(*mut Cq) -> Int;
    ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut Opaque) -> Int;
    ibv_ack_cq_events(*mut Cq, u32) -> ();
    ibv_create_srq(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    ibv_modify_srq(*mut Srq, *mut SrqAttr, Int) -> Int;
    ibv_query_srq(*mut Srq, *mut SrqAttr) -> Int;
    ibv_destroy_srq(*mut Srq) -> Int;
    ibv_create_qp(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    ibv_qp_to_qp_ex(*mut Qp) -> *mut QpEx;
    ibv_modify_qp(*mut Qp, *mut QpAttr, Int) -> Int;
    ibv_query_qp(*mut Qp, *mut QpAttr, Int, *mut QpInitAttr) -> Int;
    ibv_query_qp_data_in_order(*mut Qp, u32, u32) -> Int;
    ibv_destroy_qp(*mut Qp) -> Int;
    ibv_create_ah(*mut Pd, *mut AhAttr) -> *mut Ah;
    ibv_init_ah_from_wc(*mut Context, u8, *mut Wc, *mut Grh, *mut AhAttr) -> Int;
    ibv_create_ah_from_wc(*mut Pd, *mut Wc, *mut Grh, u8) -> *mut Ah;
    ibv_destroy_ah(*mut Ah) -> Int;
    ibv_attach_mcast(*mut Qp, *const Gid, u16) -> Int;
    ibv_detach_mcast(*mut Qp, *const Gid, u16) -> Int;
    ibv_get_async_event(*mut Context, *mut AsyncEvent) -> Int;
    ibv_ack_async_event(*mut AsyncEvent) -> ();
    ibv_set_ece(*mut Qp, *mut Opaque) -> Int;
    ibv_query_ece(*mut Qp, *mut Opaque) -> Int;
}

/// The functions. The first call loads libibverbs, which takes locks of the dynamic linker.
pub(crate) fn real() -> &'static Real {
    static REAL: OnceLock<Real> = OnceLock::new();
    REAL.get_or_init(load)
}
