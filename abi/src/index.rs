//! The table that finds a stored page by the hash of its contents. It lies in memory shared by the agent and the writers of a snapshot, which look
//! up and insert at the same time, without locks.
//!
//! ```text
//! empty (key 0) ── compare-and-swap of the key ──> taken, location 0 ── store of the location ──> found by everyone
//! ```
//! An entry that is only taken counts as not found: its page may then be stored twice, which is harmless. Entries are never removed while writers run; between checkpoints the agent takes out those of removed chunks.
//!
//! A table can be of a sample of all pages, chosen by their hashes: so the same contents are in the sample wherever and whenever they occur.

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

/// A table over shared entries, whose number is a power of two.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    entries: &'a [Entry],
    sample: u64,
}

impl<'a> Table<'a> {
    /// The table in `entries`; `None` where their number is no power of two. It knows only pages whose hashes have none of the bits `sample` in their high half.
    pub fn new(entries: &'a [Entry], sample: u64) -> Option<Self> {
        entries.len().is_power_of_two().then_some(Self { entries, sample })
    }

    /// Whether the table can know a page with this hash.
    pub fn covers(&self, hash: u128) -> bool {
        (hash >> 64) as u64 & self.sample == 0
    }

    /// Has the processor bring the entry where a search for `hash` begins.
    pub fn prefetch(&self, hash: u128) {
        let first = key(hash) as usize & (self.entries.len() - 1);
        // SAFETY: has no effect but on the caches, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.entries.as_ptr().wrapping_add(first).cast()) };
    }

    fn probe(&self, key: u64) -> impl Iterator<Item = &'a Entry> {
        let (entries, mask) = (self.entries, self.entries.len() - 1);
        (0..PROBES).filter_map(move |i| entries.get((key as usize).wrapping_add(i) & mask))
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
