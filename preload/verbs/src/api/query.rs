//! What a program asks about devices and ports.

use super::enter;
use crate::gate::Call;
use crate::names::Port;
use crate::real::real;
use crate::shadow::ShadowContext;
use crate::translate::is_identity;
use belay_ibv::*;
use std::mem::offset_of;

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_query_device(context: *mut Context, attr: *mut DeviceAttr) -> Int {
    let _call = enter!(context, (real().ibv_query_device)(context, attr));
    let c = ShadowContext::of(context);
    let error = (real().ibv_query_device)(c.real, attr);
    if error == 0 {
        show_device(c, &mut *attr);
    }
    error
}

/// What the library refuses, as a device without it says.
const REFUSED: u32 = DEVICE_MEM_WINDOW
    | DEVICE_XRC
    | DEVICE_MEM_WINDOW_TYPE_2A
    | DEVICE_MEM_WINDOW_TYPE_2B
    | DEVICE_RAW_IP_CSUM
    | DEVICE_MANAGED_FLOW_STEERING;

/// The numbers of the device that the program has opened, without what it may not use of it.
unsafe fn show_device(c: &ShadowContext, attr: &mut DeviceAttr) {
    if attr.sys_image_guid == attr.node_guid {
        attr.sys_image_guid = (*c.device()).guid;
    }
    attr.node_guid = (*c.device()).guid;
    // Less the places that queues have for markers.
    attr.max_qp_wr = (attr.max_qp_wr - 1).max(0);
    attr.max_cqe = (attr.max_cqe - super::cq::SPARE).max(0);
    attr.device_cap_flags &= !REFUSED;
    (attr.max_mw, attr.max_raw_ipv6_qp, attr.max_raw_ethy_qp) = (0, 0, 0);
}

pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut Context,
    input: *const Opaque,
    attr: *mut DeviceAttrEx,
    size: usize,
) -> Int {
    let _call = Call::enter();
    let c = ShadowContext::of(context);
    let Some(ask) = c.extended().and_then(|x| x.as_ref().query_device_ex) else {
        return libc::EOPNOTSUPP;
    };
    let error = ask(c.real, input, attr, size);
    if error == 0 && size >= size_of::<DeviceAttr>() {
        // Theirs may be shorter.
        let (mut full, bytes) = (std::mem::zeroed::<DeviceAttrEx>(), size.min(size_of::<DeviceAttrEx>()));
        std::ptr::from_mut(&mut full)
            .cast::<u8>()
            .copy_from_nonoverlapping(attr.cast(), bytes);
        show_device(c, &mut full.orig_attr);
        full.device_cap_flags_ex &= !(u64::from(REFUSED) | DEVICE_RAW_SCATTER_FCS);
        (full.rss_caps, full.max_wq_type_rq, full.raw_packet_caps) = ([0; 4], 0, 0);
        (full.tm_caps, full.max_dm_size, full.xrc_odp_caps) = ([0; 5], 0, 0);
        attr.cast::<u8>().copy_from_nonoverlapping((&raw const full).cast(), bytes);
    }
    error
}

/// The port as `ibv_query_port` of the header asks for it: a program may have been compiled with a shorter structure.
pub(crate) unsafe extern "C" fn query_port_sized(context: *mut Context, port: u8, attr: *mut PortAttr, size: usize) -> Int {
    let _call = Call::enter();
    let c = ShadowContext::of(context);
    let error = match c.extended().and_then(|x| x.as_ref().query_port) {
        Some(ask) => ask(c.real, port, attr, size),
        None => {
            std::ptr::write_bytes(attr.cast::<u8>(), 0, size);
            (real().ibv_query_port)(c.real, port, attr)
        }
    };
    if let (0, Some(then)) = (error, then(c, port.into())) {
        ((*attr).lid, (*attr).sm_lid, (*attr).gid_tbl_len) = (then.lid, then.sm_lid, then.places);
    }
    error
}

/// The port as the program is to see it, where that is another one today.
fn then(c: &ShadowContext, number: u32) -> Option<&Port> {
    c.ports().iter().find(|p| u32::from(p.number) == number && !is_identity())
}

/// The exported function, for programs that know the port's first fields only.
#[no_mangle]
unsafe extern "C" fn ibv_query_port(context: *mut Context, port: u8, attr: *mut PortAttr) -> Int {
    if super::means_real(context) {
        return (real().ibv_query_port)(context, port, attr);
    }
    query_port_sized(context, port, attr, offset_of!(PortAttr, port_cap_flags2))
}

#[no_mangle]
unsafe extern "C" fn ibv_query_gid(context: *mut Context, port: u8, index: Int, gid: *mut Gid) -> Int {
    let _call = enter!(context, (real().ibv_query_gid)(context, port, index, gid));
    let c = ShadowContext::of(context);
    let Some(then) = then(c, port.into()) else {
        return (real().ibv_query_gid)(c.real, port, index, gid);
    };
    match then.place(index as u32) {
        Ok(found) => {
            *gid = found.map_or(Gid::default(), |g| g.gid);
            0
        }
        Err(error) => {
            crate::set_errno(error);
            -1
        }
    }
}

#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut Context,
    port: u32,
    index: u32,
    entry: *mut GidEntry,
    flags: u32,
    size: usize,
) -> Int {
    let _call = enter!(context, (real()._ibv_query_gid_ex)(context, port, index, entry, flags, size));
    let c = ShadowContext::of(context);
    let Some(then) = then(c, port) else {
        return (real()._ibv_query_gid_ex)(c.real, port, index, entry, flags, size);
    };
    match then.place(index) {
        _ if flags != 0 || size < size_of::<GidEntry>() => libc::EINVAL,
        Ok(Some(found)) => {
            *entry = *found;
            0
        }
        Ok(None) => libc::ENODATA,
        Err(error) => error,
    }
}

#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut Context,
    entries: *mut GidEntry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    let _call = enter!(context, (real()._ibv_query_gid_table)(context, entries, max, flags, size));
    let c = ShadowContext::of(context);
    if is_identity() {
        return (real()._ibv_query_gid_table)(c.real, entries, max, flags, size);
    }
    if flags != 0 || size < size_of::<GidEntry>() {
        return -(libc::EINVAL as isize);
    }
    let all = c.ports().iter().flat_map(|p| &p.gids).take(max);
    all.enumerate()
        .map(|(i, g)| entries.byte_add(i * size).write_unaligned(*g))
        .count() as isize
}

/// Private to rdma-core's own programs.
#[no_mangle]
unsafe extern "C" fn ibv_query_gid_type(context: *mut Context, port: u8, index: u32, kind: *mut u32) -> Int {
    let _call = enter!(context, (real().ibv_query_gid_type)(context, port, index, kind));
    let c = ShadowContext::of(context);
    let then = then(c, port.into());
    let index = match (then, c.today().iter().find(|p| p.number == port)) {
        (Some(then), Some(today)) => today.index_like(then, index as u8).into(),
        _ => index,
    };
    (real().ibv_query_gid_type)(c.real, port, index, kind)
}

#[no_mangle]
unsafe extern "C" fn ibv_query_pkey(context: *mut Context, port: u8, index: Int, pkey: *mut u16) -> Int {
    let _call = enter!(context, (real().ibv_query_pkey)(context, port, index, pkey));
    (real().ibv_query_pkey)(ShadowContext::of(context).real, port, index, pkey)
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_get_pkey_index(context: *mut Context, port: u8, pkey: u16) -> Int {
    let _call = enter!(context, (real().ibv_get_pkey_index)(context, port, pkey));
    (real().ibv_get_pkey_index)(ShadowContext::of(context).real, port, pkey)
}

pub(crate) unsafe extern "C" fn query_rt_values(context: *mut Context, values: *mut Opaque) -> Int {
    let _call = Call::enter();
    let c = ShadowContext::of(context);
    match c.extended().and_then(|x| x.as_ref().query_rt_values) {
        Some(ask) => ask(c.real, values),
        None => libc::EOPNOTSUPP,
    }
}
