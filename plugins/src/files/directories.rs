//! Directories above files, FIFOs and sockets: noted at the checkpoint, made again where they are gone.
//!
//! One that had been deleted at the checkpoint already is made for the time of the rebuild only (`scaffold`).

use super::{owner, Seen, Sight, Sights};
use crate::env::ProcessView;
use crate::fault::{refuse, At, Fault};
use crate::model::{Directory, FsPath};
use crate::sys::fd;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Directories above `path` as they are now, outermost first.
pub(crate) fn parents(path: &Path) -> Vec<Directory> {
    let above: Vec<_> = path.ancestors().skip(1).filter(|p| p.parent().is_some()).collect();
    above.into_iter().rev().filter_map(directory).collect()
}

/// `path` as it is now; nothing where it cannot be looked at.
fn directory(path: &Path) -> Option<Directory> {
    let (mode, owner, gone) = match fd::stat(path, true) {
        Ok(stat) => (stat.st_mode & 0o7777, (stat.st_uid, stat.st_gid), false),
        Err(e) if e.kind() == io::ErrorKind::NotFound => (0o700, (0, 0), true),
        Err(_) => return None,
    };
    Some(Directory {
        path: FsPath::from(path),
        mode,
        owner,
        gone,
    })
}

/// Working directories of the processes that a restart must make again: those that had been deleted, and those that may
/// be cleaned away. Any other must be there.
pub(crate) fn working(processes: &[ProcessView]) -> Vec<Vec<Directory>> {
    let lists = linked(processes, &["cwd"]);
    let lists = lists.iter().map(|shown| {
        let deleted = fd::stat(shown, false).is_err();
        let path = if deleted { super::without_deleted(shown) } else { shown };
        parents(&path.join("x"))
    });
    lists
        .filter(|l| l.last().is_some_and(|d| d.gone || super::is_volatile(d.path.as_path(), None)))
        .collect()
}

/// Directories that are the working or root directory of a process or thread, as they are now.
pub(crate) fn entered(processes: &[ProcessView]) -> Vec<Directory> {
    let mut all = linked(processes, &["cwd", "root"]);
    all.extend(processes.iter().flat_map(|p| p.standing.iter().cloned()));
    all.iter().filter_map(|path| directory(path)).filter(|d| !d.gone).collect()
}

/// To where these links in `/proc/PID` lead.
fn linked(processes: &[ProcessView], links: &[&str]) -> BTreeSet<PathBuf> {
    let of = |p: &ProcessView, link: &str| fd::readlink(Path::new(&format!("/proc/{}/{link}", p.task))).ok();
    let all = processes
        .iter()
        .flat_map(|p| links.iter().filter_map(move |link| of(p, link)));
    all.collect()
}

/// Makes the directories that are gone. Those that were missing when they were looked at, where others may make some,
/// are made in the directory in which they were missing, and found again in no other.
pub(crate) fn make_parents(parents: &[Directory], sights: &Sights) -> Result<(), Fault> {
    // Whoever owns a directory can put another in the place of what is in it: what has been made is not looked for by
    // its path again.
    let mut last: Option<(&Path, OwnedFd)> = None;
    let mut doubtful = false;
    for (n, d) in parents.iter().enumerate() {
        let path = d.path.as_path();
        let missing = sights.missing.get(path);
        if last.is_none() && missing.is_none() && path.is_dir() {
            continue;
        }
        doubtful |= missing.is_some();
        let last_name = path.file_name();
        if last_name.is_none() && !doubtful {
            // (`..`: of what is there by now.)
            last = None;
            continue;
        }
        let above = match last.take() {
            Some((above, fd)) if path.parent() == Some(above) => fd,
            _ => fd::above(path).at(format!("open the directory of {path:?}"))?,
        };
        if let Some(dir) = missing {
            dir.must_be_directory(&above)?;
        }
        let made = match last_name {
            None => Some(fd::find_in(&above, OsStr::new("..")).at(format!("open {path:?}"))?),
            Some(_) => match fd::mkdir_at(&above, path) {
                Ok(()) => Some(give(&above, n.checked_sub(1).map(|n| &parents[n]), d)?),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => doubtful.then(|| found(&above, d, sights)).transpose()?,
                Err(e) => return Err(e).at(format!("make directory {path:?}")),
            },
        };
        if let Some(made) = made {
            sights.note(path, Seen::of(&made).at("stat")?);
            last = Some((path, made));
        }
    }
    Ok(())
}

impl Sights {
    /// Makes the directories above a file, where they are gone; `sight` is what was at its path before.
    pub(crate) fn make(&self, parents: &[Directory], sight: Sight) -> Result<Sight, Fault> {
        make_parents(parents, self)?;
        let made = parents.last().and_then(|dir| self.made(dir.path.as_path()));
        Ok(Sight {
            dir: made.or(sight.dir),
            fresh: made.is_some(),
            ..sight
        })
    }
}

/// Gives directory `d`, which has just been made in `above`, its owner and mode; `parent` is what was said of the latter.
fn give(above: &OwnedFd, parent: Option<&Directory>, d: &Directory) -> Result<OwnedFd, Fault> {
    let path = d.path.as_path();
    let made = fd::find_at(above, path).at(format!("open {path:?}"))?;
    // Of one that had been deleted nobody knows the owner.
    let (whose, mode) = match parent {
        _ if d.gone => (None, d.mode),
        Some(parent) if is_elsewhere(parent, d, path, above).at(format!("look at the directory of {path:?}"))? => {
            tracing::warn!(
                ?path,
                "the directory above belongs to another user than at the checkpoint; what is made in it is private"
            );
            (None, owner::private(d.mode))
        }
        _ => (Some(d.owner), d.mode),
    };
    let sure = !others_may_rename(above).at(format!("look at the directory of {path:?}"))?;
    owner::give_made(&made, libc::S_IFDIR, whose, mode, sure).at(format!("set owner and mode of {path:?}"))?;
    Ok(made)
}

/// The directory that has the last name of `d` in `above` by now: another part of the job may have made it. It is no
/// link, nobody else's, and no other one than before.
fn found(above: &OwnedFd, d: &Directory, sights: &Sights) -> Result<OwnedFd, Fault> {
    let path = d.path.as_path();
    let found = fd::find_at(above, path).at(format!("open {path:?}"))?;
    let stat = fd::fstat(found.as_raw_fd()).at("stat")?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
        return refuse(format!("{path:?} was missing, and something else than a directory has its name by now; look at it, move it away and restart again"));
    }
    if !d.gone && ![d.owner.0, owner::me()].contains(&stat.st_uid) {
        let whose = stat.st_uid;
        return refuse(format!(
            "{path:?} was missing, and is a directory of user {whose} by now; look at it, move it away and restart again"
        ));
    }
    if let Some(made) = sights.made(path) {
        made.must_be_directory(&found)?;
    }
    Ok(found)
}

/// Whether `above`, in which directory `d` has been made, is none in which its owner could have made it: where `parent`
/// was, somebody may have put a symbolic link. That is of concern only where something may be given away.
fn is_elsewhere(parent: &Directory, d: &Directory, path: &Path, above: &OwnedFd) -> io::Result<bool> {
    if Some(parent.path.as_path()) != path.parent() || parent.gone || owner::me() != 0 {
        return Ok(false);
    }
    let owner = fd::fstat(above.as_raw_fd())?.st_uid;
    Ok(owner != parent.owner.0 && owner != d.owner.0)
}

/// Whether others than this user and root may put something else in the place of what this user has made in `dir`.
fn others_may_rename(dir: &OwnedFd) -> io::Result<bool> {
    let stat = fd::fstat(dir.as_raw_fd())?;
    let writable = stat.st_mode & 0o022 != 0 && stat.st_mode & libc::S_ISVTX == 0;
    Ok(writable || ![0, owner::me()].contains(&stat.st_uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_made_again_whatever_leads_there() {
        let dir = std::env::temp_dir().join(format!("belay-parents-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        // As the name of a socket that was bound so.
        let file = dir.join("x/../y/z/socket");
        std::fs::create_dir(dir.join("x")).unwrap();
        std::fs::create_dir_all(dir.join("y/z")).unwrap();
        std::os::unix::fs::symlink("y", dir.join("link")).unwrap();
        let (all, by_link) = (parents(&file), parents(&dir.join("link/z/socket")));
        let mode = |path: &str| fd::stat(&dir.join(path), false).unwrap().st_mode & 0o7777;
        let modes = || (mode("x"), mode("y"), mode("y/z"));
        let before = modes();
        for gone in ["x", "y"] {
            std::fs::remove_dir_all(dir.join(gone)).unwrap();
            make_parents(&all, &Sights::default()).unwrap();
            make_parents(&all, &Sights::default()).unwrap();
            assert_eq!(modes(), before);
        }
        std::fs::remove_dir(dir.join("y/z")).unwrap();
        make_parents(&by_link, &Sights::default()).unwrap();
        assert_eq!(modes(), before);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn parts_that_restart_together_make_the_same_directories() {
        let dir = std::env::temp_dir().join(format!("belay-together-{}", std::process::id()));
        let inner = dir.join("a/b/c/d");
        std::fs::create_dir_all(&inner).unwrap();
        let bits = [
            (dir.join("a"), 0o2755),
            (dir.join("a/b"), 0o1777),
            (dir.join("a/b/c"), 0o750),
            (inner.clone(), 0o2775),
        ];
        let all = || bits.iter().map(|(path, _)| fd::stat(path, false).unwrap().st_mode & 0o7777);
        for (path, mode) in &bits {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(*mode)).unwrap();
        }
        let made = parents(&inner.join("file"));
        for _ in 0..200 {
            std::fs::remove_dir_all(dir.join("a")).unwrap();
            let start = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        start.wait();
                        make_parents(&made, &Sights::default()).unwrap();
                        assert!(inner.is_dir());
                    });
                }
            });
            assert!(all().eq(bits.iter().map(|(_, mode)| *mode)));
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn who_else_may_put_something_in_the_place_of_what_was_made_is_known() {
        let dir = std::env::temp_dir().join(format!("belay-rename-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let others = |mode: u32| {
            std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            others_may_rename(&fd::above(&dir.join("made")).unwrap()).unwrap()
        };
        assert_eq!([0o755, 0o1777, 0o2750].map(others), [false; 3]);
        assert_eq!([0o775, 0o757, 0o2770].map(others), [true; 3]);
        if owner::me() == 0 {
            std::os::unix::fs::chown(&dir, Some(4242), None).unwrap();
            assert_eq!([0o755, 0o1777].map(others), [true; 2]);
        }
        std::fs::remove_dir(dir).unwrap();
    }

    #[test]
    fn what_is_made_where_a_link_leads_is_not_given_away() {
        let me = rustix::process::geteuid().as_raw();
        // Only root gives anything away.
        let user = if me == 0 { 4242 } else { me };
        let dir = std::env::temp_dir().join(format!("belay-elsewhere-{}", std::process::id()));
        let (home, system) = (dir.join("home"), dir.join("system"));
        std::fs::create_dir_all(home.join("a/b/c")).unwrap();
        std::fs::create_dir(&system).unwrap();
        let whose = |path: &Path| fd::stat(path, false).unwrap().st_uid;
        for path in ["", "a", "a/b", "a/b/c"] {
            std::os::unix::fs::chown(home.join(path), Some(user), None).unwrap();
        }
        let all = parents(&home.join("a/b/c/file"));
        std::fs::remove_dir_all(home.join("a")).unwrap();
        make_parents(&all, &Sights::default()).unwrap();
        assert_eq!((whose(&home.join("a")), whose(&home.join("a/b/c"))), (user, user));
        std::fs::remove_dir_all(home.join("a")).unwrap();
        std::os::unix::fs::symlink(&system, home.join("a")).unwrap();
        make_parents(&all, &Sights::default()).unwrap();
        let made = fd::stat(&system.join("b"), false).unwrap();
        assert_eq!((made.st_uid, made.st_mode & 0o077 != 0), (me, me == user));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
