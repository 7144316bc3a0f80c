//! Protection domains, thread domains and memory regions.

use super::{enter, make_fitting, none};
use crate::gate::Call;
use crate::real::real;
use crate::shadow::{free, strike, ShadowContext, ShadowMr, ShadowPd, WORLD};
use crate::translate::{keys_are_free, most_keys};
use belay_ibv::*;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU8;

/// Keeps a new domain.
unsafe fn keep_pd(context: *mut Context, real: *mut Pd, parent: *mut ShadowPd) -> *mut Pd {
    if real.is_null() {
        return null_mut();
    }
    let base = Pd {
        context,
        handle: (*real).handle,
    };
    let shadow = Box::into_raw(Box::new(ShadowPd { base, real, parent }));
    WORLD.lock().pds.push(shadow);
    shadow.cast()
}

#[no_mangle]
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut Context) -> *mut Pd {
    let _call = enter!(context, (real().ibv_alloc_pd)(context));
    let pd = (real().ibv_alloc_pd)(ShadowContext::of(context).real);
    keep_pd(context, pd, null_mut())
}

#[no_mangle]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut Pd) -> Int {
    let _call = enter!((*pd).context, (real().ibv_dealloc_pd)(pd));
    let shadow = pd.cast::<ShadowPd>();
    let error = (real().ibv_dealloc_pd)((*shadow).real);
    if error == 0 {
        strike(&mut WORLD.lock().pds, shadow);
        free(shadow);
    }
    error
}

/// Thread domains promise something to the provider that it need not know: there is none behind them.
pub(crate) unsafe extern "C" fn alloc_td(context: *mut Context, _: *mut Opaque) -> *mut Td {
    Box::into_raw(Box::new(Td { context }))
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut Td) -> Int {
    free(td);
    0
}

/// A parent domain with memory of the program's for the provider is not offered: the program's functions would be
/// called when the objects are made again.
pub(crate) unsafe extern "C" fn alloc_parent_domain(context: *mut Context, attr: *mut ParentDomainInitAttr) -> *mut Pd {
    let _call = Call::enter();
    let c = ShadowContext::of(context);
    let parent = (*attr).pd.cast::<ShadowPd>();
    if parent.is_null() || (*attr).comp_mask != 0 {
        return none(if parent.is_null() { libc::EINVAL } else { libc::EOPNOTSUPP });
    }
    keep_pd(context, real_parent_domain(c, parent), parent)
}

/// The provider's parent domain.
pub(crate) unsafe fn real_parent_domain(c: &ShadowContext, parent: *mut ShadowPd) -> *mut Pd {
    let Some(make) = c.extended().and_then(|x| x.as_ref().alloc_parent_domain) else {
        return none(libc::EOPNOTSUPP);
    };
    let mut own = ParentDomainInitAttr {
        pd: (*parent).real,
        td: null_mut(),
        comp_mask: 0,
        alloc: null_mut(),
        free: null_mut(),
        pd_context: null_mut(),
    };
    make(c.real, &mut own)
}

/// Registers memory as a program's region has it.
pub(crate) unsafe fn register(pd: *mut Pd, addr: *mut Opaque, length: usize, iova: u64, access: u32) -> *mut Mr {
    // The plain function is there in every version, and does not take newer flags.
    if iova == addr as u64 && access >> 20 == 0 {
        return (real().ibv_reg_mr)(pd, addr, length, access as Int);
    }
    (real().ibv_reg_mr_iova2)(pd, addr, length, iova, access)
}

/// The same after a restart: a program may have given the memory of a region away and kept the region, whose pages stay
/// with it then. Where nothing is, there is something for as long as it takes.
pub(crate) unsafe fn register_again(pd: *mut Pd, addr: *mut Opaque, length: usize, iova: u64, access: u32) -> *mut Mr {
    let mr = register(pd, addr, length, iova, access);
    if !mr.is_null() || crate::errno() != libc::EFAULT {
        return mr;
    }
    let first = addr as usize & !(PAGE - 1);
    let mut filled = Vec::new();
    fill(first, (addr as usize + length).next_multiple_of(PAGE) - first, &mut filled);
    let mr = register(pd, addr, length, iova, access);
    let error = crate::errno();
    for (at, bytes) in filled {
        libc::munmap(at as *mut Opaque, bytes);
    }
    crate::set_errno(error);
    mr
}

const PAGE: usize = 4096;

/// Maps memory wherever there is none.
unsafe fn fill(at: usize, bytes: usize, filled: &mut Vec<(usize, usize)>) {
    // It has no effect, and fails where something is missing.
    if libc::msync(at as *mut Opaque, bytes, libc::MS_ASYNC) == 0 {
        return;
    }
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    if libc::mmap(at as *mut Opaque, bytes, rw, how, -1, 0) != libc::MAP_FAILED {
        filled.push((at, bytes));
    } else if bytes > PAGE {
        let half = (bytes / 2).next_multiple_of(PAGE);
        fill(at, half, filled);
        fill(at + half, bytes - half, filled);
    }
}

/// What regions cover that are held for their keys.
static SMALL: AtomicU8 = AtomicU8::new(0);
/// Their rights: some adapters give keys for peers to those only that peers may use.
const SMALL_ACCESS: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;

/// Registers memory for a new region: its keys are those that the program sees, so they must not be names of old ones.
unsafe fn register_new((c, pd): (&ShadowContext, *mut Pd), addr: *mut Opaque, length: usize, iova: u64, access: u32) -> *mut Mr {
    let small = SMALL.as_ptr();
    make_fitting(
        most_keys(c),
        || register(pd, addr, length, iova, access),
        || register(pd, small.cast(), 1, small as u64, SMALL_ACCESS),
        |mr| (real().ibv_dereg_mr)(mr),
        |mr| keys_are_free(c, (*mr).lkey, (*mr).rkey),
    )
}

unsafe fn make_mr(pd: *mut Pd, addr: *mut Opaque, length: usize, iova: u64, access: u32) -> *mut Mr {
    let mr = register_new(
        (ShadowContext::of((*pd).context), (*pd.cast::<ShadowPd>()).real),
        addr,
        length,
        iova,
        access,
    );
    if mr.is_null() {
        return null_mut();
    }
    let base = Mr {
        context: (*pd).context,
        pd,
        ..*mr
    };
    let shadow = Box::into_raw(Box::new(ShadowMr {
        base,
        real: mr,
        iova,
        access,
        place: 0,
    }));
    (*shadow).known();
    WORLD.lock().mrs.push(shadow);
    shadow.cast()
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr(pd: *mut Pd, addr: *mut Opaque, length: usize, access: Int) -> *mut Mr {
    let _call = enter!((*pd).context, (real().ibv_reg_mr)(pd, addr, length, access));
    make_mr(pd, addr, length, addr as u64, access as u32)
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova(pd: *mut Pd, addr: *mut Opaque, length: usize, iova: u64, access: Int) -> *mut Mr {
    let _call = enter!((*pd).context, (real().ibv_reg_mr_iova)(pd, addr, length, iova, access));
    make_mr(pd, addr, length, iova, access as u32)
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova2(pd: *mut Pd, addr: *mut Opaque, length: usize, iova: u64, access: u32) -> *mut Mr {
    let _call = enter!((*pd).context, (real().ibv_reg_mr_iova2)(pd, addr, length, iova, access));
    make_mr(pd, addr, length, iova, access)
}

/// Memory of another device is not in the image.
#[no_mangle]
unsafe extern "C" fn ibv_reg_dmabuf_mr(_: *mut Pd, _: u64, _: usize, _: u64, _: Int, _: Int) -> *mut Mr {
    none(libc::EOPNOTSUPP)
}

#[no_mangle]
unsafe extern "C" fn ibv_rereg_mr(mr: *mut Mr, flags: Int, pd: *mut Pd, addr: *mut Opaque, length: usize, access: Int) -> Int {
    let _call = enter!((*mr).context, (real().ibv_rereg_mr)(mr, flags, pd, addr, length, access));
    let shadow = &mut *mr.cast::<ShadowMr>();
    let before = ((*shadow.real).lkey, (*shadow.real).rkey);
    let domain = if pd.is_null() {
        null_mut()
    } else {
        (*pd.cast::<ShadowPd>()).real
    };
    let error = (real().ibv_rereg_mr)(shadow.real, flags, domain, addr, length, access);
    if error != 0 {
        return error;
    }
    if flags & REREG_CHANGE_TRANSLATION != 0 {
        (shadow.base.addr, shadow.base.length, shadow.iova) = (addr, length, addr as u64);
    }
    if flags & REREG_CHANGE_PD != 0 {
        shadow.base.pd = pd;
    }
    if flags & REREG_CHANGE_ACCESS != 0 {
        shadow.access = access as u32;
    }
    let keys = |mr: *mut Mr| ((*mr).lkey, (*mr).rkey);
    let kept = keys(shadow.real) == before;
    let named = kept || exchange_taken(shadow);
    if named && !kept {
        (shadow.base.lkey, shadow.base.rkey) = keys(shadow.real);
    }
    shadow.known();
    match named {
        true => 0,
        false => REREG_ERR_CMD,
    }
}

/// Takes another real region for one whose new keys are names of old ones. False where there is none.
unsafe fn exchange_taken(shadow: &mut ShadowMr) -> bool {
    let (c, base) = (ShadowContext::of(shadow.base.context), &shadow.base);
    if keys_are_free(c, (*shadow.real).lkey, (*shadow.real).rkey) {
        return true;
    }
    let domain = (*base.pd.cast::<ShadowPd>()).real;
    let other = register_new((c, domain), base.addr, base.length, shadow.iova, shadow.access);
    if !other.is_null() {
        (real().ibv_dereg_mr)(shadow.real);
        shadow.real = other;
    }
    !other.is_null()
}

#[no_mangle]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> Int {
    let _call = enter!((*mr).context, (real().ibv_dereg_mr)(mr));
    let shadow = mr.cast::<ShadowMr>();
    let error = (real().ibv_dereg_mr)((*shadow).real);
    if error == 0 {
        (*shadow).unknown();
        WORLD.lock().mrs.strike(shadow);
        free(shadow);
    }
    error
}

/// Segments that are passed on at once.
const ADVISED: usize = 64;

pub(crate) unsafe extern "C" fn advise_mr(pd: *mut Pd, advice: u32, flags: u32, list: *mut Sge, count: u32) -> Int {
    let _call = Call::enter();
    match ShadowContext::of((*pd).context).extended().and_then(|x| x.as_ref().advise_mr) {
        Some(advise) => {
            let c = ShadowContext::of((*pd).context);
            let none = Sge {
                addr: 0,
                length: 0,
                lkey: 0,
            };
            let mut now = [none; ADVISED];
            for first in (0..count as usize).step_by(ADVISED) {
                let some = ADVISED.min(count as usize - first);
                for (i, now) in now[..some].iter_mut().enumerate() {
                    *now = *list.add(first + i);
                    now.lkey = c.lkey(now.lkey);
                }
                let error = advise((*pd.cast::<ShadowPd>()).real, advice, flags, now.as_mut_ptr(), some as u32);
                if error != 0 {
                    return error;
                }
            }
            0
        }
        None => libc::EOPNOTSUPP,
    }
}
