//! What is needed of mostly dead chunks is moved out of them, see [`crate::compact`].

use super::{Session, COMPACT_PAGES};
use crate::chunk::Chunk;
use crate::control::is_rotten;
use crate::tier::directory::free_bytes;
use crate::{compact, StorageError, PAGE};
use belay_kernel::direct::Buffer;
use std::collections::{BTreeMap, BTreeSet};

impl Session {
    /// Damage that was found in what the tables refer to: the generation is not whole, and nothing is to be built on it.
    pub fn damage(&self) -> Option<&str> {
        self.damage.as_deref()
    }

    /// What lies between these pages may be what is damaged, which nobody needs.
    fn look_at_each(&mut self, from: &Chunk, wanted: &[u32]) {
        let mut buf = Buffer::default();
        let mut failed = wanted.iter().filter_map(|page| from.read(*page, 1, &mut buf).err());
        if let Some(e) = failed.find(is_rotten) {
            self.damage.get_or_insert(e.to_string());
        }
    }

    /// Moves what is needed of mostly dead chunks into this session's. Bounded: at most as much as this checkpoint
    /// wrote, and at least one chunk.
    pub fn compact(&mut self) -> Result<(), StorageError> {
        let mut needed: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for e in self.tables.values().flatten().filter(|e| self.live.contains_key(&e.chunk)) {
            let pages = needed.entry(e.chunk).or_default();
            pages.extend(e.page..e.page + e.pages() as u32);
        }
        let usage: Vec<compact::Usage> = needed
            .iter()
            .filter_map(|(id, pages)| {
                let total = self.live.get(id)?.pages;
                Some(compact::Usage {
                    id: *id,
                    needed: pages.len() as u32,
                    total,
                })
            })
            .collect();
        let budget = self.stats.written.max(u64::from(self.chunk_pages));
        let chosen = compact::choose(&usage, self.chunk_pages, budget);
        let pages = chosen
            .iter()
            .filter_map(|id| needed.get(id))
            .map(BTreeSet::len)
            .sum::<usize>();
        // The chunks that this makes needless go only after the checkpoint, which must not fail for them.
        let bytes = pages as u64 * PAGE;
        let is_tight = free_bytes(self.store.directory()).is_ok_and(|free| free < 2 * bytes);
        if chosen.is_empty() || is_tight {
            return Ok(());
        }
        let mut moved: BTreeMap<(u32, u32), (u32, u32)> = BTreeMap::new();
        let mut buf = Buffer::default();
        let mut held = 0;
        'chunks: for id in chosen {
            let (Some(entry), Some(pages)) = (self.live.get(&id).copied(), needed.get(&id)) else {
                continue;
            };
            // A chunk that cannot be read stays where it is: the checkpoint is as good as the one before.
            let Ok(from) = self.store.open(&entry) else { continue };
            for wanted in compact::windows(pages, COMPACT_PAGES) {
                let (first, last) = (wanted[0], wanted[wanted.len() - 1]);
                if from.read(first, last - first + 1, &mut buf).is_err() {
                    self.look_at_each(&from, &wanted);
                    continue;
                }
                // What comes from several places is written together.
                if held == 0 {
                    self.hold_back(2 * u64::from(COMPACT_PAGES) * PAGE);
                }
                held += wanted.len();
                for page in wanted {
                    let data = &buf[(page - first) as usize * PAGE as usize..][..PAGE as usize];
                    match self.append(data, from.hashes[page as usize]) {
                        Ok(to) => moved.insert((id, page), to),
                        // Compaction is no reason to fail.
                        Err(StorageError::Quota { .. } | StorageError::Memory { .. }) => break 'chunks,
                        Err(e) => return Err(e),
                    };
                }
                if held >= COMPACT_PAGES as usize {
                    self.write_held()?;
                    held = 0;
                }
            }
        }
        self.write_held()?;
        self.stats.written -= moved.len() as u64;
        self.stats.moved += moved.len() as u64;
        for table in self.tables.values_mut() {
            compact::relocate(table, &moved);
        }
        Ok(())
    }
}
