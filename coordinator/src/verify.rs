//! Verify: reads every byte of a generation and compares it with its checksums.
//!
//! The generation may be anybody's, and hold anything: what is in memory meanwhile does not grow with the files, and
//! each page and byte string is read once, however often it is referred to.
//!
//! Of a job on several hosts that is also what its parts have of it, as far as it lies here.

mod refs;

use crate::nodes::table::{self, Row};
use crate::tiers::parts;
use crate::Failure;

use belay_image::blobs::{BlobReader, BlobRef};
use belay_image::extents::{self, Extent, EXTENT_BYTES};
use belay_image::manifest::{ChunkEntry, FileEntry, Manifest};
use belay_image::sections::{self, Kind};
use belay_image::{files, ImageError, BLOB_FILE, JOB_FILE};
use belay_kernel::direct::Buffer;
use belay_storage::chunk::Chunk;
use belay_storage::store::Store;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::AddAssign;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

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

impl AddAssign for Verified {
    fn add_assign(&mut self, other: Self) {
        self.files += other.files;
        self.bytes += other.bytes;
        self.extents += other.extents;
        self.blobs += other.blobs;
    }
}

/// What was found of one generation of a job, on all its hosts.
#[derive(Debug, Default)]
pub struct Found {
    /// What was read.
    pub seen: Verified,
    /// Every fault.
    pub faults: Vec<Failure>,
    /// What cannot be read here, and where it may lie.
    pub elsewhere: Vec<String>,
}

/// What has been read, of each part: generations share chunks, and one reading does for all.
#[derive(Debug, Default)]
pub struct Known {
    parts: BTreeMap<u64, Chunks>,
    /// Bytes compared so far.
    pub bytes: Arc<AtomicU64>,
}

/// Pages of chunks that have been read and found whole.
type Chunks = BTreeMap<u32, Pages>;

/// Pages of a chunk, as ranges.
#[derive(Debug, Default, Clone)]
struct Pages {
    ranges: Vec<(u32, u32)>,
    /// So many of the ranges, the first ones, are in order and apart.
    settled: usize,
}

impl Pages {
    /// Adds the pages from `first` to before `end`.
    fn add(&mut self, first: u32, end: u32) {
        match self.ranges.last_mut() {
            Some(last) if last.1 == first => last.1 = end,
            _ => self.ranges.push((first, end)),
        }
        if self.ranges.len() > 2 * self.settled + UNSETTLED {
            self.settle();
        }
    }

    /// Puts the ranges in order and joins those that touch.
    fn settle(&mut self) {
        self.ranges.sort_unstable();
        self.ranges.dedup_by(|next, last| {
            let joined = next.0 <= last.1;
            if joined {
                last.1 = last.1.max(next.1);
            }
            joined
        });
        self.settled = self.ranges.len();
    }

    /// Those that are not in `known`, in pieces; both are settled.
    fn without(&self, known: &Pages) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        for &(mut first, end) in &self.ranges {
            let from = known.ranges.partition_point(|k| k.1 <= first);
            for k in known.ranges[from..].iter().take_while(|k| k.0 < end) {
                out.extend((first < k.0).then_some((first, k.0)));
                first = first.max(k.1);
            }
            out.extend((first < end).then_some((first, end)));
        }
        out
    }
}

/// So many ranges are kept before they are joined.
const UNSETTLED: usize = 1 << 16;

/// About how many bytes there are to compare of the generations in `paths` of the job in `dir`: there may be some in
/// their chunks that none of them needs.
pub fn expected<'a>(dir: &Path, paths: impl Iterator<Item = &'a Path>) -> u64 {
    let mut chunks = BTreeMap::new();
    let mut bytes = 0u64;
    for path in paths {
        let rows = table::read(path).unwrap_or_default();
        let parts = rows.iter().map(|row| (row.tag, parts::generation_of(dir, row.tag, path)));
        for (tag, own) in parts.chain([(0, path.to_owned())]) {
            let Ok(manifest) = Manifest::read(&own) else { continue };
            let files = manifest.files.iter().filter(|f| f.xxh3.is_some());
            bytes = files.fold(bytes, |all, f| all.saturating_add(f.bytes));
            chunks.extend(manifest.chunks.iter().map(|c| ((tag, c.id), c.pages)));
        }
    }
    let pages: u64 = chunks.values().map(|pages| u64::from(*pages)).sum();
    bytes.saturating_add(pages.saturating_mul(extents::PAGE))
}

/// Verifies the generation in `path` of the job in `dir`, with what its parts have of it.
pub fn generation(dir: &Path, path: &Path, known: &mut Known) -> Found {
    let mut found = Found::default();
    found.add("", known.part(0, path));
    match table::read(path) {
        Ok(rows) => rows.iter().for_each(|row| found.add_part(dir, path, row, known)),
        // A file of the generation like any other: that it is damaged is told already.
        Err(_) if !found.faults.is_empty() => {}
        Err(f) => found.faults.push(f),
    }
    found
}

impl Found {
    fn add_part(&mut self, dir: &Path, path: &Path, row: &Row, known: &mut Known) {
        let own = parts::generation_of(dir, row.tag, path);
        if parts::lies_elsewhere(&own) {
            self.elsewhere.push(format!("part {} (on {})", row.tag, row.place()));
            return;
        }
        let read = known.part(row.tag, &own);
        self.add(&format!("part {}: ", row.tag), read);
    }

    /// Adds what was found of a part, which `name` names.
    fn add(&mut self, name: &str, (seen, faults, elsewhere): Part) {
        self.seen += seen;
        let named = |f: Failure| Failure::new(f.exit, format!("{name}{f}"));
        self.faults.extend(faults.into_iter().map(Failure::from).map(named));
        self.elsewhere.extend(elsewhere.map(|what| format!("{name}{what}")));
    }
}

/// What was read of the generation of one part, every fault found, and which of its chunks lie elsewhere.
type Part = (Verified, Vec<ImageError>, Option<String>);

impl Known {
    fn part(&mut self, tag: u64, dir: &Path) -> Part {
        part(dir, self.parts.entry(tag).or_default(), &self.bytes)
    }
}

fn part(dir: &Path, known: &mut Chunks, all: &AtomicU64) -> Part {
    let mut seen = Verified::default();
    let manifest = match Manifest::read(dir) {
        Ok(manifest) => manifest,
        Err(e) => return (seen, vec![e], None),
    };
    let mut faults = Vec::new();
    for f in &manifest.files {
        seen.files += 1;
        if let Err(e) = file(dir, f, &mut seen) {
            faults.push(e);
        }
    }
    all.fetch_add(seen.bytes, Ordering::Relaxed);
    let store = Store::of_generation(dir);
    let chunks: BTreeMap<u32, _> = manifest.chunks.iter().map(|c| (c.id, c)).collect();
    let mut wanted: BTreeMap<u32, Pages> = BTreeMap::new();
    if faults.is_empty() {
        for f in &manifest.files {
            let result = if f.name.ends_with(".bidx") {
                let listed = |chunk| chunks.contains_key(&chunk);
                memory(&dir.join(&f.name), &listed, &mut wanted, &mut seen)
            } else if f.name == JOB_FILE {
                byte_strings_of(dir, &mut seen)
            } else {
                Ok(())
            };
            faults.extend(result.err());
        }
        if !manifest.files.iter().any(|f| f.name == JOB_FILE) {
            faults.push(ImageError::damaged(dir, format!("the manifest lists no {JOB_FILE}")));
        }
    }
    let (away, here): (Vec<&ChunkEntry>, Vec<_>) = manifest.chunks.iter().partition(|c| store.is_elsewhere(c.id));
    for c in here {
        let pages = wanted.remove(&c.id).unwrap_or_default();
        let result = store
            .open(c)
            .and_then(|chunk| compare(&chunk, pages, known.entry(c.id).or_default(), (&mut seen, all)));
        faults.extend(result.err());
    }
    let elsewhere = (!away.is_empty()).then(|| format!("{} chunks ({})", away.len(), store.places_elsewhere()));
    (seen, faults, elsewhere)
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

/// Which pages of which chunks a process has; `listed` says whether the manifest has a chunk.
fn memory(
    path: &Path,
    listed: &dyn Fn(u32) -> bool,
    wanted: &mut BTreeMap<u32, Pages>,
    seen: &mut Verified,
) -> Result<(), ImageError> {
    let mut take = |e: &Extent| {
        if !listed(e.chunk) {
            let (at, chunk) = (e.vaddr, e.chunk);
            let reason = format!("memory at {at:#x} lies in chunk {chunk}, which the manifest does not list");
            return Err(ImageError::damaged(path, reason));
        }
        // The table has been checked: no extent ends behind the largest page.
        let end = u32::try_from(u64::from(e.page) + e.pages()).unwrap_or(u32::MAX);
        wanted.entry(e.chunk).or_default().add(e.page, end);
        seen.extents += 1;
        Ok(())
    };
    let mut found = false;
    sections::each(path, &mut |kind, payload| {
        if kind != Kind::Extents as u32 {
            return Ok(());
        }
        found = true;
        extents_of(path, payload, &mut take)
    })?;
    if found {
        Ok(())
    } else {
        Err(ImageError::damaged(path, "no section Extents"))
    }
}

/// Gives each extent of the table that `payload` holds to `take`.
fn extents_of(
    path: &Path,
    payload: &mut dyn Read,
    take: &mut dyn FnMut(&Extent) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let mut buffer = Vec::with_capacity(EXTENTS * EXTENT_BYTES);
    let mut behind = 0;
    loop {
        buffer.clear();
        let piece = payload.take((EXTENTS * EXTENT_BYTES) as u64).read_to_end(&mut buffer);
        if piece.map_err(|e| ImageError::io("read", path, e))? == 0 {
            return Ok(());
        }
        let table = extents::decode(path, &buffer)?;
        if table.first().is_some_and(|e| e.vaddr < behind) {
            return Err(ImageError::damaged(path, "its extents are out of order"));
        }
        behind = table.last().map_or(behind, Extent::end);
        table.iter().try_for_each(&mut *take)?;
    }
}

/// Extents that are looked at together.
const EXTENTS: usize = 1 << 16;

/// Compares `pages` of a chunk, but those that are known to be whole, with their hashes.
fn compare(chunk: &Chunk, mut pages: Pages, known: &mut Pages, (seen, all): (&mut Verified, &AtomicU64)) -> Result<(), ImageError> {
    let mut buffer = Buffer::default();
    pages.settle();
    for (mut first, end) in pages.without(known) {
        while first < end {
            let run = (end - first).min(PIECE_PAGES);
            chunk.read(first, run, &mut buffer)?;
            seen.bytes += buffer.len() as u64;
            all.fetch_add(buffer.len() as u64, Ordering::Relaxed);
            first += run;
        }
    }
    known.ranges.append(&mut pages.ranges);
    known.settle();
    Ok(())
}

/// Pages read at a time.
const PIECE_PAGES: u32 = 1024;

/// Compares the byte strings of the generation in `dir` with their checksums: the manifest has none for the file that holds them.
pub(crate) fn byte_strings(dir: &Path) -> Result<(), ImageError> {
    byte_strings_of(dir, &mut Verified::default())
}

/// Every byte string that a JSON section of the job file refers to.
fn byte_strings_of(dir: &Path, seen: &mut Verified) -> Result<(), ImageError> {
    let path = dir.join(JOB_FILE);
    let mut all: Vec<BlobRef> = Vec::new();
    sections::each(&path, &mut |kind, payload| {
        if kind != Kind::Extents as u32 {
            refs::find(payload, &mut all).map_err(|e| ImageError::damaged(&path, format!("section {kind}: {e}")))?;
        }
        Ok(())
    })?;
    if all.is_empty() {
        return Ok(());
    }
    // They lie one behind the other: together they are no longer than their file, and each is read once.
    all.sort_unstable_by_key(|r| (r.offset, r.bytes, r.xxh3));
    all.dedup();
    let blobs = dir.join(BLOB_FILE);
    let reader = BlobReader::open(&blobs)?;
    let mut behind = 0;
    for r in &all {
        if r.offset < behind {
            return Err(ImageError::damaged(&blobs, format!("two byte strings lie at {}", r.offset)));
        }
        reader.check(r)?;
        behind = r.offset + r.bytes;
        seen.blobs += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::blobs::BlobWriter;
    use belay_image::sections::SectionFile;

    #[test]
    fn pages_are_read_once_whoever_refers_to_them() {
        let pages = |ranges: &[(u32, u32)]| {
            let mut p = Pages::default();
            ranges.iter().for_each(|r| p.add(r.0, r.1));
            p.settle();
            p
        };
        assert_eq!(pages(&[(5, 9), (0, 2), (2, 3), (8, 12), (6, 7)]).ranges, [(0, 3), (5, 12)]);
        let known = pages(&[(1, 2), (6, 8), (20, 30)]);
        let without = |ranges: &[(u32, u32)]| pages(ranges).without(&known);
        assert_eq!(without(&[(0, 10), (22, 25), (29, 31)]), [(0, 1), (2, 6), (8, 10), (30, 31)]);
        assert_eq!(without(&[(6, 8)]), []);
        let mut many = Pages::default();
        for i in 0..1 << 20 {
            many.add(i % 1000 * 2, 1 << 22);
        }
        assert!(many.ranges.len() <= UNSETTLED + 2000, "{}", many.ranges.len());
    }

    #[test]
    fn byte_strings_that_lie_over_each_other_are_no_jobs() {
        let dir = std::env::temp_dir().join(format!("belay-verify-twice-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mut blobs = BlobWriter::create(&dir.join(BLOB_FILE)).unwrap();
        let whole = blobs.put(b"abcdef").unwrap();
        let part = BlobRef {
            offset: whole.offset + 1,
            bytes: 2,
            xxh3: belay_image::checksum(b"bc"),
        };
        let check = |refs: &[BlobRef]| {
            let mut job = SectionFile::new();
            job.push_json(Kind::Job, &refs).unwrap();
            job.write(&dir.join(JOB_FILE)).unwrap();
            byte_strings(&dir)
        };
        check(&[whole, whole]).unwrap();
        assert!(check(&[whole, part]).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }

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
