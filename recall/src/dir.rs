//! The directory of a history. It is opened once, belongs to one user, and everything in it is reached by way of that.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// See the module.
pub(crate) struct Dir(File);

fn c_name(name: &str) -> io::Result<CString> {
    CString::new(name).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// The system's answer to a call that gives 0 or more.
pub(crate) fn answer(n: i32) -> io::Result<i32> {
    match n {
        0.. => Ok(n),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What is there already was not to be made.
fn made(answer: io::Result<i32>) -> io::Result<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    }
}

/// Opens a name, which is no link, in a directory.
fn open_at(dir: &File, name: &str, flags: i32) -> io::Result<File> {
    let name = c_name(name)?;
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: the name ends with a zero byte.
    let fd = answer(unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags, 0o600) })?;
    // SAFETY: the descriptor was just made, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn make_at(dir: &File, name: &str) -> io::Result<bool> {
    let name = c_name(name)?;
    // SAFETY: the name ends with a zero byte.
    made(answer(unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), 0o700) }))
}

fn names(dir: &File) -> io::Result<Vec<String>> {
    let all = std::fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd()))?;
    // What has other names is nobody's here.
    all.filter_map(|entry| entry.map(|e| e.file_name().into_string().ok()).transpose())
        .collect()
}

fn unlink_at(dir: &File, name: &str) -> io::Result<()> {
    let name = c_name(name)?;
    // SAFETY: the name ends with a zero byte.
    match answer(unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), 0) }) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

impl Dir {
    /// Opens directory `name` in `parent`, and makes it where it is not there.
    pub(crate) fn open_or_make(parent: &File, name: &str) -> io::Result<Self> {
        if make_at(parent, name)? {
            parent.sync_all()?;
        }
        open_at(parent, name, libc::O_DIRECTORY).map(Self)
    }

    /// Device and inode, where the directory is this user's alone.
    pub(crate) fn identity(&self) -> io::Result<Option<(u64, u64)>> {
        let meta = self.0.metadata()?;
        // SAFETY: it only asks.
        let user = unsafe { libc::geteuid() };
        let is_private = meta.uid() == user && meta.mode() & 0o077 == 0;
        Ok(is_private.then_some((meta.dev(), meta.ino())))
    }

    /// Opens `name`, which is no link.
    pub(crate) fn open(&self, name: &str, flags: i32) -> io::Result<File> {
        open_at(&self.0, name, flags)
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
        match self.open(name, libc::O_DIRECTORY) {
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
        let (fd, from, to) = (self.0.as_raw_fd(), c_name(from)?, c_name(to)?);
        // SAFETY: both names end with a zero byte.
        answer(unsafe { libc::renameat(fd, from.as_ptr(), fd, to.as_ptr()) }).map(|_| ())
    }

    /// Gives a file of this file system a name here; false where something has it.
    pub(crate) fn link(&self, file: &File, name: &str) -> io::Result<bool> {
        let (from, name) = (c_name(&format!("/proc/self/fd/{}", file.as_raw_fd()))?, c_name(name)?);
        let (fd, flags) = (self.0.as_raw_fd(), libc::AT_SYMLINK_FOLLOW);
        // SAFETY: both names end with a zero byte.
        made(answer(unsafe {
            libc::linkat(libc::AT_FDCWD, from.as_ptr(), fd, name.as_ptr(), flags)
        }))
    }

    /// Whether something is called so.
    pub(crate) fn has(&self, name: &str) -> io::Result<bool> {
        match self.open(name, libc::O_PATH) {
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
