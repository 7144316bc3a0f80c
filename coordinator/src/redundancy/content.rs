//! What a host has of a generation, as one stream of bytes: the manifest, the files it lists, the chunks it lists.

use super::parity_file;
use crate::{generations, Failure};
use belay_image::files;
use belay_image::manifest::{Manifest, MANIFEST_FILE};
use belay_redundancy::index::{Place, FOOTER};
use belay_redundancy::layout::{block_range, blocks};
use belay_redundancy::{checksum, Index, Part};
use belay_storage::chunk::file_bytes;
use belay_storage::store::Store;
use belay_wire::Exit;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The stream of generation `number` in `dir`.
pub(crate) fn parts(dir: &Path, number: u64) -> Result<Vec<Part>, Failure> {
    let path = dir.join("gen").join(generations::name(number));
    let manifest = Manifest::read(&path)?;
    let (_, length) = files::open(&path.join(MANIFEST_FILE))?;
    let own = |name: &str, bytes| Part {
        place: Place::Generation,
        name: name.into(),
        bytes,
    };
    let store = Store::of_job(dir);
    let mut out = vec![own(MANIFEST_FILE, length)];
    out.extend(manifest.files.iter().map(|f| own(&f.name, f.bytes)));
    out.extend(manifest.chunks.iter().map(|c| {
        Part {
            place: Place::Chunks,
            name: store
                .path(c.id)
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            bytes: file_bytes(c.pages),
        }
    }));
    Ok(out)
}

/// The file of a part.
pub(crate) fn path_of(dir: &Path, number: u64, part: &Part) -> PathBuf {
    match part.place {
        Place::Generation => dir.join("gen").join(generations::name(number)).join(&part.name),
        Place::Chunks => Store::of_job(dir).directory().join(&part.name),
    }
}

/// Reads the stream from `at` on; behind its end there are zeros.
pub(crate) fn read(dir: &Path, number: u64, parts: &[Part], at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    let end = at.saturating_add(bytes as u64);
    let mut begin = 0u64;
    for part in parts {
        let next = begin.saturating_add(part.bytes);
        let (from, to) = (begin.max(at), next.min(end));
        if from < to {
            let file = File::open(path_of(dir, number, part))?;
            let range = usize::try_from(from - at).unwrap_or(0)..usize::try_from(to - at).unwrap_or(0);
            file.read_exact_at(&mut out[range], from - begin)?;
        }
        begin = next;
    }
    Ok(out)
}

/// Checksums of the blocks of all `data` segments of `segment` bytes.
pub(crate) fn sums(dir: &Path, number: u64, parts: &[Part], (segment, data): (u64, usize)) -> io::Result<Vec<u64>> {
    let mut out = Vec::new();
    for n in 0..data as u64 {
        for block in 0..blocks(segment) {
            let (at, bytes) = block_range(segment, block);
            out.push(checksum(&read(dir, number, parts, n * segment + at, bytes)?));
        }
    }
    Ok(out)
}

/// What follows the parity in the file of generation `number` in `dir`.
pub(crate) fn read_tail(dir: &Path, number: u64) -> Result<Vec<u8>, Failure> {
    let path = parity_file(dir, number);
    let (tail, index) = read_file(&path)?;
    if index.generation != number {
        let why = format!("{}: damaged: it is of generation {}", path.display(), index.generation);
        return Err(Failure::new(Exit::Damaged, why));
    }
    Ok(tail)
}

/// The index in the file `path`.
pub(crate) fn index_in(path: &Path) -> Result<Index, Failure> {
    read_file(path).map(|(_, index)| index)
}

/// What follows the parity in the file `path`, and the index in it.
fn read_file(path: &Path) -> Result<(Vec<u8>, Index), Failure> {
    let fail = |e: &io::Error| Failure::io(format!("read {}", path.display()), e);
    let damaged = |e: belay_redundancy::RedundancyError| Failure::new(Exit::Damaged, format!("{}: {e}", path.display()));
    let (file, bytes) = files::open(path)?;
    let mut footer = [0; FOOTER];
    file.read_exact_at(&mut footer, bytes.saturating_sub(FOOTER as u64))
        .map_err(|e| fail(&e))?;
    let length = Index::length(&footer, bytes).map_err(damaged)? + FOOTER as u64;
    let mut tail = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact_at(&mut tail, bytes - length).map_err(|e| fail(&e))?;
    let index = Index::decode(&tail).map_err(damaged)?;
    if index.parity_bytes() + length != bytes {
        return Err(Failure::new(
            Exit::Damaged,
            format!("{}: damaged: {bytes} bytes do not fit its index", path.display()),
        ));
    }
    Ok((tail, index))
}

/// The index of generation `number` in `dir`.
pub(crate) fn read_index(dir: &Path, number: u64) -> Result<Index, Failure> {
    Ok(Index::decode(&read_tail(dir, number)?)?)
}

/// Reads parity.
pub(crate) fn read_parity(dir: &Path, number: u64, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    File::open(parity_file(dir, number))?.read_exact_at(&mut out, at)?;
    Ok(out)
}
