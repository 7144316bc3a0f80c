//! Which chunks are needed: their numbers, and what the chunks with these numbers are.
//!
//! A number alone does not say which chunk it is: a local tier that comes back, or a copy of the job directory that went
//! on by itself, may have another one of the same number.

use crate::chunk;
use belay_image::manifest::ChunkEntry;
use std::collections::BTreeMap;
use std::path::Path;

/// The chunks that manifests name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needed(BTreeMap<u32, Vec<ChunkEntry>>);

impl Needed {
    /// Adds the chunks that a manifest names.
    pub fn add(&mut self, chunks: &[ChunkEntry]) {
        for c in chunks {
            let known = self.0.entry(c.id).or_default();
            if !known.contains(c) {
                known.push(*c);
            }
        }
    }

    /// Whether a chunk of number `id` is needed.
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains_key(&id)
    }

    /// What the needed chunks of number `id` are: more than one, where generations have used a number twice.
    pub fn of(&self, id: u32) -> &[ChunkEntry] {
        self.0.get(&id).map_or(&[], Vec::as_slice)
    }

    /// Whether the file at `path` is a chunk, and another one than any that is needed of number `id`. Not one that is
    /// damaged: of that nobody can say which it was.
    pub(crate) fn is_another(&self, id: u32, path: &Path) -> bool {
        let known = self.of(id);
        chunk::mark(path).is_ok_and(|mark| !known.iter().any(|c| mark == chunk::mark_of(c))) && chunk::is_sealed(path)
    }
}

impl FromIterator<ChunkEntry> for Needed {
    fn from_iter<T: IntoIterator<Item = ChunkEntry>>(chunks: T) -> Self {
        let mut needed = Self::default();
        chunks.into_iter().for_each(|c| needed.add(&[c]));
        needed
    }
}
