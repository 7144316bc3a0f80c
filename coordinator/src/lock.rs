//! Files by whose lock (`flock`) processes keep others out, and in which the holder has written who it is.
//!
//! The lock is the kernel's, so it ends with its holders: who took it, and the processes that inherited it. What is written there tells a user who is in the way, and nothing else.

use crate::{sys, Failure};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest word of a holder.
const MAX_WORD: u64 = 256;

/// A file that can be locked.
#[derive(Debug)]
pub(crate) struct LockFile {
    path: PathBuf,
    file: File,
}

/// A lock that is held.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// Gives the lock back, also for the processes that inherited it.
    pub fn release(self) {
        // What cannot be taken away names one who may be gone.
        drop(self.0.set_len(0));
        sys::unlock(self.0.as_fd());
    }
}

/// This process, for those whom it keeps out.
fn own_word() -> String {
    let what = std::env::args_os().nth(1).unwrap_or_default();
    format!("belay {} (process {} on {})", what.display(), std::process::id(), sys::host())
}

impl LockFile {
    /// The file at `path`, which is made where there is none.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|e| Failure::io(format!("lock {}", path.display()), &e))?;
        let path = path.to_owned();
        Ok(Self { path, file })
    }

    fn taken(&self) -> io::Result<Lock> {
        let file = self.file.try_clone()?;
        let word = own_word();
        // Without the word (a full disk) only a message is poorer.
        let written = file.set_len(0).and_then(|()| file.write_all_at(word.as_bytes(), 0));
        if let Err(e) = written {
            tracing::debug!(path = %self.path.display(), error = %e, "nobody can see who holds this lock");
        }
        Ok(Lock(file))
    }

    fn failure(&self, e: &io::Error) -> Failure {
        Failure::io(format!("lock {}", self.path.display()), e)
    }

    /// The lock, if nobody holds it.
    pub(crate) fn take(&self) -> Result<Option<Lock>, Failure> {
        let got = match sys::lock(self.file.as_fd(), false) {
            Ok(()) => self.taken().map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        };
        got.map_err(|e| self.failure(&e))
    }

    /// The lock, if its holder gives it back within `limit`.
    pub(crate) fn take_within(&self, limit: Duration) -> Result<Option<Lock>, Failure> {
        let got = match sys::lock_within(self.file.as_fd(), limit) {
            Ok(true) => self.taken().map(Some),
            Ok(false) => Ok(None),
            Err(e) => Err(e),
        };
        got.map_err(|e| self.failure(&e))
    }

    /// Who holds the lock, as far as that can be told.
    pub(crate) fn holder(&self) -> String {
        let mut word = vec![0; MAX_WORD as usize];
        let n = self.file.read_at(&mut word, 0).unwrap_or(0);
        match String::from_utf8_lossy(&word[..n]).trim() {
            "" => "another belay".into(),
            word => word.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_holds_a_lock_and_the_others_hear_who() {
        let path = std::env::temp_dir().join(format!("belay-lock-{}", std::process::id()));
        let (a, b) = (LockFile::open(&path).unwrap(), LockFile::open(&path).unwrap());
        assert_eq!(b.holder(), "another belay");
        let lock = a.take().unwrap().unwrap();
        assert!(b.take().unwrap().is_none());
        assert!(b.take_within(Duration::from_millis(20)).unwrap().is_none());
        let me = format!("process {} on {}", std::process::id(), sys::host());
        assert!(b.holder().contains(&me), "{}", b.holder());
        lock.release();
        assert!(b.take().unwrap().is_some());
        std::fs::remove_file(path).unwrap();
    }
}
