//! Byte strings too large for a section: data in flight, contents of files and of shared memory.

use crate::{checksum, files, sections::create_private, ImageError};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Bytes that are read at a time where they are only looked at.
const PIECE: usize = 1 << 20;

/// Where a byte string lies in the blob file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRef {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3-64 of the bytes.
    pub xxh3: u64,
}

/// Appends byte strings to a new blob file.
#[derive(Debug)]
pub struct BlobWriter {
    path: PathBuf,
    file: File,
    offset: u64,
}

impl BlobWriter {
    /// Creates the blob file at `path`.
    pub fn create(path: &Path) -> Result<Self, ImageError> {
        Ok(Self {
            path: path.to_owned(),
            file: create_private(path)?,
            offset: 0,
        })
    }

    /// Stores `data`.
    pub fn put(&mut self, data: &[u8]) -> Result<BlobRef, ImageError> {
        self.file
            .write_all(data)
            .map_err(|e| ImageError::io("write", &self.path, e))?;
        let at = BlobRef {
            offset: self.offset,
            bytes: data.len() as u64,
            xxh3: checksum(data),
        };
        self.offset += data.len() as u64;
        Ok(at)
    }

    /// Bytes stored so far.
    pub fn bytes(&self) -> u64 {
        self.offset
    }
}

/// Reads byte strings back.
#[derive(Debug)]
pub struct BlobReader {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl BlobReader {
    /// Opens the blob file at `path`.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let (file, bytes) = files::open(path)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Verifies the byte string at `at`, piece by piece.
    pub fn check(&self, at: &BlobRef) -> Result<(), ImageError> {
        self.check_place(at)?;
        let mut piece = vec![0; PIECE.min(usize::try_from(at.bytes).unwrap_or(PIECE))];
        let (mut sum, mut done) = (Xxh3::new(), 0);
        while done < at.bytes {
            let n = piece.len().min(usize::try_from(at.bytes - done).unwrap_or(PIECE));
            self.file
                .read_exact_at(&mut piece[..n], at.offset + done)
                .map_err(|e| ImageError::io("read", &self.path, e))?;
            sum.update(&piece[..n]);
            done += n as u64;
        }
        self.check_sum(at, sum.digest())
    }

    fn check_place(&self, at: &BlobRef) -> Result<(), ImageError> {
        match at.offset.checked_add(at.bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(ImageError::damaged(
                &self.path,
                "a reference points behind the end of the file",
            )),
        }
    }

    fn check_sum(&self, at: &BlobRef, found: u64) -> Result<(), ImageError> {
        if found == at.xxh3 {
            return Ok(());
        }
        let reason = format!("checksum of {} bytes at {} does not match", at.bytes, at.offset);
        Err(ImageError::damaged(&self.path, reason))
    }

    /// Reads and verifies the byte string at `at`.
    pub fn get(&self, at: &BlobRef) -> Result<Vec<u8>, ImageError> {
        self.check_place(at)?;
        let len = usize::try_from(at.bytes).map_err(|_| ImageError::damaged(&self.path, "a reference is too long"))?;
        let mut data = Vec::new();
        data.try_reserve_exact(len)
            .map_err(|_| ImageError::io("read", &self.path, std::io::ErrorKind::OutOfMemory.into()))?;
        data.resize(len, 0);
        self.file
            .read_exact_at(&mut data, at.offset)
            .map_err(|e| ImageError::io("read", &self.path, e))?;
        self.check_sum(at, checksum(&data))?;
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_come_back_and_damage_is_noticed() {
        let dir = std::env::temp_dir().join(format!("belay-blobs-{}", std::process::id()));
        let mut w = BlobWriter::create(&dir).unwrap();
        let a = w.put(b"one").unwrap();
        let b = w.put(b"two and more").unwrap();
        let r = BlobReader::open(&dir).unwrap();
        assert_eq!(r.get(&a).unwrap(), b"one");
        assert_eq!(r.get(&b).unwrap(), b"two and more");
        let long = vec![9; 2 * PIECE + 1];
        let c = w.put(&long).unwrap();
        let r = BlobReader::open(&dir).unwrap();
        assert_eq!(r.get(&c).unwrap(), long);
        [a, b, c].iter().for_each(|at| r.check(at).unwrap());
        for bad in [
            BlobRef { xxh3: 0, ..b },
            BlobRef { xxh3: 0, ..c },
            BlobRef { bytes: u64::MAX, ..b },
            BlobRef { bytes: 1 << 40, ..b },
        ] {
            assert!(r.get(&bad).is_err() && r.check(&bad).is_err(), "{bad:?}");
        }
        std::fs::remove_file(&dir).unwrap();
    }
}
