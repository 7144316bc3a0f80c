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
        if pages < SMALL_PAGES || !self.has_room(pages, most) {
            1
        } else {
            most.max(1)
        }
    }

    /// Whether `pages` pages can be lent to `writers` threads while others have loans.
    pub fn may_lend(&self, pages: u64, writers: u32) -> bool {
        let lent = self.lent();
        lent == 0 || (self.has_room(pages, writers) && self.index_growth(lent + pages) == 0)
    }

    /// Whether `pages` pages fit, even if each of `writers` threads but the last leaves a chunk empty.
    fn has_room(&self, pages: u64, writers: u32) -> bool {
        let wanted = pages + u64::from(writers.saturating_sub(1)) * u64::from(self.chunk_pages);
        self.room_left().is_none_or(|left| wanted <= left)
    }

    /// Pages that may still be lent, where room is limited.
    fn room_left(&self) -> Option<u64> {
        let taken = self.written() + self.lent();
        self.room.map(|(room, _)| room.saturating_sub(taken))
    }

    /// Pages that writers may still fill.
    fn lent(&self) -> u64 {
        self.chunks.iter().map(|c| u64::from(c.lent)).sum()
    }

    /// Room for `pages` pages written by `writers` threads that each fill one loan after the other. Give each loan back.
    pub fn lend(&mut self, pages: u64, writers: u32) -> Result<Vec<Loan>, StorageError> {
        self.reserve_index(self.lent() + pages);
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
        for c in self.chunks.iter_mut().filter(|c| c.is_open() && c.lent == 0) {
            if wanted > 0 {
                lend(c, &mut wanted);
            }
        }
        while wanted > 0 {
            self.add_chunk(self.chunk_pages)?;
            let last = self.chunks.len() - 1;
            if !lend(&mut self.chunks[last], &mut wanted) {
                break;
            }
        }
        Ok(loans)
    }

    /// Takes a loan back: `hashes` are those of the pages written, in order. A full chunk is sealed at once.
    pub fn give_back(&mut self, id: u32, hashes: impl Iterator<Item = u128>) -> Result<(), StorageError> {
        let Some(at) = self.chunks.iter().position(|c| c.id == id) else {
            return Ok(());
        };
        let c = &mut self.chunks[at];
        c.lent = 0;
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
