//! Room in chunks for the writers of snapshots: lent, given its place when it is wanted, given back with the hashes of
//! what was written.

use super::new::{New, Spot};
use super::Session;
use crate::place::desk::Place;
use crate::StorageError;
use std::os::fd::AsRawFd;

/// Largest number of chunks lent at a time: each is an open file of the agent.
const MAX_LOANS: u64 = 200;
/// A process with less than this to write is written by one thread, into one chunk.
const SMALL_PAGES: u64 = 1024;

/// Room in a chunk that a writer of a snapshot may fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loan {
    /// The chunk.
    pub id: u32,
    /// The agent's descriptor of its file; -1 while it has no place.
    pub fd: i32,
    /// First page free.
    pub first: u32,
    /// Number of pages that may be written.
    pub pages: u32,
    /// The file can be written past the page cache; not known while it has no place.
    pub direct: bool,
}

impl Session {
    /// The agent's descriptor of the file of chunk `id`, which has been lent, and whether it can be written past the
    /// page cache; `None` while it must wait for a place.
    pub fn place_loan(&mut self, id: u32) -> Result<Option<(i32, bool)>, StorageError> {
        let Some(at) = self.chunks.iter().position(|c| c.id == id) else {
            return Err(self.no_room());
        };
        if let Some(mover) = self.mover.clone() {
            if matches!(self.chunks[at].spot, Spot::Nowhere) {
                self.chunks[at].spot = Spot::Asked(mover.desk().ask(self.chunks[at].most()));
            }
            if let Spot::Asked(ticket) = &self.chunks[at].spot {
                let Some(place) = mover.desk().granted(ticket) else {
                    self.seal_idle()?;
                    return Ok(None);
                };
                self.settle(at, place)?;
            }
        }
        Ok(self.chunks[at].open().map(|o| (o.file.as_raw_fd(), o.direct)))
    }

    /// Seals the chunks in local tiers that nobody writes, so that they can be moved.
    fn seal_idle(&mut self) -> Result<(), StorageError> {
        for at in 0..self.chunks.len() {
            let c = &self.chunks[at];
            if !c.lent && c.sealed.is_none() && !c.hashes.is_empty() && c.place() != Place::Home {
                self.seal_one(at)?;
            }
        }
        Ok(())
    }

    /// Number of threads that should write `pages` pages, of at most `most`. Each holds a chunk of its own, so where
    /// room is limited one of them could find none while another has plenty.
    pub fn writers(&self, pages: u64, most: u32) -> u32 {
        let spare = u64::from(most.saturating_sub(1)) * self.capacity(pages);
        let tight = self
            .room
            .is_some_and(|(room, _)| room.saturating_sub(self.written()) < pages + spare);
        if pages < SMALL_PAGES || tight {
            1
        } else {
            most.max(1)
        }
    }

    /// Pages of each new chunk where `pages` are to be written.
    fn capacity(&self, pages: u64) -> u64 {
        if self.is_tiered() {
            // Files are made and closed one after the other, and must fit into their tiers.
            return u64::from(self.chunk_pages);
        }
        u64::from(self.chunk_pages).max(pages / MAX_LOANS)
    }

    /// Room for `pages` pages written by `writers` threads that each fill one loan after the other. Give each loan back.
    pub fn lend(&mut self, pages: u64, writers: u32) -> Result<Vec<Loan>, StorageError> {
        self.reserve_index(pages);
        let written = self.written();
        let mut budget = self.room.map_or(u64::MAX, |(room, _)| room.saturating_sub(written));
        // While one writer has work left, each of the others can hold a loan that it does not fill.
        let capacity = self.capacity(pages);
        let mut wanted = pages + u64::from(writers - 1) * capacity;
        let mut loans = Vec::new();
        let mut lend = |c: &mut New, wanted: &mut u64| {
            let first = c.hashes.len() as u32;
            let pages = u64::from(c.capacity - first).min(budget);
            budget -= pages;
            *wanted = wanted.saturating_sub(pages);
            if pages > 0 {
                c.lent = true;
                loans.push(Loan {
                    id: c.id,
                    fd: c.file().map_or(-1, AsRawFd::as_raw_fd),
                    first,
                    pages: pages as u32,
                    direct: c.open().is_some_and(|o| o.direct),
                });
            }
            pages > 0
        };
        for c in self.chunks.iter_mut().filter(|c| c.is_open()) {
            if wanted > 0 {
                lend(c, &mut wanted);
            }
        }
        let mut more = Vec::new();
        while wanted > 0 {
            let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
            more.push(self.chunks.len());
            self.add_chunk(capacity)?;
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
        c.lent = false;
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
