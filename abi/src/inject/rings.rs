//! What the process is asked about its rings of native asynchronous I/O.

use super::{Mark, Turn};

/// Rings of native asynchronous I/O (`io_setup`). The kernel does not show requests on their way, but waits for them
/// where a ring is taken away: so each is replaced by a new one in its place, with the same events and those of the
/// requests that have ended meanwhile.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RingsTable {
    /// End of operation.
    pub mark: Mark,
    /// Its beginning and end for the other threads.
    pub turn: Turn,
    /// Number of entries of `rings` in use.
    pub count: u32,
    /// Padding.
    pub pad: u32,
    /// The rings.
    pub rings: [RingSlot; MAX_RINGS],
}

impl RingsTable {
    /// This table with what `done`, read back from the process, answers; as with [`super::NotificationTable::answered`].
    #[must_use]
    pub fn answered(&self, done: &Self) -> Self {
        let mut out = *self;
        out.mark.done = done.mark.done;
        for (ring, done) in out.rings.iter_mut().zip(&done.rings).take(self.count as usize) {
            *ring = RingSlot {
                address: ring.address,
                bytes: ring.bytes,
                polls: done.polls.min(ring.bytes / crate::aio::EVENT_BYTES),
                ..*done
            };
        }
        out
    }
}

/// Most rings in a [`RingsTable`].
pub const MAX_RINGS: usize = 16;

/// One ring in a [`RingsTable`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct RingSlot {
    /// Where it is mapped.
    pub address: u64,
    /// Length of the mapping.
    pub bytes: u64,
    /// A mapping of twice that length, to be unmapped, or 0. In its second half: an event (`aio::Event`) for each poll
    /// that was submitted anew.
    pub scratch: u64,
    /// Number of those.
    pub polls: u64,
    /// Place behind the last event that was there before they were submitted: what follows they have brought.
    pub tail: u32,
    /// Padding.
    pub pad: u32,
    /// One of `RING_*`.
    pub outcome: i32,
    /// Error number.
    pub error: i32,
}

/// [`RingSlot::outcome`]: not looked at.
pub const RING_UNKNOWN: i32 = 0;
/// [`RingSlot::outcome`]: complete; no request is on its way but polls.
pub const RING_DONE: i32 = 1;
/// [`RingSlot::outcome`]: the mapping belongs to no context of this process (it was inherited from the parent).
pub const RING_DEAD: i32 = 2;
/// [`RingSlot::outcome`]: it could not be replaced, and is as it was.
pub const RING_KEPT: i32 = 3;
/// [`RingSlot::outcome`]: it was taken away and could not be put back.
pub const RING_LOST: i32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_a_process_reports_are_not_believed() {
        let mark = Mark {
            pid: 0,
            tid: 0,
            signo: 0,
            done: 0,
            frame: 0,
            subreaper: 0,
            witness: 0,
        };
        let mut sent = RingsTable {
            mark,
            turn: Turn::default(),
            count: 1,
            pad: 0,
            rings: [RingSlot::default(); MAX_RINGS],
        };
        (sent.rings[0].address, sent.rings[0].bytes) = (0x1000, 4096);
        let mut done = sent;
        done.mark.done = 1;
        done.rings = [RingSlot {
            address: u64::MAX,
            bytes: 1 << 60,
            scratch: 0x7000,
            polls: 1 << 50,
            tail: 9,
            outcome: RING_DONE,
            ..RingSlot::default()
        }; MAX_RINGS];
        let got = sent.answered(&done);
        let ring = got.rings[0];
        assert_eq!((got.count, got.mark.done), (1, 1));
        assert_eq!((ring.address, ring.bytes, ring.polls), (0x1000, 4096, 128));
        assert_eq!((ring.scratch, ring.tail, ring.outcome), (0x7000, 9, RING_DONE));
        assert_eq!(got.rings[1].scratch, 0);
    }
}
