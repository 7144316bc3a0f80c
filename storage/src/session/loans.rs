//! Room in chunks for the writers of snapshots: lent, given its place when it is wanted, given back with the hashes of
//! what was written.

use super::new::{New, Spot};
use super::Session;
use crate::place::desk::Place;
use crate::StorageError;
use std::os::fd::AsRawFd;

/// A process with less than this to write is written by one thread, into one chunk.
const SMALL_PAGES: u64 = 1024;

/// Room in a chunk that a writer of a snapshot may fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loan {
    /// The chunk.
    pub id: u32,
    /// First page free.
    pub first: u32,
    /// Number of pages that may be written.
    pub pages: u32,
}

impl Session {
    /// The agent's descriptor of the file of chunk `id`, which has been lent, and whether it can be written past the
    /// page cache; `None` while it must wait for a place.
    pub fn place_loan(&mut self, id: u32) -> Result<Option<(i32, bool)>, StorageError> {
        let Some(at) = self.chunks.iter().position(|c| c.id == id) else {
            return Err(self.no_room());
        };
        match (&self.chunks[at].spot, self.mover.clone()) {
            (Spot::Nowhere, None) => self.settle(at, Place::Home)?,
            (Spot::Nowhere, Some(mover)) => self.chunks[at].spot = Spot::Asked(mover.desk().ask(self.chunks[at].most())),
            _ => {}
        }
        if let (Spot::Asked(ticket), Some(mover)) = (&self.chunks[at].spot, &self.mover) {
            let Some(place) = mover.desk().granted(ticket) else {
                self.seal_idle()?;
                return Ok(None);
            };
            self.settle(at, place)?;
        }
        Ok(self.chunks[at].open().map(|o| (o.file.as_raw_fd(), o.direct)))
    }

    /// Seals the chunks in local tiers that nobody writes, so that they can be moved.
    fn seal_idle(&mut self) -> Result<(), StorageError> {
        for at in 0..self.chunks.len() {
            let c = &self.chunks[at];
            if c.lent == 0 && c.sealed.is_none() && !c.hashes.is_empty() && c.place() != Place::Home {
                self.seal_one(at)?;
            }
        }
        Ok(())
    }

    /// Number of threads that should write `pages` pages, of at most `most`. Each holds a chunk of its own, so where
    /// room is limited one of them could find none while another has plenty.
    pub fn writers(&self, pages: u64, most: u32) -> u32 {
        if pages < SMALL_PAGES {
            return 1;
        }
        let spare = self.room_left().map_or(u64::MAX, |left| left.saturating_sub(pages));
        let others = spare / u64::from(self.chunk_pages);
        u32::try_from(others.saturating_add(1)).unwrap_or(u32::MAX).min(most).max(1)
    }

    /// Whether `pages` pages can be lent while others, who still have `uncounted` pages to store, have loans.
    pub fn may_lend(&self, pages: u64, uncounted: u64) -> bool {
        let fits = self.room_left().is_none_or(|left| pages <= left);
        self.lent == 0 || (fits && self.index_growth(uncounted + pages) == 0)
    }

    /// How many should borrow at once where `pages` are to be stored in all: each leaves a chunk that is not full.
    pub fn borrowers(&self, pages: u64) -> usize {
        let most = pages / u64::from(self.chunk_pages.div_ceil(4)) + 1;
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Pages that may still be lent, where room is limited.
    fn room_left(&self) -> Option<u64> {
        let taken = self.written() + self.lent;
        self.room.map(|(room, _)| room.saturating_sub(taken))
    }

    /// Room for `pages` pages written by `writers` threads that each fill one loan after the other. Give each loan back.
    pub fn lend(&mut self, pages: u64, writers: u32) -> Result<Vec<Loan>, StorageError> {
        // See `may_lend`.
        if self.lent == 0 {
            self.reserve_index(pages);
        }
        let mut budget = self.room_left().unwrap_or(u64::MAX);
        // While one writer has work left, each of the others can hold a loan that it does not fill.
        let mut wanted = pages + u64::from(writers - 1) * u64::from(self.chunk_pages);
        let mut loans = Vec::new();
        let mut lend = |c: &mut New, wanted: &mut u64| {
            let pages = c.free().min(budget).min(*wanted);
            budget -= pages;
            *wanted -= pages;
            if pages > 0 {
                c.lent = pages as u32;
                loans.push(Loan {
                    id: c.id,
                    first: c.hashes.len() as u32,
                    pages: pages as u32,
                });
            }
            pages > 0
        };
        // Those first that have a place: who waits for one must not hold another that it comes to only later, since
        // that may be the place.
        for placed in [true, false] {
            for c in self.chunks.iter_mut().filter(|c| c.is_open() && c.lent == 0) {
                if wanted > 0 && c.file().is_some() == placed {
                    lend(c, &mut wanted);
                }
            }
        }
        while wanted > 0 {
            self.add_chunk(self.chunk_pages)?;
            let last = self.chunks.len() - 1;
            if !lend(&mut self.chunks[last], &mut wanted) {
                break;
            }
        }
        self.lent += loans.iter().map(|l| u64::from(l.pages)).sum::<u64>();
        Ok(loans)
    }

    /// Takes a loan back: `hashes` are those of the pages written, in order. A full chunk is sealed at once.
    pub fn give_back(&mut self, id: u32, hashes: impl Iterator<Item = u128>) -> Result<(), StorageError> {
        let Some(at) = self.chunks.iter().position(|c| c.id == id) else {
            return Ok(());
        };
        let c = &mut self.chunks[at];
        self.lent -= u64::from(std::mem::take(&mut c.lent));
        let before = c.hashes.len();
        c.hashes.extend(hashes);
        let new = &c.hashes[before..];
        self.stats.written += new.len() as u64;
        self.stats.write_pages += new.len() as u64;
        if let Some(index) = &mut self.index {
            index.count_inserted(new);
        }
        if c.hashes.len() >= c.capacity as usize {
            self.seal_one(at)?;
        }
        Ok(())
    }
}
