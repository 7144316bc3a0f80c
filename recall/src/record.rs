//! The end of a file that holds a version.
//!
//! ```text
//! | bytes of all parts | parts: number u32, size u64 | sums: XXH3-64 of each block, u64 | fixed: 40 bytes |
//!
//! fixed: magic 8 | version u64 | bytes u64 | number of parts u32 | bytes of a block u32 | XXH3-64 of all from `parts` on before it, u64
//! ```
//! All numbers are little-endian. The bytes come first, so that they begin at a page.

use crate::shape::{Shape, PARTS};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the fixed part.
pub(crate) const FIXED: usize = 40;
/// Bytes with a checksum of their own.
pub(crate) const BLOCK: u32 = 1 << 20;
const MAGIC: [u8; 8] = *b"BLYVERS1";

/// What a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) version: u64,
    pub(crate) shape: Shape,
    pub(crate) block: u32,
    pub(crate) sums: Vec<u64>,
}

/// Blocks of so many bytes.
fn blocks(bytes: u64, block: u32) -> u64 {
    bytes.div_ceil(u64::from(block))
}

impl Record {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let parts = self.shape.parts();
        let mut out = Vec::with_capacity(12 * parts.len() + 8 * self.sums.len() + FIXED);
        for (id, size) in parts {
            out.extend(id.to_le_bytes());
            out.extend(size.to_le_bytes());
        }
        self.sums.iter().for_each(|s| out.extend(s.to_le_bytes()));
        out.extend(MAGIC);
        out.extend(self.version.to_le_bytes());
        out.extend(self.shape.bytes().to_le_bytes());
        out.extend((parts.len() as u32).to_le_bytes());
        out.extend(self.block.to_le_bytes());
        let sum = xxh3_64(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// How long the end is of a file with so much.
    fn end(bytes: u64, parts: u64, block: u32) -> Option<u64> {
        let sums = blocks(bytes, block).checked_mul(8)?;
        sums.checked_add(12 * parts)?.checked_add(FIXED as u64)
    }

    /// How long the file of a version is.
    pub(crate) fn file_of(shape: &Shape) -> u64 {
        let end = Self::end(shape.bytes(), shape.parts().len() as u64, BLOCK);
        end.and_then(|end| end.checked_add(shape.bytes())).unwrap_or(u64::MAX)
    }

    /// How long the end of a file of `file` bytes is, from its fixed part; nothing if it cannot be one.
    pub(crate) fn length(fixed: &[u8; FIXED], file: u64) -> Option<usize> {
        let mut fields = Fields(fixed);
        if fields.take::<8>()? != MAGIC {
            return None;
        }
        fields.u64()?;
        let (bytes, parts, block) = (fields.u64()?, fields.u32()?, fields.u32()?);
        // All that there ever were.
        if block != BLOCK || parts as usize > PARTS {
            return None;
        }
        let end = Self::end(bytes, u64::from(parts), block)?;
        (bytes.checked_add(end)? == file).then(|| usize::try_from(end).ok())?
    }

    /// The end of a file, of the length that [`Record::length`] says.
    pub(crate) fn decode(end: &[u8]) -> Option<Self> {
        let (covered, sum) = end.split_last_chunk::<8>()?;
        if xxh3_64(covered) != u64::from_le_bytes(*sum) {
            return None;
        }
        let (lists, fixed) = end.split_last_chunk::<FIXED>()?;
        let mut fields = Fields(fixed);
        fields.take::<8>()?;
        let (version, bytes, count, block) = (fields.u64()?, fields.u64()?, fields.u32()?, fields.u32()?);
        let mut fields = Fields(lists);
        let mut parts = Vec::new();
        for _ in 0..count {
            parts.push((fields.u32()?, fields.u64()?));
        }
        let mut sums = Vec::new();
        while !fields.0.is_empty() {
            sums.push(fields.u64()?);
        }
        let shape = Shape::new(parts.iter().copied()).ok()?;
        let is_whole = shape.bytes() == bytes && block > 0 && sums.len() as u64 == blocks(bytes, block);
        (is_whole && shape.parts() == parts).then_some(Self {
            version,
            shape,
            block,
            sums,
        })
    }
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(sizes: &[u64]) -> Record {
        let shape = Shape::new(sizes.iter().enumerate().map(|(i, s)| (3 * i as u32, *s))).unwrap();
        let sums = (0..blocks(shape.bytes(), BLOCK)).map(|n| n * n + 1).collect();
        Record {
            version: 77,
            shape,
            block: BLOCK,
            sums,
        }
    }

    fn fixed(end: &[u8]) -> [u8; FIXED] {
        *end.last_chunk().unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(sizes in prop::collection::vec(0u64..5_000_000, 0..20)) {
            let record = record(&sizes);
            let end = record.encode();
            let file = record.shape.bytes() + end.len() as u64;
            prop_assert_eq!(Record::file_of(&record.shape), file);
            prop_assert_eq!(Record::length(&fixed(&end), file), Some(end.len()));
            prop_assert_eq!(Record::length(&fixed(&end), file + 1), None);
            prop_assert_eq!(Record::decode(&end), Some(record));
        }

        /// Any change is noticed.
        #[test]
        fn what_is_damaged_is_refused(sizes in prop::collection::vec(0u64..5_000_000, 0..20), at: prop::sample::Index, bit in 0u8..8) {
            let mut end = record(&sizes).encode();
            let at = at.index(end.len());
            end[at] ^= 1 << bit;
            prop_assert_eq!(Record::decode(&end), None);
        }

        /// Anything is answered, whoever wrote it.
        #[test]
        fn anything_is_decoded_or_refused(mut end in prop::collection::vec(any::<u8>(), FIXED..300), counts: [u8; 3]) {
            let at = end.len() - FIXED;
            end[at..at + 8].copy_from_slice(&MAGIC);
            // Counts that could be meant.
            for (n, count) in [16, 24, 28].into_iter().zip(counts) {
                end[at + n..at + n + 4].copy_from_slice(&u32::from(count).to_le_bytes());
            }
            let sum = xxh3_64(&end[..end.len() - 8]).to_le_bytes();
            let covered = end.len() - 8;
            end[covered..].copy_from_slice(&sum);
            let _ = Record::length(&fixed(&end), end.len() as u64);
            let _ = Record::decode(&end);
        }
    }
}
