//! The extent table: where each stored page range of a process lies in its page files.

use crate::ImageError;
use std::path::Path;

/// One stored range of pages. Ranges without an extent are zero (anonymous memory) or equal to the mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Extent {
    /// First virtual address, page aligned.
    pub vaddr: u64,
    /// Length in bytes, a multiple of the page size.
    pub bytes: u64,
    /// Offset in the page file, page aligned.
    pub offset: u64,
    /// Number `K` of the page file `pages-PID-K.bpg`.
    pub file: u32,
    /// Reserved, 0.
    pub reserved: u32,
    /// XXH3-64 of the data.
    pub xxh3: u64,
}

/// Size of one encoded extent.
pub const EXTENT_BYTES: usize = 40;

/// Encodes a table.
pub fn encode(extents: &[Extent]) -> Vec<u8> {
    let mut out = Vec::with_capacity(extents.len() * EXTENT_BYTES);
    for e in extents {
        for v in [e.vaddr, e.bytes, e.offset, u64::from(e.file), e.xxh3] {
            out.extend_from_slice(&v.to_le_bytes());
        }
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
        let word = |i: usize| {
            let mut v = [0; 8];
            v.copy_from_slice(&raw[i * 8..i * 8 + 8]);
            u64::from_le_bytes(v)
        };
        let file = u32::try_from(word(3)).map_err(|_| ImageError::damaged(path, "extent names an impossible file"))?;
        let e = Extent {
            vaddr: word(0),
            bytes: word(1),
            offset: word(2),
            file,
            reserved: 0,
            xxh3: word(4),
        };
        let end = e.vaddr.checked_add(e.bytes);
        if (e.vaddr | e.bytes | e.offset) & 0xfff != 0 || e.bytes == 0 || e.vaddr < behind || end.is_none() {
            return Err(ImageError::damaged(
                path,
                format!("extent at {:#x} is misaligned, empty or out of order", e.vaddr),
            ));
        }
        if e.offset.checked_add(e.bytes).is_none() {
            return Err(ImageError::damaged(path, "extent reaches behind the largest offset"));
        }
        behind = end.unwrap_or(u64::MAX);
        out.push(e);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_order() {
        let a = Extent {
            vaddr: 0x1000,
            bytes: 0x2000,
            offset: 0,
            file: 0,
            reserved: 0,
            xxh3: 9,
        };
        let b = Extent {
            vaddr: 0x3000,
            bytes: 0x1000,
            offset: 0x2000,
            file: 1,
            reserved: 0,
            xxh3: 8,
        };
        assert_eq!(decode(Path::new("x"), &encode(&[a, b])).unwrap(), vec![a, b]);
        assert!(decode(Path::new("x"), &encode(&[b, a])).is_err());
        assert!(decode(Path::new("x"), &encode(&[a, a])).is_err());
        assert!(decode(Path::new("x"), &encode(&[Extent { bytes: 1, ..a }])).is_err());
        assert!(decode(Path::new("x"), &[0; 39]).is_err());
    }
}
