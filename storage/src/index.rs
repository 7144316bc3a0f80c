//! The agent's side of the table of page hashes (see `belay_abi::index`): memory that the writers of a snapshot can
//! map, growth, and forgetting.

use crate::StorageError;
use belay_abi::index::{location, Entry, Table};
use belay_kernel::shared::Shared;
use rustix::fs::{fallocate, FallocateFlags, MemfdFlags};
use rustix::io::retry_on_intr;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering::Relaxed;

/// What is said where the table cannot be made.
pub(crate) const NO_ROOM: &str = "no room for hashes: pages are not looked for by their contents in this checkpoint";
/// The smallest table.
const MIN_ENTRIES: u64 = 4096;
/// Bits of a hash that choose the sample: one page in 64.
const SAMPLE: u64 = 63;

/// The table of page hashes, for writers that map it.
#[derive(Debug, Clone, Copy)]
pub struct IndexShare {
    /// The agent's descriptor of it, -1 where there is none.
    pub fd: i32,
    /// Its length.
    pub bytes: u64,
    /// Which pages it is of (`belay_abi::index::Table::new`).
    pub sample: u64,
}

impl IndexShare {
    /// That there is none.
    pub const NONE: Self = Self {
        fd: -1,
        bytes: 0,
        sample: 0,
    };
}

/// Hash of every page in the chunks of the newest generation, with the page's place.
#[derive(Debug)]
pub struct Index {
    file: File,
    memory: Shared,
    slots: usize,
    /// Which pages it is of: 0 for all, or [`SAMPLE`].
    sample: u64,
    /// Entries taken.
    used: u64,
}

impl Index {
    /// Entries of a table with room for `pages` pages.
    fn slots_for(pages: u64) -> u64 {
        // At five eighths full, no chain comes near the number of entries that a look-up visits.
        (pages / 5 * 8 + 8).max(MIN_ENTRIES)
    }

    /// Pages for which the next table has room, where this one has none for `pages` more: that many, and enough that it
    /// is not made anew again and again.
    fn next_size(&self, pages: u64) -> u64 {
        (self.used + self.entries_of(pages)).max(self.slots as u64)
    }

    fn has_room(&self, pages: u64) -> bool {
        self.used + self.entries_of(pages) <= self.slots as u64 / 8 * 5
    }

    /// Entries that `pages` pages take at most; of a sample twice as many as are likely, and should there be more, they
    /// are not noted.
    fn entries_of(&self, pages: u64) -> u64 {
        match self.sample {
            0 => pages,
            _ => pages / (SAMPLE + 1) * 2 + MIN_ENTRIES / 8,
        }
    }

    /// Bytes of memory that room for `pages` more entries takes: the larger table, while the old one is there too.
    pub fn growth(&self, pages: u64) -> u64 {
        if self.has_room(pages) {
            return 0;
        }
        Self::slots_for(self.next_size(pages)) * size_of::<Entry>() as u64
    }

    /// An empty table, of all pages or of a sample.
    pub fn new(sampled: bool) -> Result<Self, StorageError> {
        Self::with_entries(MIN_ENTRIES / 2, if sampled { SAMPLE } else { 0 })
    }

    fn with_entries(entries: u64, sample: u64) -> Result<Self, StorageError> {
        let fail = |step: &'static str| move |source| StorageError::System { step, source };
        let slots = Self::slots_for(entries);
        let bytes = slots * size_of::<Entry>() as u64;
        let file = rustix::fs::memfd_create("belay-index", MemfdFlags::CLOEXEC);
        let file = File::from(file.map_err(|e| fail("create the index")(e.into()))?);
        // All of it is used soon, hashes being spread evenly. Taken at once it costs no fault for each page, and what
        // the kernel cannot promise is an error, not a SIGBUS.
        allocate(&file, bytes).map_err(fail("size the index"))?;
        let (slots, bytes) = match (usize::try_from(slots), usize::try_from(bytes)) {
            (Ok(s), Ok(b)) => (s, b),
            _ => return Err(fail("size the index")(std::io::ErrorKind::OutOfMemory.into())),
        };
        let memory = Shared::map(file.as_fd(), bytes).map_err(fail("map the index"))?;
        Ok(Self {
            file,
            memory,
            slots,
            sample,
            used: 0,
        })
    }

    fn entries(&self) -> &[Entry] {
        self.memory.parts(0, self.slots)
    }

    fn table(&self) -> Table<'_> {
        Table::new(self.entries(), self.sample)
    }

    /// Whether it is of a sample only.
    pub fn is_sampled(&self) -> bool {
        self.sample != 0
    }

    /// Whether it can know a page with this hash.
    pub fn covers(&self, hash: u128) -> bool {
        self.table().covers(hash)
    }

    /// For a process that maps it too.
    pub fn share(&self) -> IndexShare {
        IndexShare {
            fd: self.file.as_raw_fd(),
            bytes: (self.slots * size_of::<Entry>()) as u64,
            sample: self.sample,
        }
    }

    /// Where a page with this hash is stored: (chunk, page).
    pub fn find(&self, hash: u128) -> Option<(u32, u32)> {
        self.table().find(hash).map(|at| ((at >> 32) as u32, at as u32))
    }

    /// Notes where a page is stored.
    pub fn insert(&mut self, hash: u128, chunk: u32, page: u32) {
        let done = self.table().insert(hash, location(chunk, page));
        self.used += u64::from(done);
    }

    /// Counts the entries of pages that others have inserted.
    pub fn count_inserted(&mut self, hashes: &[u128]) {
        let new = match self.sample {
            0 => hashes.len(),
            _ => hashes.iter().filter(|h| self.covers(**h)).count(),
        };
        self.used += new as u64;
    }

    /// Makes room for `pages` more pages.
    pub fn reserve(&mut self, pages: u64) -> Result<(), StorageError> {
        if !self.has_room(pages) {
            *self = self.copied(self.next_size(pages), self.sample)?;
        }
        Ok(())
    }

    /// What it says about a sample of all pages.
    pub fn thinned(&self) -> Result<Self, StorageError> {
        self.copied(self.used / SAMPLE, SAMPLE)
    }

    fn copied(&self, entries: u64, sample: u64) -> Result<Self, StorageError> {
        let mut new = Self::with_entries(entries, sample)?;
        for (hash, at) in self.entries().iter().filter_map(read) {
            new.insert(hash, (at >> 32) as u32, at as u32);
        }
        Ok(new)
    }

    /// Forgets pages in chunks other than `alive`. In place: what has been forgotten leaves no trace that would fill
    /// the table, and it need not be made anew while the job stays as large as it is.
    pub fn forget_others(&mut self, alive: &BTreeSet<u32>) {
        let (entries, table) = (self.entries(), self.table());
        let is_taken = |e: &Entry| e.key.load(Relaxed) != 0;
        // At most five eighths are taken.
        let Some(empty) = entries.iter().position(|e| !is_taken(e)) else {
            return;
        };
        let (mut left, mut dead) = (Vec::new(), false);
        let mut run = 0;
        let mut used = 0;
        // What belongs to a place lies in the run of taken entries around it, so each run can be put in order by itself.
        let wrapped = |place: usize| if place < entries.len() { place } else { place - entries.len() };
        for at in (1..=entries.len()).map(|i| wrapped(empty + i)) {
            if is_taken(&entries[at]) {
                run += 1;
                let known = read(&entries[at]).filter(|(_, at)| alive.contains(&((at >> 32) as u32)));
                dead |= known.is_none();
                left.extend(known);
                continue;
            }
            if dead {
                for i in 1..=run {
                    let e = &entries[wrapped(at + entries.len() - i)];
                    e.location.store(0, Relaxed);
                    e.key.store(0, Relaxed);
                }
                for (hash, at) in &left {
                    table.insert(*hash, *at);
                }
            }
            used += left.len() as u64;
            left.clear();
            (run, dead) = (0, false);
        }
        self.used = used;
    }
}

/// Makes `file` `bytes` long, and takes the memory for that.
fn allocate(file: &File, bytes: u64) -> std::io::Result<()> {
    i64::try_from(bytes).map_err(std::io::Error::other)?;
    Ok(retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes))?)
}

/// Hash and location of an entry that is taken and filled in.
fn read(e: &Entry) -> Option<(u128, u64)> {
    let hash = u128::from(e.key.load(Relaxed)) | u128::from(e.high.load(Relaxed)) << 64;
    let at = e.location.load(Relaxed);
    (at != 0).then_some((hash, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn hash(n: u64) -> u128 {
        xxhash_rust::xxh3::xxh3_128(&n.to_le_bytes())
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_map(steps in prop::collection::vec((0u64..400, 1u32..6, any::<bool>()), 1..300)) {
            let mut index = Index::new(false).unwrap();
            let mut model: HashMap<u64, (u32, u32)> = HashMap::new();
            let mut alive: BTreeSet<u32> = (1..6).collect();
            for (i, (n, chunk, forget)) in steps.into_iter().enumerate() {
                if forget && i % 20 == 0 {
                    alive.remove(&chunk);
                    index.forget_others(&alive);
                    model.retain(|_, (c, _)| alive.contains(c));
                } else if alive.contains(&chunk) && !model.contains_key(&n) {
                    index.reserve(1).unwrap();
                    index.insert(hash(n), chunk, i as u32);
                    model.insert(n, (chunk, i as u32));
                }
                for n in 0..400 {
                    prop_assert_eq!(index.find(hash(n)), model.get(&n).copied());
                }
                prop_assert_eq!(index.used, model.len() as u64);
                prop_assert_eq!(index.entries().iter().filter_map(read).count(), model.len());
            }
        }
    }

    #[test]
    fn a_table_that_is_nearly_full_forgets_in_place() {
        let mut index = Index::new(false).unwrap();
        let full = index.slots as u64 / 8 * 5;
        for n in 0..full {
            index.insert(hash(n), 1 + (n % 2) as u32, n as u32);
        }
        let place = index.memory.range();
        for round in 1..50 {
            let alive = BTreeSet::from([1 + (round % 2) as u32]);
            index.forget_others(&alive);
            assert_eq!(index.used, full / 2);
            index.reserve(full / 2).unwrap();
            let new = round * full..round * full + full / 2;
            for n in new.clone() {
                index.insert(hash(n), 2 - (round % 2) as u32, n as u32);
            }
            assert!(new.clone().all(|n| index.find(hash(n)).is_some()));
            assert_eq!((index.used, index.memory.range()), (full, place), "round {round}");
        }
    }

    #[test]
    fn a_sample_knows_some_pages_and_those_for_certain() {
        let mut all = Index::new(false).unwrap();
        all.reserve(100_000).unwrap();
        (0..100_000).for_each(|n| all.insert(hash(n), 1, n as u32));
        let mut sample = all.thinned().unwrap();
        let covered: Vec<u64> = (0..200_000).filter(|n| sample.covers(hash(*n))).collect();
        assert!((2500..3750).contains(&covered.len()), "{}", covered.len());
        sample.reserve(100_000).unwrap();
        let hashes: Vec<u128> = (100_000..200_000).map(hash).collect();
        let before = sample.used;
        for (n, h) in (100_000..).zip(&hashes) {
            // As a writer does.
            sample.table().insert(*h, location(2, n));
        }
        sample.count_inserted(&hashes);
        assert_eq!(sample.used, covered.len() as u64);
        assert_eq!(before, covered.iter().filter(|n| **n < 100_000).count() as u64);
        for n in 0..200_000 {
            let chunk = if n < 100_000 { 1 } else { 2 };
            let expected = sample.covers(hash(n)).then_some((chunk, n as u32));
            assert_eq!(sample.find(hash(n)), expected);
        }
        assert!(sample.slots <= all.slots / 16 && !all.is_sampled());
    }

    #[test]
    fn a_run_of_entries_goes_on_at_the_begin_of_the_table() {
        let mut index = Index::new(false).unwrap();
        // All of these begin at the last place.
        let last: Vec<u128> = (0..20).map(|n| u128::from(u64::MAX - n) | (1 << 64)).collect();
        // And these at the first ones, where the run goes on.
        let first: Vec<u128> = (0..20).map(|n| ((n << 40) + 2) | (1 << 64)).collect();
        let all: Vec<u128> = last.iter().chain(&first).copied().collect();
        for (n, hash) in (0..).zip(&all) {
            index.insert(*hash, 1 + n % 2, n);
        }
        let found = |index: &Index| all.iter().map(|h| index.find(*h)).collect::<Vec<_>>();
        let expected: Vec<_> = (0..40).map(|n| Some((1 + n % 2, n))).collect();
        assert_eq!(found(&index), expected);
        index.forget_others(&BTreeSet::from([2]));
        let left: Vec<_> = expected.iter().map(|e| e.filter(|(chunk, _)| *chunk == 2)).collect();
        assert_eq!((found(&index), index.used), (left, 20));
        index.reserve(10_000).unwrap();
        assert_eq!(found(&index).iter().flatten().count(), 20);
    }

    #[test]
    fn it_grows_and_the_halves_of_a_hash_both_count() {
        let mut index = Index::new(false).unwrap();
        for n in 0..20_000 {
            index.reserve(1).unwrap();
            index.insert(hash(n), 1, n as u32);
        }
        assert!((0..20_000).all(|n| index.find(hash(n)) == Some((1, n as u32))));
        assert_eq!(index.find(hash(7) ^ 1 << 100), None);
        index.insert(5, 2, 2);
        index.insert(5 | 1 << 64, 3, 3);
        assert_eq!((index.find(5), index.find(5 | 1 << 64)), (Some((2, 2)), Some((3, 3))));
    }
}
