//! What librdmacm has and this library does not: programs are told that it is not supported.

use super::refuse;
use belay_ibv::{CmId, Int, Opaque};
use libc::sockaddr;

#[no_mangle]
unsafe extern "C" fn rdma_join_multicast(_: *mut CmId, _: *mut sockaddr, _: *mut Opaque) -> Int {
    refuse(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn rdma_join_multicast_ex(_: *mut CmId, _: *mut Opaque, _: *mut Opaque) -> Int {
    refuse(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn rdma_leave_multicast(_: *mut CmId, _: *mut sockaddr) -> Int {
    refuse(libc::EADDRNOTAVAIL)
}

/// The queues that it takes a domain or a kind for (XRC) are not made again.
#[no_mangle]
unsafe extern "C" fn rdma_create_srq_ex(_: *mut CmId, _: *mut Opaque) -> Int {
    refuse(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn rdma_set_local_ece(_: *mut CmId, _: *mut Opaque) -> Int {
    refuse(libc::EOPNOTSUPP)
}

/// No other end has told any.
#[no_mangle]
unsafe extern "C" fn rdma_get_remote_ece(id: *mut CmId, ece: *mut u32) -> Int {
    if id.is_null() || !(*id).qp.is_null() || ece.is_null() {
        return refuse(libc::EINVAL);
    }
    std::ptr::write_bytes(ece, 0, 3);
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_resolve_addrinfo(_: *mut CmId, _: *const Opaque, _: *const Opaque, _: *const Opaque) -> Int {
    refuse(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn rdma_query_addrinfo(_: *mut CmId, _: *mut *mut Opaque) -> Int {
    refuse(libc::ENOENT)
}

#[no_mangle]
unsafe extern "C" fn rdma_write_cm_event(_: *mut CmId, _: u32, _: Int, _: u64) -> Int {
    refuse(libc::EOPNOTSUPP)
}

/// Sockets over the verbs: without one, none of librdmacm's other functions of them does anything.
#[no_mangle]
unsafe extern "C" fn rsocket(_: Int, _: Int, _: Int) -> Int {
    refuse(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn repoll_create(_: Int) -> Int {
    refuse(libc::EOPNOTSUPP)
}
