//! What lies at the paths of a job, as it was seen before its restart began.

use super::owner::me;
use crate::fault::{refuse, At, Fault};
use crate::sys::fd;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Whoever is not known in a user namespace.
pub(super) const UNKNOWN: u32 = 65534;

/// A file as it was found: what is opened later must be this one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    dev: u64,
    ino: u64,
    mine: bool,
}

impl Seen {
    /// What `file` is open on.
    pub(crate) fn of(file: &OwnedFd) -> io::Result<Self> {
        Ok(Self::from(&fd::fstat(file.as_raw_fd())?))
    }

    pub(crate) fn from(stat: &fd::Stat) -> Self {
        Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
            mine: stat.st_uid == me(),
        }
    }

    /// Whether `now` is the same one. In a user namespace everything of others seems to belong to [`UNKNOWN`], which
    /// may be the user's own number.
    pub(crate) fn is(self, now: Self) -> bool {
        (self.dev, self.ino) == (now.dev, now.ino) && (self.mine == now.mine || me() == UNKNOWN)
    }

    /// The same, whoever it belongs to by now.
    pub(crate) fn is_same_file(self, now: Self) -> bool {
        (self.dev, self.ino) == (now.dev, now.ino)
    }

    /// Finds it at `path` again, to open it.
    pub(crate) fn find(self, path: &Path) -> Result<OwnedFd, Fault> {
        let found = fd::open(path, libc::O_PATH, 0).at("look for it")?;
        self.must_be(&found)?;
        Ok(found)
    }

    /// The same of a directory.
    pub(super) fn must_be_directory(self, dir: &OwnedFd) -> Result<(), Fault> {
        if self.is(Self::of(dir).at("stat")?) {
            return Ok(());
        }
        refuse("another directory has taken the place of its own while the job was being restarted; restart again")
    }

    /// Refuses what `file` is open on where that is another one.
    pub(crate) fn must_be(self, file: &OwnedFd) -> Result<(), Fault> {
        if self.is(Self::of(file).at("stat")?) {
            return Ok(());
        }
        refuse("another file has taken its place while the job was being restarted; look at it, move it away and restart again")
    }
}

/// What lies at a path of the job.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sight {
    /// The file or directory, where it may be taken for the job's; a directory only where others could exchange it.
    pub(crate) file: Option<Seen>,
    /// The directory.
    pub(crate) dir: Option<Seen>,
    /// Others could exchange it, or a directory on the way to it.
    pub(crate) doubtful: bool,
    /// The directory was missing: what has a name in it was made since.
    pub(crate) fresh: bool,
    /// The file is not here as it was, and the checkpoint has a copy of it.
    pub(crate) stored: bool,
}

impl Sight {
    /// Makes sure that `now` is what was seen, where anything was.
    pub(crate) fn is(self, now: &fd::Stat) -> Result<(), Fault> {
        if self.file.is_some_and(|seen| !seen.is(Seen::from(now))) {
            return refuse("another one has taken its place while the job was being restarted; restart again");
        }
        Ok(())
    }

    /// Opens the directory of `path`, which must be the one that was seen, or have been missing.
    pub(crate) fn above(self, path: &Path) -> Result<OwnedFd, Fault> {
        let above = fd::above(path).at("open its directory")?;
        if let Some(dir) = self.dir {
            dir.must_be_directory(&above)?;
        }
        Ok(above)
    }
}

/// A file that the checkpoint may have because it is mapped: its path, length and time of last change (nanoseconds).
pub type Key<'a> = (&'a Path, u64, i64);
/// Whether this machine lacks it, and the checkpoint has all of it.
pub type Stored<'a> = dyn Fn(&Key<'_>) -> bool + 'a;
/// The copy of it.
pub type Copies<'a> = dyn Fn(&Key<'_>) -> Option<RawFd> + 'a;

/// What was found before a restart begins.
#[derive(Debug, Clone, Default)]
pub struct Sights {
    /// For each file of the job.
    pub(super) files: Vec<Sight>,
    /// For FIFOs, the files of sockets and directories, by their paths.
    pub(super) places: HashMap<PathBuf, Sight>,
    /// For the files of sockets to which others answered, by their paths: whether that may be trusted which lies there.
    pub(super) peers: HashMap<PathBuf, Sight>,
    /// For directories that were missing where others may make some: in which they were.
    pub(super) missing: HashMap<PathBuf, Seen>,
    /// Directories that were missing, as the restart has made them.
    pub(super) made: Arc<Mutex<HashMap<PathBuf, Seen>>>,
}

impl Sights {
    /// Only what lay at `path`.
    #[cfg(test)]
    pub(crate) fn with(path: &Path, sight: Sight) -> Self {
        Self {
            places: [(path.to_owned(), sight)].into(),
            ..Self::default()
        }
    }

    /// What lies at the path of that file.
    pub(crate) fn get(&self, at: usize) -> Sight {
        self.files.get(at).copied().unwrap_or_default()
    }

    /// The same of a FIFO, the file of a socket or a directory.
    pub(crate) fn at(&self, path: &Path) -> Sight {
        let sight = self.places.get(path).copied().unwrap_or_default();
        Sight {
            file: sight.file.or_else(|| self.made(path)),
            ..sight
        }
    }

    /// Opens the file of a socket at `path`, to which another program is to answer. One that somebody can have put
    /// there who has nothing to do with that is refused: it would get what is not meant for it.
    pub(crate) fn answerer(&self, path: &Path) -> Result<OwnedFd, Fault> {
        let found = fd::open(path, libc::O_PATH, 0).at("look for its file")?;
        match self.peers.get(path) {
            Some(sight) if !sight.doubtful => Ok(found),
            Some(Sight { file: Some(seen), .. }) => seen.must_be(&found).map(|()| found),
            _ => refuse("others can have put its file there, and it is not of the user whose it was, of this user or of root"),
        }
    }

    /// The directory that has been made at `path`.
    pub(super) fn made(&self, path: &Path) -> Option<Seen> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.get(path).copied()
    }

    /// Takes note of one.
    pub(super) fn note(&self, path: &Path, dir: Seen) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.insert(path.to_owned(), dir);
    }
}
