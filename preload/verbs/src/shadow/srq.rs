//! Shared receive queues.
//!
//! Completions come in any order, so each request carries the number of its place in the log in place of the program's
//! number.

use super::Log;
use crate::bias::Biased;
use belay_ibv::*;

/// In the upper half of a request's number: the lower half is a place.
pub(crate) const SRQ_TAG: u64 = 0xbe1a_5eed << 32;

/// Requests that are posted, by place, and places that are free.
pub(crate) struct SharedLog {
    pub(crate) log: Log,
    free: Vec<u32>,
    /// When each was posted.
    pub(crate) order: Vec<u64>,
    posted: u64,
}

impl SharedLog {
    fn new(room: u32, sges: u32) -> Option<Self> {
        let log = Log::new(room, sges, 0)?;
        let n = log.room();
        Some(SharedLog {
            log,
            free: (0..n).rev().collect(),
            order: vec![0; n as usize],
            posted: 0,
        })
    }

    /// A place, as long as there is one.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<u32> {
        let place = self.free.pop()?;
        self.posted += 1;
        self.order[place as usize] = self.posted;
        Some(place)
    }

    /// The request in this place is done, or was not posted.
    #[inline]
    pub(crate) fn give(&mut self, place: u32) {
        self.order[place as usize] = 0;
        // There is room for all.
        self.free.push(place);
    }

    pub(crate) fn posted(&self) -> usize {
        self.order.len() - self.free.len()
    }

    /// The place of the request whose completion this is: free again, and as it was until the next one is posted.
    #[inline]
    pub(crate) fn done(&mut self, tagged: u64) -> Option<u64> {
        let place = (tagged ^ SRQ_TAG) as usize;
        if *self.order.get(place)? == 0 {
            return None;
        }
        self.give(place as u32);
        Some(place as u64)
    }
}

#[repr(C)]
pub(crate) struct ShadowSrq {
    pub(crate) base: Srq,
    pub(crate) real: *mut Srq,
    pub(crate) attr: SrqAttr,
    pub(crate) requests: Biased<SharedLog>,
    /// The number that the program may have asked for.
    pub(crate) number: u32,
    pub(crate) async_events: u32,
}

impl ShadowSrq {
    pub(crate) fn shared_log(attr: &SrqAttr) -> Option<Biased<SharedLog>> {
        SharedLog::new(attr.max_wr, attr.max_sge).map(Biased::new)
    }

    /// Makes room for a larger queue, as far as there is memory. What is posted stays in its place.
    pub(crate) fn grow(&self, room: u32) {
        let mut old = self.requests.lock();
        let new = SharedLog::new(room, self.attr.max_sge);
        let Some(mut new) = new.filter(|new| new.log.room() > old.log.room()) else {
            return;
        };
        for place in 0..old.log.room() {
            new.log.copy(u64::from(place), &old.log);
        }
        new.order[..old.order.len()].copy_from_slice(&old.order);
        new.posted = old.posted;
        let taken = |p: &u32| new.order[*p as usize] == 0;
        new.free = (0..new.log.room()).rev().filter(taken).collect();
        new.free.reserve(new.log.room() as usize);
        *old = new;
    }
}
