//! The page on which a program says what its loops do to its data (`libbelay.so`, `belay_access.h`), for the agent.
//!
//! The library makes a memfd called [`NAME`], sealed against shrinking and growing, maps it shared and fills in a
//! [`Page`]. Nobody waits for anybody by it but for a moment at a chosen loop, with a time limit.
//!
//! ```text
//! program  [datasets, sites] ── enter: record into the ring, open = its place ── the loop ── leave: open = 0
//! agent    watched = 1 (at the first checkpoint; before that nothing is recorded; the first record makes it 2)
//! agent    site = S, want = n ┄┄ stops all ┄┄ want = 0
//! program  enter of S: here = n ── waits while want is n, for a moment ── here = n and GONE_ON
//! agent    after the stop: reads what is recorded from then on
//! restart  dead = what was left out, which has no access rights ── enter, when its record is whole: gives it back
//! restart  ring, up to whole_at = what was recorded before ── a record that differs ends the program
//! agent    point_want = n, for all processes with parts of global arrays ┄┄ stops all ┄┄ point_want = 0
//! program  comes to its point for the n-th time: payload, point_here = n ── waits while point_want is n ── point_here = 0
//! ```
//! A record is a row of words: [`header`], time stamp counter, then for each use [`used`], followed, unless the use is
//! of the whole dataset, by a word for each dimension: the first element, and one behind the last in the upper half.

use crate::control::Span;
use crate::words::{Shared, Words};
use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// Name of the memfd.
pub const NAME: &CStr = c"belay-access";
/// How `/proc/PID/maps` shows it.
pub const MAPPED: &str = "/memfd:belay-access (deleted)";
/// `Page::magic`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"belayacc");
/// `Page::version`.
pub const VERSION: u32 = 5;

/// Most dimensions.
pub const DIMS: usize = 5;
/// Most datasets, and most sites.
pub const MOST: usize = 1024;
/// Most ranges without access rights.
pub const MOST_DEAD: usize = 1024;
/// Words in the ring, a power of two.
pub const RING: usize = 1 << 17;
/// Places in the ring of which it is known that a record begins there.
pub const MARKS: usize = 16;
/// Words from one of them to the next, or more.
pub const MARK_WORDS: u64 = (RING / MARKS) as u64;
/// Most uses of one loop.
pub const MOST_USES: usize = 64;
/// Most words that a restarted program is to record again before something else.
pub const MOST_WAY: usize = RING / 4;
/// Most words of a record.
pub const MOST_WORDS: usize = 2 + MOST_USES * (1 + DIMS);
/// Longest payload of a point, bytes.
pub const MOST_PAYLOAD: usize = 4096;

/// Kind of a record: a loop begins.
pub const ENTER: u64 = 1;
/// The dataset whose number is in place of the site lies elsewhere from now on: a word with its address follows, 0
/// where it was given up.
pub const MOVE: u64 = 2;

/// From here on nothing is known of what has not been used yet: datasets became others, or the process forked. In place
/// of the site, 1 where that was in a loop, whose uses are not known either.
pub const RESET: u64 = 3;

/// Kinds of uses.
pub const READ: u64 = 1;
/// All of it is overwritten, and nothing of it read before.
pub const WRITE: u64 = 2;
/// Both, or a part of it only.
pub const BOTH: u64 = 3;

/// `Page::watched`: loops are to be recorded.
pub const WANTED: u32 = 1;
/// A loop has been: from here on, one that the program is in is known.
pub const BEGUN: u32 = 2;

/// `Page::faults`: two threads were in loops at the same time, a loop was begun in another, or one that had not begun was
/// left.
pub const NESTED: u32 = 1;
/// A loop has more uses than there is room for, or did not say which.
pub const TOO_MANY: u32 = 2;

/// Beside the number in `Page::here`: who has come there waits no more.
pub const GONE_ON: u32 = 1 << 31;

/// First word of a record.
pub const fn header(kind: u64, site: u32, uses: usize) -> u64 {
    kind | (uses as u64) << 8 | (site as u64) << 32
}

/// Kind, site and number of uses.
pub const fn of_header(word: u64) -> (u64, u32, usize) {
    (word & 0xff, (word >> 32) as u32, (word >> 8 & 0xffff) as usize)
}

/// First word of a use: how many words with bounds follow.
pub const fn used(dataset: u32, kind: u64, bounds: usize) -> u64 {
    kind | (bounds as u64) << 8 | (dataset as u64) << 32
}

/// Kind, dataset and number of words.
pub const fn of_used(word: u64) -> (u64, u32, usize) {
    (word & 0xff, (word >> 32) as u32, (word >> 8 & 0xff) as usize)
}

/// A dataset. All zero: none.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dataset {
    /// Where its first element is; 0 for one that was given up.
    pub address: u64,
    /// Bytes of an element.
    pub elem: u64,
    /// Elements in each dimension, 1 in those that it does not have.
    pub extent: [u64; DIMS],
    /// Bytes from one element to the next in each dimension.
    pub stride: [u64; DIMS],
    /// Not 0: always alive.
    pub keep: u32,
    /// How many dimensions it has.
    pub dims: u32,
    /// Its name, ended by a zero byte.
    pub name: [u8; 32],
}

// SAFETY: integers of 8 bytes, two of 4, and 32 single bytes.
unsafe impl Words for Dataset {}

/// A site.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Site {
    /// Its name, ended by a zero byte.
    pub name: [u8; 32],
}

// SAFETY: 32 single bytes.
unsafe impl Words for Site {}

/// Which part of a global array a dataset is. All zero: of none.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Elements of the global array in each dimension, 1 in those that it does not have.
    pub global: [u64; DIMS],
    /// Where in it the first element of the dataset lies: below 0 where that is a ghost beyond its rim.
    pub lower: [i64; DIMS],
    /// The first element of the dataset, in each dimension, that is the process's own.
    pub lo: [u64; DIMS],
    /// One behind the last.
    pub hi: [u64; DIMS],
}

// SAFETY: integers of 8 bytes.
unsafe impl Words for Share {}

/// Memory without access rights, which a checkpoint has left out.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dead {
    /// Where.
    pub span: Span,
    /// `PROT_*` that it has when it is alive.
    pub prot: u64,
}

// SAFETY: three integers of 8 bytes.
unsafe impl Words for Dead {}

/// The page. All that the library writes is to be checked by who reads it.
#[repr(C)]
#[derive(Debug)]
pub struct Page {
    /// [`MAGIC`], stored last.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The process, which a fork does not change.
    pub owner: AtomicI32,
    /// The memfd's descriptor in that process.
    pub descriptor: AtomicI32,
    /// The agent wants records: [`WANTED`]; and has some: [`BEGUN`].
    pub watched: AtomicU32,
    /// Which thread writes to the page; 0 for none.
    pub busy: AtomicU32,
    /// What has been done that the agent cannot follow.
    pub faults: AtomicU32,
    /// How often datasets or sites were changed: odd while that is being done.
    pub changes: AtomicU32,
    /// At this site,
    pub site: AtomicU32,
    /// who comes there waits as long as this is not 0 and not changed;
    pub want: AtomicU32,
    /// who has come has written the same here, and adds [`GONE_ON`] before it begins its loop.
    pub here: AtomicU32,
    /// Words that have been written to the ring, and are whole.
    pub head: AtomicU64,
    /// The same, and those that are being written.
    pub reserved: AtomicU64,
    /// Where the record of the loop begins that the program is in, and 1; 0 for none.
    pub open: AtomicU64,
    /// How many of `dead` there are.
    pub dead_count: AtomicU32,
    /// How many of `datasets` there are.
    pub dataset_count: AtomicU32,
    /// How many of `sites`.
    pub site_count: AtomicU32,
    /// Not 0: the process forked before it had overwritten all that was left out.
    pub forked: AtomicU32,
    /// Written by a restart: from this word of the ring on, the program has overwritten all that was left out. Up to it,
    /// but for the time stamps, the ring holds what it is to record.
    pub whole_at: AtomicU64,
    /// Number `n` is in place `n - 1`.
    pub datasets: [Shared<Dataset>; MOST],
    /// The same.
    pub sites: [Shared<Site>; MOST],
    /// Written by a restart, and taken away by the library.
    pub dead: [Shared<Dead>; MOST_DEAD],
    /// The first record that begins behind word `n * MARK_WORDS` is in place `n % MARKS`.
    pub marks: [AtomicU64; MARKS],
    /// Word `n` is in place `n % RING`.
    pub ring: [AtomicU64; RING],
    /// How often the program has come to its point.
    pub point: AtomicU64,
    /// Not 0: who comes there for this time waits as long as this is not changed.
    pub point_want: AtomicU64,
    /// The number of the point at which the program waits; 0 for none.
    pub point_here: AtomicU64,
    /// Time stamp counter when it came there last, and how much that was after the time before.
    pub point_at: AtomicU64,
    /// See `point_at`.
    pub point_took: AtomicU64,
    /// Changes when `point_want` does: who waits, waits for this.
    pub point_turn: AtomicU32,
    /// Bytes of `payload`.
    pub payload_bytes: AtomicU32,
    /// What the program keeps with the point at which it waits.
    pub payload: [AtomicU64; MOST_PAYLOAD / 8],
    /// That of dataset `n` is in place `n - 1`.
    pub shares: [Shared<Share>; MOST],
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn a_program_of_before_relies_on_the_layout() {
        let places = [
            offset_of!(Page, watched),
            offset_of!(Page, site),
            offset_of!(Page, head),
            offset_of!(Page, open),
            offset_of!(Page, datasets),
            offset_of!(Page, sites),
            offset_of!(Page, dead),
            offset_of!(Page, ring),
            offset_of!(Page, point),
            offset_of!(Page, shares),
        ];
        assert_eq!(places, [20, 36, 48, 64, 96, 139_360, 172_128, 196_832, 1_245_408, 1_249_552]);
        assert_eq!((size_of::<Page>(), size_of::<Dataset>()), (1_413_392, 136));
        let shown = MAPPED.strip_prefix("/memfd:").and_then(|m| m.strip_suffix(" (deleted)"));
        assert_eq!(shown, NAME.to_str().ok());
    }

    #[test]
    fn words_say_what_was_put_into_them() {
        assert_eq!(of_header(header(ENTER, u32::MAX, MOST_USES)), (ENTER, u32::MAX, MOST_USES));
        assert_eq!(of_used(used(u32::MAX, BOTH, DIMS)), (BOTH, u32::MAX, DIMS));
    }
}
