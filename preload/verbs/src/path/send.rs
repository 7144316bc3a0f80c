//! Send requests: each goes into the log, then to the provider.

use crate::gate::Whole;
use crate::names::context_of;
use crate::shadow::{Entry, Log, ShadowAh, ShadowContext, ShadowQp};
use crate::translate::{self, is_identity};
use belay_ibv::*;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::null_mut;

/// Requests that are given to the provider at a time, where they are not the program's own.
const BATCH: usize = 16;
/// The number of a marker.
pub(super) const MARKER: u64 = 0xbe1a_0000_6d61_726b;

pub(crate) unsafe extern "C" fn post_send(qp: *mut Qp, wr: *mut SendWr, bad: *mut *mut SendWr) -> Int {
    let q = &*qp.cast::<ShadowQp>();
    q.send.log.enter(move |log| post_logged(q, log, wr, bad))
}

#[inline(always)]
unsafe fn post_logged(q: &ShadowQp, log: &mut Log, wr: *mut SendWr, bad: *mut *mut SendWr) -> Int {
    let first = q.send.next();
    let limit = q.send.limit();
    // Most programs post one at a time.
    if let Some(w) = wr.as_ref().filter(|w| w.next.is_null()) {
        if first != limit && is_passed_on(q) && record(log, first, w, q.kind()) == 0 {
            q.send.publish(first + 1);
            return pass_on(q, wr, bad, first);
        }
    }
    post_chain(q, log, limit, wr, bad)
}

/// Whether the provider gets the program's own requests: keys and numbers are real ones.
#[inline]
fn is_passed_on(q: &ShadowQp) -> bool {
    q.kind() != QPT_UD && is_identity()
}

#[inline(never)]
unsafe fn post_chain(q: &ShadowQp, log: &mut Log, limit: u64, wr: *mut SendWr, bad: *mut *mut SendWr) -> Int {
    let first = q.send.next();
    let (mut tail, mut refused, mut next) = (first, 0, wr);
    while let Some(w) = next.as_ref() {
        refused = if tail == limit {
            libc::ENOMEM
        } else {
            record(log, tail, w, q.kind())
        };
        if refused != 0 {
            break;
        }
        tail += 1;
        next = w.next;
    }
    q.send.publish(tail);
    if refused == 0 && is_passed_on(q) {
        return pass_on(q, wr, bad, first);
    }
    let (posted, error) = give(q, log, first, tail);
    q.send.publish(first + posted);
    let error = if error != 0 { error } else { refused };
    if error != 0 {
        let mut w = wr;
        for _ in 0..posted {
            w = (*w).next;
        }
        *bad = w;
    }
    error
}

/// Gives the program's own requests to the provider.
#[inline]
unsafe fn pass_on(q: &ShadowQp, wr: *mut SendWr, bad: *mut *mut SendWr, first: u64) -> Int {
    let Some(post) = (*(*q.real).context).ops.post_send else {
        return libc::EOPNOTSUPP;
    };
    let error = post(q.real, wr, bad);
    if error != 0 {
        keep_posted(q, wr, *bad, first);
    }
    error
}

/// Drops what the provider has refused from the log.
#[cold]
unsafe fn keep_posted(q: &ShadowQp, wr: *mut SendWr, bad: *mut SendWr, first: u64) {
    let (mut posted, mut w) = (0, wr);
    while w != bad && !w.is_null() {
        posted += 1;
        w = (*w).next;
    }
    q.send.publish(first + posted);
}

/// Puts a request into the log. 0, or why the provider would not have it either.
#[inline]
unsafe fn record(log: &mut Log, index: u64, w: &SendWr, kind: u32) -> Int {
    let mut e = Entry {
        wr_id: w.wr_id,
        opcode: w.opcode,
        flags: w.send_flags,
        imm: w.imm_data,
        ..Entry::default()
    };
    match w.opcode {
        _ if kind == QPT_UD => {
            let ud = w.wr.ud;
            (e.remote, e.key, e.qkey) = (ud.ah as u64, ud.remote_qpn, ud.remote_qkey);
        }
        WR_SEND | WR_SEND_WITH_IMM | WR_SEND_WITH_INV => {}
        WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM | WR_RDMA_READ => (e.remote, e.key) = (w.wr.rdma.remote_addr, w.wr.rdma.rkey),
        WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD => {
            let a = w.wr.atomic;
            (e.remote, e.key, e.compare, e.swap) = (a.remote_addr, a.rkey, a.compare_add, a.swap);
        }
        _ => return libc::EINVAL,
    }
    *log.entry_mut(index) = e;
    if log.keep(index, w.sg_list, w.num_sge, w.send_flags) {
        0
    } else {
        libc::EINVAL
    }
}

/// Posts a write without data, whose completion is nobody's and says that all before it is done.
///
/// # Safety
/// The queue pair lives, and has none that is pending.
pub(crate) unsafe fn mark(q: &ShadowQp) {
    let mut log = q.send.log.lock();
    let tail = q.send.next();
    *log.entry_mut(tail) = Entry {
        wr_id: MARKER,
        opcode: WR_RDMA_WRITE,
        flags: SEND_SIGNALED,
        marker: true,
        ..Entry::default()
    };
    q.send.publish(tail + 1);
    q.send.set_markers(1);
    // A provider that does not take it leaves the queue pair as it was.
    if give(q, &log, tail, tail + 1).1 != 0 {
        q.send.publish(tail);
        q.send.set_markers(0);
    }
}

/// Gives the provider what is in the log. How much it took, and why not all.
///
/// # Safety
/// The entries are complete, and the log is locked.
pub(crate) unsafe fn give(q: &ShadowQp, log: &Log, first: u64, end: u64) -> (u64, Int) {
    let Some(post) = (*(*q.real).context).ops.post_send else {
        return (0, libc::EOPNOTSUPP);
    };
    // Who is told to end in the provider would leave in the log what that has not been given.
    let _whole = (end - first > BATCH as u64).then(Whole::begin);
    let mut at = first;
    while at < end {
        let count = BATCH.min((end - at) as usize);
        let (mut wrs, mut sges) = ([const { MaybeUninit::uninit() }; BATCH], Segments::new());
        let mut made = 0;
        while made < count {
            let Some(one) = request(q, log, at + made as u64, &mut sges) else {
                break;
            };
            wrs[made].write(one);
            made += 1;
        }
        // One request has no more segments than there is room for: it has no handle.
        if made == 0 {
            return (at - first, libc::EINVAL);
        }
        let count = made;
        for i in 1..count {
            let next = wrs[i].as_mut_ptr();
            wrs[i - 1].assume_init_mut().next = next;
        }
        let mut bad = null_mut();
        let error = post(q.real, wrs[0].as_mut_ptr(), &mut bad);
        if error != 0 {
            let taken = wrs[..count].iter().position(|w| w.as_ptr() == bad).unwrap_or(0);
            return (at + taken as u64 - first, error);
        }
        at += count as u64;
    }
    (end - first, 0)
}

const EMPTY: SendWr = SendWr {
    wr_id: 0,
    next: null_mut(),
    sg_list: null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    wr: Remote {
        atomic: Atomic {
            remote_addr: 0,
            compare_add: 0,
            swap: 0,
            rkey: 0,
        },
    },
    remote_srqn: 0,
    rest: [0; 6],
};

/// Memory for segments that are not the log's own. It is not cleared, nor are the requests: of most of it nothing is
/// used, and that would take longer than all the rest.
pub(super) struct Segments {
    list: [MaybeUninit<Sge>; SEGMENTS],
    used: usize,
}

/// More than any adapter takes with one request.
const SEGMENTS: usize = 128;

impl Segments {
    pub(super) fn new() -> Self {
        Segments {
            list: [const { MaybeUninit::uninit() }; SEGMENTS],
            used: 0,
        }
    }

    /// The same segments with the keys of today.
    pub(super) unsafe fn translated(&mut self, c: &ShadowContext, list: *const Sge, count: usize) -> Option<*mut Sge> {
        let to = self.list.get_mut(self.used..self.used + count)?;
        for (i, s) in to.iter_mut().enumerate() {
            let from = *list.add(i);
            s.write(Sge {
                lkey: c.lkey(from.lkey),
                ..from
            });
        }
        self.used += count;
        Some(to.as_mut_ptr().cast())
    }
}

/// Whether every request of these has a handle to its destination, which those for datagrams need.
///
/// # Safety
/// As for [`give`].
pub(super) unsafe fn have_handles(q: &ShadowQp, log: &Log, mut requests: Range<u64>) -> bool {
    q.kind() != QPT_UD
        || requests.all(|i| {
            let e = log.entry(i);
            !(*(e.remote as *mut ShadowAh)).resolve(e.key).0.is_null()
        })
}

/// The request of an entry, as it is today. None when there is no room for its segments, and where the provider makes no
/// handle for its destination, nor one that leads nowhere.
unsafe fn request(q: &ShadowQp, log: &Log, index: u64, sges: &mut Segments) -> Option<SendWr> {
    let e = log.entry(index);
    let mut w = SendWr {
        wr_id: e.wr_id,
        opcode: e.opcode,
        send_flags: e.flags,
        imm_data: e.imm,
        ..EMPTY
    };
    if e.flags & SEND_INLINE != 0 {
        let one = Sge {
            addr: log.inline_at(index) as u64,
            length: e.inline,
            lkey: 0,
        };
        (w.sg_list, w.num_sge) = (sges.translated(context_of(q), &one, 1)?, 1);
    } else {
        let own = log.sges_at(index);
        w.sg_list = if is_identity() {
            own
        } else {
            sges.translated(context_of(q), own, e.sges as usize)?
        };
        w.num_sge = e.sges as i32;
    }
    if e.opcode == WR_SEND_WITH_INV {
        w.imm_data = translate::rkey(q, e.imm);
    }
    let rkey = translate::rkey(q, e.key);
    w.wr = match e.opcode {
        _ if q.kind() == QPT_UD => {
            let (ah, remote_qpn) = (*(e.remote as *mut ShadowAh)).resolve(e.key);
            if ah.is_null() {
                return None;
            }
            Remote {
                ud: Ud {
                    ah,
                    remote_qpn,
                    remote_qkey: e.qkey,
                },
            }
        }
        WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD => Remote {
            atomic: Atomic {
                remote_addr: e.remote,
                compare_add: e.compare,
                swap: e.swap,
                rkey,
            },
        },
        _ => Remote {
            rdma: Rdma {
                remote_addr: e.remote,
                rkey,
            },
        },
    };
    Some(w)
}
