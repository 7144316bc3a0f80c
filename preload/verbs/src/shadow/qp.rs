//! Queue pairs.

use super::{Log, Queue, ShadowCq, ShadowSrq};
use crate::lock::Lock;
use crate::translate::Keys;
use belay_ibv::*;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicU8, Ordering};

/// In the upper half of the number of a request to receive, as the provider has it: the lower half is its place. An error
/// does not say which of the two queues it is of, and a program may give both the same numbers.
pub(crate) const RECEIVE_TAG: u64 = 0xbe1a_4ecf << 32;

/// A queue with so much room for the program, where there is the memory.
fn queue(room: u32, sges: u32, inline: u32) -> Option<Queue> {
    // Some more, for markers.
    Some(Queue::new(Log::new(room.saturating_add(8), sges, inline)?, room))
}

/// What the program has set, whatever the provider was told.
#[derive(Clone, Copy, Default)]
pub(crate) struct Shown {
    /// All attributes that were given, by their last values.
    pub(crate) attr: QpAttr,
    /// Which were given on the way to RTR and to RTS.
    pub(crate) to_init: i32,
    pub(crate) to_rtr: i32,
    pub(crate) to_rts: i32,
    /// [`QP_EN_SQD_ASYNC_NOTIFY`] while the event that its requests to send are drained is asked for and has not come.
    pub(crate) to_sqd: i32,
    /// The right to write was added for markers: the program has not given it.
    pub(crate) write_added: bool,
}

/// Requests between `ibv_wr_start` and `ibv_wr_complete`.
#[derive(Default)]
pub(crate) struct Building {
    pub(crate) count: u64,
    pub(crate) error: i32,
    /// Held since `ibv_wr_start`. A thread that ends before `ibv_wr_complete` is out by itself.
    pub(crate) inside: Option<ManuallyDrop<crate::gate::Inside>>,
}

#[repr(C)]
pub(crate) struct ShadowQp {
    /// A plain one uses the beginning only.
    pub(crate) base: QpEx,
    pub(crate) real: *mut Qp,
    pub(crate) send: Queue,
    /// Empty with a shared queue.
    pub(crate) recv: Queue,
    /// As the program was told.
    pub(crate) cap: QpCap,
    /// Places to send that the real one has besides, for markers.
    pub(crate) spare: u32,
    pub(crate) sig_all: bool,
    /// Of one made with `ibv_create_qp_ex`: what it was made with.
    pub(crate) extended: Option<QpInitAttrEx>,
    pub(crate) shown: Lock<Shown>,
    /// The port of `shown`, for whoever polls.
    port: AtomicU8,
    /// Behind the lock of the send queue.
    pub(crate) building: Building,
    /// Requests that take a receive at the peer and are acknowledged.
    pub(crate) acknowledged: AtomicU64,
    /// Messages that have taken a receive here.
    pub(crate) received: AtomicU64,
    /// A request has failed since it was reset: of those whose numbers are the same it is not known which are done.
    pub(crate) broken: AtomicBool,
    /// What is posted from this place on was posted when it held back already (SQD).
    pub(crate) held_from: AtomicU64,
    /// When it came to rest it had done all that it had begun, and held the rest back (SQD).
    pub(crate) drained: AtomicBool,
    /// It is brought into error in order to be reset or destroyed: the program is not told of that.
    pub(crate) leaving: AtomicBool,
    pub(crate) async_events: u32,
    /// The state in which the provider had it when it came to rest.
    pub(crate) rested: AtomicU32,
    /// It was connected when it came to rest, and its peer not yet.
    pub(crate) half_open: AtomicBool,
    /// The keys of its peer's regions after a restart.
    pub(crate) peer_keys: AtomicPtr<Keys>,
    /// Groups that it has joined.
    pub(crate) groups: Lock<Vec<(Gid, u16)>>,
}

impl ShadowQp {
    /// None where there is no memory for what is posted. `spare`: places of the real one that `cap` does not tell of.
    pub(crate) fn new(
        base: QpEx,
        real: *mut Qp,
        (cap, spare): (QpCap, u32),
        init: &QpInitAttr,
        extended: Option<QpInitAttrEx>,
    ) -> Option<Box<ShadowQp>> {
        // With a shared queue the attributes of an own one are nobody's, and may be anything.
        let (receives, segments) = match base.base.srq.is_null() {
            true => (cap.max_recv_wr, cap.max_recv_sge),
            false => (0, 0),
        };
        Some(Box::new(ShadowQp {
            send: queue(cap.max_send_wr, cap.max_send_sge, cap.max_inline_data)?,
            recv: queue(receives, segments, 0)?,
            base,
            real,
            cap,
            spare,
            sig_all: init.sq_sig_all != 0,
            extended,
            shown: Lock::default(),
            port: AtomicU8::new(0),
            building: Building::default(),
            acknowledged: AtomicU64::new(0),
            received: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            held_from: AtomicU64::new(0),
            drained: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            async_events: 0,
            rested: AtomicU32::new(0),
            half_open: AtomicBool::new(false),
            peer_keys: AtomicPtr::new(std::ptr::null_mut()),
            groups: Lock::default(),
        }))
    }

    /// The number of its port; 0 where it has none yet.
    pub(crate) fn port(&self) -> u8 {
        self.port.load(Ordering::Relaxed)
    }

    /// After a change of what is shown.
    pub(crate) fn note_port(&self, shown: &Shown) {
        self.port.store(shown.attr.port_num, Ordering::Relaxed);
    }

    pub(crate) fn kind(&self) -> u32 {
        self.base.base.qp_type
    }

    pub(crate) fn number(&self) -> u32 {
        self.base.base.qp_num
    }

    pub(crate) fn send_cq(&self) -> *mut ShadowCq {
        self.base.base.send_cq.cast()
    }

    pub(crate) fn recv_cq(&self) -> *mut ShadowCq {
        self.base.base.recv_cq.cast()
    }

    /// Whether the request in this place of the send queue has a completion of its own.
    ///
    /// # Safety
    /// It is posted, and not retired meanwhile.
    pub(crate) unsafe fn is_signalled(&self, place: u64) -> bool {
        self.sig_all || self.send.log.peek().entry(place).flags & SEND_SIGNALED != 0
    }

    /// Its completion queues, each once.
    pub(crate) fn cqs(&self) -> impl Iterator<Item = *mut ShadowCq> {
        let (send, receive) = (self.send_cq(), self.recv_cq());
        [send].into_iter().chain((receive != send).then_some(receive))
    }

    pub(crate) fn srq(&self) -> *mut ShadowSrq {
        self.base.base.srq.cast()
    }

    /// It sends again after an error: all that was posted before has completed, whichever its numbers say.
    ///
    /// # Safety
    /// Its completion queues live, and the caller has the lock of neither, nor of its own queues.
    pub(crate) unsafe fn mend(&self) {
        let end = self.send.posted_by_now();
        // Who polls moves the beginnings of its queues.
        let _polls = (*self.send_cq()).state.lock();
        if self.broken.swap(false, Ordering::AcqRel) {
            self.send.forget(end);
        }
    }

    /// It was reset: nothing is posted, and no message counted.
    ///
    /// # Safety
    /// As for [`Self::mend`].
    pub(crate) unsafe fn forget(&self) {
        let [sends, receives] = [&self.send, &self.recv].map(Queue::posted_by_now);
        let polls = (*self.send_cq()).state.lock();
        self.send.forget(sends);
        self.acknowledged.store(0, Ordering::Release);
        self.broken.store(false, Ordering::Release);
        drop(polls);
        let _polls = self.recv_cq().as_ref().map(|cq| cq.state.lock());
        self.recv.forget(receives);
        self.received.store(0, Ordering::Release);
    }
}
