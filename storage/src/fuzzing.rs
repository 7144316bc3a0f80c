//! Entries for the fuzzer: what lies on durable tiers, sealed or not, and the list of local ones.

use crate::catalogue::Listed;
use crate::pack::{unpack, Index, Piece, FOOTER, PIECE};
use crate::seal::{stored, Keys, Opener, HEADER};
use crate::store::decode_list;
use belay_image::checksum;
use belay_kernel::direct::Buffer;
use std::path::Path;

/// A pack as it lies on a tier, and the JSON of its index behind pieces of a certain length, with a right checksum.
pub fn pack(data: &[u8]) {
    const PIECES: u64 = 1 << 20;
    let bytes = data.len() as u64;
    let footer = data.len().saturating_sub(FOOTER as usize);
    if let Ok((at, sum)) = Index::locate(&data[footer..], bytes) {
        let index = &data[usize::try_from(at).unwrap_or(usize::MAX)..footer];
        drop(Index::decode(index, sum, at));
    }
    let Ok(index) = Index::decode(data, checksum(data), PIECES) else {
        return;
    };
    assert!(index
        .items
        .iter()
        .flat_map(|i| &i.pieces)
        .all(|p| p.offset + u64::from(p.stored) <= PIECES));
    for item in &index.items {
        item.bytes();
    }
    let Ok(again) = index.encode() else { return };
    let footer = again.len() - FOOTER as usize;
    let decoded = Index::locate(&again[footer..], PIECES + again.len() as u64).and_then(|(at, sum)| {
        assert_eq!(at, PIECES);
        Index::decode(&again[..footer], sum, at)
    });
    assert_eq!(decoded.as_ref(), Ok(&index), "an index that is written again differs");
}

/// A compressed piece, whose checksum is right.
pub fn piece(data: &[u8]) {
    let (mut buf, mut out) = (Buffer::default(), Buffer::default());
    let stored = u32::try_from(data.len().min(PIECE)).unwrap_or(0);
    let data = &data[..stored as usize];
    for bytes in [0, 4096, PIECE as u32] {
        buf.resize(0);
        buf.extend_from_slice(data);
        let piece = Piece {
            offset: 0,
            stored,
            bytes,
            zstd: true,
            xxh3: checksum(data),
        };
        if unpack(&piece, &mut buf, &mut out).is_ok() {
            assert_eq!(out.len(), bytes as usize);
        }
    }
}

/// The record of a generation: as it lies on a tier, and its body with a right checksum.
pub fn record(data: &[u8]) {
    drop(Listed::decode("gen/record", data));
    let Ok(body) = std::str::from_utf8(data) else { return };
    let envelope = serde_json::json!({ "format": 1, "xxh3": checksum(data), "body": body });
    if let Ok(listed) = Listed::decode("gen/record", envelope.to_string().as_bytes()) {
        let lists = listed.manifest.chunks.len() + listed.manifest.files.len();
        assert!(listed.items().len() <= lists);
    }
}

/// A sealed object, and a list of keys.
pub fn sealed(data: &[u8]) {
    if let Ok(keys) = Keys::parse(data) {
        assert!(keys.newest().is_some());
    }
    opens(data);
}

/// Whether `data` is an object that the key of the corpus has sealed: then it holds what was sealed, and nothing else.
pub fn opens(data: &[u8]) -> bool {
    let Ok(keys) = Keys::parse("c".repeat(64).as_bytes()) else {
        return false;
    };
    let header = &data[..data.len().min(HEADER)];
    let Ok(opener) = Opener::new(&keys, "corpus/object", header, data.len() as u64) else {
        return false;
    };
    let range = 0..opener.bytes();
    let from = stored(&range, opener.bytes());
    let mut buf = Buffer::default();
    buf.extend_from_slice(&data[from.start as usize..from.end as usize]);
    let opened = opener.open(&range, &mut buf, 0).is_ok();
    assert!(!opened || *buf == *b"what was sealed", "forged");
    opened
}

/// The list of local tiers.
pub fn places(data: &[u8]) {
    let Ok(tiers) = decode_list(Path::new("places.json"), data) else {
        return;
    };
    for t in &tiers {
        assert!(!t.to_string().is_empty() || t.name.is_empty());
        t.is_here();
    }
    let again = serde_json::to_vec(&tiers).unwrap_or_default();
    assert!(decode_list(Path::new("places.json"), &again).is_ok_and(|t| t == tiers));
}
