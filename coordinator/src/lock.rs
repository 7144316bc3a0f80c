//! Files by whose lock (`flock`) processes keep others out, and in which the holder has written who it is.
//!
//! The lock is the kernel's, so it ends with its holders: who took it, and the processes that inherited it. What is
//! written there tells a user who is in the way and how far it is, and nothing else.

use crate::{sys, Failure};
use belay_kernel::dir::Dir;
use belay_wire::Exit;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest word of a holder.
const MAX_WORD: u64 = 256;

/// End of the word of a holder who serves a job.
const SERVING: &str = ", serving";

/// Who holds a lock, as it has written itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// What, which process, on which host.
    pub word: String,
    /// An agent of it serves the job, or did so when it was last heard of.
    pub serving: bool,
}

impl Holder {
    fn of(word: &[u8]) -> Self {
        let word = String::from_utf8_lossy(word);
        let (word, serving) = match word.trim().strip_suffix(SERVING) {
            Some(word) => (word, true),
            None => (word.trim(), false),
        };
        let word = if word.is_empty() { "another belay" } else { word }.to_owned();
        Self { word, serving }
    }

    /// Whether it runs a job, or is about to: not one who tidies.
    pub fn runs(&self) -> bool {
        let verb = self.word.strip_prefix("belay ").and_then(|w| w.split(' ').next());
        verb.is_some_and(|v| ["launch", "restart", "run", "agent"].contains(&v))
    }

    /// Its host, where the word names one.
    pub fn host(&self) -> Option<&str> {
        self.word.rsplit_once(" on ").and_then(|(_, host)| host.strip_suffix(')'))
    }
}

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
    /// Adds to the word that an agent serves the job by now.
    pub(crate) fn serving(&self) {
        let word = self
            .0
            .metadata()
            .and_then(|m| self.0.write_all_at(SERVING.as_bytes(), m.len()));
        if let Err(e) = word {
            tracing::debug!(error = %e, "others take the job for one that is still starting");
        }
    }

    /// Takes the word away: whoever finds nobody at home from now on need not ask why.
    pub(crate) fn leaving(&self) {
        // What cannot be taken away names one who may be gone.
        drop(self.0.set_len(0));
    }

    /// Gives the lock back, also for the processes that inherited it.
    pub fn release(self) {
        self.leaving();
        sys::unlock(self.0.as_fd());
    }
}

/// This process, for those whom it keeps out.
fn own_word() -> String {
    let what = std::env::args_os().nth(1).unwrap_or_default();
    format!("belay {} (process {} on {})", what.display(), std::process::id(), sys::host())
}

impl LockFile {
    /// The file `name` in `dir`, which lies at `at`; it is made where there is none. What the lock's holder writes
    /// never goes through a link, or into somebody else's file.
    pub(crate) fn open(dir: &Dir, at: &Path, name: &str) -> Result<Self, Failure> {
        let path = at.join(name);
        let fail = |e: &io::Error| Failure::io(format!("lock {}", path.display()), e);
        let file = dir
            .open(name.as_ref(), libc::O_RDWR | libc::O_CREAT, 0o600)
            .map_err(|e| fail(&e))?;
        let m = file.metadata().map_err(|e| fail(&e))?;
        if !m.is_file() || m.uid() != sys::euid() {
            let why = format!("{} is no file of user {}; remove it", path.display(), sys::euid());
            return Err(Failure::new(Exit::NotOurs, why));
        }
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
    pub(crate) fn holder(&self) -> Holder {
        holder(&self.file)
    }
}

fn holder(file: &File) -> Holder {
    let mut word = vec![0; MAX_WORD as usize];
    let n = file.read_at(&mut word, 0).unwrap_or(0);
    Holder::of(&word[..n])
}

/// Who holds the lock of `file`, which is only looked at; `None` when nobody does. Whoever wants it for itself in this
/// very moment waits for that moment.
pub(crate) fn held_by(file: &File) -> io::Result<Option<Holder>> {
    match sys::lock_shared(file.as_fd()) {
        Ok(()) => {
            sys::unlock(file.as_fd());
            Ok(None)
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Some(holder(file))),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_holds_a_lock_and_the_others_hear_who() {
        let at = std::env::temp_dir().join(format!("belay-lock-{}", std::process::id()));
        std::fs::create_dir(&at).unwrap();
        let dir = Dir::find(&at).unwrap();
        let open = || LockFile::open(&dir, &at, "lock").unwrap();
        let (a, b) = (open(), open());
        assert_eq!(b.holder().word, "another belay");
        assert_eq!(held_by(&b.file).unwrap(), None);
        let lock = a.take().unwrap().unwrap();
        assert!(b.take().unwrap().is_none());
        assert!(b.take_within(Duration::from_millis(20)).unwrap().is_none());
        let me = format!("process {} on {}", std::process::id(), sys::host());
        let holder = held_by(&b.file).unwrap().unwrap();
        assert!(holder.word.contains(&me) && !holder.serving, "{holder:?}");
        assert_eq!(holder.host(), Some(sys::host().as_str()));
        lock.serving();
        assert_eq!(b.holder(), Holder { serving: true, ..holder });
        lock.release();
        assert!(b.take().unwrap().is_some());
        std::fs::remove_dir_all(at).unwrap();
    }

    #[test]
    fn nothing_is_written_through_a_link_or_into_what_is_no_file() {
        let at = std::env::temp_dir().join(format!("belay-lock-links-{}", std::process::id()));
        std::fs::create_dir(&at).unwrap();
        let (dir, victim) = (Dir::find(&at).unwrap(), at.join("victim"));
        std::fs::write(&victim, "theirs").unwrap();
        std::os::unix::fs::symlink(&victim, at.join("lock")).unwrap();
        assert!(LockFile::open(&dir, &at, "lock").is_err());
        std::fs::create_dir(at.join("moves.lock")).unwrap();
        assert!(LockFile::open(&dir, &at, "moves.lock").is_err());
        assert_eq!(std::fs::read_to_string(victim).unwrap(), "theirs");
        std::fs::remove_dir_all(at).unwrap();
    }

    #[test]
    fn only_who_runs_a_job_makes_it_more_than_ended() {
        for (word, runs) in [
            ("belay run (process 3 on n1), serving", true),
            ("belay restart (process 3 on n1)", true),
            ("belay gc (process 3 on n1)", false),
            ("belay flush", false),
            ("", false),
            ("\u{1b}[2J run", false),
        ] {
            let holder = Holder::of(word.as_bytes());
            assert_eq!((holder.runs(), holder.serving), (runs, word.ends_with("serving")), "{word:?}");
        }
    }
}
