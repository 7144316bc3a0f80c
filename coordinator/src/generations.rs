//! Generations in the job directory: listing, making, committing, retention.
//!
//! ```text
//! gen/.tmp-000008/ ──(files, manifest.json, fsync)── rename ──> gen/000008/ ── rename ──> gen/.tmp-000008 ── removed
//! ```
//! So a name without `.tmp-` is a whole generation, whatever was killed when.

use crate::{sys, Failure};
use belay_image::manifest::{FileEntry, Manifest, MANIFEST_FILE};
use belay_image::{sections, ImageError};
use belay_wire::{Exit, GenerationStatus, Level, Phase};
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TEMPORARY: &str = ".tmp-";

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
    /// Its manifest, where every file it lists is present with its length.
    pub manifest: Result<Manifest, ImageError>,
}

impl Generation {
    fn open(number: u64, path: PathBuf) -> Self {
        let manifest = Manifest::read(&path).and_then(|m| {
            for f in &m.files {
                let file = path.join(&f.name);
                let found = std::fs::metadata(&file).map_err(|e| ImageError::io("stat", &file, e))?.len();
                if found != f.bytes {
                    return Err(ImageError::damaged(&file, format!("{found} bytes instead of {}", f.bytes)));
                }
            }
            Ok(m)
        });
        Self { number, path, manifest }
    }

    /// Whether the manifest is valid and every file has its length.
    pub fn is_whole(&self) -> bool {
        self.manifest.is_ok()
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
        let files = self.manifest()?.files.iter().map(|f| self.path.join(&f.name));
        for path in files.chain([self.path.clone(), self.path.join(MANIFEST_FILE)]) {
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

    /// As the status document shows it.
    pub fn status(&self) -> GenerationStatus {
        let (m, damage) = match &self.manifest {
            Ok(m) => (Some(m), None),
            Err(e) => (None, Some(e.to_string())),
        };
        GenerationStatus {
            generation: self.number,
            time_unix_s: m.map_or(0, |m| m.time_unix_s),
            level: Level::Local,
            ranks: m.map_or(0, |m| m.processes),
            threads: m.map_or(0, |m| m.threads),
            bytes: m.map_or(0, |m| m.bytes),
            blocked_ms: m.map_or(0.0, |m| m.blocked_ms),
            phases_ms: m.map(|m| m.phases_ms.iter().cloned().collect()).unwrap_or_default(),
            whole: damage.is_none(),
            damage,
        }
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

/// The generations in `dir`, oldest first.
pub fn list(dir: &Path) -> Result<Vec<Generation>, Failure> {
    let mut numbers: Vec<u64> = entries(dir)?
        .iter()
        .filter_map(|n| n.parse().ok().filter(|number| name(*number) == *n))
        .collect();
    numbers.sort_unstable();
    Ok(numbers.into_iter().map(|n| Generation::open(n, dir.join(name(n)))).collect())
}

/// Which of `generations` (number, whole), oldest first, retention removes: all that are older than the `keep` newest whole ones. While there are
/// not that many whole ones, nothing is removed; the newest whole one always stays.
pub fn condemned(generations: &[(u64, bool)], keep: u32) -> Vec<u64> {
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
        .filter(|n| oldest_kept.is_some_and(|k| *n < k))
        .collect()
}

/// Removes generations beyond `keep`; returns their numbers.
pub fn retain(dir: &Path, keep: u32) -> Result<Vec<u64>, Failure> {
    let found: Vec<(u64, bool)> = list(dir)?.iter().map(|g| (g.number, g.is_whole())).collect();
    let gone = condemned(&found, keep);
    for n in &gone {
        remove(dir, *n)?;
    }
    Ok(gone)
}

/// Removes generation `number`. It stops being one in a single step.
pub fn remove(dir: &Path, number: u64) -> Result<(), Failure> {
    let hidden = dir.join(format!("{TEMPORARY}{}", name(number)));
    let path = dir.join(name(number));
    std::fs::rename(&path, &hidden)
        .and_then(|()| std::fs::remove_dir_all(&hidden))
        .map_err(|e| Failure::io(format!("remove {}", path.display()), &e))
}

/// Removes what an interrupted checkpoint or removal left behind; returns how many. Call only while holding the job's lock.
pub fn clear_leftovers(dir: &Path) -> Result<usize, Failure> {
    let left: Vec<String> = entries(dir)?.into_iter().filter(|n| n.starts_with(TEMPORARY)).collect();
    for n in &left {
        let path = dir.join(n);
        std::fs::remove_dir_all(&path).map_err(|e| Failure::io(format!("remove {}", path.display()), &e))?;
    }
    Ok(left.len())
}

/// A generation being made. Dropped before [`Draft::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    /// Its number.
    pub number: u64,
    /// Where its files go until it is committed.
    pub path: PathBuf,
    dir: PathBuf,
}

/// What the manifest of a draft says besides its files.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Time the processes were blocked.
    pub blocked: Duration,
    /// Time of each phase.
    pub phases: Vec<(Phase, Duration)>,
    /// Live processes.
    pub processes: u32,
    /// Threads.
    pub threads: u32,
}

/// A duration in milliseconds.
pub fn ms(d: Duration) -> f64 {
    (d.as_secs_f64() * 1e6).round() / 1e3
}

impl Draft {
    /// Begins generation `number` in `dir`.
    pub fn create(dir: &Path, number: u64) -> Result<Self, Failure> {
        let path = dir.join(format!("{TEMPORARY}{}", name(number)));
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|e| Failure::io(format!("make {}", path.display()), &e))?;
        Ok(Self {
            number,
            path,
            dir: dir.to_owned(),
        })
    }

    /// Makes the draft a generation: manifest, fsync, rename, fsync. `files` are synced already.
    pub fn commit(self, files: Vec<FileEntry>, facts: &Facts) -> Result<GenerationStatus, Failure> {
        let manifest = Manifest {
            generation: self.number,
            time_unix_s: sys::now_unix_s(),
            arch: std::env::consts::ARCH.into(),
            blocked_ms: ms(facts.blocked),
            phases_ms: facts.phases.iter().map(|(p, d)| (p.name().into(), ms(*d))).collect(),
            processes: facts.processes,
            threads: facts.threads,
            bytes: files.iter().map(|f| f.bytes).sum(),
            files,
        };
        let path = self.path.join(MANIFEST_FILE);
        let mut f = sections::create_private(&path)?;
        f.write_all(&manifest.encode()?)
            .and_then(|()| f.sync_all())
            .map_err(|e| Failure::io(format!("write {}", path.display()), &e))?;
        sync_dir(&self.path)?;
        let target = self.dir.join(name(self.number));
        std::fs::rename(&self.path, &target).map_err(|e| Failure::io(format!("commit {}", target.display()), &e))?;
        sync_dir(&self.dir)?;
        let number = self.number;
        Ok(Generation::open(number, target).status())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After the commit nothing has this name.
        if let Err(e) = std::fs::remove_dir_all(&self.path) {
            if e.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %self.path.display(), error = %e, "dropped generation could not be removed");
            }
        }
    }
}

fn sync_dir(dir: &Path) -> Result<(), Failure> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(|e| Failure::io(format!("sync {}", dir.display()), &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(test: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("belay-generations-{test}-{}", std::process::id()));
            std::fs::create_dir(&dir).unwrap();
            Self(dir)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn facts() -> Facts {
        Facts {
            blocked: Duration::from_micros(1500),
            phases: vec![(Phase::Suspend, Duration::from_millis(1))],
            processes: 3,
            threads: 7,
        }
    }

    fn commit(dir: &Path, number: u64) -> GenerationStatus {
        let d = Draft::create(dir, number).unwrap();
        std::fs::write(d.path.join("job.bimg"), b"12345").unwrap();
        let file = FileEntry {
            name: "job.bimg".into(),
            bytes: 5,
            xxh3: None,
        };
        d.commit(vec![file], &facts()).unwrap()
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
    fn retention_removes_from_disk() {
        let s = Scratch::new("retain");
        for n in 1..=4 {
            commit(&s.0, n);
        }
        assert_eq!(retain(&s.0, 2).unwrap(), [1, 2]);
        assert_eq!(list(&s.0).unwrap().iter().map(|g| g.number).collect::<Vec<_>>(), [3, 4]);
    }

    #[test]
    fn retention_counts_whole_ones_only() {
        assert_eq!(condemned(&[(1, true), (2, true), (3, true)], 2), [1]);
        assert_eq!(condemned(&[(1, true), (2, true), (3, false)], 2), [] as [u64; 0]);
        assert_eq!(condemned(&[(1, true), (2, false), (3, true), (4, true)], 2), [1, 2]);
        assert_eq!(condemned(&[(1, true), (2, false), (3, false)], 1), [] as [u64; 0]);
        assert_eq!(condemned(&[(1, true)], 0), [] as [u64; 0]);
        assert_eq!(condemned(&[], 2), [] as [u64; 0]);
    }
}
