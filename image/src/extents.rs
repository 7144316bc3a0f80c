//! The extent table: in which chunk each stored range of a process's memory lies.
//!
//! A range without an extent is zero (anonymous memory) or equal to the mapped file. Extents say nothing about the
//! data's checksums: every chunk carries those of its own pages, so that a page is described once, however many
//! generations and processes refer to it.

use crate::ImageError;
use std::path::Path;

/// Size of a page, the unit of storage.
pub const PAGE: u64 = 4096;

/// One stored range of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First virtual address, page aligned.
    pub vaddr: u64,
    /// Length in bytes, a multiple of the page size.
    pub bytes: u64,
    /// The chunk.
    pub chunk: u32,
    /// First page in the chunk.
    pub page: u32,
}

/// Size of one encoded extent.
pub const EXTENT_BYTES: usize = 20;

impl Extent {
    /// First address behind it.
    pub fn end(&self) -> u64 {
        self.vaddr + self.bytes
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.bytes / PAGE
    }

    /// Offset of its data in the chunk's file.
    pub fn offset(&self) -> u64 {
        u64::from(self.page) * PAGE
    }

    /// Whether `next` goes on where this one ends, in memory and in the chunk.
    fn continues(&self, next: &Extent) -> bool {
        self.end() == next.vaddr && self.chunk == next.chunk && u64::from(self.page) + self.pages() == u64::from(next.page)
    }

    /// The part of it in `start..end`, which must overlap it.
    pub fn part(&self, start: u64, end: u64) -> Extent {
        let (start, end) = (start.max(self.vaddr), end.min(self.end()));
        Extent {
            vaddr: start,
            bytes: end - start,
            chunk: self.chunk,
            page: self.page + u32::try_from((start - self.vaddr) / PAGE).unwrap_or(u32::MAX),
        }
    }
}

/// Sorts by address and joins what belongs together.
pub fn normalise(table: &mut Vec<Extent>) {
    table.sort_unstable_by_key(|e| e.vaddr);
    table.dedup_by(|next, last| {
        let joined = last.continues(next);
        if joined {
            last.bytes += next.bytes;
        }
        joined
    });
}

/// Appends to `out` the parts of `table` (sorted) that lie in `start..end`.
pub fn within(table: &[Extent], start: u64, end: u64, out: &mut Vec<Extent>) {
    let first = table.partition_point(|e| e.end() <= start);
    out.extend(
        table[first..]
            .iter()
            .take_while(|e| e.vaddr < end)
            .map(|e| e.part(start, end)),
    );
}

/// Encodes a table.
pub fn encode(extents: &[Extent]) -> Vec<u8> {
    let mut out = Vec::with_capacity(extents.len() * EXTENT_BYTES);
    for e in extents {
        out.extend_from_slice(&e.vaddr.to_le_bytes());
        out.extend_from_slice(&u32::try_from(e.pages()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend_from_slice(&e.chunk.to_le_bytes());
        out.extend_from_slice(&e.page.to_le_bytes());
    }
    out
}

/// Decodes a table, checking alignment, order and overlap; `path` is named in errors.
pub fn decode(path: &Path, payload: &[u8]) -> Result<Vec<Extent>, ImageError> {
    if !payload.len().is_multiple_of(EXTENT_BYTES) {
        return Err(ImageError::damaged(path, "extent table is not a whole number of extents"));
    }
    let mut out = Vec::with_capacity(payload.len() / EXTENT_BYTES);
    let mut behind = 0;
    for raw in payload.chunks_exact(EXTENT_BYTES) {
        let half = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let e = Extent {
            vaddr: u64::from(half(0)) | u64::from(half(4)) << 32,
            bytes: u64::from(half(8)) * PAGE,
            chunk: half(12),
            page: half(16),
        };
        let end = e.vaddr.checked_add(e.bytes);
        if !e.vaddr.is_multiple_of(PAGE) || e.bytes == 0 || e.vaddr < behind || end.is_none() {
            return Err(ImageError::damaged(
                path,
                format!("extent at {:#x} is misaligned, empty or out of order", e.vaddr),
            ));
        }
        if e.page.checked_add(half(8)).is_none() {
            return Err(ImageError::damaged(path, "extent reaches behind the largest chunk"));
        }
        behind = end.unwrap_or(u64::MAX);
        out.push(e);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(vaddr: u64, pages: u64, chunk: u32, page: u32) -> Extent {
        Extent {
            vaddr: vaddr * PAGE,
            bytes: pages * PAGE,
            chunk,
            page,
        }
    }

    #[test]
    fn round_trip_and_order() {
        let (a, b) = (extent(1, 2, 7, 0), extent(3, 1, 1, 2));
        assert_eq!(decode(Path::new("x"), &encode(&[a, b])).unwrap(), vec![a, b]);
        assert!(decode(Path::new("x"), &encode(&[b, a])).is_err());
        assert!(decode(Path::new("x"), &encode(&[a, a])).is_err());
        assert!(decode(Path::new("x"), &encode(&[Extent { vaddr: 1, ..a }])).is_err());
        assert!(decode(Path::new("x"), &encode(&[Extent { bytes: 0, ..a }])).is_err());
        assert!(decode(Path::new("x"), &encode(&[Extent { page: u32::MAX, ..a }])).is_err());
        assert!(decode(Path::new("x"), &encode(&[extent(u64::MAX / PAGE, 2, 0, 0)])).is_err());
        assert!(decode(Path::new("x"), &[0; 39]).is_err());
    }

    #[test]
    fn neighbours_are_joined_and_parts_are_found() {
        let mut t = vec![extent(4, 1, 1, 3), extent(1, 2, 1, 0), extent(3, 1, 1, 2), extent(5, 1, 2, 4)];
        normalise(&mut t);
        assert_eq!(t, [extent(1, 4, 1, 0), extent(5, 1, 2, 4)]);
        let mut out = Vec::new();
        within(&t, 2 * PAGE, 6 * PAGE, &mut out);
        assert_eq!(out, [extent(2, 3, 1, 1), extent(5, 1, 2, 4)]);
        out.clear();
        within(&t, 6 * PAGE, 9 * PAGE, &mut out);
        within(&t, 0, PAGE, &mut out);
        assert!(out.is_empty());
    }
}
