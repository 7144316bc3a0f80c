//! The table that finds a stored page by the hash of its contents. It lies in memory shared by the agent and the
//! writers of a snapshot, which look up and insert at the same time, without locks.
//!
//! ```text
//! empty (key 0) ── compare-and-swap of the key ──> taken, location 0 ── store of the location ──> found by everyone
//! ```
//! An entry that is only taken counts as not found: its page may then be stored twice, which is harmless. Entries are
//! never removed while writers run; between checkpoints the agent takes out those of removed chunks.
//!
//! A search begins at a place in proportion to the hash, so a table of any size is used evenly, and entries in order of
//! their places are nearly in order of their hashes: a larger table is filled from one end to the other.
//!
//! A table can be of a sample of all pages, chosen by their hashes: so the same contents are in the sample wherever and
//! whenever they occur.

use core::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
use core::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Entries looked at before a hash counts as not in the table, and before an insertion is given up.
const PROBES: usize = 256;

/// One entry.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Entry {
    /// Low half of the hash; 0 for an empty entry.
    pub key: AtomicU64,
    /// High half of the hash.
    pub high: AtomicU64,
    /// Chunk and page, see [`location`]; 0 while it is being filled in.
    pub location: AtomicU64,
}

/// Chunk and page in one word. Chunk numbers begin with 1.
pub fn location(chunk: u32, page: u32) -> u64 {
    (chunk as u64) << 32 | page as u64
}

/// A table over shared entries.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    entries: &'a [Entry],
    sample: u64,
}

impl<'a> Table<'a> {
    /// The table in `entries`. It knows only pages whose hashes have none of the bits `sample` in their high half.
    pub fn new(entries: &'a [Entry], sample: u64) -> Self {
        Self { entries, sample }
    }

    /// Whether the table can know a page with this hash.
    pub fn covers(&self, hash: u128) -> bool {
        (hash >> 64) as u64 & self.sample == 0
    }

    /// Has the processor bring the entry where a search for `hash` begins.
    pub fn prefetch(&self, hash: u128) {
        let first = self.first(key(hash));
        // SAFETY: has no effect but on the caches, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.entries.as_ptr().wrapping_add(first).cast()) };
    }

    /// Where a search for `key` begins.
    fn first(&self, key: u64) -> usize {
        ((key as u128 * self.entries.len() as u128) >> 64) as usize
    }

    fn probe(&self, key: u64) -> impl Iterator<Item = &'a Entry> {
        let (to_the_end, from_the_begin) = match self.entries.split_at_checked(self.first(key)) {
            Some((before, from)) => (from, before),
            None => (self.entries, self.entries),
        };
        to_the_end.iter().chain(from_the_begin).take(PROBES)
    }

    /// Where a page with this hash is stored.
    pub fn find(&self, hash: u128) -> Option<u64> {
        if !self.covers(hash) {
            return None;
        }
        let key = key(hash);
        for e in self.probe(key) {
            match e.key.load(Acquire) {
                0 => return None,
                k if k == key => {
                    let at = e.location.load(Acquire);
                    if at != 0 && e.high.load(Relaxed) == (hash >> 64) as u64 {
                        return Some(at);
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// Notes that a page with this hash is stored at `at`. Whether it is known now: there was room, and the table covers it.
    pub fn insert(&self, hash: u128, at: u64) -> bool {
        if !self.covers(hash) {
            return false;
        }
        let key = key(hash);
        for e in self.probe(key) {
            if e.key.load(Relaxed) == 0 && e.key.compare_exchange(0, key, AcqRel, Relaxed).is_ok() {
                e.high.store((hash >> 64) as u64, Relaxed);
                e.location.store(at, Release);
                return true;
            }
        }
        false
    }
}

/// 0 means empty, so that hash shares an entry's key with 1; the high half still tells them apart.
fn key(hash: u128) -> u64 {
    (hash as u64).max(1)
}
