//! The objects that programs hold in place of the provider's.
//!
//! Each begins with the structure that the header shows, so that a pointer to it is what a program may have, and is
//! made by `Box` and freed by the function that destroys it. `real` is the provider's object. What holds for all
//! `unsafe` code here and in `api`: a pointer that a program gives is one that it got from this library and has not
//! given back, as the interface demands; `real` is valid as long as the shadow is; whatever goes over the
//! fields that more than one thread changes is behind a lock or atomic.

mod bell;
mod context;
mod cq;
mod device;
mod log;
mod memory;
mod qp;
mod queue;
mod srq;
mod table;

pub(crate) use bell::{wait_readable, Bell};
pub(crate) use context::ShadowContext;
pub(crate) use cq::{Completion, CqState, ShadowChannel, ShadowCq};
pub(crate) use device::ShadowDevice;
pub(crate) use log::{Entry, Log};
pub(crate) use memory::{after_fork, memory_of, RealAhs, Regions, ShadowAh, ShadowMr, ShadowPd};
pub(crate) use qp::{Building, ShadowQp, Shown, RECEIVE_TAG};
pub(crate) use queue::Queue;
pub(crate) use srq::{ShadowSrq, SharedLog, SRQ_TAG};
pub(crate) use table::Table;

use crate::bias::Struck;
use crate::lock::Lock;

/// Every object that is to be made again after a restart, in the order in which they were made.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) devices: Vec<*mut ShadowDevice>,
    pub(crate) contexts: Vec<*mut ShadowContext>,
    pub(crate) pds: Vec<*mut ShadowPd>,
    pub(crate) mrs: Regions,
    pub(crate) channels: Vec<*mut ShadowChannel>,
    pub(crate) cqs: Vec<*mut ShadowCq>,
    pub(crate) srqs: Vec<*mut ShadowSrq>,
    pub(crate) qps: Vec<*mut ShadowQp>,
}

impl World {
    /// Strikes all objects of a context off.
    ///
    /// # Safety
    /// All that are on the lists live.
    pub(crate) unsafe fn leave(&mut self, context: *mut belay_ibv::Context) {
        self.pds.retain(|o| (**o).base.context != context);
        self.mrs.leave(context);
        self.channels.retain(|o| (**o).base.context != context);
        self.cqs.retain(|o| (**o).base.base.context != context);
        self.srqs.retain(|o| (**o).base.context != context);
        self.qps.retain(|o| (**o).base.base.context != context);
    }

    /// Markers that complete into this queue.
    ///
    /// # Safety
    /// As for [`World::leave`].
    pub(crate) unsafe fn markers(&self, cq: *mut ShadowCq) -> u32 {
        let into = self.qps.iter().map(|q| &**q).filter(|q| q.send_cq() == cq);
        into.map(|q| q.send.markers()).sum()
    }

    /// The locks by which threads go in without looking at the gate.
    ///
    /// # Safety
    /// As for [`World::leave`].
    pub(crate) unsafe fn locks(&self) -> impl Iterator<Item = &dyn Struck> {
        let of_qp = |q: &*mut ShadowQp| [&(**q).send.log as &dyn Struck, &(**q).recv.log];
        let cqs = self.cqs.iter().map(|c| &(**c).state as &dyn Struck);
        let srqs = self.srqs.iter().map(|s| &(**s).requests as &dyn Struck);
        self.qps.iter().flat_map(of_qp).chain(cqs).chain(srqs)
    }
}

/// Taken inside the gate only.
pub(crate) static WORLD: Lock<World> = Lock::new(World {
    devices: Vec::new(),
    contexts: Vec::new(),
    pds: Vec::new(),
    mrs: Regions::new(),
    channels: Vec::new(),
    cqs: Vec::new(),
    srqs: Vec::new(),
    qps: Vec::new(),
});

/// Strikes an object off its list. The last ones are those that go first, as a rule.
pub(crate) fn strike<T>(list: &mut Vec<*mut T>, object: *mut T) {
    if let Some(place) = list.iter().rposition(|o| *o == object) {
        list.remove(place);
    }
}

/// Gives the memory of an object back, which nobody has any more.
///
/// # Safety
/// It was made by `Box`, and its pointer is not used again.
pub(crate) unsafe fn free<T>(object: *mut T) {
    drop(Box::from_raw(object));
}

/// A lock and a condition as libibverbs makes them in the objects that programs see.
pub(crate) const MUTEX: libc::pthread_mutex_t = libc::PTHREAD_MUTEX_INITIALIZER;
pub(crate) const CONDITION: libc::pthread_cond_t = libc::PTHREAD_COND_INITIALIZER;

/// Counts an acknowledged event.
///
/// # Safety
/// All three belong to a shadow that lives.
pub(crate) unsafe fn acknowledge(mutex: *mut libc::pthread_mutex_t, cond: *mut libc::pthread_cond_t, count: *mut u32, by: u32) {
    libc::pthread_mutex_lock(mutex);
    *count = (*count).wrapping_add(by);
    libc::pthread_cond_signal(cond);
    libc::pthread_mutex_unlock(mutex);
}

/// Waits until as many events are acknowledged as were handed out: whoever destroys an object has to.
///
/// # Safety
/// As for [`acknowledge`].
pub(crate) unsafe fn await_acknowledged(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    done: impl Fn() -> bool,
) {
    libc::pthread_mutex_lock(mutex);
    while !done() {
        libc::pthread_cond_wait(cond, mutex);
    }
    libc::pthread_mutex_unlock(mutex);
}
