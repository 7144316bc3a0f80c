//! The chunk file.
//!
//! ```text
//! 0            pages                                   pages * 4096
//! …            hash of each page                       pages * 16
//! …            magic "BELAYCHK"                        8
//!              format version                          u32
//!              pages                                   u32
//!              XXH3-64 of all from the first hash on   u64
//! ```
//! All numbers are little endian. The low half of a hash is the page's XXH3-64, which readers compare; the high half is
//! for who has the key of the job ([`crate::page_key`]). The last word also stands in the manifest of every generation
//! that refers to the chunk, so a chunk of another job or time is noticed. The file is written under a temporary name
//! and never changed once it has its own.

use crate::PAGE;
use belay_image::manifest::ChunkEntry;
use belay_image::{checksum, files, ImageError, FORMAT_VERSION};
use belay_kernel::direct::{self, Buffer};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"BELAYCHK";
const FOOTER: usize = 24;
const HASH: usize = 16;
/// A chunk with more pages than this (16 GiB) is refused.
const MAX_PAGES: u32 = 1 << 22;

/// Length of a chunk file with `pages` pages.
pub fn file_bytes(pages: u32) -> u64 {
    u64::from(pages) * (PAGE + HASH as u64) + FOOTER as u64
}

/// What follows the pages, and its checksum.
pub fn encode_trailer(hashes: &[u128]) -> (Vec<u8>, u64) {
    let mut out = Vec::with_capacity(hashes.len() * HASH + FOOTER);
    for h in hashes {
        out.extend_from_slice(&h.to_le_bytes());
    }
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    out.extend_from_slice(&u32::try_from(hashes.len()).unwrap_or(u32::MAX).to_le_bytes());
    let sum = checksum(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    (out, sum)
}

/// The hashes in `trailer`, everything behind the pages of a chunk; `path` is named in errors.
pub fn decode_trailer(path: &Path, trailer: &[u8]) -> Result<(Vec<u128>, u64), ImageError> {
    let damaged = |reason: &str| ImageError::damaged(path, reason);
    let (body, sum) = trailer
        .split_last_chunk::<8>()
        .ok_or_else(|| damaged("it has no table of hashes"))?;
    let sum = u64::from_le_bytes(*sum);
    if checksum(body) != sum {
        return Err(damaged("checksum of its table of hashes does not match"));
    }
    let (rest, pages) = body.split_last_chunk::<4>().ok_or_else(|| damaged("it has no footer"))?;
    let (rest, version) = rest.split_last_chunk::<4>().ok_or_else(|| damaged("it has no footer"))?;
    let (table, magic) = rest.split_last_chunk::<8>().ok_or_else(|| damaged("it has no footer"))?;
    if magic != MAGIC {
        return Err(damaged("not a chunk"));
    }
    let version = u32::from_le_bytes(*version);
    if version != FORMAT_VERSION {
        return Err(ImageError::Version {
            path: path.display().to_string(),
            found: version,
            expected: FORMAT_VERSION,
        });
    }
    if table.len() as u64 != u64::from(u32::from_le_bytes(*pages)) * HASH as u64 {
        return Err(damaged("its table of hashes has another length than its footer says"));
    }
    let hashes = table.as_chunks::<HASH>().0.iter().map(|h| u128::from_le_bytes(*h)).collect();
    Ok((hashes, sum))
}

/// A chunk of the store, open for reading, whose table of hashes has been checked.
#[derive(Debug)]
pub struct Chunk {
    /// Its file.
    pub path: PathBuf,
    /// The file.
    pub file: File,
    /// The hash of each page.
    pub hashes: Vec<u128>,
}

impl Chunk {
    /// Opens the chunk at `path`, which must be the one that `entry` describes.
    pub fn open(path: PathBuf, entry: &ChunkEntry) -> Result<Self, ImageError> {
        let (file, length) = files::open(&path)?;
        check_length(&path, length, entry)?;
        // The length has been compared with that of the file: the allocation is bounded by what is there.
        let bytes = usize::try_from(file_bytes(entry.pages) - u64::from(entry.pages) * PAGE)
            .map_err(|_| ImageError::damaged(&path, "more pages than fit in memory"))?;
        let mut trailer = Vec::new();
        // A sparse file has any length.
        trailer
            .try_reserve_exact(bytes)
            .map_err(|_| ImageError::io("read", &path, std::io::ErrorKind::OutOfMemory.into()))?;
        trailer.resize(bytes, 0);
        file.read_exact_at(&mut trailer, u64::from(entry.pages) * PAGE)
            .map_err(|e| ImageError::io("read", &path, e))?;
        let (hashes, sum) = decode_trailer(&path, &trailer)?;
        if sum != entry.xxh3 || hashes.len() != entry.pages as usize {
            return Err(ImageError::damaged(
                &path,
                "it is not the chunk that was written for this generation",
            ));
        }
        Ok(Self { path, file, hashes })
    }

    /// Reads `pages` pages from `first` on into `buf` and compares each with its hash.
    pub fn read(&self, first: u32, pages: u32, buf: &mut Buffer) -> Result<(), ImageError> {
        let end = first.checked_add(pages).filter(|end| *end as usize <= self.hashes.len());
        let (Some(end), Ok(bytes)) = (end, usize::try_from(u64::from(pages) * PAGE)) else {
            return Err(ImageError::damaged(&self.path, format!("it has no page {first}")));
        };
        buf.resize(bytes);
        // Whole pages into whole pages, so that it does not matter if somebody else who has this description of the
        // file does the same.
        direct::read_exact_at(&self.file, buf, u64::from(first) * PAGE).map_err(|e| ImageError::io("read", &self.path, e))?;
        for ((page, data), hash) in (first..end)
            .zip(buf.chunks_exact(PAGE as usize))
            .zip(&self.hashes[first as usize..])
        {
            if crate::page_checksum(data) != *hash as u64 {
                return Err(ImageError::damaged(
                    &self.path,
                    format!("checksum of page {page}, at {}, does not match", u64::from(page) * PAGE),
                ));
            }
        }
        Ok(())
    }
}

/// What a chunk file says it is, without being read: its length and the last word, its checksum.
pub(crate) type Mark = (u64, u64);

/// The mark of the chunk `entry`.
pub(crate) fn mark_of(entry: &ChunkEntry) -> Mark {
    (file_bytes(entry.pages), entry.xxh3)
}

/// The mark of the file at `path`.
pub(crate) fn mark(path: &Path) -> Result<Mark, ImageError> {
    let (file, length) = files::open(path)?;
    let mut word = [0; 8];
    let at = length.checked_sub(8).ok_or_else(|| ImageError::damaged(path, "no chunk"))?;
    file.read_exact_at(&mut word, at)
        .map_err(|e| ImageError::io("read", path, e))?;
    Ok((length, u64::from_le_bytes(word)))
}

/// Whether the file at `path` is a chunk with a whole table of hashes, whichever chunk that is.
pub(crate) fn is_sealed(path: &Path) -> bool {
    entry_of(path).is_ok_and(|entry| Chunk::open(path.to_owned(), &entry).is_ok())
}

/// What the chunk at `path` says it is; it has no number there.
pub(crate) fn entry_of(path: &Path) -> Result<ChunkEntry, ImageError> {
    let (length, xxh3) = mark(path)?;
    let pages = length.saturating_sub(FOOTER as u64) / (PAGE + HASH as u64);
    let pages = u32::try_from(pages).map_err(|_| ImageError::damaged(path, "no chunk"))?;
    Ok(ChunkEntry { id: 0, pages, xxh3 })
}

/// Whether the file of the chunk `entry` at `path` is there with its length.
pub fn check_present(path: &Path, entry: &ChunkEntry) -> Result<(), ImageError> {
    let (_, length) = files::open(path)?;
    check_length(path, length, entry)
}

fn check_length(path: &Path, found: u64, entry: &ChunkEntry) -> Result<(), ImageError> {
    let expected = file_bytes(entry.pages);
    if entry.pages > MAX_PAGES || found != expected {
        return Err(ImageError::damaged(path, format!("{found} bytes instead of {expected}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailer_comes_back_and_no_flipped_bit_or_cut_passes() {
        let hashes: Vec<u128> = (0..40u128).map(|i| i << 70 | i).collect();
        let (good, sum) = encode_trailer(&hashes);
        assert_eq!(decode_trailer(Path::new("x"), &good).unwrap(), (hashes, sum));
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(decode_trailer(Path::new("x"), &bad).is_err(), "bit {at}");
        }
        for len in 0..good.len() {
            assert!(decode_trailer(Path::new("x"), &good[..len]).is_err(), "length {len}");
        }
    }
}
