//! A directory by its descriptor: what is opened, made or renamed in it lies in this one, whatever its path leads to meanwhile.

use crate::check;
use rustix::fs::RenameFlags;
use rustix::io::Errno;
use std::ffi::{CString, OsStr};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// A name that leads nowhere else: one part, no link is followed, nothing is waited for, and no terminal becomes this
/// process's own.
const PLAIN: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;

/// An open directory.
#[derive(Debug)]
pub struct Dir(File);

pub(crate) fn c_string(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// `openat` with the flags as they are.
pub(crate) fn open_at(dir: RawFd, path: &Path, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    let path = c_string(path)?;
    // SAFETY: the path is a zero-terminated string that lives as long as the call.
    let fd = check(unsafe { libc::openat(dir, path.as_ptr(), flags | libc::O_CLOEXEC, mode) }.into())?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Where the symbolic link `name` in `dir` leads; the one on which `dir` itself is open where `name` is empty.
pub fn read_link_at(dir: &impl AsRawFd, name: &Path) -> io::Result<PathBuf> {
    let name = c_string(name)?;
    let mut target = [0u8; libc::PATH_MAX as usize];
    // SAFETY: the name is a zero-terminated string, the buffer is valid for writing its length.
    let n = unsafe { libc::readlinkat(dir.as_raw_fd(), name.as_ptr(), target.as_mut_ptr().cast(), target.len()) };
    match target.get(..check(n as libc::c_long)? as usize) {
        Some(path) if path.len() < target.len() => Ok(OsStr::from_bytes(path).into()),
        _ => Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG)),
    }
}

/// Opens by O_PATH what a file handle of this kind (`fdinfo` of inotify instances tells them) leads to in the file system
/// that `mount` is open in.
pub fn open_handle(mount: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        data: [u8; 128],
    }
    let mut h = Handle {
        bytes: u32::try_from(handle.len()).map_err(io::Error::other)?,
        kind,
        data: [0; 128],
    };
    let data = h.data.get_mut(..handle.len()).ok_or(io::ErrorKind::InvalidInput)?;
    data.copy_from_slice(handle);
    let (mount, flags) = (mount.as_fd().as_raw_fd(), libc::O_PATH | libc::O_CLOEXEC);
    // SAFETY: `h` is a file handle with its stated length.
    let fd = check(unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount, &raw const h, flags) })?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Makes an empty directory, for nobody else, whose name begins with `start`.
pub fn make_new(start: &Path) -> io::Result<PathBuf> {
    let mut template = start.as_os_str().as_bytes().to_vec();
    template.extend_from_slice(b"XXXXXX");
    let mut template = CString::new(template)?.into_bytes_with_nul();
    // SAFETY: a live string with a zero at its end, which is changed in its place.
    if unsafe { libc::mkdtemp(template.as_mut_ptr().cast()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    template.pop();
    Ok(OsStr::from_bytes(&template).into())
}

/// Makes the name `path` durable, as far as this process may: a directory that it may enter but not read cannot be synced
/// by it.
pub fn sync_above(path: &Path) -> io::Result<()> {
    let Some(above) = path.parent() else {
        return Ok(());
    };
    let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
    match File::open(above) {
        Ok(dir) => dir.sync_all(),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(e) => Err(e),
    }
}

/// Puts the directory `new` in the place of `old`, if there is one. Where the file system can, there is always one of
/// them.
pub fn replace(new: &Path, old: &Path) -> io::Result<()> {
    let (from, to) = (c_string(new)?, c_string(old)?);
    let (here, from, to) = (libc::AT_FDCWD, from.as_ptr(), to.as_ptr());
    // SAFETY: both are zero-terminated strings that live as long as the call.
    match check(unsafe { libc::renameat2(here, from, here, to, libc::RENAME_EXCHANGE) }.into()) {
        // What was there has the other name now.
        Ok(_) => return std::fs::remove_dir_all(new),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => std::fs::remove_dir_all(old)?,
        Err(e) => return Err(e),
    }
    std::fs::rename(new, old)
}

/// Renames the file `from` to `to`, where nothing is: [`io::ErrorKind::AlreadyExists`] where something is.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, RenameFlags::NOREPLACE) {
        // The file system cannot do that (NFS).
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => std::fs::hard_link(from, to).and_then(|()| std::fs::remove_file(from)),
        other => Ok(other?),
    }
}

/// `name`, if it is one part of a path.
fn part(name: &Path) -> io::Result<&Path> {
    let mut parts = name.components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(one)), None) if one == name.as_os_str() => Ok(name),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

impl Dir {
    /// The directory at `path`, of which nothing but its metadata is asked: no right to read it is needed. Links are followed.
    pub fn find(path: &Path) -> io::Result<Self> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        open_at(libc::AT_FDCWD, path, flags, 0).map(Self::of)
    }

    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// The same, opened for reading with the rights that this process has now.
    pub fn reopened(&self) -> io::Result<Self> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY;
        open_at(self.as_raw_fd(), Path::new("."), flags, 0).map(Self::of)
    }

    /// What is known of the directory itself.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    /// Makes the names in it durable.
    pub fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    /// Opens `name` in it, which is not a link, with `flags` of `open`; what it makes has `mode`.
    pub fn open(&self, name: &Path, flags: i32, mode: u32) -> io::Result<File> {
        open_at(self.as_raw_fd(), part(name)?, flags | PLAIN, mode).map(File::from)
    }

    /// Whether `name` is in it, whatever it is.
    pub fn has(&self, name: &Path) -> bool {
        self.open(name, libc::O_PATH, 0).is_ok()
    }

    /// Makes directory `name` in it.
    pub fn make(&self, name: &Path, mode: u32) -> io::Result<()> {
        let name = c_string(part(name)?)?;
        // SAFETY: the name is a zero-terminated string that lives as long as the call.
        check(unsafe { libc::mkdirat(self.as_raw_fd(), name.as_ptr(), mode) }.into()).map(drop)
    }

    /// Directory `name` in it, of which nothing but its metadata is asked, and which is no link.
    pub fn inner(&self, name: &Path) -> io::Result<Self> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        open_at(self.as_raw_fd(), part(name)?, flags, 0).map(Self::of)
    }

    /// Makes symbolic link `name` in it, which leads to `target`.
    pub fn link(&self, name: &Path, target: &Path) -> io::Result<()> {
        let (name, target) = (c_string(part(name)?)?, c_string(target)?);
        // SAFETY: both are zero-terminated strings that live as long as the call.
        check(unsafe { libc::symlinkat(target.as_ptr(), self.as_raw_fd(), name.as_ptr()) }.into()).map(drop)
    }

    /// Gives `old` in it the name `new`.
    pub fn rename(&self, old: &Path, new: &Path) -> io::Result<()> {
        let (old, new) = (c_string(part(old)?)?, c_string(part(new)?)?);
        let dir = self.as_raw_fd();
        // SAFETY: both names are zero-terminated strings that live as long as the call.
        check(unsafe { libc::renameat(dir, old.as_ptr(), dir, new.as_ptr()) }.into()).map(drop)
    }

    /// Removes `name` from it, which is no directory; one that is not there is no error.
    pub fn remove(&self, name: &Path) -> io::Result<()> {
        let name = c_string(part(name)?)?;
        // SAFETY: the name is a zero-terminated string that lives as long as the call.
        match check(unsafe { libc::unlinkat(self.as_raw_fd(), name.as_ptr(), 0) }.into()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Changes the directory's mode.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        // SAFETY: takes numbers only.
        check(unsafe { libc::fchmod(self.as_raw_fd(), mode) }.into()).map(drop)
    }
}

impl AsRawFd for Dir {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn names_stay_in_the_directory_whatever_its_path_leads_to() {
        let base = std::env::temp_dir().join(format!("belay-dir-{}", std::process::id()));
        let (path, other) = (base.join("job"), base.join("other"));
        std::fs::create_dir_all(&path).unwrap();
        let dir = Dir::find(&path).unwrap().reopened().unwrap();
        std::fs::rename(&path, base.join("moved")).unwrap();
        std::fs::create_dir(&other).unwrap();
        symlink(&other, &path).unwrap();
        let create = libc::O_RDWR | libc::O_CREAT;
        dir.open("x".as_ref(), create, 0o600).unwrap();
        dir.rename("x".as_ref(), "y".as_ref()).unwrap();
        dir.make("sub".as_ref(), 0o700).unwrap();
        assert!(base.join("moved/y").is_file() && base.join("moved/sub").is_dir());
        assert_eq!(std::fs::read_dir(&other).unwrap().count(), 0);
        for bad in ["", ".", "..", "a/b", "/x", "../other", "y/"] {
            assert!(dir.open(bad.as_ref(), create, 0o600).is_err(), "{bad:?}");
        }
        // No link is followed, and none is written through.
        symlink(other.join("victim"), base.join("moved/link")).unwrap();
        assert!(dir.open("link".as_ref(), create, 0o600).is_err() && !other.join("victim").exists());
        assert!(dir.has("link".as_ref()) && !dir.has("z".as_ref()));
        assert!(dir.inner("link".as_ref()).is_err() && dir.inner("../other".as_ref()).is_err());
        dir.remove("link".as_ref()).unwrap();
        dir.remove("link".as_ref()).unwrap();
        dir.inner("sub".as_ref()).unwrap().link("to".as_ref(), &other).unwrap();
        assert_eq!(std::fs::read_link(base.join("moved/sub/to")).unwrap(), other);
        dir.sync().unwrap();
        std::fs::remove_dir_all(base).unwrap();
    }
}
