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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::{check_present, encode_trailer, Chunk};
    use crate::testing::Scratch;
    use crate::{page_checksum, PAGE};
    use belay_kernel::direct::Buffer;

    /// A chunk of two pages, all of whose bytes are `fill`, and what a manifest says of it.
    fn chunk(fill: u8) -> (Vec<u8>, ChunkEntry) {
        let page = vec![fill; PAGE as usize];
        let (trailer, xxh3) = encode_trailer(&[page_checksum(&page).into(); 2]);
        let entry = ChunkEntry { id: 1, pages: 2, xxh3 };
        ([page.repeat(2), trailer].concat(), entry)
    }

    #[test]
    fn a_table_behind_junk_is_no_chunk_that_anybody_takes_for_whole() {
        let s = Scratch::new("needed");
        let path = s.0.join("chunk");
        let ((wanted, entry), (another, of_another)) = (chunk(1), chunk(2));
        let needed: Needed = [entry].into_iter().collect();
        let with = |pages: &[u8], table: &[u8]| {
            std::fs::write(&path, [&pages[..2 * PAGE as usize], &table[2 * PAGE as usize..]].concat()).unwrap();
            let read = |e: &ChunkEntry| {
                let chunk = Chunk::open(path.clone(), e)?;
                chunk.read(0, 2, &mut Buffer::default())
            };
            (needed.is_another(1, &path), read(&entry).is_ok(), read(&of_another).is_ok())
        };
        let junk = vec![3; wanted.len()];
        assert_eq!(with(&wanted, &wanted), (false, true, false));
        assert_eq!(with(&another, &another), (true, false, true));
        // With its own table it is the chunk, damaged; with that of another one it is of no use to anybody.
        assert_eq!(with(&junk, &wanted), (false, false, false));
        assert_eq!(with(&junk, &another), (true, false, false));
        assert!(check_present(&path, &entry).is_ok(), "that is of its length only");
        // The beginning of something sealed is no table.
        assert_eq!(with(&wanted, &junk), (false, false, false));
    }
}
