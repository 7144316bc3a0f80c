//! Address handles and multicast groups.

use super::{enter, none};
use crate::lock::Lock;
use crate::real::real;
use crate::shadow::{free, RealAhs, ShadowAh, ShadowContext, ShadowPd, ShadowQp};
use crate::translate::{address_of_port, ends, epoch, is_identity};
use belay_ibv::*;
use std::ptr::null_mut;

/// What follows the header of RoCE v2.
const UDP: u8 = 17;
const GID_TYPE_ROCE_V2: u32 = 2;

#[no_mangle]
unsafe extern "C" fn ibv_create_ah(pd: *mut Pd, attr: *mut AhAttr) -> *mut Ah {
    let _call = enter!((*pd).context, (real().ibv_create_ah)(pd, attr));
    make(pd, &*attr)
}

/// A handle. After a restart its real one is made for the first destination, which tells where it leads to.
unsafe fn make(pd: *mut Pd, attr: &AhAttr) -> *mut Ah {
    let mut ahs = RealAhs {
        epoch: epoch(),
        ..RealAhs::default()
    };
    let mut handle = 0;
    if is_identity() {
        let made = (real().ibv_create_ah)((*pd.cast::<ShadowPd>()).real, &mut { *attr });
        if made.is_null() {
            return null_mut();
        }
        handle = (*made).handle;
        ahs.all.push((*attr, made));
    }
    let base = Ah {
        context: (*pd).context,
        pd,
        handle,
    };
    Box::into_raw(Box::new(ShadowAh {
        base,
        attr: *attr,
        real: Lock::new(ahs),
    }))
    .cast()
}

/// The address of whom a datagram came from, by the names that the program knows.
unsafe fn address_of_sender(c: &ShadowContext, port: u8, wc: &Wc, grh: *const Grh) -> Option<AhAttr> {
    let mut attr = AhAttr {
        dlid: wc.slid,
        sl: wc.sl,
        src_path_bits: wc.dlid_path_bits,
        port_num: port,
        ..AhAttr::default()
    };
    if wc.wc_flags & WC_GRH == 0 {
        return Some(attr);
    }
    let own = c.ports().iter().find(|p| p.number == port)?;
    let ((from, to), ipv4) = ends(grh.cast_mut().cast());
    let v2 = ipv4 || (*grh).next_hdr == UDP;
    let entry = own
        .gids
        .iter()
        .find(|g| g.gid == to && (g.gid_type == GID_TYPE_ROCE_V2) == v2)?;
    let (flow_label, traffic_class) = match ipv4 {
        // IPv4 has no label; its header begins in the middle of this one.
        true => (0, *grh.cast::<u8>().add(21)),
        false => {
            let flow = u32::from_be((*grh).version_tclass_flow);
            (flow & 0xf_ffff, (flow >> 20) as u8)
        }
    };
    attr.is_global = 1;
    attr.grh = GlobalRoute {
        dgid: from,
        flow_label,
        sgid_index: entry.gid_index as u8,
        hop_limit: 0xff,
        traffic_class,
    };
    Some(attr)
}

/// As libibverbs does it; after a restart by the ports that the program knows.
unsafe fn sender(c: &ShadowContext, port: u8, wc: *mut Wc, grh: *mut Grh, attr: *mut AhAttr) -> Int {
    if is_identity() {
        return (real().ibv_init_ah_from_wc)(c.real, port, wc, grh, attr);
    }
    match address_of_sender(c, port, &*wc, grh) {
        Some(found) => {
            *attr = found;
            0
        }
        None => -1,
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_init_ah_from_wc(context: *mut Context, port: u8, wc: *mut Wc, grh: *mut Grh, attr: *mut AhAttr) -> Int {
    let _call = enter!(context, (real().ibv_init_ah_from_wc)(context, port, wc, grh, attr));
    sender(ShadowContext::of(context), port, wc, grh, attr)
}

#[no_mangle]
unsafe extern "C" fn ibv_create_ah_from_wc(pd: *mut Pd, wc: *mut Wc, grh: *mut Grh, port: u8) -> *mut Ah {
    let _call = enter!((*pd).context, (real().ibv_create_ah_from_wc)(pd, wc, grh, port));
    let mut attr = AhAttr::default();
    if sender(ShadowContext::of((*pd).context), port, wc, grh, &mut attr) != 0 {
        return none(libc::EINVAL);
    }
    make(pd, &attr)
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_ah(ah: *mut Ah) -> Int {
    let _call = enter!((*ah).context, (real().ibv_destroy_ah)(ah));
    let shadow = ah.cast::<ShadowAh>();
    {
        let mut ahs = (*shadow).real.lock();
        // Those of before a restart are gone with their device.
        while let (Some((_, made)), true) = (ahs.all.last().copied(), ahs.epoch == epoch()) {
            let error = (real().ibv_destroy_ah)(made);
            if error != 0 {
                return error;
            }
            ahs.all.pop();
        }
    }
    free(shadow);
    0
}

#[no_mangle]
unsafe extern "C" fn ibv_attach_mcast(qp: *mut Qp, gid: *const Gid, lid: u16) -> Int {
    let _call = enter!((*qp).context, (real().ibv_attach_mcast)(qp, gid, lid));
    let q = &*qp.cast::<ShadowQp>();
    let error = (real().ibv_attach_mcast)(q.real, gid, lid);
    if error == 0 {
        q.groups.lock().push((*gid, lid));
    }
    error
}

#[no_mangle]
unsafe extern "C" fn ibv_detach_mcast(qp: *mut Qp, gid: *const Gid, lid: u16) -> Int {
    let _call = enter!((*qp).context, (real().ibv_detach_mcast)(qp, gid, lid));
    let q = &*qp.cast::<ShadowQp>();
    let error = (real().ibv_detach_mcast)(q.real, gid, lid);
    if error == 0 {
        let mut groups = q.groups.lock();
        if let Some(at) = groups.iter().position(|g| *g == (*gid, lid)) {
            groups.remove(at);
        }
    }
    error
}

/// For RoCE: the hardware address of the other end, from the host's tables; after a restart that of today.
#[no_mangle]
unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(context: *mut Context, attr: *mut AhAttr, mac: *mut u8, vlan: *mut u16) -> Int {
    let _call = enter!(context, (real().ibv_resolve_eth_l2_from_gid)(context, attr, mac, vlan));
    let c = ShadowContext::of(context);
    // The real function only reads it.
    let mut now = address_of_port(c, &*attr);
    (real().ibv_resolve_eth_l2_from_gid)(c.real, &mut now, mac, vlan)
}
