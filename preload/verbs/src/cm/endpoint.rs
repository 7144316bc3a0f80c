//! The simple interface: endpoints whose calls wait, and names of hosts.

use super::channel::{rdma_ack_cm_event, rdma_get_cm_event};
use super::id::{create, rdma_bind_addr, rdma_destroy_id, rdma_resolve_addr, rdma_resolve_route};
use super::queue::{rdma_create_qp, rdma_destroy_qp, rdma_destroy_srq};
use super::{refuse, Id};
use belay_ibv::*;
use libc::{addrinfo, c_char, sockaddr, socklen_t};
use std::mem::zeroed;
use std::ptr::null_mut;

/// How long an address is looked for: nobody here waits for that.
const TIMEOUT_MS: Int = 2000;

#[no_mangle]
unsafe extern "C" fn rdma_get_request(listener: *mut CmId, id: *mut *mut CmId) -> Int {
    let this = Id::of(listener);
    if !this.sync {
        return refuse(libc::EINVAL);
    }
    if !(*listener).event.is_null() {
        rdma_ack_cm_event((*listener).event);
        (*listener).event = null_mut();
    }
    let mut event = null_mut();
    let error = rdma_get_cm_event((*listener).channel, &mut event);
    if error != 0 {
        return error;
    }
    let made = match ((*event).event, (*event).status, this.template) {
        (CM_REJECTED, ..) => Err(libc::ECONNREFUSED),
        (_, status, _) if status != 0 => Err(-status),
        (CM_CONNECT_REQUEST, _, None) => Ok(()),
        (CM_CONNECT_REQUEST, _, Some(mut init)) => match rdma_create_qp((*event).id, (*listener).pd, &mut init) {
            0 => Ok(()),
            _ => Err(crate::errno()),
        },
        _ => Err(libc::EINVAL),
    };
    if let Err(error) = made {
        (*listener).event = event;
        return refuse(error);
    }
    *id = (*event).id;
    (**id).event = event;
    0
}

/// The steps to an endpoint that listens, or that is about to connect.
unsafe fn prepare(id: *mut CmId, res: &AddrInfo, pd: *mut Pd, init: *mut QpInitAttr) -> Int {
    if res.flags & RAI_PASSIVE != 0 {
        let error = rdma_bind_addr(id, res.src_addr);
        if error != 0 {
            return error;
        }
        if !pd.is_null() {
            (*id).pd = pd;
        }
        let kind = res.qp_type as u32;
        Id::of(id).template = init.as_ref().map(|i| QpInitAttr { qp_type: kind, ..*i });
        return 0;
    }
    let mut error = rdma_resolve_addr(id, res.src_addr, res.dst_addr, TIMEOUT_MS);
    if error == 0 {
        error = rdma_resolve_route(id, TIMEOUT_MS);
    }
    if error == 0 && !init.is_null() {
        (*init).qp_type = res.qp_type as u32;
        error = rdma_create_qp(id, pd, init);
    }
    if error == 0 && res.connect_len > 0 && !res.connect.is_null() {
        let prefix = std::slice::from_raw_parts(res.connect.cast::<u8>(), res.connect_len);
        Id::of(id).prefix = prefix.to_vec();
    }
    error
}

#[no_mangle]
unsafe extern "C" fn rdma_create_ep(id: *mut *mut CmId, res: *mut AddrInfo, pd: *mut Pd, init: *mut QpInitAttr) -> Int {
    let res = &*res;
    let mut made = null_mut();
    let error = create(null_mut(), &mut made, null_mut(), res.port_space as u32, res.qp_type as u32);
    if error != 0 {
        return error;
    }
    if prepare(made, res, pd, init) != 0 {
        let error = crate::errno();
        rdma_destroy_ep(made);
        return refuse(error);
    }
    *id = made;
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_destroy_ep(id: *mut CmId) {
    if !(*id).qp.is_null() {
        rdma_destroy_qp(id);
    }
    if !(*id).srq.is_null() {
        rdma_destroy_srq(id);
    }
    rdma_destroy_id(id);
}

/// What the C library is asked for.
fn hints_of(hints: &AddrInfo) -> addrinfo {
    // SAFETY: numbers and pointers, for which zero is a value.
    let mut ai: addrinfo = unsafe { zeroed() };
    if hints.flags & RAI_PASSIVE != 0 {
        ai.ai_flags |= libc::AI_PASSIVE;
    }
    if hints.flags & RAI_NUMERICHOST != 0 {
        ai.ai_flags |= libc::AI_NUMERICHOST;
    }
    if hints.flags & RAI_FAMILY != 0 {
        ai.ai_family = hints.family;
    }
    ai.ai_socktype = match hints.qp_type as u32 {
        QPT_RC | QPT_UC => libc::SOCK_STREAM,
        QPT_UD => libc::SOCK_DGRAM,
        _ => 0,
    };
    ai.ai_protocol = match (hints.port_space as u32, ai.ai_socktype) {
        (PS_TCP, _) | (PS_IB, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
        (PS_UDP, _) | (PS_IB, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
        _ => 0,
    };
    ai
}

unsafe fn copy(from: *const sockaddr, length: socklen_t) -> (*mut sockaddr, socklen_t) {
    let to = libc::malloc(length as usize).cast::<u8>();
    if to.is_null() {
        return (null_mut(), 0);
    }
    to.copy_from_nonoverlapping(from.cast(), length as usize);
    (to.cast(), length)
}

/// Takes over what the C library has found.
unsafe fn found(res: &mut AddrInfo, hints: Option<&AddrInfo>, ai: &addrinfo) {
    res.qp_type = match hints.map_or(0, |h| h.qp_type) {
        0 if ai.ai_socktype == libc::SOCK_STREAM => QPT_RC as Int,
        0 if ai.ai_socktype == libc::SOCK_DGRAM => QPT_UD as Int,
        given => given,
    };
    res.port_space = match hints.map_or(0, |h| h.port_space) {
        0 if ai.ai_protocol == libc::IPPROTO_TCP => PS_TCP as Int,
        0 if ai.ai_protocol == libc::IPPROTO_UDP => PS_UDP as Int,
        given => given,
    };
    res.family = ai.ai_family;
    let name = match ai.ai_canonname.is_null() {
        true => null_mut(),
        false => libc::strdup(ai.ai_canonname),
    };
    let address = copy(ai.ai_addr, ai.ai_addrlen);
    if hints.is_some_and(|h| h.flags & RAI_PASSIVE != 0) {
        res.flags = RAI_PASSIVE;
        (res.src_addr, res.src_len) = address;
        res.src_canonname = name;
    } else {
        (res.dst_addr, res.dst_len) = address;
        res.dst_canonname = name;
    }
}

#[no_mangle]
unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const AddrInfo,
    res: *mut *mut AddrInfo,
) -> Int {
    let hints = hints.as_ref();
    if node.is_null() && service.is_null() && hints.is_none() {
        return refuse(libc::EINVAL);
    }
    let made = libc::calloc(1, size_of::<AddrInfo>()).cast::<AddrInfo>();
    let Some(new) = made.as_mut() else {
        return refuse(libc::ENOMEM);
    };
    if !node.is_null() || !service.is_null() {
        let wanted = hints.map(hints_of);
        let mut list = null_mut();
        let error = libc::getaddrinfo(
            node,
            service,
            wanted.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            &mut list,
        );
        if error != 0 {
            rdma_freeaddrinfo(made);
            return error;
        }
        found(new, hints, &*list);
        libc::freeaddrinfo(list);
    } else if let Some(h) = hints {
        (new.flags, new.family, new.qp_type, new.port_space) = (h.flags, h.family, h.qp_type, h.port_space);
        if h.dst_len > 0 {
            (new.dst_addr, new.dst_len) = copy(h.dst_addr, h.dst_len);
        }
    }
    if let Some(h) = hints.filter(|h| new.src_len == 0 && h.src_len > 0) {
        (new.src_addr, new.src_len) = copy(h.src_addr, h.src_len);
    }
    *res = made;
    0
}

#[no_mangle]
unsafe extern "C" fn rdma_freeaddrinfo(mut res: *mut AddrInfo) {
    while let Some(this) = res.as_mut() {
        let next = this.next;
        for part in [
            this.src_addr.cast::<Opaque>(),
            this.dst_addr.cast(),
            this.src_canonname.cast(),
            this.dst_canonname.cast(),
            this.route,
            this.connect,
        ] {
            libc::free(part);
        }
        libc::free(res.cast());
        res = next;
    }
}
