//! To whom what a restart makes again belongs.
//!
//! Only root may give things away. What belonged to somebody else becomes the user's own where it cannot be given back,
//! and private: nobody else may read it, and least of all run it as its new owner.

use crate::sys::fd;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;

/// Whose something without a name is, and who may open it below `/proc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Belongs {
    /// Owner and group.
    pub(crate) owner: (u32, u32),
    mode: u32,
}

impl From<&fd::Stat> for Belongs {
    fn from(stat: &fd::Stat) -> Self {
        Self {
            owner: (stat.st_uid, stat.st_gid),
            mode: stat.st_mode & 0o7777,
        }
    }
}

impl Belongs {
    /// Gives what `raw` is open on, and has just been made, to them, where that may be.
    pub(crate) fn give(self, raw: RawFd) -> io::Result<()> {
        give(raw, self.owner, self.mode).map(drop)
    }
}

/// What is left of the mode of what cannot be given back.
const PRIVATE: u32 = 0o700;

/// Gives what `raw` is open on (O_PATH is enough), and has just been made, its owner and group, and as much of `mode`
/// as it may have then, which is returned. `None`: it could not be given back.
pub(crate) fn give(raw: RawFd, owner: (u32, u32), mode: u32) -> io::Result<Option<u32>> {
    let stat = fd::fstat(raw)?;
    let given = (stat.st_uid, stat.st_gid) == owner
        || match chown(raw, owner) {
            // EINVAL: whoever is not known in a user namespace.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::EINVAL)) => false,
            set => set.map(|()| true)?,
        };
    let mode = if given { mode } else { private(mode) };
    // To change the owner can take bits away.
    if (stat.st_uid, stat.st_gid) != owner || stat.st_mode & 0o7777 != mode {
        match set_mode(raw, mode) {
            // Who may give things away need not be allowed to change what is not theirs.
            Err(e) if given && e.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
            set => set?,
        }
    }
    Ok(given.then_some(mode))
}

/// The user as whom things are made. Only root may give them away.
pub(crate) fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The mode of what belonged to somebody else, and could not be given back.
pub(crate) fn private(mode: u32) -> u32 {
    mode & PRIVATE
}

/// Gives what has just been made, an object of type `kind` (`S_IFDIR`, ...), its mode, and `owner` where that is known.
/// In a directory of others something else may have its name by the time it is looked for; that is refused where it can
/// be told: by its type, its owner, another name that it has, or what lies in it. Not where it is `sure` that nobody
/// else can have done so: then another part of the job, which restarts here too, may have made something in it.
pub(crate) fn give_made(made: &OwnedFd, kind: u32, owner: Option<(u32, u32)>, mode: u32, sure: bool) -> io::Result<()> {
    let stat = fd::fstat(made.as_raw_fd())?;
    let now = (stat.st_uid, stat.st_gid);
    // A server of a network file system may make root's things somebody else's.
    let ours = now.0 == me() || owner.is_none_or(|owner| owner == now);
    let fresh = if sure {
        true
    } else if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        std::fs::read_dir(fd::self_path(made.as_raw_fd()))?.next().is_none()
    } else {
        stat.st_nlink <= 1
    };
    if !ours || !fresh || stat.st_mode & libc::S_IFMT != kind {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "somebody has put something else in its place; look at it, move it away and restart again",
        ));
    }
    if give(made.as_raw_fd(), owner.unwrap_or(now), mode)?.is_none() {
        // The restart itself must be able to use it.
        let needed = if kind == libc::S_IFDIR { 0o700 } else { 0o600 };
        set_mode(made.as_raw_fd(), private(mode) | needed)?;
    }
    Ok(())
}

fn set_mode(raw: RawFd, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(fd::self_path(raw), PermissionsExt::from_mode(mode))
}

fn chown(raw: RawFd, owner: (u32, u32)) -> io::Result<()> {
    fd::chown_found(raw, owner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, MetadataExt};
    use std::path::Path;

    fn give_path(path: &Path, kind: u32, owner: (u32, u32), mode: u32) -> io::Result<()> {
        let made = fd::open(path, libc::O_PATH | libc::O_NOFOLLOW, 0)?;
        give_made(&made, kind, Some(owner), mode, false)
    }

    #[test]
    fn what_somebody_has_put_in_its_place_is_not_given_away() {
        let dir = std::env::temp_dir().join(format!("belay-owner-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let own = std::fs::metadata(&dir).unwrap();
        let (own, path) = ((own.uid(), own.gid()), dir.join("made"));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        std::fs::create_dir(&path).unwrap();
        give_path(&path, libc::S_IFDIR, own, 0o2755).unwrap();
        assert_eq!(mode(&path), 0o2755);
        assert!(give_path(&path, libc::S_IFIFO, own, 0o777).is_err(), "another type");
        let inner = path.join("inner");
        std::fs::create_dir(&inner).unwrap();
        assert!(give_path(&path, libc::S_IFDIR, own, 0o777).is_err(), "something lies in it");
        std::fs::remove_dir(inner).unwrap();
        let link = dir.join("link");
        symlink(&path, &link).unwrap();
        assert!(give_path(&link, libc::S_IFDIR, own, 0o777).is_err(), "a symbolic link");
        let (fifo, name) = (dir.join("fifo"), dir.join("name"));
        fd::mkfifo_at(&fd::above(&fifo).unwrap(), &fifo).unwrap();
        give_path(&fifo, libc::S_IFIFO, own, 0o640).unwrap();
        assert_eq!(mode(&fifo), 0o640);
        std::fs::hard_link(&fifo, &name).unwrap();
        assert!(give_path(&fifo, libc::S_IFIFO, own, 0o777).is_err(), "it has another name");
        std::fs::remove_file(&name).unwrap();
        assert_eq!((mode(&path), mode(&fifo)), (0o2755, 0o640));
        if own.0 == 0 {
            for (path, kind) in [(&path, libc::S_IFDIR), (&fifo, libc::S_IFIFO)] {
                give_path(path, kind, (65534, 65533), 0o4755).unwrap();
                let now = std::fs::metadata(path).unwrap();
                assert_eq!((now.uid(), now.gid(), now.mode() & 0o7777), (65534, 65533, 0o4755));
                assert!(give_path(path, kind, own, 0o755).is_err(), "it is somebody else's now");
                assert_eq!(std::fs::metadata(path).unwrap().uid(), 65534);
            }
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
