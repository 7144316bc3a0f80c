//! Receive requests.

use super::send::Segments;
use crate::shadow::{Entry, Log, ShadowContext, ShadowQp, ShadowSrq, SharedLog, RECEIVE_TAG, SRQ_TAG};
use crate::translate::is_identity;
use belay_ibv::*;
use std::ptr::null_mut;

#[inline]
unsafe fn record(log: &mut Log, index: u64, w: &RecvWr) -> bool {
    *log.entry_mut(index) = Entry {
        wr_id: w.wr_id,
        ..Entry::default()
    };
    log.keep(index, w.sg_list, w.num_sge, 0)
}

/// Posts one request, with the keys of today and this number.
#[inline]
unsafe fn post_one(c: *mut Context, w: &RecvWr, wr_id: u64, post: impl FnOnce(*mut RecvWr) -> Int) -> Int {
    let mut one = RecvWr {
        wr_id,
        next: null_mut(),
        ..*w
    };
    if is_identity() {
        return post(&mut one);
    }
    let mut sges = Segments::new();
    match sges.translated(ShadowContext::of(c), w.sg_list, w.num_sge as usize) {
        Some(list) => {
            one.sg_list = list;
            post(&mut one)
        }
        None => libc::EINVAL,
    }
}

/// What the provider calls the request in this place.
#[inline]
fn numbered(place: u64) -> u64 {
    RECEIVE_TAG | u64::from(place as u32)
}

/// The request of an entry.
fn entry(log: &Log, index: u64) -> RecvWr {
    let e = log.entry(index);
    RecvWr {
        wr_id: e.wr_id,
        next: null_mut(),
        sg_list: log.sges_at(index),
        num_sge: e.sges as i32,
    }
}

/// Posts again all that is in the log of a queue pair.
///
/// # Safety
/// Its provider has none of it.
pub(crate) unsafe fn repost(q: &ShadowQp) -> Int {
    let Some(post) = (*(*q.real).context).ops.post_recv else {
        return libc::EOPNOTSUPP;
    };
    let log = q.recv.log.lock();
    for i in q.recv.places() {
        let w = entry(&log, i);
        let error = post_one(q.base.base.context, &w, numbered(i), |one| post(q.real, one, &mut null_mut()));
        if error != 0 {
            return error;
        }
    }
    0
}

/// The same of a shared queue, in the order in which the program has posted.
///
/// # Safety
/// As for [`repost`].
pub(crate) unsafe fn repost_shared(s: &ShadowSrq) -> Int {
    let Some(post) = (*(*s.real).context).ops.post_srq_recv else {
        return libc::EOPNOTSUPP;
    };
    let requests = s.requests.lock();
    let mut places: Vec<(u64, usize)> = requests
        .order
        .iter()
        .copied()
        .zip(0..)
        .filter(|(order, _)| *order != 0)
        .collect();
    places.sort_unstable();
    for (_, place) in places {
        let w = entry(&requests.log, place as u64);
        let error = post_one(s.base.context, &w, SRQ_TAG | place as u64, |one| {
            post(s.real, one, &mut null_mut())
        });
        if error != 0 {
            return error;
        }
    }
    0
}

pub(crate) unsafe extern "C" fn post_recv(qp: *mut Qp, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> Int {
    let q = &*qp.cast::<ShadowQp>();
    q.recv.log.enter(move |log| post_logged(q, log, wr, bad))
}

unsafe fn post_logged(q: &ShadowQp, log: &mut Log, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> Int {
    let Some(post) = (*(*q.real).context).ops.post_recv else {
        return libc::EOPNOTSUPP;
    };
    let limit = q.recv.begins() + u64::from(log.room());
    let mut tail = q.recv.next();
    let mut next = wr;
    // One by one: what the provider refuses in the middle has been recorded for nothing.
    while let Some(w) = next.as_ref() {
        let error = if !q.srq().is_null() || tail == limit {
            // It has no queue of its own, or not so much room: the provider says so as well.
            if q.srq().is_null() {
                libc::ENOMEM
            } else {
                libc::EINVAL
            }
        } else if record(log, tail, w) {
            q.recv.publish(tail + 1);
            post_one(q.base.base.context, w, numbered(tail), |one| {
                post(q.real, one, &mut null_mut())
            })
        } else {
            libc::EINVAL
        };
        if error != 0 {
            q.recv.publish(tail);
            *bad = next;
            return error;
        }
        tail += 1;
        next = w.next;
    }
    0
}

pub(crate) unsafe extern "C" fn post_srq_recv(srq: *mut Srq, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> Int {
    let s = &*srq.cast::<ShadowSrq>();
    s.requests.enter(move |requests| post_shared(s, requests, wr, bad))
}

unsafe fn post_shared(s: &ShadowSrq, requests: &mut SharedLog, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> Int {
    let Some(post) = (*(*s.real).context).ops.post_srq_recv else {
        return libc::EOPNOTSUPP;
    };
    let mut next = wr;
    while let Some(w) = next.as_ref() {
        let mut error = libc::ENOMEM;
        if let Some(place) = requests.take() {
            error = if record(&mut requests.log, u64::from(place), w) {
                post_one(s.base.context, w, SRQ_TAG | u64::from(place), |one| {
                    post(s.real, one, &mut null_mut())
                })
            } else {
                libc::EINVAL
            };
            if error != 0 {
                requests.give(place);
            }
        }
        if error != 0 {
            *bad = next;
            return error;
        }
        next = w.next;
    }
    0
}
