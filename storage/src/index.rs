//! The agent's side of the table of page hashes (see `belay_abi::index`): memory that the writers of a snapshot can map, growth, and forgetting.

use crate::{StorageError, PAGE};
use belay_abi::index::{location, Entry, Table, GONE};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::Ordering::Relaxed;

/// The smallest table.
const MIN_ENTRIES: u64 = 4096;

/// Hash of every page in the chunks of the newest generation, with the page's place.
#[derive(Debug)]
pub struct Index {
    file: File,
    entries: *mut Entry,
    slots: usize,
    /// Entries taken, those of removed chunks included.
    used: u64,
}

// SAFETY: the mapping belongs to this value alone and is only used through atomics.
unsafe impl Send for Index {}

impl Index {
    /// Entries of a table with room for `pages` pages.
    fn slots_for(pages: u64) -> u64 {
        // At five eighths full, no chain comes near the number of entries that a look-up visits.
        (pages / 5 * 8 + 8).max(MIN_ENTRIES).next_power_of_two()
    }

    fn has_room(&self, pages: u64) -> bool {
        self.used + pages <= self.slots as u64 / 8 * 5
    }

    /// Bytes of memory that room for `pages` more entries takes at most: the larger table, while the old one is there too, or the rest of this one.
    pub fn growth(&self, pages: u64) -> u64 {
        let bytes = |slots: u64| slots * size_of::<Entry>() as u64;
        if !self.has_room(pages) {
            return bytes(Self::slots_for(self.used + pages));
        }
        // Hashes are spread evenly: soon every page of the table has been written to.
        let own = bytes(self.slots as u64);
        if self.used > own / PAGE * 8 {
            0
        } else {
            own.min(pages * PAGE)
        }
    }

    /// An empty table with room for `pages` pages.
    pub fn with_room(pages: u64) -> Result<Self, StorageError> {
        let fail = |step: &'static str| move |source| StorageError::System { step, source };
        let slots = Self::slots_for(pages);
        let bytes = slots * size_of::<Entry>() as u64;
        // SAFETY: a constant name; the result is checked and owned.
        let file = unsafe {
            let fd = libc::memfd_create(c"belay-index".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(fail("create the index")(std::io::Error::last_os_error()));
            }
            File::from_raw_fd(fd)
        };
        file.set_len(bytes).map_err(fail("size the index"))?;
        let (slots, bytes) = match (usize::try_from(slots), usize::try_from(bytes)) {
            (Ok(s), Ok(b)) => (s, b),
            _ => return Err(fail("size the index")(std::io::ErrorKind::OutOfMemory.into())),
        };
        // SAFETY: a new shared mapping of our own file, which has that length.
        let p = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), bytes, prot, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if p == libc::MAP_FAILED {
            return Err(fail("map the index")(std::io::Error::last_os_error()));
        }
        Ok(Self {
            file,
            entries: p.cast(),
            slots,
            used: 0,
        })
    }

    fn entries(&self) -> &[Entry] {
        // SAFETY: the mapping holds `slots` entries and lives as long as `self`; all bit patterns are valid, and every access is atomic.
        unsafe { std::slice::from_raw_parts(self.entries, self.slots) }
    }

    fn table(&self) -> Option<Table<'_>> {
        Table::new(self.entries())
    }

    /// Descriptor and length in bytes, for a process that maps it too.
    pub fn share(&self) -> (i32, u64) {
        (self.file.as_raw_fd(), (self.slots * size_of::<Entry>()) as u64)
    }

    /// Where a page with this hash is stored: (chunk, page).
    pub fn find(&self, hash: u128) -> Option<(u32, u32)> {
        self.table()?.find(hash).map(|at| ((at >> 32) as u32, at as u32))
    }

    /// Notes where a page is stored.
    pub fn insert(&mut self, hash: u128, chunk: u32, page: u32) {
        let done = self.table().is_some_and(|t| t.insert(hash, location(chunk, page)));
        self.used += u64::from(done);
    }

    /// Counts entries that others have inserted.
    pub fn count_inserted(&mut self, pages: u64) {
        self.used += pages;
    }

    /// Makes room for `pages` more entries.
    pub fn reserve(&mut self, pages: u64) -> Result<(), StorageError> {
        if self.has_room(pages) {
            return Ok(());
        }
        let live = |e: &&Entry| !matches!(e.location.load(Relaxed), 0 | GONE);
        let mut new = Self::with_room(self.entries().iter().filter(live).count() as u64 + pages)?;
        for e in self.entries().iter().filter(live) {
            let hash = u128::from(e.key.load(Relaxed)) | u128::from(e.high.load(Relaxed)) << 64;
            let at = e.location.load(Relaxed);
            new.insert(hash, (at >> 32) as u32, at as u32);
        }
        *self = new;
        Ok(())
    }

    /// Seconds that a look-up takes, of pages all over the table.
    pub fn cost(&self) -> f64 {
        const LOOKS: u64 = 2048;
        let begin = std::time::Instant::now();
        let mut hash = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835u128;
        let mut found = 0u64;
        for _ in 0..LOOKS {
            hash = hash.wrapping_mul(0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645).wrapping_add(1) ^ hash >> 64;
            found += u64::from(self.find(hash).is_some());
        }
        std::hint::black_box(found);
        begin.elapsed().as_secs_f64() / LOOKS as f64
    }

    /// Forgets pages in chunks other than `alive`.
    pub fn forget_others(&mut self, alive: &BTreeSet<u32>) {
        for e in self.entries() {
            let at = e.location.load(Relaxed);
            if e.key.load(Relaxed) != 0 && at != GONE && !alive.contains(&((at >> 32) as u32)) {
                e.location.store(GONE, Relaxed);
            }
        }
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        // SAFETY: our own mapping; no reference into it outlives `self`.
        unsafe { libc::munmap(self.entries.cast(), self.slots * size_of::<Entry>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn hash(n: u64) -> u128 {
        crate::hash(&n.to_le_bytes())
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_map(steps in prop::collection::vec((0u64..400, 1u32..6, any::<bool>()), 1..300)) {
            let mut index = Index::with_room(1).unwrap();
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
            }
        }
    }

    #[test]
    fn it_grows_and_the_halves_of_a_hash_both_count() {
        let mut index = Index::with_room(1).unwrap();
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
