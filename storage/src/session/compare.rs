//! Whether what earlier checkpoints have stored is still what they stored.

use super::Session;
use crate::chunk::Chunk;
use belay_image::extents::Extent;
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use std::collections::BTreeMap;

/// What is read at once, bytes.
const PIECE: u64 = 1 << 20;

impl Session {
    /// Reads what lies at `table` and compares it with its checksums: whether all of it is intact. Where a chunk is
    /// damaged, or cannot be read, pages are not looked for in it from here on.
    pub fn is_intact(&mut self, table: &[Extent]) -> bool {
        let mut of_chunk: BTreeMap<u32, Vec<&Extent>> = BTreeMap::new();
        table.iter().for_each(|e| of_chunk.entry(e.chunk).or_default().push(e));
        let mut intact = true;
        for (id, extents) in of_chunk {
            let Some(entry) = self.live.get(&id) else {
                intact = false;
                continue;
            };
            let read = self.store.open(entry).and_then(|chunk| compare(&chunk, &extents));
            if let Err(error) = read {
                tracing::warn!(chunk = id, %error, "not as it was stored: not referred to any more");
                intact = false;
                let others = self.live.keys().copied().filter(|other| *other != id).collect();
                self.index.iter_mut().for_each(|i| i.forget_others(&others));
            }
        }
        intact
    }
}

fn compare(chunk: &Chunk, extents: &[&Extent]) -> Result<(), ImageError> {
    let mut buf = Buffer::default();
    for e in extents {
        for at in (e.vaddr..e.end()).step_by(PIECE as usize) {
            let part = e.part(at, at.saturating_add(PIECE));
            chunk.read(part.page, u32::try_from(part.pages()).unwrap_or(u32::MAX), &mut buf)?;
        }
    }
    Ok(())
}
