//! Contents of shared memory and files, read from the chunks of the generation.

use belay_image::extents::{self, Extent};
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use belay_plugins::PageSource;
use belay_storage::chunk::Chunk;
use std::collections::HashMap;
use std::ops::Range;

/// Where the contents of a generation lie.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    pub(crate) table: &'a [Extent],
    pub(crate) chunks: &'a HashMap<u32, Chunk>,
}

impl PageSource for Contents<'_> {
    fn within(&self, range: Range<u64>) -> Vec<Extent> {
        let mut out = Vec::new();
        // What begins in one page too many is cut by whoever knows the length.
        let end = range.end.checked_next_multiple_of(extents::PAGE).unwrap_or(range.end);
        extents::within(self.table, range.start, end, &mut out);
        out
    }

    fn read(&self, part: &Extent, into: &mut Buffer) -> Result<(), ImageError> {
        let pages = u32::try_from(part.pages()).unwrap_or(u32::MAX);
        let chunk = self.chunks.get(&part.chunk).ok_or_else(|| ImageError::Damaged {
            path: format!("chunk {}", part.chunk),
            reason: "it is not in the manifest".into(),
        })?;
        chunk.read(part.page, pages, into)
    }
}
