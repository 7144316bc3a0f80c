//! A chunk from its number to its seal.

use crate::chunk;
use crate::place::desk::{Place, Ticket};
use belay_image::manifest::ChunkEntry;
use std::fs::File;

/// A chunk being written.
#[derive(Debug)]
pub(super) struct New {
    pub(super) id: u32,
    /// Where it is, once that is known.
    pub(super) spot: Spot,
    pub(super) hashes: Vec<u128>,
    pub(super) capacity: u32,
    /// Pages that a writer has been lent; 0: nobody has it.
    pub(super) lent: u32,
    /// Set once the table of hashes is written and the file is durable.
    pub(super) sealed: Option<ChunkEntry>,
    pub(super) published: bool,
}

/// Where a new chunk is.
#[derive(Debug)]
pub(super) enum Spot {
    /// Nobody has asked for a place.
    Nowhere,
    /// A place has been asked for.
    Asked(Ticket),
    /// There; the file is open until the chunk is sealed.
    At(Place, Option<Open>),
}

/// The file of a chunk being written.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) file: File,
    /// It can be written past the page cache.
    pub(super) direct: bool,
}

impl New {
    pub(super) fn place(&self) -> Place {
        match self.spot {
            Spot::At(place, _) => place,
            Spot::Nowhere | Spot::Asked(_) => Place::Home,
        }
    }

    pub(super) fn open(&self) -> Option<&Open> {
        match &self.spot {
            Spot::At(_, open) => open.as_ref(),
            Spot::Nowhere | Spot::Asked(_) => None,
        }
    }

    pub(super) fn file(&self) -> Option<&File> {
        self.open().map(|o| &o.file)
    }

    /// Bytes that it can grow to.
    pub(super) fn most(&self) -> u64 {
        chunk::file_bytes(self.capacity)
    }

    /// Pages that it has place for.
    pub(super) fn free(&self) -> u64 {
        u64::from(self.capacity).saturating_sub(self.hashes.len() as u64)
    }

    pub(super) fn is_open(&self) -> bool {
        self.sealed.is_none() && self.hashes.len() < self.capacity as usize
    }
}
