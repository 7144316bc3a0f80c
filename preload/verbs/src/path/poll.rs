//! Completions: each retires what is in a log.

use super::extended_poll;
use super::send::MARKER;
use crate::gate::Inside;
use crate::shadow::{memory_of, Completion, CqState, Log, ShadowContext, ShadowCq, ShadowQp, RECEIVE_TAG, SRQ_TAG};
use crate::translate::{self, is_identity};
use belay_ibv::*;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Completions that are taken from the provider at a time.
const BATCH: usize = 32;

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut Cq, wanted: Int, wc: *mut Wc) -> Int {
    let c = &*cq.cast::<ShadowCq>();
    c.state.enter(move |state| match state.saved.is_empty() {
        true => poll_fresh(c, wanted, wc),
        false => poll_saved(c, state, wanted, wc),
    })
}

/// What the provider has.
#[inline(always)]
unsafe fn poll_fresh(c: &ShadowCq, wanted: Int, wc: *mut Wc) -> Int {
    loop {
        let came = poll_real(c, wanted, wc);
        if came <= 0 {
            return came;
        }
        let mut kept = 0;
        for i in 0..came as usize {
            let one = wc.add(i);
            if settle(c, &mut *one) {
                // Each stays where it is, as long as none is the library's own.
                if kept < i {
                    *wc.add(kept) = *one;
                }
                kept += 1;
            }
        }
        if kept > 0 {
            return kept as Int;
        }
    }
}

/// What was saved first, then what the provider has.
#[cold]
unsafe fn poll_saved(c: &ShadowCq, state: &mut CqState, wanted: Int, wc: *mut Wc) -> Int {
    let mut got = 0;
    while got < wanted {
        let Some(saved) = state.saved.pop_front() else {
            c.note_saved(state);
            return got + poll_fresh(c, wanted - got, wc.add(got as usize)).max(0);
        };
        *wc.add(got as usize) = saved.wc;
        got += 1;
    }
    c.note_saved(state);
    got
}

#[inline]
unsafe fn poll_real(c: &ShadowCq, wanted: Int, wc: *mut Wc) -> Int {
    match (*(*c.real).context).ops.poll_cq {
        Some(poll) => poll(c.real, wanted, wc),
        None => 0,
    }
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut Cq, solicited: Int) -> Int {
    let _inside = Inside::enter();
    let c = &*cq.cast::<ShadowCq>();
    let want = if solicited != 0 { 1 } else { 2 };
    if c.armed.load(Relaxed) < want {
        c.armed.store(want, Relaxed);
    }
    let Some(notify) = (*(*c.real).context).ops.req_notify_cq else {
        return libc::EOPNOTSUPP;
    };
    let error = notify(c.real, solicited);
    // The provider does not have these any more, of which it may have raised the event.
    if error == 0 && c.has_saved.load(Acquire) {
        c.kick();
    }
    error
}

/// Takes everything from the provider into `saved`. How much came.
///
/// # Safety
/// The queue lives, and its lock is held: it is the owner of `state`.
pub(crate) unsafe fn collect(c: &ShadowCq, state: &mut CqState) -> usize {
    let mut count = 0;
    if c.extended.is_some() {
        while let Some(mut one) = extended_poll::fetch(c) {
            count += 1;
            if settle(c, &mut one.wc) {
                state.saved.push_back(one);
            }
        }
        c.note_saved(state);
        return count;
    }
    let mut wc = [Wc::default(); BATCH];
    loop {
        let came = poll_real(c, BATCH as Int, wc.as_mut_ptr()).max(0) as usize;
        for one in &mut wc[..came] {
            if settle(c, one) {
                state.saved.push_back(Completion {
                    wc: *one,
                    ..Completion::default()
                });
            }
        }
        count += came;
        if came == 0 {
            c.note_saved(state);
            return count;
        }
    }
}

/// Forgets the saved completions of a queue pair that goes or is reset.
///
/// # Safety
/// The queue lives.
pub(crate) unsafe fn forget_saved(cq: *mut ShadowCq, number: u32) {
    let Some(c) = cq.as_ref() else { return };
    let mut state = c.state.lock();
    state.saved.retain(|s| s.wc.qp_num != number);
    c.note_saved(&state);
}

/// Retires what a completion says is done, and makes it one of the shadow's. False when it is none of the program's.
#[inline]
pub(super) unsafe fn settle(c: &ShadowCq, wc: &mut Wc) -> bool {
    let Some(q) = ShadowContext::of(c.base.base.context).qps.get(wc.qp_num) else {
        // Of a queue pair that is gone.
        return false;
    };
    wc.qp_num = q.number();
    match (wc.status == WC_SUCCESS, wc.opcode & WC_RECV != 0) {
        (true, true) => arrived(q, wc),
        (true, false) => sent(q),
        (false, _) => failed(q, wc),
    }
}

/// A message has come.
#[inline(never)]
unsafe fn arrived(q: &ShadowQp, wc: &mut Wc) -> bool {
    q.received.store(q.received.load(Relaxed) + 1, Relaxed);
    let first = received(q, wc);
    if !is_identity() && q.kind() == QPT_UD {
        let header = first.filter(|f| f.length as usize >= GRH_BYTES);
        translate::received(q, wc, header.map(|h| memory_of(q.base.base.context, &h)));
    }
    true
}

/// Retires the receive that a completion is of. Its first segment, where the header of a datagram may be.
fn received(q: &ShadowQp, wc: &mut Wc) -> Option<Sge> {
    if q.srq().is_null() {
        let head = q.recv.pending().next()?;
        // SAFETY: the entry is complete, and not overwritten before the head has passed it.
        let log = unsafe { q.recv.log.peek() };
        wc.wr_id = log.entry(head).wr_id;
        let first = first(log, head);
        q.recv.retire(head + 1, false);
        return first;
    }
    // SAFETY: a shared queue lives as long as its queue pairs.
    let mut requests = unsafe { &*q.srq() }.requests.lock();
    let place = requests.done(wc.wr_id)?;
    wc.wr_id = requests.log.entry(place).wr_id;
    first(&requests.log, place)
}

#[inline]
fn first(log: &Log, place: u64) -> Option<Sge> {
    // SAFETY: as many segments as the entry says.
    (log.entry(place).sges > 0).then(|| unsafe { *log.sges_at(place) })
}

/// Whether a request takes a receive at the other end.
pub(crate) fn takes_receive(opcode: u32) -> bool {
    matches!(opcode, WR_SEND | WR_SEND_WITH_IMM | WR_SEND_WITH_INV | WR_RDMA_WRITE_WITH_IMM)
}

/// The next signalled request is done, with all before it.
#[inline]
fn sent(q: &ShadowQp) -> bool {
    // SAFETY: entries before the tail are complete, and not overwritten before the head has passed them.
    let log = unsafe { q.send.log.peek() };
    let Range {
        start: mut head,
        end: tail,
    } = q.send.pending();
    let (mut consumed, mut own) = (0, true);
    while head < tail {
        let e = log.entry(head);
        head += 1;
        consumed += u64::from(takes_receive(e.opcode));
        if q.sig_all || e.flags & SEND_SIGNALED != 0 {
            own = !e.marker;
            break;
        }
    }
    q.acknowledged.store(q.acknowledged.load(Relaxed) + consumed, Relaxed);
    q.send.retire(head, !own);
    own
}

/// A request has failed, which one its number says; what it was is not told. Those before it are done.
#[cold]
fn failed(q: &ShadowQp, wc: &mut Wc) -> bool {
    let tag = if q.srq().is_null() { RECEIVE_TAG } else { SRQ_TAG };
    let of_receive = wc.wr_id >> 32 == tag >> 32;
    // Without a connection it may go on to send: a datagram that is too long for a request of a shared queue.
    if !of_receive || q.kind() == QPT_RC {
        q.broken.store(true, Release);
    }
    if of_receive {
        received(q, wc);
        return true;
    }
    // SAFETY: as in `sent`.
    let log = unsafe { q.send.log.peek() };
    let pending = q.send.pending();
    if let Some(at) = pending.clone().find(|i| log.entry(*i).wr_id == wc.wr_id) {
        let marked = (pending.start..=at).any(|i| log.entry(i).marker);
        let own = !log.entry(at).marker;
        q.send.retire(at + 1, marked);
        return own;
    }
    wc.wr_id != MARKER
}
