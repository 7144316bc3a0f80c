//! The fetch: brings a generation from durable tiers back into the job directory, and with it heals one that is damaged there.
//!
//! ```text
//! gen/.fetching-000007/manifest.json                                   says which chunks are needed from now on
//! chunks/.tmp-pages-… ── checked, fsync ── rename ──> chunks/pages-…   only those that are missing or damaged
//! gen/.fetching-000007/ ── files, fsync ── rename ──> gen/000007/
//! ```
//! Each item is taken from the first tier that has it whole, and nothing gets its name before it has been compared with
//! its checksums. A kill leaves chunks that are whole, which the next fetch uses, and left-overs, which the next agent
//! removes; when a restarted job has a checkpoint of its own, also what is under way.

use crate::catalogue::{mark, Catalogue, Listed};
use crate::chunk::Chunk;
use crate::control::Control;
use crate::pack::{self, read_piece};
use crate::place::desk::Place;
use crate::store::Store;
use crate::tier::Tier;
use crate::{StorageError, PAGE};
use belay_image::manifest::{ChunkEntry, FileEntry, MANIFEST_FILE, MAX_BYTES};
use belay_image::sections::create_private;
use belay_image::{checksum, files, ImageError};
use belay_kernel::dir;
use belay_kernel::direct::{self, Buffer};
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// How the directory of a generation is called, before its number, while the generation is being fetched: the chunks that
/// its manifest names are needed.
pub const UNDER_WAY: &str = ".fetching-";
/// Pages compared at a time.
const STEP: u32 = 256;

/// What a fetch has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Chunks and files brought.
    pub items: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Chunks and files that were whole in the job directory.
    pub present: u64,
}

/// Durable tiers and what they hold.
pub type Sources<'a> = [(&'a dyn Tier, &'a Catalogue)];

/// Brings generation `wanted` into job directory `job`, so that every byte of it there has been compared with its checksums.
pub fn fetch(job: &Path, wanted: &Listed, sources: &Sources<'_>, control: &Control) -> Result<Fetched, StorageError> {
    let m = &wanted.manifest;
    control.bytes.store(0, Ordering::Relaxed);
    let expected = wanted.items().values().sum();
    control.expected.store(expected, Ordering::Relaxed);
    let mut fetch = Fetch {
        store: Store::of_job(job),
        sources,
        control,
        done: Fetched::default(),
    };
    fetch.store.create()?;
    let gen = job.join("gen");
    let draft = fetch.draft(&gen, wanted)?;
    for c in &m.chunks {
        fetch.chunk(c)?;
    }
    fetch.store.sync()?;
    if let Some(draft) = draft {
        fetch.generation(&gen, &draft, wanted)?;
    }
    Ok(fetch.done)
}

struct Fetch<'a> {
    store: Store,
    sources: &'a Sources<'a>,
    control: &'a Control,
    done: Fetched,
}

/// Damage of what was brought, which is known by its name here, lies in pack `key`.
fn of_pack(tier: &dyn Tier, (key, item): (&str, &str), e: StorageError) -> StorageError {
    match e {
        StorageError::Image(ImageError::Damaged { reason, .. }) => StorageError::TierDamaged {
            tier: tier.name().to_owned(),
            key: key.to_owned(),
            reason: format!("{item} in it is not what was stored: {reason}"),
        },
        other => other,
    }
}

/// Compares every page of a chunk with its hash.
pub fn check_pages(chunk: &Chunk, control: &Control) -> Result<(), StorageError> {
    let pages = chunk.hashes.len() as u32;
    let mut buf = Buffer::default();
    for first in (0..pages).step_by(STEP as usize) {
        control.check()?;
        let count = STEP.min(pages - first);
        chunk.read(first, count, &mut buf)?;
        control.bytes.fetch_add(u64::from(count) * PAGE, Ordering::Relaxed);
    }
    Ok(())
}

/// Whether the file at `path` has the checksum that `entry` says.
pub(crate) fn file_is_whole(path: &Path, entry: &FileEntry) -> bool {
    // What has no checksum of the whole file cannot be known to be good here; the restart checks what is read of it.
    let data = entry.xxh3.and_then(|sum| Some((sum, files::read(path, entry.bytes).ok()?)));
    data.is_some_and(|(sum, data)| data.len() as u64 == entry.bytes && checksum(&data) == sum)
}

impl Fetch<'_> {
    /// Writes item `name` to `path`; `good` says whether what was written is what it should be.
    fn item(&mut self, name: &str, path: &Path, good: &dyn Fn() -> Result<(), StorageError>) -> Result<(), StorageError> {
        let mut failure = None;
        for (tier, catalogue) in self.sources {
            for (p, item) in catalogue.find(name) {
                let copied = self.copy(*tier, &p.key, item, path);
                // What comes out of the tier as it went in, and is damaged here, says nothing about the pack.
                if let Some(e) = copied.as_ref().err().filter(|e| e.is_contradicted()) {
                    mark(*tier, &p.key, &e.to_string());
                }
                let good = || good().map_err(|e| of_pack(*tier, (&p.key, name), e));
                match copied.and_then(|()| good()) {
                    Ok(()) => {
                        self.done.items += 1;
                        self.done.bytes += item.bytes();
                        return Ok(());
                    }
                    Err(StorageError::Cancelled) => return Err(StorageError::Cancelled),
                    Err(e) => {
                        tracing::warn!(item = name, tier = tier.name(), error = %e, "not fetched from there");
                        // What is out of reach may be whole.
                        failure = Some(failure.filter(|f: &StorageError| !f.is_damage()).unwrap_or(e));
                    }
                }
            }
        }
        let missing = || ImageError::damaged(path, format!("no tier holds {name}")).into();
        Err(failure.unwrap_or_else(missing))
    }

    fn copy(&self, tier: &dyn Tier, key: &str, item: &pack::Item, path: &Path) -> Result<(), StorageError> {
        let file = create_private(path)?;
        let (mut buf, mut out, mut at) = (Buffer::default(), Buffer::default(), 0);
        for piece in &item.pieces {
            self.control.check()?;
            read_piece(tier, key, piece, &mut buf, &mut out)?;
            direct::write_all_at(&file, &out, at).map_err(|e| ImageError::io("write", path, e))?;
            at += out.len() as u64;
        }
        Ok(file.sync_all().map_err(|e| ImageError::io("fsync", path, e))?)
    }

    fn chunk(&mut self, entry: &ChunkEntry) -> Result<(), StorageError> {
        let path = self.store.path_in(Place::Home, entry.id);
        let found = self.store.open(entry).map_err(StorageError::from);
        match found.and_then(|c| check_pages(&c, self.control)) {
            Ok(()) => {
                self.done.present += 1;
                return Ok(());
            }
            Err(StorageError::Cancelled) => return Err(StorageError::Cancelled),
            Err(e) => tracing::info!(chunk = entry.id, reason = %e, "fetching"),
        }
        let temporary = self.store.name_in(Place::Home, entry.id, false);
        let control = self.control;
        let good = || check_pages(&Chunk::open(temporary.clone(), entry)?, control);
        self.item(&pack::chunk_name(entry), &temporary, &good)?;
        std::fs::rename(&temporary, &path).map_err(|e| ImageError::io("rename", &temporary, e))?;
        Ok(())
    }

    /// Where the generation's own files go, and which one they belong to; none where they are whole in their place.
    fn draft(&mut self, gen: &Path, wanted: &Listed) -> Result<Option<PathBuf>, ImageError> {
        make_private(gen)?;
        let (m, manifest) = (&wanted.manifest, wanted.record.manifest.as_bytes());
        let is_of_it = |dir: &Path| files::read(&dir.join(MANIFEST_FILE), MAX_BYTES).is_ok_and(|found| found == manifest);
        let target = gen.join(format!("{:06}", m.generation));
        if is_of_it(&target) && m.files.iter().all(|f| file_is_whole(&target.join(&f.name), f)) {
            self.done.present += m.files.len() as u64;
            return Ok(None);
        }
        let draft = gen.join(format!("{UNDER_WAY}{:06}", m.generation));
        if is_of_it(&draft) {
            return Ok(Some(draft));
        }
        if draft.exists() {
            std::fs::remove_dir_all(&draft).map_err(|e| ImageError::io("remove", &draft, e))?;
        }
        make_private(&draft)?;
        let path = draft.join(MANIFEST_FILE);
        let file = create_private(&path)?;
        file.write_all_at(manifest, 0)
            .and_then(|()| file.sync_all())
            .map_err(|e| ImageError::io("write", &path, e))?;
        Ok(Some(draft))
    }

    /// Brings the generation's own files into `draft`, and that into its place.
    fn generation(&mut self, gen: &Path, draft: &Path, wanted: &Listed) -> Result<(), StorageError> {
        let (m, manifest) = (&wanted.manifest, wanted.record.manifest.as_bytes());
        for f in &m.files {
            let path = draft.join(&f.name);
            let good = || match f.xxh3 {
                Some(_) if !file_is_whole(&path, f) => Err(ImageError::damaged(&path, "checksum does not match").into()),
                _ => Ok(()),
            };
            self.item(&pack::file_name(m.generation, checksum(manifest), &f.name), &path, &good)?;
            self.control.bytes.fetch_add(f.bytes, Ordering::Relaxed);
        }
        sync(draft)?;
        dir::replace(draft, &gen.join(format!("{:06}", m.generation))).map_err(|e| ImageError::io("rename", draft, e))?;
        Ok(sync(gen)?)
    }
}

fn make_private(dir: &Path) -> Result<(), ImageError> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(ImageError::io("make", dir, e)),
        _ => Ok(()),
    }
}

fn sync(dir: &Path) -> Result<(), ImageError> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(|e| ImageError::io("sync", dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::items;
    use crate::pack::Writer;
    use crate::testing::Scratch;

    #[test]
    fn damage_of_what_was_brought_names_tier_and_pack() {
        let s = Scratch::new("fetch");
        let m = s.commit(&mut s.engine(), 1, &Scratch::memory(10, 1));
        let tier = s.tier("pfs");
        let text = std::fs::read_to_string(s.generation(1).join(MANIFEST_FILE)).unwrap();
        // Its checksums are right, but it holds something else than it says.
        let mut w = Writer::begin(&tier, "packs/000001-1.bpk".into()).unwrap();
        for (name, bytes) in items(&m, checksum(text.as_bytes())) {
            w.item(name);
            w.piece(&vec![0; bytes as usize], bytes as usize, false).unwrap();
        }
        let (pack, _) = w.finish(false).unwrap();
        Catalogue::commit(&tier, text, vec![pack], Vec::new()).unwrap();
        let c = Catalogue::read(&tier, &Catalogue::default()).unwrap();
        std::fs::remove_dir_all(s.job().join("chunks")).unwrap();
        let e = fetch(&s.job(), &c.generations[0], &[(&tier, &c)], &Control::default()).unwrap_err();
        assert!(e.is_contradicted(), "{e}");
        let e = e.to_string();
        assert!(e.starts_with("tier pfs: packs/000001-1.bpk: damaged: chunk/"), "{e}");
    }
}
