//! What lies at the paths of a job, as it was seen before its restart began.

use super::owner::me;
use crate::fault::{refuse, At, Fault};
use crate::sys::fd;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

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

    /// Whether `now` is the same one. In a user namespace everything of others seems to belong to [`UNKNOWN`], which may be the user's own number.
    pub(crate) fn is(self, now: Self) -> bool {
        (self.dev, self.ino) == (now.dev, now.ino) && (self.mine == now.mine || me() == UNKNOWN)
    }

    /// Finds it at `path` again, to open it.
    pub(crate) fn find(self, path: &Path) -> Result<OwnedFd, Fault> {
        let found = fd::open(path, libc::O_PATH, 0).at("look for it")?;
        self.must_be(&found)?;
        Ok(found)
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
        let now = Seen::of(&above).at("stat")?;
        if self.dir.is_some_and(|dir| !dir.is(now)) {
            return refuse("another directory has taken the place of its own while the job was being restarted; restart again");
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
}

impl Sights {
    /// What lies at the path of that file.
    pub(crate) fn get(&self, at: usize) -> Sight {
        self.files.get(at).copied().unwrap_or_default()
    }

    /// The same of a FIFO, the file of a socket or a directory.
    pub(crate) fn at(&self, path: &Path) -> Sight {
        self.places.get(path).copied().unwrap_or_default()
    }
}
