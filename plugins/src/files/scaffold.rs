//! Directories that had been deleted at the checkpoint already (a session directory whose owner is about to end), and
//! are made for the time of the rebuild only: what was in one is made, and loses its name again.

use super::sight::{Seen, Sights};
use crate::model::Directory;
use crate::sys::fd;
use std::collections::BTreeSet;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Directories that exist only while the job is rebuilt, innermost first; removed at the end of the rebuild, or when it fails.
#[derive(Debug)]
pub(crate) struct Scaffold {
    paths: Mutex<Vec<PathBuf>>,
    sights: Sights,
}

impl Scaffold {
    /// Those of `parents` that the rebuild is going to make for that time: they had been deleted at the checkpoint and
    /// are not there now.
    pub(crate) fn of<'a>(parents: impl Iterator<Item = &'a Directory>, sights: &Sights) -> Self {
        Self {
            paths: Mutex::new(missing(parents.filter(|d| d.gone).map(|d| d.path.0.clone()))),
            sights: sights.clone(),
        }
    }

    /// Removes them. One that is not empty stays: something in it has its name.
    pub(crate) fn remove(&self) {
        for path in self.paths.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Err(error) = self.remove_one(&path) {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(%error, ?path, "a directory that had been deleted is there again");
                }
            }
        }
    }

    /// Removes one: where others could have put something else in its place, the one that was made.
    fn remove_one(&self, path: &Path) -> io::Result<()> {
        let above = match self.sights.made(path) {
            Some(made) => {
                let above = fd::above(path)?;
                let is_it = made.is(Seen::of(&fd::find_at(&above, path)?)?);
                is_it.then_some(above).ok_or(io::ErrorKind::NotFound)?
            }
            None if self.sights.missing.keys().any(|missing| path.starts_with(missing)) => return Ok(()),
            None => fd::above(path)?,
        };
        fd::rmdir_at(&above, path)
    }
}

/// Those of `paths` that are not there, innermost first.
fn missing(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let settled: BTreeSet<PathBuf> = paths.map(|p| settled(&p)).collect();
    settled.into_iter().rev().filter(|p| fd::stat(p, false).is_err()).collect()
}

/// `path` without `..` behind what is not there: that is going to be a directory, and no symbolic link.
fn settled(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        if part != Component::ParentDir || fd::stat(&out, false).is_ok() {
            out.push(part);
        } else {
            out.pop();
        }
    }
    out
}

impl Drop for Scaffold {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::super::{make_parents, parents};
    use super::*;

    #[test]
    fn what_was_there_is_not_removed_with_what_was_made_for_a_time() {
        let dir = std::env::temp_dir().join(format!("belay-scaffold-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("y")).unwrap();
        let file = dir.join("x/../y/z/../socket");
        // As at a checkpoint after `x` was deleted: nothing behind it can be looked at.
        let all = parents(&file);
        let gone = all.iter().filter(|d| d.gone).map(|d| d.path.0.clone());
        let scaffold = Scaffold {
            paths: Mutex::new(missing(gone)),
            sights: Sights::default(),
        };
        make_parents(&all, &Sights::default()).unwrap();
        let there = |name: &str| dir.join(name).is_dir();
        assert!(there("x") && there("y/z"));
        scaffold.remove();
        assert!(!there("x") && !there("y/z") && there("y"));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
