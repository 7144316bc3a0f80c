//! Numbers of chunks that may have been used, also by chunks that nobody can see now: they may lie in a local tier that
//! is not there, or belong to a generation on a durable tier that cannot be read.
//!
//! ```text
//! belay-job/chunk-numbers    a number greater than that of any chunk that has been published, as a decimal number
//! ```
//! It is raised in steps, before a checkpoint begins, and whoever begins anew begins there: one fsync for many chunks.

use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Name of the file in the job directory.
pub const NUMBERS: &str = "chunk-numbers";
/// Numbers that are reserved at a time.
const STEP: u32 = 1024;
/// Greater ones are of no job.
const MOST: u32 = u32::MAX / 2;

/// The reserved numbers of a job.
#[derive(Debug)]
pub(crate) struct Numbers {
    path: PathBuf,
    end: AtomicU32,
}

impl Numbers {
    /// Those of the job in directory `job`.
    pub(crate) fn open(job: &Path) -> Result<Self, ImageError> {
        let path = job.join(NUMBERS);
        let end = match files::read(&path, 64) {
            Ok(text) => std::str::from_utf8(&text).ok().and_then(|t| t.trim().parse().ok()),
            Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Some(1),
            Err(e) => return Err(e),
        };
        let end = end.filter(|n| *n <= MOST).unwrap_or_else(|| {
            tracing::warn!(path = %path.display(), "no number: going on from those of the chunks that are there");
            1
        });
        Ok(Self { path, end: end.into() })
    }

    /// The first one that surely nobody has.
    pub(crate) fn end(&self) -> u32 {
        self.end.load(Ordering::Relaxed)
    }

    /// Before a checkpoint, whose first chunk gets number `next`: reserves as many as most checkpoints need.
    pub(crate) fn reserve(&self, next: u32) -> Result<(), ImageError> {
        self.cover(next.saturating_add(STEP / 2))
    }

    /// Reserves, durably, the numbers below `next`.
    pub(crate) fn cover(&self, next: u32) -> Result<(), ImageError> {
        if next <= self.end() {
            return Ok(());
        }
        let end = next.saturating_add(STEP / 2);
        let new = self.path.with_extension("new");
        let mut file = create_private(&new)?;
        writeln!(file, "{end}")
            .and_then(|()| file.sync_all())
            .map_err(|e| ImageError::io("write", &new, e))?;
        std::fs::rename(&new, &self.path).map_err(|e| ImageError::io("rename", &new, e))?;
        let job = self.path.parent().unwrap_or(Path::new("."));
        File::open(job)
            .and_then(|d| d.sync_all())
            .map_err(|e| ImageError::io("sync", job, e))?;
        self.end.store(end, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn numbers_are_reserved_in_steps_and_whoever_comes_next_begins_behind_them() {
        let s = Scratch::new("numbers");
        let path = s.job().join(NUMBERS);
        let numbers = Numbers::open(&s.job()).unwrap();
        assert_eq!((numbers.end(), path.exists()), (1, false));
        numbers.reserve(1).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1025\n");
        std::fs::remove_file(&path).unwrap();
        numbers.reserve(500).unwrap();
        numbers.cover(1025).unwrap();
        assert!(!path.exists(), "there are enough");
        numbers.cover(1026).unwrap();
        assert_eq!(Numbers::open(&s.job()).unwrap().end(), 1538);
        for text in ["", "x", "4294967295"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(Numbers::open(&s.job()).unwrap().end(), 1, "{text}");
        }
    }
}
