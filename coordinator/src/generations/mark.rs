//! The mark of a generation in which damage has been found.
//!
//! ```text
//! gen/000007/damaged      of the job on one host, or of the root
//! damaged/000007-2        of part 2, in the directory of the job
//! ```
//! Most damage shows only when every byte is read, which is too much for a list or for retention. Who has read it and
//! found damage, a restart, a flush or `belay verify`, leaves a file; who makes the generation whole again, or reads all
//! of it and finds nothing, removes that. A marked one is not counted as whole, and stays as any other that is not,
//! until enough whole ones are newer: it may be made whole from elsewhere.
//!
//! What a part has may lie on its host's own disk, where the root sees nothing of it: so its mark lies where all hosts
//! see it, and the root's generation of that number is not whole either.

use crate::jobdir::JOB;
use crate::nodes::seat::{part_dir, PARTS};
use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use belay_kernel::dir;
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const MARK: &str = "damaged";
/// Longest reason.
const MAX: usize = 1000;

/// Marks the generation in directory `generation`. Where that cannot be written (the disk is full), the damage will be
/// found once more.
pub fn mark(generation: &Path, why: &str) {
    let why: String = why.chars().take(MAX).collect();
    let path = file(generation);
    let write = || {
        make_above(&path)?;
        let mut file = create_private(&path)?;
        let written = file.write_all(why.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|e| ImageError::io("write", &path, e))
    };
    // One that is there says when it began.
    if is_marked(generation) {
        return;
    }
    match write() {
        Ok(()) => {
            tracing::warn!(generation = %generation.display(), why, "damaged: not counted as whole from now on");
            drop(dir::sync_above(&path).inspect_err(|e| tracing::warn!(error = %e, "the mark may be lost")));
        }
        Err(e) => tracing::warn!(error = %e, "damage is not marked"),
    }
}

/// Makes the directory of the marks of parts, where `path` lies there.
fn make_above(path: &Path) -> Result<(), ImageError> {
    let Some(above) = path.parent().filter(|above| above.file_name() == Some(MARK.as_ref())) else {
        return Ok(());
    };
    match DirBuilder::new().mode(0o700).create(above) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made
            .and_then(|()| dir::sync_above(above))
            .map_err(|e| ImageError::io("make", above, e)),
    }
}

/// All of the generation in directory `generation` has been read, and is as it was written.
pub fn unmark(generation: &Path) {
    match std::fs::remove_file(file(generation)) {
        Ok(()) => tracing::info!(generation = %generation.display(), "whole again"),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => tracing::warn!(error = %e, "a mark of damage stays"),
    }
}

/// The same, where that is also so of what the parts have of it.
pub fn unmark_all(generation: &Path) {
    unmark(generation);
    if let (Some(gen), Some(number)) = (generation.parent(), number_of(generation)) {
        forget(gen, &[number]);
    }
}

/// Whether the generation in directory `generation` is marked, whatever parts have of it.
pub fn is_marked(generation: &Path) -> bool {
    file(generation).exists()
}

/// The mark of the generation in directory `generation`.
fn file(generation: &Path) -> PathBuf {
    of_part(generation).unwrap_or_else(|| generation.join(MARK))
}

/// The same, where it is that of a part.
fn of_part(generation: &Path) -> Option<PathBuf> {
    let (number, part) = (number_of(generation)?, generation.parent()?.parent()?);
    let (tag, parts) = (part.file_name()?.to_str()?.parse().ok()?, part.parent()?);
    let job = parts.parent().filter(|_| parts.file_name() == Some(PARTS.as_ref()))?;
    let is_part = part_dir(job, tag) == part && job.join(JOB).exists();
    is_part.then(|| job.join(MARK).join(format!("{}-{tag}", super::name(number))))
}

fn number_of(generation: &Path) -> Option<u64> {
    generation.file_name()?.to_str()?.parse().ok()
}

/// Generations `numbers` of the job with directory `gen` are gone, or begin: what parts have had of them is forgotten.
pub(super) fn forget(gen: &Path, numbers: &[u64]) {
    let Marks { dir, parts } = Marks::read(gen);
    for (_, name) in numbers.iter().filter_map(|n| parts.get(n)).flatten() {
        if let Err(e) = std::fs::remove_file(dir.join(name)) {
            tracing::warn!(error = %e, name, "a mark of damage stays");
        }
    }
}

/// The marks of what the parts of a job have.
#[derive(Debug)]
pub(super) struct Marks {
    dir: PathBuf,
    /// Of each generation: tags of parts, and names of the marks.
    parts: BTreeMap<u64, Vec<(u64, String)>>,
}

impl Marks {
    /// Those of the job whose generations lie in `gen`.
    pub(super) fn read(gen: &Path) -> Self {
        let dir = gen.with_file_name(MARK);
        let mut parts: BTreeMap<u64, Vec<(u64, String)>> = BTreeMap::new();
        let list = std::fs::read_dir(&dir).and_then(|list| list.collect::<io::Result<Vec<_>>>());
        match &list {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(error = %e, dir = %dir.display(), "what parts have found is not known");
            }
            _ => {}
        }
        for entry in list.into_iter().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let parsed = name
                .split_once('-')
                .and_then(|(n, tag)| Some((n.parse().ok()?, tag.parse().ok()?)));
            if let Some((number, tag)) = parsed {
                parts.entry(number).or_default().push((tag, name));
            }
        }
        Self { dir, parts }
    }

    /// Why generation `number`, in directory `generation`, is marked, where it or what a part has of it is.
    pub(super) fn why(&self, number: u64, generation: &Path) -> Option<String> {
        let own = is_marked(generation).then(|| read(&file(generation)));
        own.or_else(|| {
            let (tag, name) = self.parts.get(&number)?.first()?;
            Some(format!("part {tag}: {}", read(&self.dir.join(name))))
        })
    }
}

fn read(path: &Path) -> String {
    let why = files::read(path, 4 * MAX as u64).unwrap_or_default();
    let why = crate::failure::plain(&String::from_utf8_lossy(&why));
    if why.is_empty() {
        "it was found to be".into()
    } else {
        why
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generations::tests::{commit, Scratch};
    use crate::generations::{complete, for_all, fullest, list, name, order, remove, retain, Draft};
    use std::collections::BTreeSet;

    /// The directories of generations of a job and of its parts 1 and 2, which have 1 to 3.
    fn job(test: &str) -> (PathBuf, [PathBuf; 3]) {
        let job = std::env::temp_dir().join(format!("belay-mark-{test}-{}", std::process::id()));
        let gens = [0, 1, 2].map(|tag| part_dir(&job, tag).join("gen"));
        for gen in &gens {
            std::fs::create_dir_all(gen).unwrap();
            (1..=3).for_each(|number| drop(commit(gen, number)));
        }
        std::fs::write(job.join(JOB), "").unwrap();
        (job, gens)
    }

    fn whole(gen: &Path) -> Vec<u64> {
        let whole = list(gen).unwrap().into_iter().filter(|g| g.is_whole());
        whole.map(|g| g.number).collect()
    }

    #[test]
    fn what_was_found_damaged_is_not_whole_until_it_is_healed() {
        let s = Scratch::new("mark");
        for n in 1..=3 {
            commit(&s.0, n);
        }
        let newest = || list(&s.0).unwrap().pop().unwrap();
        newest().is_damaged("bit\nflips");
        let g = newest();
        assert!(!g.is_whole() && g.whole().is_none() && g.manifest().is_ok());
        let status = g.status();
        assert!(!status.whole && status.damage.unwrap().contains("flips") && status.bytes == 5);
        // It pushes nothing out, and stays itself: it may be healed.
        assert_eq!(retain(&s.0, 2, &[]).unwrap(), [] as [u64; 0]);
        assert_eq!(
            (fullest(&list(&s.0).unwrap()), complete(&list(&s.0).unwrap())),
            (Some(2), Some(2))
        );
        unmark(&g.path);
        assert!(newest().is_whole() && newest().status().damage.is_none());
        assert_eq!(retain(&s.0, 2, &[]).unwrap(), [1]);
        // What shows anyway needs no mark, and one that cannot be written is no failure.
        std::fs::write(s.0.join("000002/job.bimg"), b"1234").unwrap();
        list(&s.0).unwrap()[0].is_damaged("short");
        assert!(list(&s.0).unwrap()[0].damage.is_none());
        mark(&s.0.join("000007"), "not there");
    }

    #[test]
    fn what_a_part_has_found_damaged_is_not_whole_for_the_root() {
        let (job, [root, one, two]) = job("root");
        mark(&one.join(name(2)), "bit flips");
        assert_eq!(
            (whole(&root), whole(&one), whole(&two)),
            (vec![1, 3], vec![1, 3], vec![1, 2, 3])
        );
        assert!(list(&root).unwrap()[1]
            .damage
            .as_deref()
            .unwrap()
            .contains("part 1: bit flips"));
        // The others, to whom it is as whole as any, keep what the root counts.
        assert_eq!(for_all(&list(&root).unwrap(), 3), [3, 1, 3, 3]);
        assert_eq!(order(&root, (1..=3).collect(), &BTreeSet::new()), [3, 1, 2]);
        assert!(is_marked(&one.join(name(2))) && !is_marked(&root.join(name(2))));
        // The root's own being whole says nothing of it; the part's does, or that of all.
        unmark(&root.join(name(2)));
        assert_eq!(whole(&root), [1, 3]);
        unmark(&one.join(name(2)));
        assert_eq!(whole(&root), [1, 2, 3]);
        mark(&two.join(name(3)), "bit flips");
        mark(&root.join(name(3)), "more");
        unmark_all(&root.join(name(3)));
        assert_eq!((whole(&root), whole(&two)), (vec![1, 2, 3], vec![1, 2, 3]));
        std::fs::remove_dir_all(job).unwrap();
    }

    #[test]
    fn what_was_found_of_one_says_nothing_of_the_next_of_its_number() {
        let (job, [root, one, _]) = job("again");
        for number in [2, 3] {
            mark(&one.join(name(number)), "bit flips");
        }
        // The part's may go while the root's is there.
        remove(&one, 2).unwrap();
        assert_eq!(whole(&root), [1]);
        remove(&root, 2).unwrap();
        assert!(!is_marked(&one.join(name(2))) && is_marked(&one.join(name(3))));
        // Here it went by another hand.
        std::fs::remove_dir_all(root.join(name(3))).unwrap();
        drop(Draft::create(&root, 3).unwrap());
        assert!(!is_marked(&one.join(name(3))));
        std::fs::remove_dir_all(job).unwrap();
    }
}
