//! To whom what a restart makes again belongs.
//!
//! Only root may give things away. What belonged to somebody else becomes the user's own where it cannot be given back, and private: nobody else may read it, and least of all run it as its new owner.

use crate::sys::fd;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// What is left of the mode of what cannot be given back.
const PRIVATE: u32 = 0o700;

/// Gives what `raw` is open on (O_PATH is enough), and has just been made, its owner and group, and as much of `mode` as it may have then, which is returned. `None`: it could not be given back.
pub(crate) fn give(raw: RawFd, owner: (u32, u32), mode: u32) -> io::Result<Option<u32>> {
    let stat = fd::fstat(raw)?;
    let given = (stat.st_uid, stat.st_gid) == owner
        || match chown(raw, owner) {
            // EINVAL: whoever is not known in a user namespace.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EINVAL)) => false,
            set => set.map(|()| true)?,
        };
    let mode = if given { mode } else { private(mode) };
    std::fs::set_permissions(fd::self_path(raw), PermissionsExt::from_mode(mode))?;
    Ok(given.then_some(mode))
}

/// The mode of what belonged to somebody else, and could not be given back.
pub(crate) fn private(mode: u32) -> u32 {
    mode & PRIVATE
}

/// The same for what has the name `path`, and is not a symbolic link: in a directory of others that may not be any more what was made there.
pub(crate) fn give_path(path: &Path, owner: (u32, u32), mode: u32) -> io::Result<()> {
    let file = fd::open(path, libc::O_PATH | libc::O_NOFOLLOW, 0)?;
    let stat = fd::fstat(file.as_raw_fd())?;
    // SAFETY: has no preconditions.
    let me = unsafe { libc::geteuid() };
    // A server of a network file system may make root's things somebody else's.
    let made = stat.st_uid == me || (stat.st_uid, stat.st_gid) == owner;
    if !made || stat.st_mode & libc::S_IFMT == libc::S_IFLNK {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "somebody has put another in its place",
        ));
    }
    give(file.as_raw_fd(), owner, mode).map(drop)
}

fn chown(raw: RawFd, owner: (u32, u32)) -> io::Result<()> {
    // SAFETY: the path is a valid C string; the rest are numbers.
    let r = unsafe { libc::fchownat(raw, c"".as_ptr(), owner.0, owner.1, libc::AT_EMPTY_PATH) };
    crate::sys::check(r).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, MetadataExt};

    #[test]
    fn what_is_somebody_elses_or_a_link_is_not_given_away() {
        let dir = std::env::temp_dir().join(format!("belay-owner-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let own = std::fs::metadata(&dir).unwrap();
        let (own, path) = ((own.uid(), own.gid()), dir.join("made"));
        std::fs::create_dir(&path).unwrap();
        give_path(&path, own, 0o2755).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o2755);
        let link = dir.join("link");
        symlink(&path, &link).unwrap();
        assert!(give_path(&link, own, 0o777).is_err());
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o2755);
        if own.0 == 0 {
            give_path(&path, (65534, 65534), 0o4755).unwrap();
            let now = std::fs::metadata(&path).unwrap();
            assert_eq!((now.uid(), now.mode() & 0o7777), (65534, 0o4755));
            assert!(give_path(&path, own, 0o755).is_err(), "it is somebody else's now");
            assert_eq!(std::fs::metadata(&path).unwrap().uid(), 65534);
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
