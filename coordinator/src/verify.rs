//! Verify: reads every byte of a generation and compares it with its checksums.

use belay_image::blobs::{BlobReader, BlobRef};
use belay_image::extents;
use belay_image::manifest::{FileEntry, Manifest};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{files, ImageError, BLOB_FILE, JOB_FILE};
use belay_kernel::direct::Buffer;
use belay_storage::chunk::Chunk;
use belay_storage::store::Store;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

/// What was read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files.
    pub files: u64,
    /// Bytes read and compared.
    pub bytes: u64,
    /// Extents of memory.
    pub extents: u64,
    /// Byte strings (data in flight, contents of files and shared memory).
    pub blobs: u64,
}

/// Pages of chunks that have been read and found whole: generations share them, and one reading does for all.
#[derive(Debug, Default)]
pub struct Known(BTreeSet<(u32, u32)>);

/// Verifies the generation in `dir`; every fault found.
pub fn generation(dir: &Path, known: &mut Known) -> Result<Verified, Vec<ImageError>> {
    let manifest = Manifest::read(dir).map_err(|e| vec![e])?;
    let mut seen = Verified::default();
    let mut faults = Vec::new();
    for f in &manifest.files {
        seen.files += 1;
        if let Err(e) = file(dir, f, &mut seen) {
            faults.push(e);
        }
    }
    let store = Store::of_generation(dir);
    let mut chunks = BTreeMap::new();
    for c in &manifest.chunks {
        match store.open(c) {
            Ok(chunk) => drop(chunks.insert(c.id, chunk)),
            Err(e) => faults.push(e),
        }
    }
    if faults.is_empty() {
        for f in &manifest.files {
            let result = if f.name.ends_with(".bidx") {
                memory(&dir.join(&f.name), &chunks, known, &mut seen)
            } else if f.name == JOB_FILE {
                blobs(dir, &mut seen)
            } else {
                Ok(())
            };
            faults.extend(result.err());
        }
        if !manifest.files.iter().any(|f| f.name == JOB_FILE) {
            faults.push(ImageError::damaged(dir, format!("the manifest lists no {JOB_FILE}")));
        }
    }
    if faults.is_empty() {
        Ok(seen)
    } else {
        Err(faults)
    }
}

/// Length, whole-file checksum, and section checksums.
fn file(dir: &Path, entry: &FileEntry, seen: &mut Verified) -> Result<(), ImageError> {
    let path = dir.join(&entry.name);
    let (mut f, found) = files::open(&path)?;
    if found != entry.bytes {
        return Err(ImageError::damaged(
            &path,
            format!("{found} bytes instead of {}", entry.bytes),
        ));
    }
    if let Some(expected) = entry.xxh3 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = f.read(&mut buffer).map_err(|e| ImageError::io("read", &path, e))?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
        }
        if hash.digest() != expected {
            return Err(ImageError::damaged(&path, "checksum does not match the manifest"));
        }
        seen.bytes += entry.bytes;
    }
    Ok(())
}

/// Every page of a process against its hash.
fn memory(path: &Path, chunks: &BTreeMap<u32, Chunk>, known: &mut Known, seen: &mut Verified) -> Result<(), ImageError> {
    let table = extents::decode(path, SectionFile::read(path)?.get(Kind::Extents)?)?;
    let mut buffer = Buffer::default();
    for e in &table {
        let chunk = chunks.get(&e.chunk).ok_or_else(|| {
            let reason = format!(
                "memory at {:#x} lies in chunk {}, which the manifest does not list",
                e.vaddr, e.chunk
            );
            ImageError::damaged(path, reason)
        })?;
        let mut page = e.page;
        let end = u64::from(e.page) + e.pages();
        while u64::from(page) < end {
            let run = (end - u64::from(page)).min(PIECE_PAGES) as u32;
            if !(page..page + run).all(|p| known.0.contains(&(e.chunk, p))) {
                chunk.read(page, run, &mut buffer)?;
                known.0.extend((page..page + run).map(|p| (e.chunk, p)));
                seen.bytes += buffer.len() as u64;
            }
            page += run;
        }
        seen.extents += 1;
    }
    Ok(())
}

/// Pages read at a time.
const PIECE_PAGES: u64 = 1024;

/// Compares the byte strings of the generation in `dir` with their checksums: the manifest has none for the file that holds them.
pub(crate) fn byte_strings(dir: &Path) -> Result<(), ImageError> {
    blobs(dir, &mut Verified::default())
}

/// Every byte string that a JSON section of the job file refers to.
fn blobs(dir: &Path, seen: &mut Verified) -> Result<(), ImageError> {
    let path = dir.join(JOB_FILE);
    let job = SectionFile::read(&path)?;
    let mut refs = Vec::new();
    for section in job.sections() {
        if section.kind == Kind::Extents as u32 {
            continue;
        }
        let value: Value = serde_json::from_slice(&section.payload)
            .map_err(|e| ImageError::damaged(&path, format!("section {}: {e}", section.kind)))?;
        collect_refs(&value, &mut refs);
    }
    if refs.is_empty() {
        return Ok(());
    }
    let reader = BlobReader::open(&dir.join(BLOB_FILE))?;
    for r in &refs {
        reader.get(r)?;
        seen.blobs += 1;
    }
    Ok(())
}

/// A reference is known by its fields, so that this works for every kind of descriptor.
fn collect_refs(value: &Value, out: &mut Vec<BlobRef>) {
    match value {
        Value::Object(fields) => {
            let is_ref = fields.len() == 3
                && ["offset", "bytes", "xxh3"]
                    .iter()
                    .all(|k| fields.get(*k).is_some_and(Value::is_u64));
            match serde_json::from_value(value.clone()) {
                Ok(r) if is_ref => out.push(r),
                _ => fields.values().for_each(|v| collect_refs(v, out)),
            }
        }
        Value::Array(items) => items.iter().for_each(|v| collect_refs(v, out)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::blobs::BlobWriter;

    #[test]
    fn a_byte_string_that_is_damaged_is_found() {
        let dir = std::env::temp_dir().join(format!("belay-verify-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mut blobs = BlobWriter::create(&dir.join(BLOB_FILE)).unwrap();
        let at = [b"one".as_slice(), b"another"].map(|data| blobs.put(data).unwrap());
        let mut job = SectionFile::new();
        job.push_json(
            Kind::Job,
            &serde_json::json!({ "pipes": [{ "data": at[0] }, { "data": at[1] }] }),
        )
        .unwrap();
        job.write(&dir.join(JOB_FILE)).unwrap();
        byte_strings(&dir).unwrap();
        let good = std::fs::read(dir.join(BLOB_FILE)).unwrap();
        for r in at {
            let mut bad = good.clone();
            bad[r.offset as usize] ^= 1;
            std::fs::write(dir.join(BLOB_FILE), bad).unwrap();
            assert!(matches!(byte_strings(&dir), Err(ImageError::Damaged { .. })));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
