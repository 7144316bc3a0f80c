//! The directories of chunks: names, what is there, removal of what no generation needs.
//!
//! A chunk lies at home, in `chunks/` of the job directory, or in the directory of a local tier (see `place`), which
//! `places.json` lists. Who looks for one looks at home first, then in the tiers, and once more at home, because it may
//! have been moved meanwhile.

use crate::chunk;
use crate::needed::Needed;
use crate::numbers::Numbers;
use crate::place::desk::Place;
use belay_image::manifest::ChunkEntry;
use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use belay_kernel::{dir, trust};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Name of the directory in the job directory.
pub const DIRECTORY: &str = "chunks";
const TEMPORARY: &str = ".tmp-";

/// Name of the list of local tiers in the job directory.
pub const PLACES: &str = "places.json";
/// Longest list that is read.
const MAX_PLACES: u64 = 1 << 20;

/// A local tier: where its chunks are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalTier {
    /// Its name in the configuration.
    pub name: String,
    /// It lies in memory.
    pub memory: bool,
    /// The directory of the job's chunks in it.
    pub dir: PathBuf,
    /// Where that is, in a job that may have several hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
}

/// A host of a job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// What it calls itself.
    pub name: String,
    /// What a remote shell was told to reach it, where that named one host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub called: Option<String>,
}

impl Host {
    /// Whether this is it.
    pub fn is_here(&self) -> bool {
        self.name == this_host()
    }
}

impl fmt::Display for LocalTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Some(host) => write!(f, "{} of {}", self.name, host.name),
            None => f.write_str(&self.name),
        }
    }
}

impl LocalTier {
    /// Whether it is, if anywhere, on this host.
    pub fn is_here(&self) -> bool {
        self.host.as_ref().is_none_or(Host::is_here)
    }
}

/// The name of this host: what it was when that was first asked, and in processes that were forked since. A restarted
/// job, and its agent, may be called otherwise.
pub fn this_host() -> String {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(host_name).clone()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The store of one job.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    tiers: Arc<[LocalTier]>,
    /// Those on other hosts.
    elsewhere: Arc<[LocalTier]>,
    /// Numbers of chunks that may be used where nobody sees them.
    numbers: Option<Arc<Numbers>>,
}

/// What a removal removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Chunks.
    pub chunks: u64,
    /// Bytes of their files.
    pub bytes: u64,
}

fn name(id: u32) -> String {
    format!("pages-{id:08x}.bpg")
}

/// The number of the chunk with file name `name`.
fn number(file: &str) -> Option<u32> {
    let digits = file.strip_prefix("pages-")?.strip_suffix(".bpg")?;
    u32::from_str_radix(digits, 16).ok().filter(|id| name(*id) == file)
}

impl Store {
    /// The store in job directory `job`.
    pub fn of_job(job: &Path) -> Self {
        let listed = listed(job).unwrap_or_else(|e| {
            tracing::warn!(error = %e, "local tiers are not known");
            Vec::new()
        });
        let (here, elsewhere): (Vec<_>, Vec<_>) = listed.into_iter().partition(LocalTier::is_here);
        Self {
            dir: job.join(DIRECTORY),
            tiers: own(job, here).into(),
            elsewhere: elsewhere.into(),
            numbers: None,
        }
    }

    /// The store that the generation in directory `generation` refers to: `gen` and `chunks` are neighbours.
    pub fn of_generation(generation: &Path) -> Self {
        let job = generation.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        Self::of_job(job)
    }

    pub(crate) fn with_tiers(self, tiers: Vec<LocalTier>) -> Self {
        let tiers = tiers.into();
        Self { tiers, ..self }
    }

    /// Makes the directory, where it is not there yet.
    pub fn create(&self) -> Result<(), ImageError> {
        match DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(ImageError::io("make", &self.dir, e)),
            _ => Ok(()),
        }
    }

    /// Has the numbers of chunks noted in the job directory from now on; the first one that is free by that.
    pub(crate) fn keep_numbers(&mut self) -> Result<u32, ImageError> {
        let numbers = Numbers::open(self.dir.parent().unwrap_or(Path::new(".")))?;
        let first = numbers.end();
        self.numbers = Some(Arc::new(numbers));
        Ok(first)
    }

    /// The noted numbers, where they are noted.
    pub(crate) fn numbers(&self) -> Option<&Numbers> {
        self.numbers.as_deref()
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// The local tiers.
    pub fn tiers(&self) -> &[LocalTier] {
        &self.tiers
    }

    /// Local tiers on other hosts, in which chunks may lie.
    pub fn elsewhere(&self) -> &[LocalTier] {
        &self.elsewhere
    }

    /// Whether chunk `id` is not here, and may lie in a local tier of another host.
    pub fn is_elsewhere(&self, id: u32) -> bool {
        !self.elsewhere.is_empty() && !self.path(id).exists()
    }

    /// The local tiers on other hosts, as text.
    pub fn places_elsewhere(&self) -> String {
        let places: Vec<String> = self.elsewhere.iter().map(LocalTier::to_string).collect();
        places.join(" or ")
    }

    /// The chunks that lie at home.
    pub fn at_home(&self) -> Result<BTreeSet<u32>, ImageError> {
        let names = self.names_in(Place::Home)?;
        Ok(names.iter().filter_map(|file| number(file)).collect())
    }

    /// Whether local tier `tier` lies in memory.
    pub fn is_memory(&self, tier: usize) -> bool {
        self.tiers.get(tier).is_some_and(|t| t.memory)
    }

    fn directory_of(&self, place: Place) -> &Path {
        match place {
            Place::Tier(tier) => self.tiers.get(tier).map_or(&self.dir, |t| &t.dir),
            Place::Home => &self.dir,
        }
    }

    /// File of chunk `id` in `place`.
    pub fn path_in(&self, place: Place, id: u32) -> PathBuf {
        self.directory_of(place).join(name(id))
    }

    /// File of chunk `id` in `place`, under the name that it has before or after it is published.
    pub fn name_in(&self, place: Place, id: u32, published: bool) -> PathBuf {
        let prefix = if published { "" } else { TEMPORARY };
        self.directory_of(place).join(format!("{prefix}{}", name(id)))
    }

    /// File of chunk `id`, wherever it lies; at home where it is nowhere.
    pub fn path(&self, id: u32) -> PathBuf {
        self.path_in(self.place_of(id), id)
    }

    /// The file called `name`, that of a chunk, wherever it lies; at home where it is nowhere.
    pub fn path_of_file(&self, name: &str) -> PathBuf {
        number(name).map_or_else(|| self.dir.join(name), |id| self.path(id))
    }

    /// Where chunk `id` lies; at home where it is nowhere.
    pub fn place_of(&self, id: u32) -> Place {
        self.look(|place| self.path_in(place, id).exists())
    }

    /// All places: home, and the local tiers.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> {
        [Place::Home].into_iter().chain((0..self.tiers.len()).map(Place::Tier))
    }

    fn look(&self, is_in: impl Fn(Place) -> bool) -> Place {
        if self.tiers.is_empty() || is_in(Place::Home) {
            return Place::Home;
        }
        let found = (0..self.tiers.len()).map(Place::Tier).find(|p| is_in(*p));
        // Moved while we looked.
        found.filter(|_| !is_in(Place::Home)).unwrap_or(Place::Home)
    }

    /// Opens a chunk at its place; once more, where it was moved meanwhile.
    fn with_path<T>(&self, id: u32, open: impl Fn(PathBuf) -> Result<T, ImageError>) -> Result<T, ImageError> {
        let path = self.path(id);
        match open(path.clone()) {
            Err(_) if path != self.path_in(Place::Home, id) && !path.exists() => open(self.path(id)),
            Err(_) if !self.elsewhere.is_empty() && !path.exists() => Err(ImageError::Elsewhere {
                path: path.display().to_string(),
                places: self.places_elsewhere(),
            }),
            other => other,
        }
    }

    /// Opens a chunk.
    pub fn open(&self, entry: &ChunkEntry) -> Result<chunk::Chunk, ImageError> {
        self.with_path(entry.id, |path| chunk::Chunk::open(path, entry))
    }

    /// Whether a chunk's file is there with its length.
    pub fn check_present(&self, entry: &ChunkEntry) -> Result<(), ImageError> {
        self.with_path(entry.id, |path| chunk::check_present(&path, entry))
    }

    /// All files: place, name and length.
    fn entries(&self) -> Result<Vec<(Place, String, u64)>, ImageError> {
        let mut out = Vec::new();
        for place in self.places() {
            let there = self.entries_in(place)?;
            out.extend(there.into_iter().map(|(file, bytes)| (place, file, bytes)));
        }
        Ok(out)
    }

    /// The names of the files in `place`.
    fn names_in(&self, place: Place) -> Result<Vec<String>, ImageError> {
        let dir = self.directory_of(place);
        let fail = |e| ImageError::io("read", dir, e);
        let list = match std::fs::read_dir(dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(fail)?,
        };
        list.map(|e| Ok(e.map_err(fail)?.file_name().to_string_lossy().into_owned()))
            .collect()
    }

    /// The files in `place`: name and length.
    fn entries_in(&self, place: Place) -> Result<Vec<(String, u64)>, ImageError> {
        let dir = self.directory_of(place);
        let mut out = Vec::new();
        for file in self.names_in(place)? {
            let bytes = match std::fs::symlink_metadata(dir.join(&file)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(|e| ImageError::io("read", dir, e))?.len(),
            };
            out.push((file, bytes));
        }
        Ok(out)
    }

    /// Bytes of all files in the store.
    pub fn bytes(&self) -> Result<u64, ImageError> {
        Ok(self.entries()?.iter().map(|(_, _, bytes)| bytes).sum())
    }

    /// The chunks in local tiers, as (tier, number, length).
    pub fn in_tiers(&self) -> Result<Vec<(usize, u32, u64)>, ImageError> {
        let in_tier = |(place, file, bytes): (Place, String, u64)| match place {
            Place::Tier(tier) => Some((tier, number(&file)?, bytes)),
            Place::Home => None,
        };
        Ok(self.entries()?.into_iter().filter_map(in_tier).collect())
    }

    /// A number greater than that of any chunk, finished or not.
    pub fn next_id(&self) -> Result<u32, ImageError> {
        let entries = self.entries()?;
        let ids = entries
            .iter()
            .filter_map(|(_, n, _)| number(n.strip_prefix(TEMPORARY).unwrap_or(n)));
        Ok(ids.max().map_or(1, |id| id.saturating_add(1)))
    }

    /// Removes every chunk that is not in `needed`, and every unfinished one. Call while no checkpoint is being written.
    /// In a tier also what only has the number of a chunk that is needed: it is of an earlier time, or another job.
    pub fn collect(&self, needed: &Needed) -> Result<Removed, ImageError> {
        self.collect_but(needed, &BTreeSet::new())
    }

    /// The same, but unfinished files of chunks in `moving` stay.
    pub(crate) fn collect_but(&self, needed: &Needed, moving: &BTreeSet<u32>) -> Result<Removed, ImageError> {
        let mut removed = Removed::default();
        for (place, file, bytes) in self.entries()? {
            let unneeded = match file.strip_prefix(TEMPORARY) {
                Some(finished) => !number(finished).is_some_and(|id| moving.contains(&id)),
                None => number(&file).is_some_and(|id| self.is_unneeded(place, id, needed)),
            };
            if unneeded {
                let path = self.directory_of(place).join(&file);
                match std::fs::remove_file(&path) {
                    // Moved since it was listed.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    other => other.map_err(|e| ImageError::io("remove", &path, e))?,
                }
                removed.chunks += 1;
                removed.bytes += bytes;
            }
        }
        Ok(removed)
    }

    /// Whether nobody needs chunk `id` as it lies in `place`.
    pub(crate) fn is_unneeded(&self, place: Place, id: u32, needed: &Needed) -> bool {
        !needed.contains(id) || (place != Place::Home && needed.is_another(id, &self.path_in(place, id)))
    }

    /// Makes the names in the directory durable.
    pub fn sync(&self) -> Result<(), ImageError> {
        self.sync_place(Place::Home)
    }

    /// Makes the names of the chunks in `place` durable.
    pub(crate) fn sync_place(&self, place: Place) -> Result<(), ImageError> {
        let dir = self.directory_of(place);
        File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(|e| ImageError::io("sync", dir, e))
    }
}

/// The local tiers of the job in directory `job`, whether they are there or not; none where there is no list. Fails
/// where there is one that cannot be read.
pub fn listed(job: &Path) -> Result<Vec<LocalTier>, ImageError> {
    let path = job.join(PLACES);
    match files::read(&path, MAX_PLACES) {
        Ok(text) => decode_list(&path, &text),
        Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Decodes the list of local tiers in `text`, naming it `path` in errors.
pub(crate) fn decode_list(path: &Path, text: &[u8]) -> Result<Vec<LocalTier>, ImageError> {
    serde_json::from_slice(text).map_err(|e| ImageError::damaged(path, e.to_string()))
}

/// Those of `tiers` that are there, belong to whom the job belongs, and cannot be exchanged by others.
fn own(job: &Path, tiers: Vec<LocalTier>) -> Vec<LocalTier> {
    if tiers.is_empty() {
        return tiers;
    }
    let owner = std::fs::metadata(job).map(|m| m.uid()).ok();
    let own = |t: &LocalTier| {
        let there = std::fs::symlink_metadata(&t.dir).ok();
        let is_own = there.is_some_and(|m| m.is_dir() && Some(m.uid()) == owner && m.mode() & 0o022 == 0);
        is_own && t.dir.parent().is_some_and(|above| trust::holder(above).is_ok())
    };
    tiers.into_iter().filter(own).collect()
}

/// Notes the local tiers of the job in directory `job`, durably, and then makes the directories of those that are
/// `used`: what is there is noted.
pub fn set_local_tiers(job: &Path, tiers: &[LocalTier], used: &[LocalTier]) -> Result<(), ImageError> {
    let path = job.join(PLACES);
    if tiers.is_empty() && !path.exists() {
        return Ok(());
    }
    write_list(job, tiers)?;
    used.iter().try_for_each(|t| make(&t.dir))
}

/// Makes directory `dir` and those above it, durably: what lies in one is not found after a power cut where the name of
/// the directory itself is lost.
fn make(dir: &Path) -> Result<(), ImageError> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|d| !d.exists()).collect();
    match DirBuilder::new().mode(0o700).recursive(true).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(ImageError::io("make", dir, e)),
        _ => {}
    }
    let sync = |new: &&Path| dir::sync_above(new).map_err(|e| ImageError::io("sync the directory of", new, e));
    missing.iter().try_for_each(sync)
}

/// Before the job in directory `job` writes a chunk: what may lie in local tiers of hosts that it has left is given up,
/// because chunks get the same numbers from now on. Whether there were such tiers.
pub fn forget_elsewhere(job: &Path) -> Result<bool, ImageError> {
    let (here, elsewhere): (Vec<_>, Vec<_>) = listed(job)?.into_iter().partition(LocalTier::is_here);
    if elsewhere.is_empty() {
        return Ok(false);
    }
    write_list(job, &here).map(|()| true)
}

fn write_list(job: &Path, tiers: &[LocalTier]) -> Result<(), ImageError> {
    let path = job.join(PLACES);
    let new = job.join(".places.json.new");
    let mut file = create_private(&new)?;
    let text = serde_json::to_vec_pretty(tiers).map_err(|e| ImageError::damaged(&new, e.to_string()))?;
    file.write_all(&text)
        .and_then(|()| file.sync_all())
        .map_err(|e| ImageError::io("write", &new, e))?;
    std::fs::rename(&new, &path).map_err(|e| ImageError::io("rename", &new, e))?;
    File::open(job)
        .and_then(|d| d.sync_all())
        .map_err(|e| ImageError::io("sync", job, e))
}

/// A new job begins in directory `job`, or all that was there has been removed: what lies in local tiers that are not
/// there now, or on other hosts, is given up. The tiers that were forgotten.
pub fn forget_absent(job: &Path) -> Result<Vec<LocalTier>, ImageError> {
    let (there, absent): (Vec<_>, Vec<_>) = listed(job)?.into_iter().partition(|t| t.is_here() && t.dir.exists());
    if !absent.is_empty() {
        write_list(job, &there)?;
    }
    Ok(absent)
}

/// The chunk files that lie in directory `dir` of a local tier.
pub fn chunks_in(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    names.filter(|e| number(&e.file_name().to_string_lossy()).is_some()).count()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::testing;

    /// Chunks of these numbers, none of which is there.
    pub(crate) fn needed(ids: impl IntoIterator<Item = u32>) -> Needed {
        let entry = |id| ChunkEntry { id, pages: 1, xxh3: 0 };
        ids.into_iter().map(entry).collect()
    }

    /// A store in a job directory of its own, removed at the end.
    pub(crate) struct Scratch(pub(crate) PathBuf, #[expect(dead_code)] testing::Scratch);

    impl Scratch {
        pub(crate) fn new(test: &str) -> (Self, Store) {
            let dir = testing::Scratch::new(test);
            let job = dir.0.join("job");
            let store = Store::of_job(&job);
            store.create().unwrap();
            (Self(job, dir), store)
        }
    }

    #[test]
    fn only_what_is_needed_stays_and_numbers_go_on() {
        let (_s, store) = Scratch::new("collect");
        assert_eq!(store.next_id().unwrap(), 1);
        for id in [1, 2, 0x1f] {
            std::fs::write(store.path(id), [0; 10]).unwrap();
        }
        std::fs::write(store.name_in(Place::Home, 0x20, false), [0; 7]).unwrap();
        std::fs::write(store.dir.join("unrelated"), b"x").unwrap();
        assert_eq!((store.next_id().unwrap(), store.bytes().unwrap()), (0x21, 38));
        let removed = store.collect(&needed([2])).unwrap();
        assert_eq!(removed, Removed { chunks: 3, bytes: 27 });
        assert!(store.path(2).exists() && store.dir.join("unrelated").exists());
        assert_eq!(Store::of_generation(&store.dir.with_file_name("gen/000001")).dir, store.dir);
    }

    #[test]
    fn tiers_of_other_hosts_are_named_until_they_are_given_up() {
        let (s, _) = Scratch::new("elsewhere");
        let tier = |name: &str| LocalTier {
            name: "ram".into(),
            memory: true,
            dir: s.0.join("same-path"),
            host: Some(Host {
                name: name.into(),
                called: None,
            }),
        };
        let (here, there) = (tier(&this_host()), tier("another host"));
        set_local_tiers(&s.0, &[here.clone(), there.clone()], std::slice::from_ref(&here)).unwrap();
        let store = Store::of_job(&s.0);
        assert_eq!((store.tiers(), store.elsewhere()), (&[here.clone()][..], &[there][..]));
        std::fs::write(store.path_in(Place::Tier(0), 1), [0; 10]).unwrap();
        std::fs::write(store.path_in(Place::Home, 2), [0; 10]).unwrap();
        assert_eq!(store.at_home().unwrap(), BTreeSet::from([2]));
        let entry = ChunkEntry {
            id: 3,
            pages: 1,
            xxh3: 0,
        };
        let why = store.check_present(&entry).unwrap_err().to_string();
        assert!(why.contains("ram of another host"), "{why}");
        assert!(forget_elsewhere(&s.0).unwrap() && !forget_elsewhere(&s.0).unwrap());
        assert_eq!(listed(&s.0).unwrap(), [here]);
        assert!(!Store::of_job(&s.0)
            .check_present(&entry)
            .unwrap_err()
            .to_string()
            .contains("another"));
    }

    #[test]
    fn a_chunk_that_is_moved_home_while_it_is_looked_for_is_found() {
        use std::cell::Cell;
        let (s, _) = Scratch::new("looks");
        let tiers = ["a", "b"].map(|name| LocalTier {
            name: name.into(),
            memory: false,
            dir: s.0.join(name),
            host: None,
        });
        set_local_tiers(&s.0, &tiers, &tiers).unwrap();
        let store = Store::of_job(&s.0);
        let (tier, home) = (store.path_in(Place::Tier(1), 1), store.path_in(Place::Home, 1));
        let move_home = || std::fs::rename(&tier, &home).unwrap();
        // After so many looks: at home, in the first tier, in the second, at home.
        for after in 0..=4 {
            std::fs::write(&tier, after.to_string()).unwrap();
            let looks = Cell::new(0);
            let found = store.look(|place| {
                if looks.replace(looks.get() + 1) == after {
                    move_home();
                }
                store.path_in(place, 1).exists()
            });
            let expected = if after == 4 { Place::Tier(1) } else { Place::Home };
            assert_eq!(found, expected, "moved after {after} looks");
            // And once more, where it is moved between the last look and the opening.
            drop(std::fs::rename(&home, &tier));
            let opened = Cell::new(0);
            let text = store.with_path(1, |path| {
                if opened.replace(opened.get() + 1) == 0 {
                    move_home();
                }
                std::fs::read_to_string(&path).map_err(|e| ImageError::io("read", &path, e))
            });
            assert_eq!((text.unwrap(), opened.get()), (after.to_string(), 2));
            std::fs::remove_file(&home).unwrap();
        }
        let gone = store.with_path(1, |path| std::fs::read(&path).map_err(|e| ImageError::io("read", &path, e)));
        assert!(gone.unwrap_err().to_string().contains("chunks/pages-00000001.bpg"));
    }
}
