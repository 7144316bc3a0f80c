//! The directory of a history. It is opened once, belongs to one user, and everything in it is reached by way of that.

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// See the module.
pub(crate) struct Dir(File);

/// What is there already was not to be made.
fn made(answer: rustix::io::Result<()>) -> io::Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Opens a name, which is no link, in a directory.
fn open_at(dir: &File, name: &str, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn make_at(dir: &File, name: &str) -> io::Result<bool> {
    made(rustix::fs::mkdirat(dir, name, Mode::RWXU))
}

fn names(dir: &File) -> io::Result<Vec<String>> {
    let all = std::fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
    // What has other names is nobody's here.
    all.filter_map(|entry| entry.map(|e| e.file_name().into_string().ok()).transpose())
        .collect()
}

fn unlink_at(dir: &File, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Dir {
    /// Opens directory `name` in `parent`, and makes it where it is not there.
    pub(crate) fn open_or_make(parent: &File, name: &str) -> io::Result<Self> {
        if make_at(parent, name)? {
            parent.sync_all()?;
        }
        open_at(parent, name, OFlags::DIRECTORY).map(Self)
    }

    /// Whether it is this user's alone.
    pub(crate) fn is_private(&self) -> io::Result<bool> {
        let meta = self.0.metadata()?;
        Ok(meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o077 == 0)
    }

    /// Opens `name`, which is no link.
    pub(crate) fn open(&self, name: &str, flags: OFlags) -> io::Result<File> {
        open_at(&self.0, name, flags)
    }

    /// Opens a file for reading. What is no file is not there, and not waited for as a pipe would be.
    pub(crate) fn regular(&self, name: &str) -> io::Result<File> {
        let file = self.open(name, OFlags::RDONLY | OFlags::NONBLOCK)?;
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Makes a directory in it, if there is none.
    pub(crate) fn make(&self, name: &str) -> io::Result<()> {
        make_at(&self.0, name).map(drop)
    }

    /// All names.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        names(&self.0)
    }

    /// A directory in it; nothing where that is gone.
    pub(crate) fn inner(&self, name: &str) -> io::Result<Option<Self>> {
        match self.open(name, OFlags::DIRECTORY) {
            Ok(dir) => Ok(Some(Self(dir))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Where a symbolic link leads.
    pub(crate) fn target(&self, name: &str) -> io::Result<PathBuf> {
        std::fs::read_link(Path::new(&format!("/proc/self/fd/{}", self.0.as_raw_fd())).join(name))
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.0, from, &self.0, to)?)
    }

    /// Gives a file of this file system a name here; false where something has it.
    pub(crate) fn link(&self, file: &File, name: &str) -> io::Result<bool> {
        let from = format!("/proc/self/fd/{}", file.as_raw_fd());
        made(rustix::fs::linkat(
            rustix::fs::CWD,
            from,
            &self.0,
            name,
            AtFlags::SYMLINK_FOLLOW,
        ))
    }

    /// Whether something is called so.
    pub(crate) fn has(&self, name: &str) -> io::Result<bool> {
        match self.open(name, OFlags::PATH) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other.map(|_| true),
        }
    }

    /// Removes a name; one that is not there is no error.
    pub(crate) fn unlink(&self, name: &str) -> io::Result<()> {
        unlink_at(&self.0, name)
    }

    /// Names are on the disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}
