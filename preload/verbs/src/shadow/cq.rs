//! Completion queues and their channels.

use super::Bell;
use crate::bias::Biased;
use crate::gate::Whole;
use crate::lock::Lock;
use belay_ibv::*;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Release};

/// A completion with all that can be asked of it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Completion {
    pub(crate) wc: Wc,
    pub(crate) time: u64,
    pub(crate) wallclock: u64,
}

#[repr(C)]
pub(crate) struct ShadowChannel {
    pub(crate) base: CompChannel,
    pub(crate) real: *mut CompChannel,
    pub(crate) bell: Bell,
    /// Queues that say so.
    pub(crate) users: AtomicU32,
    /// Held while an event is handed out, and while a queue goes.
    pub(crate) events: Lock<ChannelState>,
}

#[derive(Default)]
pub(crate) struct ChannelState {
    /// Queues with an event of this library's.
    pub(crate) kicked: VecDeque<*mut ShadowCq>,
}

/// What polling changes.
#[derive(Default)]
pub(crate) struct CqState {
    /// Completions that the provider has given already, and the program has not had.
    pub(crate) saved: VecDeque<Completion>,
    /// The one that `ibv_start_poll` or `ibv_next_poll` shows.
    pub(crate) current: Completion,
    /// Whoever polls in the extended way stays inside from the first completion to the end. A thread that ends in between is
    /// out by itself.
    pub(crate) inside: Option<ManuallyDrop<crate::gate::Inside>>,
}

#[repr(C)]
pub(crate) struct ShadowCq {
    /// A plain one uses the beginning only.
    pub(crate) base: CqEx,
    pub(crate) real: *mut Cq,
    pub(crate) state: Biased<CqState>,
    pub(crate) vector: i32,
    /// Places that the real one has besides those that the program was told of, for markers.
    pub(crate) spare: i32,
    /// The program wants events; it is not known whether it has had its last one.
    pub(crate) armed: AtomicU32,
    /// Completions are saved. For whoever must not wait for the state: the program may be polling in the extended way.
    pub(crate) has_saved: AtomicBool,
    /// Of an extended one: what it was made with.
    pub(crate) extended: Option<CqInitAttrEx>,
    /// When the program wants its events: what it has last told the provider; no mask where it has not.
    pub(crate) moderation: ModifyCqAttr,
    /// Events handed out. Behind the base's mutex.
    pub(crate) events: u32,
    pub(crate) async_events: u32,
}

impl ShadowCq {
    pub(crate) fn channel(&self) -> *mut ShadowChannel {
        self.base.base.channel.cast()
    }

    /// After a change of what is saved.
    pub(crate) fn note_saved(&self, state: &CqState) {
        self.has_saved.store(!state.saved.is_empty(), Release);
    }

    /// Raises an event that the provider knows nothing of.
    pub(crate) fn kick(&self) {
        // SAFETY: a channel lives as long as its queues.
        let Some(channel) = (unsafe { self.channel().as_ref() }) else {
            return;
        };
        let own = std::ptr::from_ref(self).cast_mut();
        // The bell is the kernel's.
        let _whole = Whole::begin();
        let mut events = channel.events.lock();
        if !events.kicked.contains(&own) {
            events.kicked.push_back(own);
        }
        channel.bell.ring();
    }
}
