//! What the job knows of its redundant generations: `DIR/redundant/000007.json`, one for each, written when all members
//! have confirmed; and `DIR/redundant/last`, the number of the newest checkpoint that was begun, because numbers must
//! not be used twice when the host that knew them is lost.

use super::parity::{parity_file, PARITY};
use crate::nodes::seat::name_here;
use crate::nodes::table::Row;
use crate::{generations, Failure};
use belay_image::manifest::MAX_NUMBER;
use belay_image::{files, ImageError};
use belay_redundancy::Scheme;
use belay_wire::{Exit, GenerationStatus, Level, OnTier};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "redundant";
const LAST: &str = "last";
/// Longest record that is read.
const MAX_BYTES: u64 = 64 << 20;
/// Version of the record.
const FORMAT: u32 = 1;

/// A redundant generation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    /// As the status shows it.
    pub(crate) status: GenerationStatus,
    /// How it was made redundant.
    pub(crate) scheme: Scheme,
    /// How many hosts of a group may be lost.
    pub(crate) parity: usize,
    /// The parts of each group; 0 is the job's own.
    pub(crate) groups: Vec<Vec<u64>>,
    /// The host of part 0.
    pub(crate) root: String,
    /// The other parts.
    pub(crate) rows: Vec<Row>,
}

fn file(dir: &Path, number: u64) -> PathBuf {
    dir.join(DIRECTORY).join(format!("{}.json", generations::name(number)))
}

/// Writes `bytes` so that a reader sees the old contents or the new, durably.
fn put(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let new = path.with_extension("new");
    let write = || -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let mut f = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        f.write_all(bytes)?;
        f.sync_all()?;
        std::fs::rename(&new, path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|e| Failure::io(format!("write {}", path.display()), &e))
}

impl Record {
    pub(crate) fn new(status: GenerationStatus, root: String, rows: Vec<Row>) -> Self {
        Self {
            format: FORMAT,
            status,
            scheme: Scheme::Xor,
            parity: 0,
            groups: Vec::new(),
            root,
            rows,
        }
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<(), Failure> {
        let text = serde_json::to_vec(self).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
        put(&file(dir, self.status.generation), &text)
    }

    /// That of generation `number` of the job in `dir`.
    pub(crate) fn read(dir: &Path, number: u64) -> Result<Option<Self>, Failure> {
        let path = file(dir, number);
        let bytes = match files::read(&path, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        Self::decode(&path, &bytes, number).map(Some)
    }

    /// Decodes the record of generation `number`, naming it `path` in errors.
    pub(super) fn decode(path: &Path, bytes: &[u8], number: u64) -> Result<Self, Failure> {
        let record: Self = serde_json::from_slice(bytes).map_err(|e| ImageError::damaged(path, e.to_string()))?;
        if record.format != FORMAT || record.status.generation != number {
            return Err(ImageError::damaged(path, "not the record of this generation").into());
        }
        Ok(record)
    }
}

/// Numbers of the generations of the job in `dir` that have a record. Only where the directory of records is not there
/// are there none: one that cannot be read may hold some.
pub(crate) fn numbers(dir: &Path) -> Result<Vec<u64>, Failure> {
    let path = dir.join(DIRECTORY);
    let fail = |e: io::Error| Failure::io(format!("read {}", path.display()), &e);
    let list = match std::fs::read_dir(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(fail)?,
    };
    let mut out = Vec::new();
    for entry in list {
        let name = entry.map_err(fail)?.file_name();
        let number: Option<u64> = name.to_str().and_then(|n| n.strip_suffix(".json")?.parse().ok());
        out.extend(number.filter(|n| *n < MAX_NUMBER));
    }
    out.sort_unstable();
    Ok(out)
}

/// Notes that checkpoint `number` begins.
pub(crate) fn begin(dir: &Path, number: u64) -> Result<(), Failure> {
    put(&dir.join(DIRECTORY).join(LAST), number.to_string().as_bytes())
}

/// The newest number that has been used.
pub(crate) fn last(dir: &Path) -> Result<u64, Failure> {
    let noted = match files::read(&dir.join(DIRECTORY).join(LAST), 64) {
        Ok(bytes) => String::from_utf8(bytes).ok().and_then(|t| t.trim().parse().ok()),
        Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e.into()),
    };
    let noted = noted.filter(|n| *n < MAX_NUMBER).unwrap_or(0);
    Ok(noted.max(newest(dir)?.unwrap_or(0)))
}

/// Whether there have been checkpoints, and their data lies on another host: the links lead nowhere.
pub(crate) fn lies_elsewhere(dir: &Path) -> Result<bool, Failure> {
    Ok(last(dir)? > 0 && leads_nowhere(&dir.join("gen")))
}

/// Whether `link` is one of those to a store on another host.
fn leads_nowhere(link: &Path) -> bool {
    !link.exists() && std::fs::symlink_metadata(link).is_ok_and(|m| m.is_symlink())
}

/// Forgets all redundant generations of the job in `dir`, and which numbers have been used.
pub fn remove_all(dir: &Path) -> Result<(), Failure> {
    let last = dir.join(DIRECTORY).join(LAST);
    for path in numbers(dir)?.into_iter().map(|n| file(dir, n)).chain([last]) {
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Failure::io(format!("remove {}", path.display()), &e)),
            _ => {}
        }
    }
    Ok(())
}

/// The newest generation of the job in `dir` that has a record.
pub fn newest(dir: &Path) -> Result<Option<u64>, Failure> {
    Ok(numbers(dir)?.pop())
}

/// A redundant generation of `job` that is not in `gen`: what lies beside may be chunks of it, left by a rebuilding
/// that was killed.
pub fn missing(job: &Path, gen: &Path) -> Result<Option<u64>, Failure> {
    let here = generations::numbers(gen)?;
    Ok(numbers(job)?.into_iter().find(|n| !here.contains(n)))
}

/// Removes from `gen`, that of a part of `job`, what is newer than `number` and no checkpoint of the job: the part has
/// committed it, and the root has not. What the root has left out because it is damaged somewhere may be made whole
/// yet. Where it cannot be seen what the root has, because that lies on another host, nothing is removed.
pub fn drop_uncommitted(job: &Path, gen: &Path, number: u64) -> Result<(), Failure> {
    let of_root = job.join("gen");
    if leads_nowhere(&of_root) {
        return Ok(());
    }
    let root = generations::numbers(&of_root)?;
    let committed: Vec<u64> = numbers(job)?.into_iter().chain(root).collect();
    let here = generations::numbers(gen)?.into_iter();
    let mut later = here.filter(|n| *n > number && !committed.contains(n));
    later.try_for_each(|n| generations::remove(gen, n))
}

/// The newest generation of `job` with a record that is not newer than `number`.
pub(crate) fn newest_to(job: &Path, number: u64) -> Result<Option<u64>, Failure> {
    Ok(numbers(job)?.into_iter().rfind(|n| *n <= number))
}

/// Removes the parity in `dir` (that of `job` or of a part of it) that belongs to no generation there or with a record,
/// and, where nobody writes, what was left unfinished.
pub fn tidy(job: &Path, dir: &Path, unfinished: bool) -> Result<(), Failure> {
    let parity = dir.join(PARITY);
    let here = generations::numbers(&dir.join("gen"))?;
    let known = here.into_iter().chain(numbers(job)?);
    let kept: Vec<PathBuf> = known.map(|n| parity_file(dir, n)).collect();
    for path in std::fs::read_dir(&parity).into_iter().flatten().flatten().map(|e| e.path()) {
        let temporary = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(".tmp-"));
        if !kept.contains(&path) && (unfinished || !temporary) {
            std::fs::remove_file(&path).map_err(|e| Failure::io(format!("remove {}", path.display()), &e))?;
        }
    }
    Ok(())
}

/// At the agent of the root, after a checkpoint: also removes records that are older than all generations here, once
/// there is a newer one that was made from this host. What is merely not here, because another host led the job or a
/// restart has failed, can be made again.
pub(crate) fn tidy_root(dir: &Path, unfinished: bool) -> Result<(), Failure> {
    let here = generations::numbers(&dir.join("gen"))?;
    let numbers = numbers(dir)?;
    let own = |n: u64| Record::read(dir, n).ok().flatten().is_some_and(|r| r.root == name_here());
    if let Some(oldest) = here.first().copied().filter(|o| numbers.iter().any(|n| n < o)) {
        let newest_own = numbers.iter().rev().copied().find(|n| own(*n)).unwrap_or(0);
        for number in numbers.into_iter().filter(|n| *n < oldest && *n < newest_own) {
            let path = file(dir, number);
            std::fs::remove_file(&path).map_err(|e| Failure::io(format!("remove {}", path.display()), &e))?;
        }
    }
    tidy(dir, dir, unfinished)
}

/// Adds to `statuses` what the records say.
pub(crate) fn add_to(dir: &Path, statuses: &mut BTreeMap<u64, GenerationStatus>) {
    // What cannot be read is not shown.
    let numbers = numbers(dir).unwrap_or_default();
    for record in numbers.into_iter().filter_map(|n| Record::read(dir, n).ok().flatten()) {
        let known = statuses
            .entry(record.status.generation)
            .or_insert_with(|| record.status.clone());
        if known.level == Level::Local {
            known.level = Level::Redundant;
        }
        known.tiers.push(OnTier {
            tier: record.scheme.name().into(),
            kind: "hosts".into(),
            bytes: record.status.bytes,
            whole: true,
            host: None,
            keys: Vec::new(),
            locked: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_records_that_newer_ones_of_this_host_replace_are_removed() {
        let dir = std::env::temp_dir().join(format!("belay-record-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("gen/000004")).unwrap();
        let write = |number: u64, root: &str| {
            let mut r = Record::new(GenerationStatus::default(), root.into(), Vec::new());
            r.status.generation = number;
            r.write(&dir).unwrap();
        };
        write(2, "elsewhere");
        write(3, "elsewhere");
        write(5, "elsewhere");
        std::fs::create_dir(dir.join("parity")).unwrap();
        for n in [1, 5] {
            std::fs::write(parity_file(&dir, n), "").unwrap();
        }
        tidy_root(&dir, true).unwrap();
        assert_eq!((numbers(&dir).unwrap(), newest(&dir).unwrap()), (vec![2, 3, 5], Some(5)));
        assert!(parity_file(&dir, 5).exists() && !parity_file(&dir, 1).exists());
        // The newest of this host itself stays, also when its generation is not here any more.
        write(3, &name_here());
        tidy_root(&dir, true).unwrap();
        assert_eq!(numbers(&dir).unwrap(), [3, 5]);
        write(4, &name_here());
        tidy_root(&dir, true).unwrap();
        assert_eq!(numbers(&dir).unwrap(), [4, 5]);
        assert_eq!(missing(&dir, &dir.join("gen")).unwrap(), Some(5));
        std::fs::create_dir(dir.join("gen/000005")).unwrap();
        assert_eq!(missing(&dir, &dir.join("gen")).unwrap(), None);
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// A job directory, and the checkpoints of its part 1, of these numbers.
    fn job_with_part(name: &str, numbers: std::ops::RangeInclusive<u64>) -> (PathBuf, PathBuf) {
        let job = std::env::temp_dir().join(format!("belay-{name}-{}", std::process::id()));
        let part = job.join("nodes/1/gen");
        for n in numbers {
            std::fs::create_dir_all(part.join(generations::name(n))).unwrap();
        }
        (job, part)
    }

    #[test]
    fn what_a_restart_goes_back_behind_stays_if_it_is_a_checkpoint_of_the_job() {
        let (job, part) = job_with_part("uncommitted", 4..=8);
        // The root has committed 5 to 7, of which 6 is redundant and not on its host any more.
        for n in [5, 7] {
            std::fs::create_dir_all(job.join("gen").join(generations::name(n))).unwrap();
        }
        let mut r = Record::new(GenerationStatus::default(), "elsewhere".into(), Vec::new());
        r.status.generation = 6;
        r.write(&job).unwrap();
        drop_uncommitted(&job, &part, 5).unwrap();
        let left: Vec<u64> = generations::list(&part).unwrap().iter().map(|g| g.number).collect();
        assert_eq!(left, [4, 5, 6, 7]);
        assert_eq!((newest_to(&job, 5).unwrap(), newest_to(&job, 7).unwrap()), (None, Some(6)));
        std::fs::remove_dir_all(job).unwrap();
    }

    #[test]
    fn nothing_is_removed_where_it_cannot_be_seen_what_the_root_has() {
        let (job, part) = job_with_part("unseen", 4..=6);
        std::os::unix::fs::symlink("/nowhere/gen", job.join("gen")).unwrap();
        drop_uncommitted(&job, &part, 4).unwrap();
        assert_eq!(generations::list(&part).unwrap().len(), 3);
        std::fs::remove_dir_all(job).unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_none() {
        let job = std::env::temp_dir().join(format!("belay-unread-{}", std::process::id()));
        std::fs::create_dir(&job).unwrap();
        assert_eq!((numbers(&job).unwrap(), last(&job).unwrap()), (vec![], 0));
        // Something else than a directory is in its place.
        std::fs::write(job.join(DIRECTORY), "").unwrap();
        assert!(numbers(&job).is_err() && last(&job).is_err() && newest(&job).is_err());
        assert!(lies_elsewhere(&job).is_err() && newest_to(&job, 1).is_err());
        std::fs::remove_dir_all(job).unwrap();
    }
}
