//! Polling through the functions of an extended completion queue.

use super::poll::settle;
use crate::gate::Inside;
use crate::shadow::{Completion, CqState, ShadowCq};
use belay_ibv::*;
use std::mem::ManuallyDrop;

macro_rules! read {
    ($cq:expr, $field:ident) => {
        match (*$cq).$field {
            Some(f) => f($cq),
            None => Default::default(),
        }
    };
}

/// The provider's next completion, as it is.
///
/// Each has a beginning and an end of its own. An end behind an `ibv_next_poll` that has found nothing is not the same to
/// all providers: that of soft-RoCE (rdma-core 44) takes one more completion there, which it does not have.
///
/// # Safety
/// An extended queue, whose lock is held.
pub(super) unsafe fn fetch(c: &ShadowCq) -> Option<Completion> {
    let real = c.real.cast::<CqEx>();
    let start = (*real).start_poll?;
    if start(real, &mut PollAttr::default()) != 0 {
        return None;
    }
    let one = read_all(real, c.extended.map_or(0, |e| e.wc_flags));
    read!(real, end_poll);
    Some(one)
}

unsafe fn read_all(real: *mut CqEx, flags: u64) -> Completion {
    let wc = Wc {
        wr_id: (*real).wr_id,
        status: (*real).status,
        qp_num: read!(real, read_qp_num),
        vendor_err: read!(real, read_vendor_err),
        ..Wc::default()
    };
    let mut one = Completion {
        wc,
        ..Completion::default()
    };
    if one.wc.status == WC_SUCCESS {
        let wc = &mut one.wc;
        wc.opcode = read!(real, read_opcode);
        wc.byte_len = read!(real, read_byte_len);
        wc.imm_data = read!(real, read_imm_data);
        wc.src_qp = read!(real, read_src_qp);
        wc.wc_flags = read!(real, read_wc_flags);
        wc.slid = read!(real, read_slid) as u16;
        wc.sl = read!(real, read_sl);
        wc.dlid_path_bits = read!(real, read_dlid_path_bits);
    }
    if flags & WC_EX_WITH_COMPLETION_TIMESTAMP != 0 {
        one.time = read!(real, read_completion_ts);
    }
    if flags & WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK != 0 {
        one.wallclock = read!(real, read_completion_wallclock_ns);
    }
    one
}

/// The next completion of the program's becomes the current one. 0 or ENOENT.
unsafe fn advance(c: &ShadowCq, shown: *mut CqEx, state: &mut CqState) -> Int {
    loop {
        let saved = state.saved.pop_front();
        let fresh = saved.is_none();
        if !fresh {
            c.note_saved(state);
        }
        let Some(mut one) = saved.or_else(|| fetch(c)) else {
            return libc::ENOENT;
        };
        if fresh && !settle(c, &mut one.wc) {
            continue;
        }
        (*shown).status = one.wc.status;
        (*shown).wr_id = one.wc.wr_id;
        state.current = one;
        return 0;
    }
}

unsafe extern "C" fn start_poll(cq: *mut CqEx, attr: *mut PollAttr) -> Int {
    if (*attr).comp_mask != 0 {
        return libc::EINVAL;
    }
    let inside = Inside::enter();
    let c = &*cq.cast::<ShadowCq>();
    let mut state = c.state.lock();
    let found = advance(c, cq, &mut state);
    if found == 0 {
        state.inside = Some(ManuallyDrop::new(inside));
        state.keep();
    }
    found
}

unsafe extern "C" fn next_poll(cq: *mut CqEx) -> Int {
    let c = &*cq.cast::<ShadowCq>();
    let mut state = c.state.held();
    let found = advance(c, cq, &mut state);
    state.keep();
    found
}

unsafe extern "C" fn end_poll(cq: *mut CqEx) {
    let c = &*cq.cast::<ShadowCq>();
    let mut state = c.state.held();
    let inside = state.inside.take();
    drop(state);
    drop(inside.map(ManuallyDrop::into_inner));
}

/// Between the beginning and the end of polling: the lock is held.
unsafe fn current<'a>(cq: *mut CqEx) -> &'a Completion {
    &(*cq.cast::<ShadowCq>()).state.peek().current
}

macro_rules! readers {
    ($($name:ident -> $answer:ty = |$one:ident| $value:expr;)*) => {
        $(unsafe extern "C" fn $name(cq: *mut CqEx) -> $answer {
            let $one = current(cq);
            $value
        })*
    };
}
readers! {
    read_opcode -> u32 = |one| one.wc.opcode;
    read_vendor_err -> u32 = |one| one.wc.vendor_err;
    read_byte_len -> u32 = |one| one.wc.byte_len;
    read_imm_data -> u32 = |one| one.wc.imm_data;
    read_qp_num -> u32 = |one| one.wc.qp_num;
    read_src_qp -> u32 = |one| one.wc.src_qp;
    read_wc_flags -> u32 = |one| one.wc.wc_flags;
    read_slid -> u32 = |one| u32::from(one.wc.slid);
    read_sl -> u8 = |one| one.wc.sl;
    read_dlid_path_bits -> u8 = |one| one.wc.dlid_path_bits;
    read_completion_ts -> u64 = |one| one.time;
    read_completion_wallclock_ns -> u64 = |one| one.wallclock;
}

/// Gives a queue the functions that its real one has.
pub(crate) fn extend_cq(cq: &mut CqEx) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_imm_data = Some(read_imm_data);
    cq.read_qp_num = Some(read_qp_num);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_slid);
    cq.read_sl = Some(read_sl);
    cq.read_dlid_path_bits = Some(read_dlid_path_bits);
    cq.read_completion_ts = Some(read_completion_ts);
    cq.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
}
