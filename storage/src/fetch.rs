//! The fetch: brings a generation from durable tiers back into the job directory, and with it heals one that is damaged there.
//!
//! ```text
//! what would be overwritten and is needed by others: refused
//! gen/.fetching-000007/manifest.json                                   says which chunks are needed from now on
//! chunks/.tmp-pages-… ── checked, fsync ── rename ──> chunks/pages-…   only those that are missing or damaged
//! chunks/ ── fsync; then what lies of them in local tiers goes
//! gen/.fetching-000007/ ── files, fsync ── rename ──> gen/000007/
//! ```
//! Each item is taken from the first tier that has it whole, and nothing gets its name before it has been compared with
//! its checksums. A kill leaves chunks that are whole, which the next fetch uses, and left-overs, which the next agent
//! removes; when a restarted job has a checkpoint of its own, also what is under way.

use crate::catalogue::{mark, Catalogue, Listed};
use crate::chunk::{self, Chunk};
use crate::control::Control;
use crate::pack::{self, read_piece};
use crate::place::desk::Place;
use crate::store::Store;
use crate::tier::Tier;
use crate::{StorageError, PAGE};
use belay_image::manifest::{ChunkEntry, FileEntry, Manifest, MANIFEST_FILE, MAX_BYTES};
use belay_image::sections::create_private;
use belay_image::{checksum, files, ImageError};
use belay_kernel::dir;
use belay_kernel::direct::{self, Buffer};
use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
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
        brought: Vec::new(),
    };
    fetch.store.create()?;
    let gen = job.join("gen");
    fetch.refuse_other(&gen, wanted)?;
    let draft = fetch.draft(&gen, wanted)?;
    for c in &m.chunks {
        fetch.chunk(c)?;
    }
    fetch.store.sync()?;
    fetch.clear_tiers()?;
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
    /// Numbers of chunks that were brought.
    brought: Vec<u32>,
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
        self.brought.push(entry.id);
        Ok(())
    }

    /// Nothing here is overwritten that another generation needs, or that is another one: numbers are used twice where a
    /// copy of the job directory went on by itself, or where a tier could not be read for want of a key.
    fn refuse_other(&self, gen: &Path, wanted: &Listed) -> Result<(), StorageError> {
        let number = wanted.manifest.generation;
        let refuse = |reason: String| Err(StorageError::InUse { number, reason });
        let (mut others, mut unread) = (Vec::new(), false);
        for n in numbers(gen)? {
            let dir = gen.join(format!("{n:06}"));
            match Manifest::read(&dir) {
                Ok(m) if n != number => others.push(m),
                Ok(_) if files::read(&dir.join(MANIFEST_FILE), MAX_BYTES)? != wanted.record.manifest.as_bytes() => {
                    return refuse(format!("another one with its number is {}", dir.display()));
                }
                Ok(_) => {}
                Err(_) => unread |= n != number,
            }
        }
        for c in &wanted.manifest.chunks {
            for path in self.store.places().map(|place| self.store.path_in(place, c.id)) {
                let Some(there) = chunk::mark(&path).ok().filter(|there| *there != chunk::mark_of(c)) else {
                    continue;
                };
                let has_it = |m: &&Manifest| m.chunks.iter().any(|o| o.id == c.id && chunk::mark_of(o) == there);
                if let Some(m) = others.iter().find(has_it) {
                    let (path, by) = (path.display(), m.generation);
                    return refuse(format!("{path}, which it would overwrite, is needed by generation {by}"));
                }
                if unread && chunk::is_sealed(&path) {
                    let path = path.display();
                    return refuse(format!(
                        "{path}, which it would overwrite, may be needed by a generation whose manifest cannot be read"
                    ));
                }
            }
        }
        Ok(())
    }

    /// What lies in local tiers of chunks that have been brought home, and are durable there: it was damaged.
    fn clear_tiers(&self) -> Result<(), ImageError> {
        let (store, _) = self.store.clone().own_tiers();
        for id in &self.brought {
            for place in store.places().filter(|place| *place != Place::Home) {
                let path = store.path_in(place, *id);
                match std::fs::remove_file(&path) {
                    Err(e) if e.kind() != ErrorKind::NotFound => return Err(ImageError::io("remove", &path, e)),
                    _ => {}
                }
            }
        }
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

/// The numbers of the generations in `gen`.
fn numbers(gen: &Path) -> Result<Vec<u64>, ImageError> {
    let fail = |e| ImageError::io("read", gen, e);
    let list = match std::fs::read_dir(gen) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        list => list.map_err(fail)?,
    };
    let mut out = Vec::new();
    for entry in list {
        out.extend(entry.map_err(fail)?.file_name().to_str().and_then(|n| n.parse::<u64>().ok()));
    }
    Ok(out)
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
    use crate::store::{set_local_tiers, LocalTier};
    use crate::testing::Scratch;

    /// Has `tier` hold generation `m` as it lies in the job directory.
    fn put(s: &Scratch, tier: &dyn Tier, m: &Manifest) -> Catalogue {
        let text = std::fs::read_to_string(s.generation(m.generation).join(MANIFEST_FILE)).unwrap();
        let mut w = Writer::begin(tier, format!("packs/{:06}-1.bpk", m.generation)).unwrap();
        for (name, _) in items(m, checksum(text.as_bytes())) {
            let chunk = m.chunks.iter().find(|c| pack::chunk_name(c) == name);
            let path = match chunk {
                Some(c) => Store::of_job(&s.job()).path(c.id),
                None => s.generation(m.generation).join(name.rsplit('/').next().unwrap()),
            };
            let data = std::fs::read(path).unwrap();
            w.item(name);
            w.piece(&data, data.len(), false).unwrap();
        }
        let (pack, _) = w.finish(false).unwrap();
        Catalogue::commit(tier, text, vec![pack], Vec::new()).unwrap();
        Catalogue::read(tier, &Catalogue::default()).unwrap()
    }

    #[test]
    fn what_other_generations_need_is_not_overwritten() {
        let s = Scratch::new("in-use");
        let m = s.commit(&mut s.engine(), 1, &Scratch::memory(10, 1));
        let tier = s.tier("pfs");
        let c = put(&s, &tier, &m);
        let fetch = || fetch(&s.job(), &c.generations[0], &[(&tier, &c)], &Control::default());
        // Files without a checksum are always brought, and with them all of the generation.
        assert_eq!(fetch().unwrap().items, 2);
        // The job directory was put back to what it was before, and the job went on: its chunks have the same numbers.
        std::fs::remove_dir_all(s.job().join("chunks")).unwrap();
        std::fs::remove_dir_all(s.generation(1)).unwrap();
        let other = s.commit(&mut s.engine(), 5, &Scratch::memory(10, 2));
        assert_eq!(m.chunks[0].id, other.chunks[0].id);
        let store = Store::of_job(&s.job());
        let why = fetch().unwrap_err();
        assert!(why.is_damage() && !why.is_contradicted(), "{why}");
        assert!(why.to_string().ends_with("is needed by generation 5"), "{why}");
        let manifest = s.generation(5).join(MANIFEST_FILE);
        let text = std::fs::read(&manifest).unwrap();
        std::fs::write(&manifest, "{").unwrap();
        let why = fetch().unwrap_err().to_string();
        assert!(why.ends_with("whose manifest cannot be read"), "{why}");
        std::fs::write(&manifest, text).unwrap();
        check_pages(&store.open(&other.chunks[0]).unwrap(), &Control::default()).unwrap();
        std::fs::rename(s.generation(5), s.generation(1)).unwrap();
        let why = fetch().unwrap_err().to_string();
        assert!(why.contains("another one with its number is "), "{why}");
        // What nobody needs may be in the way.
        std::fs::remove_dir_all(s.generation(1)).unwrap();
        assert_eq!(fetch().unwrap().items, 3);
        check_pages(&store.open(&m.chunks[0]).unwrap(), &Control::default()).unwrap();
    }

    #[test]
    fn what_is_damaged_in_a_local_tier_goes_when_it_has_been_brought() {
        let s = Scratch::new("heals");
        let m = s.commit(&mut s.engine(), 1, &Scratch::memory(10, 1));
        let tier = s.tier("pfs");
        let c = put(&s, &tier, &m);
        let ssd = LocalTier {
            name: "ssd".into(),
            memory: false,
            dir: s.0.join("ssd"),
            host: None,
        };
        set_local_tiers(&s.job(), std::slice::from_ref(&ssd), std::slice::from_ref(&ssd)).unwrap();
        let store = Store::of_job(&s.job());
        let [home, there] = [Place::Home, Place::Tier(0)].map(|p| store.path_in(p, m.chunks[0].id));
        let mut data = std::fs::read(&home).unwrap();
        data[5000] ^= 1;
        std::fs::write(&there, data).unwrap();
        std::fs::remove_file(&home).unwrap();
        let done = fetch(&s.job(), &c.generations[0], &[(&tier, &c)], &Control::default()).unwrap();
        assert_eq!((done.items, there.exists()), (3, false));
        check_pages(&store.open(&m.chunks[0]).unwrap(), &Control::default()).unwrap();
    }

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
