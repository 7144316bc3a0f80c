//! Generations in the job directory: listing, making, committing, retention.
//!
//! ```text
//! gen/.tmp-000008/ ──(files, manifest.json, fsync)── rename, fsync ──> gen/000008/ ── rename, fsync ──> gen/.tmp-000008 ── removed
//! ```
//! So a name without `.tmp-` is a whole generation, whatever was killed when. The chunks that it refers to have got
//! their names just before; those that no generation refers to any more are removed by [`needed_chunks`] and the store.

mod draft;
mod mark;
mod status;

pub use draft::{ms, Draft, Facts};
pub use mark::{is_marked, mark, unmark, unmark_all};
pub use status::status;

use mark::Marks;
pub(crate) use status::add_parts;

use crate::{state, sys, Failure};
use belay_abi::histories::TEMPORARY;
use belay_image::manifest::{Manifest, MANIFEST_FILE, MAX_NUMBER};
use belay_image::ImageError;
use belay_storage::fetch::UNDER_WAY;
use belay_storage::needed::Needed;
use belay_storage::store::Store;
use belay_wire::{Exit, GenerationStatus};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Name of generation `number`'s directory.
pub fn name(number: u64) -> String {
    format!("{number:06}")
}

/// A committed generation.
#[derive(Debug)]
pub struct Generation {
    /// Its number.
    pub number: u64,
    /// Its directory.
    pub path: PathBuf,
    /// Its manifest, where every file and chunk it lists is present with its length.
    pub manifest: Result<Manifest, ImageError>,
    /// Why it is not whole all the same: somebody has read it, and found damage.
    pub damage: Option<String>,
}

impl Generation {
    /// Generation `number` in `dir`, whether or not it is there.
    pub fn at(dir: &Path, number: u64) -> Self {
        Self::open(number, dir.join(name(number)))
    }

    /// The generation in directory `path`, which is called after its number.
    pub(crate) fn here(path: &Path) -> Self {
        let number = path.file_name().and_then(|n| n.to_str()?.parse().ok());
        Self::open(number.unwrap_or_default(), path.to_owned())
    }

    pub(crate) fn open(number: u64, path: PathBuf) -> Self {
        let known = (&Store::of_generation(&path), &Marks::read(path.parent().unwrap_or(&path)));
        Self::open_with(number, path, known, &mut BTreeSet::new())
    }

    /// The same, where the store has been opened, and these chunks (number, pages) are known to be `present`.
    fn open_with(number: u64, path: PathBuf, (store, marks): (&Store, &Marks), present: &mut BTreeSet<(u32, u32)>) -> Self {
        let manifest = Manifest::read(&path).and_then(|m| {
            for f in &m.files {
                let file = path.join(&f.name);
                let found = std::fs::metadata(&file).map_err(|e| ImageError::io("stat", &file, e))?.len();
                if found != f.bytes {
                    return Err(ImageError::damaged(&file, format!("{found} bytes instead of {}", f.bytes)));
                }
            }
            let mut elsewhere = None;
            for c in &m.chunks {
                if present.contains(&(c.id, c.pages)) {
                    continue;
                }
                match store.check_present(c) {
                    Ok(()) => drop(present.insert((c.id, c.pages))),
                    // Damage, if there is any, says more.
                    Err(e @ ImageError::Elsewhere { .. }) => drop(elsewhere.get_or_insert(e)),
                    Err(e) => return Err(e),
                }
            }
            elsewhere.map_or(Ok(m), Err)
        });
        let damage = marks.why(number, &path);
        Self {
            number,
            path,
            manifest,
            damage,
        }
    }

    /// Whether the manifest is valid, every file and chunk has its length, and nobody has found damage.
    pub fn is_whole(&self) -> bool {
        self.manifest.is_ok() && self.damage.is_none()
    }

    /// The manifest of one that is whole.
    pub(crate) fn whole(&self) -> Option<&Manifest> {
        self.manifest.as_ref().ok().filter(|_| self.is_whole())
    }

    /// Marks it where the damage that `why` tells of would not be seen otherwise.
    pub fn is_damaged(&self, why: &str) {
        if self.is_whole() {
            mark(&self.path, why);
        }
    }

    /// The manifest, or why the generation is not whole.
    pub fn manifest(&self) -> Result<&Manifest, Failure> {
        self.manifest
            .as_ref()
            .map_err(|e| Failure::new(crate::failure::exit_of_image(e, Exit::Damaged), e.to_string()))
    }

    /// Refuses files that others could have written: a restart executes what they hold.
    pub fn check_owner(&self) -> Result<(), Failure> {
        let me = sys::euid();
        let store = Store::of_generation(&self.path);
        let m = self.manifest()?;
        let files = m.files.iter().map(|f| self.path.join(&f.name));
        let chunks = m.chunks.iter().map(|c| store.path(c.id));
        for path in files.chain(chunks).chain([self.path.clone(), self.path.join(MANIFEST_FILE)]) {
            let m = std::fs::metadata(&path).map_err(|e| Failure::io(format!("stat {}", path.display()), &e))?;
            let why = if m.uid() != me {
                format!("belongs to user {}, not to {me}; run as its owner", m.uid())
            } else if m.mode() & 0o022 != 0 {
                format!(
                    "has mode {:03o}, so others could have changed it; chmod go-w it if you trust it",
                    m.mode() & 0o777
                )
            } else {
                continue;
            };
            return Err(Failure::new(Exit::NotOurs, format!("{} {why}", path.display())));
        }
        Ok(())
    }

    /// What it consists of, also where some of that may lie on other hosts.
    fn held_anywhere(&self) -> Result<Cow<'_, Manifest>, String> {
        match &self.manifest {
            Ok(m) => Ok(Cow::Borrowed(m)),
            Err(ImageError::Elsewhere { .. }) => Manifest::read(&self.path).map(Cow::Owned).map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// As the status document shows it. What may lie on other hosts is not missing.
    pub fn status(&self) -> GenerationStatus {
        let damaged = |damage: String| GenerationStatus {
            generation: self.number,
            damage: Some(damage.into()),
            ..GenerationStatus::default()
        };
        let found = |m: Cow<'_, Manifest>| GenerationStatus {
            whole: self.damage.is_none(),
            damage: self.damage.clone().map(Into::into),
            ..status(&m)
        };
        self.held_anywhere().map_or_else(damaged, found)
    }
}

fn entries(dir: &Path) -> Result<Vec<String>, Failure> {
    let fail = |e| Failure::io(format!("read {}", dir.display()), &e);
    match std::fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(fail(e)),
        Ok(list) => list
            .map(|e| Ok(e.map_err(fail)?.file_name().to_string_lossy().into_owned()))
            .collect(),
    }
}

/// Numbers of the generations in `dir`, the oldest first.
pub(crate) fn numbers(dir: &Path) -> Result<Vec<u64>, Failure> {
    let mut numbers: Vec<u64> = entries(dir)?
        .iter()
        .filter_map(|n| n.parse().ok().filter(|number| *number < MAX_NUMBER && name(*number) == *n))
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The generations in `dir`, oldest first. Each chunk is looked for once, which on a shared file system takes its time
/// all the same: ask for [`numbers`] or [`manifests`] where they are enough.
pub fn list(dir: &Path) -> Result<Vec<Generation>, Failure> {
    let numbers = numbers(dir)?;
    let known = (&Store::of_generation(&dir.join("any")), &Marks::read(dir));
    let mut present = BTreeSet::new();
    let open = |n| Generation::open_with(n, dir.join(name(n)), known, &mut present);
    Ok(numbers.into_iter().map(open).collect())
}

/// What the generations in `dir` consist of, oldest first, wherever that may be.
pub(crate) fn manifests(dir: &Path) -> Result<impl Iterator<Item = (u64, Result<Manifest, ImageError>)> + '_, Failure> {
    let numbers = numbers(dir)?;
    Ok(numbers.into_iter().map(|n| (n, Manifest::read(&dir.join(name(n))))))
}

/// The order in which a restart tries generations `numbers` of `dir`: the newest first, then those in which damage has
/// been found, unless they may come from `elsewhere`, and last those that hold only what the command left behind when it
/// failed, which nobody wants to go on in place of the command.
pub(crate) fn order(dir: &Path, numbers: BTreeSet<u64>, elsewhere: &BTreeSet<u64>) -> Vec<u64> {
    let marks = Marks::read(dir);
    let rank = |n: &u64| {
        let path = dir.join(name(*n));
        let is_damaged = !elsewhere.contains(n) && marks.why(*n, &path).is_some();
        (state::has_failed(&path), is_damaged)
    };
    let mut order: Vec<u64> = numbers.into_iter().rev().collect();
    order.sort_by_cached_key(rank);
    order
}

/// The newest whole one of `generations`, oldest first, that holds most of the job: its command, unless that had failed
/// by then, and as many parts on other hosts as any.
pub(crate) fn fullest(generations: &[Generation]) -> Option<u64> {
    let whole = generations.iter().filter(|g| g.is_whole());
    let parts = |g: &Generation| crate::nodes::table::read(&g.path).map_or(0, |rows| rows.len());
    let held = whole.map(|g| (!state::has_failed(&g.path), parts(g), g.number));
    held.max().map(|(.., number)| number)
}

/// The newest whole one of `generations`, oldest first, in which nothing was left out: to go back to, should the program
/// take another way after a restart from a newer one.
pub(crate) fn complete(generations: &[Generation]) -> Option<u64> {
    let complete = |g: &&Generation| g.whole().is_some_and(|m| m.left_out.is_none()) && !state::has_failed(&g.path);
    generations.iter().rev().find(complete).map(|g| g.number)
}

/// Which of `generations`, oldest first, all parts keep beside the next one: each removes what is old by itself, and does
/// not know what others have found damaged.
pub(crate) fn for_all(generations: &[Generation], keep: u32) -> Vec<u64> {
    let whole = generations.iter().rev().filter(|g| g.is_whole()).map(|g| g.number);
    let newest = whole.take(keep.saturating_sub(1) as usize);
    newest.chain(fullest(generations)).chain(complete(generations)).collect()
}

/// Those of `generations` that are whole without what lies in tiers which may be lost; of a set of chunks `is_away` says
/// whether one of them lies there. A job falls back to the newest of these, so retention leaves that alone.
pub(crate) fn at_rest<'a>(
    generations: &'a [Generation],
    is_away: impl Fn(&BTreeSet<u32>) -> bool + 'a,
) -> impl DoubleEndedIterator<Item = &'a Generation> {
    let chunks = |m: &Manifest| m.chunks.iter().map(|c| c.id).collect();
    let is_home = move |g: &&Generation| g.whole().is_some_and(|m| !is_away(&chunks(m)));
    generations.iter().filter(is_home)
}

/// Which of `generations` (number, whole), oldest first, retention removes: all that are older than the `keep` newest
/// whole ones. While there are not that many whole ones, nothing is removed; the newest whole one always stays, and so
/// do those in `pinned`.
pub fn condemned(generations: &[(u64, bool)], keep: u32, pinned: &[u64]) -> Vec<u64> {
    let keep = keep.max(1) as usize;
    let oldest_kept = generations
        .iter()
        .rev()
        .filter(|(_, whole)| *whole)
        .nth(keep - 1)
        .map(|(n, _)| *n);
    generations
        .iter()
        .map(|(n, _)| *n)
        .filter(|n| oldest_kept.is_some_and(|k| *n < k) && !pinned.contains(n))
        .collect()
}

/// Removes generations beyond `keep` that are not `pinned`; returns their numbers. The newest one from which most of
/// the job goes on stays too, however many come after it, and the newest one that is complete.
pub fn retain(dir: &Path, keep: u32, pinned: &[u64]) -> Result<Vec<u64>, Failure> {
    let all = list(dir)?;
    let found: Vec<(u64, bool)> = all.iter().map(|g| (g.number, g.is_whole())).collect();
    let pinned = pinned.iter().copied().chain(fullest(&all)).chain(complete(&all));
    let pinned: Vec<u64> = pinned.collect();
    let gone = condemned(&found, keep, &pinned);
    remove_all(dir, &gone)?;
    Ok(gone)
}

/// Removes generation `number`. It stops being one in a single step.
pub fn remove(dir: &Path, number: u64) -> Result<(), Failure> {
    remove_all(dir, &[number])
}

/// Removes generations. That they are none any more is on the device before anything of them, or a chunk that they
/// need, is removed: a power cut leaves no half of one. What cannot be removed does not keep the others from it.
pub fn remove_all(dir: &Path, numbers: &[u64]) -> Result<(), Failure> {
    let hidden = |n: u64| dir.join(format!("{TEMPORARY}{}", name(n)));
    let mut failed = None;
    let mut note = |n: u64, done: io::Result<()>| {
        let fail = |e| Failure::io(format!("remove {}", dir.join(name(n)).display()), &e);
        let error = done.map_err(fail).err();
        let is_done = error.is_none();
        failed = failed.take().or(error);
        is_done
    };
    let rename = |n: &&u64| note(**n, std::fs::rename(dir.join(name(**n)), hidden(**n)));
    let gone: Vec<u64> = numbers.iter().filter(rename).copied().collect();
    if !gone.is_empty() {
        sync_dir(dir)?;
    }
    mark::forget(dir, &gone);
    for n in gone {
        note(n, std::fs::remove_dir_all(hidden(n)));
    }
    failed.map_or(Ok(()), Err)
}

/// Bytes of the generations' own files, without the chunks they share.
pub fn own_bytes(dir: &Path) -> Result<u64, Failure> {
    let sizes = |m: Manifest| m.files.iter().map(|f| f.bytes).sum::<u64>();
    Ok(manifests(dir)?.map(|(_, m)| m.map_or(0, sizes)).sum())
}

/// The chunks that the generations in `dir` refer to. `None` while a manifest cannot be read: what it refers to is not
/// known, and it may be repaired from a copy as long as its chunks are there. A damaged generation goes with the
/// retention of those after it.
pub fn needed_chunks(dir: &Path) -> Result<Option<Needed>, Failure> {
    let mut needed = Needed::default();
    for (number, manifest) in manifests(dir)? {
        match manifest {
            Ok(m) => needed.add(&m.chunks),
            Err(e) => {
                tracing::warn!(generation = number, error = %e, "chunks are not collected");
                return Ok(None);
            }
        }
    }
    // What an interrupted fetch has brought, the next one need not bring.
    for m in under_way(dir)?.iter().filter_map(|d| Manifest::read(d).ok()) {
        needed.add(&m.chunks);
    }
    Ok(Some(needed))
}

/// The directories of generations whose fetch from a durable tier was interrupted.
fn under_way(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let names = entries(dir)?.into_iter().filter(|n| n.starts_with(UNDER_WAY));
    Ok(names.map(|n| dir.join(n)).collect())
}

/// Gives up what interrupted fetches have brought: the job goes on without. Whether there was any.
pub fn give_up_fetches(dir: &Path) -> Result<bool, Failure> {
    let left = under_way(dir)?;
    left.iter().try_for_each(|d| remove_left(d))?;
    Ok(!left.is_empty())
}

fn remove_left(path: &Path) -> Result<(), Failure> {
    std::fs::remove_dir_all(path).map_err(|e| Failure::io(format!("remove {}", path.display()), &e))
}

/// Removes what an interrupted checkpoint or removal left behind; returns how many. Call only while holding the job's lock.
pub fn clear_leftovers(dir: &Path) -> Result<usize, Failure> {
    let left: Vec<String> = entries(dir)?.into_iter().filter(|n| n.starts_with(TEMPORARY)).collect();
    for n in &left {
        remove_left(&dir.join(n))?;
    }
    Ok(left.len())
}

fn sync_dir(dir: &Path) -> Result<(), Failure> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(|e| Failure::io(format!("sync {}", dir.display()), &e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::manifest::{ChunkEntry, FileEntry, Taken};
    use belay_storage::engine::{Engine, Options};
    use belay_storage::store::{set_local_tiers, Host, LocalTier};
    use belay_wire::Phase;
    use std::time::Duration;

    /// The directory `gen` of a job directory.
    pub(super) struct Scratch(pub(super) PathBuf);

    impl Scratch {
        pub(super) fn new(test: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("belay-generations-{test}-{}", std::process::id()));
            std::fs::create_dir(&dir).unwrap();
            std::fs::create_dir(dir.join("gen")).unwrap();
            Self(dir.join("gen"))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_dir_all(self.0.parent().unwrap()).unwrap();
        }
    }

    #[test]
    fn one_that_cannot_be_removed_does_not_keep_the_others() {
        let gen = Scratch::new("remove");
        for made in ["000001", "000002", "000003", ".tmp-000002/in-the-way"] {
            std::fs::create_dir_all(gen.0.join(made)).unwrap();
        }
        let failed = remove_all(&gen.0, &[1, 2, 3]).unwrap_err();
        assert!(failed.to_string().contains("000002"), "{failed}");
        let mut left = entries(&gen.0).unwrap();
        left.sort();
        assert_eq!(left, [".tmp-000002", "000002"]);
    }

    fn facts() -> Facts {
        Facts {
            blocked: Duration::from_micros(1500),
            phases: vec![(Phase::Suspend, Duration::from_millis(1))],
            processes: 3,
            threads: 7,
            taken: Taken {
                mode: "copy_on_write".into(),
                reason: "enough".into(),
                stops: 1,
            },
            left_out: None,
            declared: None,
            dirty: None,
        }
    }

    pub(super) fn commit(dir: &Path, number: u64) -> GenerationStatus {
        let d = Draft::create(dir, number).unwrap();
        std::fs::write(d.path.join("job.bimg"), b"12345").unwrap();
        let file = FileEntry {
            name: "job.bimg".into(),
            bytes: 5,
            xxh3: None,
        };
        let mut engine = Engine::new(Store::of_generation(&d.path), Options::default()).unwrap();
        d.commit(vec![file], &mut engine.begin(0).unwrap(), &facts()).unwrap()
    }

    #[test]
    fn a_commit_shows_up_and_a_draft_does_not() {
        let s = Scratch::new("commit");
        let status = commit(&s.0, 4);
        assert_eq!(
            (status.generation, status.bytes, status.ranks, status.blocked_ms),
            (4, 5, 3, 1.5)
        );
        assert_eq!(status.phases_ms["suspend"], 1.0);
        assert_eq!(status.snapshot.map(|s| (s.mode, s.stops)), Some(("copy_on_write".into(), 1)));
        let draft = Draft::create(&s.0, 5).unwrap();
        assert_eq!(list(&s.0).unwrap().len(), 1);
        drop(draft);
        assert_eq!(entries(&s.0).unwrap(), ["000004"]);
    }

    #[test]
    fn leftovers_are_cleared_and_missing_or_short_files_are_noticed() {
        let s = Scratch::new("damage");
        commit(&s.0, 1);
        commit(&s.0, 2);
        std::mem::forget(Draft::create(&s.0, 3).unwrap());
        assert_eq!(clear_leftovers(&s.0).unwrap(), 1);
        std::fs::write(s.0.join("000002/job.bimg"), b"1234").unwrap();
        let found = list(&s.0).unwrap();
        assert!(found[0].is_whole() && !found[1].is_whole());
        assert!(found[1].status().damage.unwrap().contains("4 bytes instead of 5"));
        std::fs::remove_file(s.0.join("000001/job.bimg")).unwrap();
        assert!(!list(&s.0).unwrap()[0].is_whole());
    }

    #[test]
    fn chunks_that_may_lie_on_another_host_are_not_damage() {
        let s = Scratch::new("away");
        let status = commit(&s.0, 1);
        let (dir, job) = (s.0.join(name(1)), s.0.parent().unwrap());
        let mut m = Manifest::read(&dir).unwrap();
        m.chunks.push(ChunkEntry {
            id: 1,
            pages: 1,
            xxh3: 0,
        });
        std::fs::write(dir.join(MANIFEST_FILE), m.encode().unwrap()).unwrap();
        let seen = |wanted: &str| {
            let g = list(&s.0).unwrap().remove(0);
            let why = g.manifest().unwrap_err().to_string();
            assert!(!g.is_whole() && why.contains(wanted), "{why}");
            g.status()
        };
        assert!(seen("No such file").damage.is_some());
        let there = LocalTier {
            name: "ram".into(),
            memory: true,
            dir: job.join("ram"),
            host: Some(Host {
                name: "another".into(),
                called: None,
            }),
        };
        set_local_tiers(job, &[there], &[]).unwrap();
        assert_eq!(seen("ram of another"), status);
        // Damage says more.
        std::fs::write(dir.join("job.bimg"), b"1234").unwrap();
        assert!(seen("4 bytes instead of 5").damage.is_some());
    }

    #[test]
    fn nothing_is_collected_while_a_manifest_cannot_be_read() {
        let s = Scratch::new("collect");
        commit(&s.0, 1);
        commit(&s.0, 2);
        assert_eq!(needed_chunks(&s.0).unwrap(), Some(Needed::default()));
        std::fs::write(s.0.join("000001").join(MANIFEST_FILE), b"{").unwrap();
        assert_eq!(needed_chunks(&s.0).unwrap(), None);
    }

    #[test]
    fn retention_removes_from_disk() {
        let s = Scratch::new("retain");
        for n in 1..=4 {
            commit(&s.0, n);
        }
        assert_eq!(retain(&s.0, 2, &[]).unwrap(), [1, 2]);
        assert_eq!(list(&s.0).unwrap().iter().map(|g| g.number).collect::<Vec<_>>(), [3, 4]);
    }

    #[test]
    fn what_a_failed_command_left_behind_pushes_nothing_out_and_comes_last() {
        let s = Scratch::new("left");
        for n in 1..=6 {
            commit(&s.0, n);
        }
        for n in [3, 5, 6] {
            state::write(&s.0.join(name(n)), libc::SIGKILL).unwrap();
        }
        // A command that has done its work.
        state::write(&s.0.join(name(4)), 0).unwrap();
        let none = BTreeSet::new();
        assert_eq!(order(&s.0, (1..=6).collect(), &none), [4, 2, 1, 6, 5, 3]);
        // Those in which damage has been found come before these, unless they may come from elsewhere.
        for n in [4, 6] {
            mark(&s.0.join(name(n)), "bit flips");
        }
        assert_eq!(order(&s.0, (1..=6).collect(), &none), [2, 1, 4, 5, 3, 6]);
        assert_eq!(order(&s.0, (1..=6).collect(), &[4].into()), [4, 2, 1, 5, 3, 6]);
        for n in [4, 6] {
            unmark(&s.0.join(name(n)));
        }
        assert_eq!(retain(&s.0, 1, &[]).unwrap(), [1, 2, 3, 5]);
        std::fs::write(s.0.join("000004").join(MANIFEST_FILE), b"{").unwrap();
        assert_eq!(fullest(&list(&s.0).unwrap()), Some(6));
    }

    #[test]
    fn retention_counts_whole_ones_only() {
        assert_eq!(condemned(&[(1, true), (2, true), (3, true)], 2, &[]), [1]);
        assert_eq!(condemned(&[(1, true), (2, true), (3, false)], 2, &[]), [] as [u64; 0]);
        assert_eq!(condemned(&[(1, true), (2, false), (3, true), (4, true)], 2, &[]), [1, 2]);
        assert_eq!(condemned(&[(1, true), (2, false), (3, false)], 1, &[]), [] as [u64; 0]);
        assert_eq!(condemned(&[(1, true)], 0, &[]), [] as [u64; 0]);
        assert_eq!(condemned(&[], 2, &[]), [] as [u64; 0]);
        assert_eq!(condemned(&[(1, true), (2, true), (3, true), (4, true)], 2, &[1]), [2]);
    }
}
