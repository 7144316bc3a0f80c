//! One of the two queues of a queue pair: who posts writes at its end, under its lock, and who polls reads at its
//! beginning, under that of a completion queue. Neither waits for the other.
//!
//! ```text
//! posts                                    polls
//!   next, and limit (acquire)                oldest, and end (acquire)
//!   writes the entry in this place           reads the entries between these
//!   publish (release), then the provider     retire (release)
//! ```
//! So an entry is complete when it is seen before the end, and its place is not written again before who polls has read
//! it.

use super::Log;
use crate::bias::Biased;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::ops::Range;

pub(crate) struct Queue<L = Log> {
    /// The requests from `head` to `tail` are posted, and not known to be done.
    pub(crate) log: Biased<L>,
    head: AtomicU64,
    tail: AtomicU64,
    /// How many the program may post, as it was told.
    size: u32,
    /// Markers among them: at most one.
    markers: AtomicU32,
}

impl<L> Queue<L> {
    /// `log` has places for some more than `size`.
    pub(crate) fn new(log: L, size: u32) -> Self {
        Queue {
            log: Biased::new(log),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            size,
            markers: AtomicU32::new(0),
        }
    }

    /// How far the tail may come: a marker takes no place of the program's.
    #[inline]
    pub(crate) fn limit(&self) -> u64 {
        // Who retires one moves the head first.
        let markers = self.markers.load(Ordering::Acquire);
        self.begins() + u64::from(self.size) + u64::from(markers)
    }

    /// Where the oldest request is, that is not known to be done.
    #[inline]
    pub(crate) fn begins(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Behind the last request.
    #[inline]
    pub(crate) fn ends(&self) -> u64 {
        self.tail.load(Ordering::Acquire)
    }

    /// The places of what is posted.
    pub(crate) fn places(&self) -> Range<u64> {
        self.begins()..self.ends()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places().is_empty()
    }

    pub(crate) fn posted(&self) -> u64 {
        let places = self.places();
        places.end - places.start
    }

    /// For who posts: the place of the next request.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.tail.load(Ordering::Relaxed)
    }

    /// For who posts: all before `end` is posted, or nothing behind it is after all.
    #[inline]
    pub(crate) fn publish(&self, end: u64) {
        self.tail.store(end, Ordering::Release);
    }

    /// For who polls: the places of what is posted.
    #[inline]
    pub(crate) fn pending(&self) -> Range<u64> {
        self.head.load(Ordering::Relaxed)..self.ends()
    }

    /// For who polls: all before `begin` is done, with the marker among it, where `marker` says so.
    #[inline]
    pub(crate) fn retire(&self, begin: u64, marker: bool) {
        self.head.store(begin, Ordering::Release);
        if marker {
            self.set_markers(0);
        }
    }

    pub(crate) fn markers(&self) -> u32 {
        self.markers.load(Ordering::Acquire)
    }

    pub(crate) fn set_markers(&self, markers: u32) {
        self.markers.store(markers, Ordering::Release);
    }

    /// Behind what is posted, also for who does not post. While somebody does, the end may be further than where it will be:
    /// what is refused is taken back.
    pub(crate) fn posted_by_now(&self) -> u64 {
        // A thread that was told to end in a post may reset the queue pair on its way out: nothing is taken back any more.
        let _posts = (!self.log.is_own()).then(|| self.log.lock());
        self.ends()
    }

    /// For who polls: nothing before `end` is pending.
    pub(crate) fn forget(&self, end: u64) {
        self.retire(end.max(self.begins()), true);
    }

    pub(crate) fn clear(&self) {
        self.forget(self.ends());
    }
}
