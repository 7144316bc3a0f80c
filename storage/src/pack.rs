//! The pack: an object of a durable tier that holds many chunks and files.
//!
//! ```text
//! 0      pieces of items, one after the other, each as it is or compressed by zstd
//! …      index: JSON, see `Index`
//! …      length of the index                        u64
//!        XXH3-64 of the index                       u64
//!        format version                             u32
//!        magic "BELAYPCK"                           8
//! ```
//! All numbers are little endian. An item is named by what it is, checksum included, so two items of one name have the
//! same contents whoever wrote them when.

use crate::seal::HEADER;
use crate::tier::{locked, Put, Tier};
use crate::StorageError;
use belay_image::checksum;
use belay_image::manifest::ChunkEntry;
use belay_kernel::direct::Buffer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

const MAGIC: &[u8; 8] = b"BELAYPCK";
const VERSION: u32 = 1;
/// Bytes behind the index.
pub const FOOTER: u64 = 28;
/// Longest piece, before and after compression.
pub const PIECE: usize = 4 << 20;
/// Longest index that is read.
const MAX_INDEX: u64 = 256 << 20;

/// What a pack holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// The items.
    pub items: Vec<Item>,
}

/// A chunk or a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Its name: see [`chunk_name`] and [`file_name`].
    pub name: String,
    /// Its pieces in order.
    pub pieces: Vec<Piece>,
}

/// A part of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Where it begins in the pack.
    pub offset: u64,
    /// Bytes in the pack.
    pub stored: u32,
    /// Bytes that it stands for.
    pub bytes: u32,
    /// Whether it is compressed.
    pub zstd: bool,
    /// XXH3-64 of the bytes in the pack.
    pub xxh3: u64,
}

impl Item {
    /// Bytes that it stands for.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| u64::from(p.bytes)).sum()
    }
}

/// Name of the item that holds a chunk.
pub fn chunk_name(c: &ChunkEntry) -> String {
    format!("chunk/{:08x}/{}/{:016x}", c.id, c.pages, c.xxh3)
}

/// Name of the item that holds file `name` of the generation whose manifest has checksum `manifest`.
pub fn file_name(generation: u64, manifest: u64, name: &str) -> String {
    format!("file/{generation:06}-{manifest:016x}/{name}")
}

impl Index {
    /// The index and what follows it.
    pub fn encode(&self) -> Result<Vec<u8>, StorageError> {
        let mut out = serde_json::to_vec(self).map_err(|e| StorageError::System {
            step: "encode the index of a pack",
            source: e.into(),
        })?;
        let (length, sum) = (out.len() as u64, checksum(&out));
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(&sum.to_le_bytes());
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(MAGIC);
        Ok(out)
    }

    /// Where the index lies in a pack of `bytes` bytes that ends with `footer`, and its checksum.
    pub(crate) fn locate(footer: &[u8], bytes: u64) -> Result<(u64, u64), String> {
        let (rest, magic) = footer.split_last_chunk::<8>().ok_or("it has no footer")?;
        let (rest, version) = rest.split_last_chunk::<4>().ok_or("it has no footer")?;
        let (rest, sum) = rest.split_last_chunk::<8>().ok_or("it has no footer")?;
        let (_, length) = rest.split_last_chunk::<8>().ok_or("it has no footer")?;
        if magic != MAGIC {
            return Err("not a pack".into());
        }
        let version = u32::from_le_bytes(*version);
        if version != VERSION {
            return Err(format!("pack format {version}, this belay reads format {VERSION}"));
        }
        let length = u64::from_le_bytes(*length);
        match bytes.checked_sub(FOOTER).and_then(|b| b.checked_sub(length)) {
            Some(at) if length <= MAX_INDEX => Ok((at, u64::from_le_bytes(*sum))),
            _ => Err(format!("its index of {length} bytes does not fit into it")),
        }
    }

    /// Checks what was read as the index, which ends at `end` of the pack.
    pub(crate) fn decode(index: &[u8], sum: u64, end: u64) -> Result<Self, String> {
        if checksum(index) != sum {
            return Err("checksum of its index does not match".into());
        }
        let index: Index = serde_json::from_slice(index).map_err(|e| format!("its index: {e}"))?;
        for p in index.items.iter().flat_map(|i| &i.pieces) {
            let fits = p.offset.checked_add(p.stored.into()).is_some_and(|e| e <= end);
            let sane = p.bytes as usize <= PIECE && p.stored as usize <= PIECE && (p.zstd || p.stored == p.bytes);
            if !fits || !sane {
                return Err(format!("its index: no piece of {} bytes at {}", p.stored, p.offset));
            }
        }
        Ok(index)
    }

    /// Reads the index of pack `key`, which has `bytes` bytes.
    pub fn read(tier: &dyn Tier, key: &str, bytes: u64) -> Result<Self, StorageError> {
        let damaged = |reason| damaged(tier, key, reason);
        let mut buf = Buffer::default();
        let from = bytes.checked_sub(FOOTER).ok_or_else(|| damaged("it has no footer".into()))?;
        tier.get(key, from..bytes, &mut buf)?;
        let (at, sum) = match Self::locate(&buf, bytes) {
            Ok(found) => found,
            Err(reason) => {
                tier.get(key, 0..bytes.min(HEADER as u64), &mut buf)?;
                locked(tier, key, &buf, bytes)?;
                return Err(damaged(reason));
            }
        };
        tier.get(key, at..from, &mut buf)?;
        Self::decode(&buf, sum, at).map_err(damaged)
    }
}

fn damaged(tier: &dyn Tier, key: &str, reason: String) -> StorageError {
    StorageError::TierDamaged {
        tier: tier.name().to_owned(),
        key: key.to_owned(),
        reason,
    }
}

/// Reads one piece of pack `key` into `out`, checked and uncompressed; `buf` is room to work in.
pub fn read_piece(tier: &dyn Tier, key: &str, piece: &Piece, buf: &mut Buffer, out: &mut Buffer) -> Result<(), StorageError> {
    tier.get(key, piece.offset..piece.offset + u64::from(piece.stored), buf)?;
    unpack(piece, buf, out).map_err(|reason| damaged(tier, key, reason))
}

/// Checks what was read as `piece`, and uncompresses it into `out`.
pub(crate) fn unpack(piece: &Piece, buf: &mut Buffer, out: &mut Buffer) -> Result<(), String> {
    if checksum(buf) != piece.xxh3 {
        return Err(format!(
            "checksum of {} bytes at {} does not match",
            piece.stored, piece.offset
        ));
    }
    if !piece.zstd {
        std::mem::swap(buf, out);
        return Ok(());
    }
    // The checksum was right, so this is what was written; its length is bounded by the index all the same.
    out.resize(piece.bytes as usize);
    let bytes = zstd::bulk::decompress_to_buffer(buf, out).map_err(|e| format!("uncompress: {e}"))?;
    if bytes != out.len() {
        return Err(format!("{bytes} bytes instead of {}", piece.bytes));
    }
    Ok(())
}

/// A pack being written. Dropped, it leaves nothing behind.
pub struct Writer<'a> {
    tier: &'a dyn Tier,
    key: String,
    put: Box<dyn Put + 'a>,
    at: u64,
    index: Index,
}

/// A pack as it lies on its tier.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PackRef {
    /// Its key.
    pub key: String,
    /// Its length.
    pub bytes: u64,
}

impl<'a> Writer<'a> {
    /// Begins pack `key`.
    pub fn begin(tier: &'a dyn Tier, key: String) -> Result<Self, StorageError> {
        Ok(Self {
            put: tier.put(&key)?,
            tier,
            key,
            at: 0,
            index: Index::default(),
        })
    }

    /// Begins item `name`.
    pub fn item(&mut self, name: String) {
        self.index.items.push(Item {
            name,
            pieces: Vec::new(),
        });
    }

    /// Appends a piece of the item begun last: `stored` stands for `bytes` bytes.
    pub fn piece(&mut self, stored: &[u8], bytes: usize, zstd: bool) -> Result<(), StorageError> {
        let piece = Piece {
            offset: self.at,
            stored: stored.len() as u32,
            bytes: bytes as u32,
            zstd,
            xxh3: checksum(stored),
        };
        self.put.write(stored)?;
        self.at += stored.len() as u64;
        if let Some(item) = self.index.items.last_mut() {
            item.pieces.push(piece);
        }
        Ok(())
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.at
    }

    /// Completes the pack, makes it durable, and with `verify` reads it back from the tier.
    pub fn finish(mut self, verify: bool) -> Result<(PackRef, Index), StorageError> {
        let tail = self.index.encode()?;
        self.put.write(&tail)?;
        self.put.finish()?;
        self.tier.sync()?;
        let pack = PackRef {
            bytes: self.at + tail.len() as u64,
            key: self.key,
        };
        if verify {
            let found = Index::read(self.tier, &pack.key, pack.bytes)?;
            if found != self.index {
                return Err(damaged(self.tier, &pack.key, "it is not what was written".into()));
            }
            check(self.tier, &pack.key, &found)?;
        }
        Ok((pack, self.index))
    }
}

/// Reads every piece of pack `key` and compares it with its checksum; the bytes read.
pub fn check(tier: &dyn Tier, key: &str, index: &Index) -> Result<u64, StorageError> {
    let (mut buf, mut seen, mut bytes) = (Buffer::default(), BTreeSet::new(), 0);
    let mut is_new = |p: &&Piece| seen.insert((p.offset, p.stored, p.xxh3));
    for p in index.items.iter().flat_map(|i| &i.pieces).filter(&mut is_new) {
        tier.get(key, p.offset..p.offset + u64::from(p.stored), &mut buf)?;
        if checksum(&buf) != p.xxh3 {
            let reason = format!("checksum of {} bytes at {} does not match", p.stored, p.offset);
            return Err(damaged(tier, key, reason));
        }
        bytes += u64::from(p.stored);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use crate::tier::{read_whole, write_whole};

    #[test]
    fn items_come_back_and_no_flipped_bit_passes() {
        let scratch = Scratch::new("pack");
        let tier = scratch.tier("t");
        let data: Vec<u8> = (0..5000u32).flat_map(|i| (i / 7).to_le_bytes()).collect();
        let small = zstd::bulk::compress(&data, 1).unwrap();
        let mut w = Writer::begin(&tier, "packs/a".into()).unwrap();
        w.item("one".into());
        w.piece(&small, data.len(), true).unwrap();
        w.piece(&data[..100], 100, false).unwrap();
        w.item("none".into());
        let (pack, index) = w.finish(true).unwrap();
        let good = read_whole(&tier, "packs/a", u64::MAX).unwrap();
        assert_eq!((pack.bytes, index.items[0].bytes()), (good.len() as u64, 20_100));
        let read = |tier: &dyn Tier| -> Result<Vec<u8>, StorageError> {
            let index = Index::read(tier, "packs/a", pack.bytes)?;
            let (mut buf, mut part, mut out) = (Buffer::default(), Buffer::default(), Vec::new());
            for p in &index.items[0].pieces {
                read_piece(tier, "packs/a", p, &mut buf, &mut part)?;
                out.extend_from_slice(&part);
            }
            Ok(out)
        };
        assert_eq!(read(&tier).unwrap(), [&data[..], &data[..100]].concat());
        // Another piece that begins where a good one does.
        let mut lies = index.clone();
        let first = lies.items[0].pieces[0];
        lies.items[1].pieces.push(Piece { xxh3: 0, ..first });
        assert!(check(&tier, "packs/a", &index).is_ok() && check(&tier, "packs/a", &lies).is_err());
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            write_whole(&tier, "packs/a", &bad).unwrap();
            assert!(read(&tier).is_err(), "byte {at}");
        }
        for len in (0..good.len()).step_by(13) {
            write_whole(&tier, "packs/a", &good[..len]).unwrap();
            assert!(Index::read(&tier, "packs/a", len as u64).is_err(), "length {len}");
        }
    }
}
