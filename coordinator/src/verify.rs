//! Verify: reads every byte of a generation and compares it with its checksums.

use belay_image::blobs::{BlobReader, BlobRef};
use belay_image::extents::{self, Extent};
use belay_image::manifest::{FileEntry, Manifest};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{checksum, ImageError, BLOB_FILE, JOB_FILE};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
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

/// Verifies the generation in `dir`; every fault found.
pub fn generation(dir: &Path) -> Result<Verified, Vec<ImageError>> {
    let manifest = Manifest::read(dir).map_err(|e| vec![e])?;
    let mut seen = Verified::default();
    let mut faults = Vec::new();
    for f in &manifest.files {
        seen.files += 1;
        if let Err(e) = file(dir, f, &mut seen) {
            faults.push(e);
        }
    }
    if faults.is_empty() {
        for f in &manifest.files {
            let result = if f.name.ends_with(".bidx") {
                memory(dir, f, &mut seen)
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
    let mut f = File::open(&path).map_err(|e| ImageError::io("open", &path, e))?;
    let found = f.metadata().map_err(|e| ImageError::io("stat", &path, e))?.len();
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

/// Every extent of a process against the page data.
fn memory(dir: &Path, index: &FileEntry, seen: &mut Verified) -> Result<(), ImageError> {
    let path = dir.join(&index.name);
    let table = extents::decode(&path, SectionFile::read(&path)?.get(Kind::Extents)?)?;
    let stem = index.name.trim_end_matches(".bidx");
    let mut files: BTreeMap<u32, (std::path::PathBuf, File)> = BTreeMap::new();
    let mut buffer = Vec::new();
    for e in &table {
        if let std::collections::btree_map::Entry::Vacant(v) = files.entry(e.file) {
            let page_file = dir.join(format!("{stem}-{}.bpg", e.file));
            let f = File::open(&page_file).map_err(|err| ImageError::io("open", &page_file, err))?;
            v.insert((page_file, f));
        }
        let (page_file, f) = &files[&e.file];
        extent(page_file, f, e, &mut buffer)?;
        seen.extents += 1;
        seen.bytes += e.bytes;
    }
    Ok(())
}

fn extent(path: &Path, f: &File, e: &Extent, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
    let size = f.metadata().map_err(|err| ImageError::io("stat", path, err))?.len();
    // Checked before the allocation: the table is untrusted.
    if e.offset + e.bytes > size {
        return Err(ImageError::damaged(
            path,
            format!("memory at {:#x} lies behind the end of the file", e.vaddr),
        ));
    }
    let len = usize::try_from(e.bytes).map_err(|_| ImageError::damaged(path, "extent too large"))?;
    buffer.resize(len, 0);
    f.read_exact_at(buffer, e.offset)
        .map_err(|err| ImageError::io("read", path, err))?;
    if checksum(buffer) != e.xxh3 {
        return Err(ImageError::damaged(
            path,
            format!("checksum of the {} bytes of memory at {:#x} does not match", e.bytes, e.vaddr),
        ));
    }
    Ok(())
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
