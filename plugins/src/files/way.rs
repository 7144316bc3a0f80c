//! Who could have chosen what lies at a path: looked at before a restart begins, outside its namespaces, in which the
//! owners of most things cannot be told.
//!
//! The paths of a checkpoint led through no symbolic links: the kernel says where a file lies. What another user may
//! have put there since, a link, another file, a second name of a third one, must not be taken for the job's, and least
//! of all be written.

use super::owner::me;
use super::sight::{Seen, Sight, Sights, Stored, UNKNOWN};
use super::{FileObject, Origin, Print, PROC};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::kind::Ways;
use crate::model::{Descriptors, Directory};
use crate::sys::fd;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Symbolic links that are followed on one way, as many as the kernel follows.
const MOST_LINKS: usize = 40;

impl Sights {
    /// Takes back what was seen of the files of `d` below `dir`, in whose place the restart has made another directory,
    /// which nobody else reaches.
    pub fn forget_below(&mut self, d: &Descriptors, dir: &Path) {
        for (sight, file) in self.files.iter_mut().zip(d.list::<FileObject>()) {
            if file.path.as_path().starts_with(dir) {
                *sight = Sight::default();
            }
        }
        self.places.retain(|path, _| !path.starts_with(dir));
        self.missing.retain(|path, _| !path.starts_with(dir));
    }
}

/// Looks at all that the rebuild of `d` is going to open or make by its path.
pub(crate) fn look(d: &Descriptors, ways: Ways, stored: &Stored<'_>) -> Result<Sights, Refusal> {
    let mut seen = Vec::new();
    for object in d.list::<FileObject>() {
        let found = match (&object.origin, &object.content) {
            (Origin::Named, None) => check_named(object).or_else(|e| match stored(&object.key()) {
                true if !object.written => Ok(Sight {
                    stored: true,
                    ..Sight::default()
                }),
                _ => Err(e),
            }),
            // What others have put in its place stays there.
            (Origin::Named, Some(_)) if object.closed => Ok(to_overwrite(object).unwrap_or_default()),
            (Origin::Named | Origin::Deleted { .. }, _) => to_overwrite(object),
            (Origin::Memfd { .. } | Origin::Anonymous, _) => Ok(Sight::default()),
        };
        seen.push(found.map_err(|e| e.of(0, format!("file {}", object.path)))?);
    }
    let mut places: BTreeMap<PathBuf, Vec<u32>> = BTreeMap::new();
    for (path, owner) in ways.places {
        places.entry(path).or_default().push(owner);
    }
    let working = d.working.iter().filter_map(|list| list.last());
    let dirs = working.chain(&d.entered).chain(&ways.opened);
    let mut sights = Sights {
        files: seen,
        ..Sights::default()
    };
    for dir in dirs {
        let path = dir.path.as_path();
        let sight = directory(dir).map_err(|e| e.of(0, path.display().to_string()))?;
        sights.places.insert(path.to_owned(), sight);
    }
    let above = ways.parents.iter().chain(d.working.iter().chain(&d.sessions).flatten());
    for path in above.map(|dir| dir.path.as_path()).collect::<BTreeSet<_>>() {
        let way = check(path).map_err(|e| e.of(0, path.display().to_string()))?;
        if let (None, Some(dir), Some(_)) = (&way.last, way.dir, &way.doubt) {
            sights.missing.insert(path.to_owned(), dir);
        }
    }
    let mut peers: BTreeMap<PathBuf, Vec<u32>> = BTreeMap::new();
    for (path, owner) in ways.peers {
        peers.entry(path).or_default().extend(owner);
    }
    sights.peers = peers
        .into_iter()
        .map(|(path, owners)| {
            let sight = answerer(&path, &owners);
            (path, sight)
        })
        .collect();
    for (path, owners) in places {
        let way = check(&path).map_err(|e| e.of(0, path.display().to_string()))?;
        let is_ours = |stat: &&fd::Stat| stat.st_uid == me() || owners.contains(&stat.st_uid);
        let sight = Sight {
            file: way.last.as_ref().filter(is_ours).map(Seen::from),
            dir: way.dir,
            doubtful: way.doubt.is_some(),
            ..Sight::default()
        };
        sights.places.insert(path, sight);
    }
    Ok(sights)
}

/// The file of a socket at `path`, to which one of `owners` answered, where it may still be one of theirs.
fn answerer(path: &Path, owners: &[u32]) -> Sight {
    let way = match Way::to(path, true) {
        Ok(way) => way,
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "cannot be looked at");
            return Sight {
                doubtful: true,
                ..Sight::default()
            };
        }
    };
    // Who is not known in a user namespace may be anybody.
    let known = |uid: u32| [0, me()].contains(&uid) || uid != UNKNOWN && owners.contains(&uid);
    let trusted = |stat: &&fd::Stat| way.link.is_none() && known(stat.st_uid);
    Sight {
        file: way.last.as_ref().filter(trusted).map(Seen::from),
        dir: way.dir,
        doubtful: way.doubt.is_some() || way.link.is_some(),
        ..Sight::default()
    }
}

/// What lies where directory `then` was. One that somebody else can have put there, and that belongs to somebody else,
/// is refused: what the job makes in it by relative names would be led wherever they like.
fn directory(then: &Directory) -> Result<Sight, Fault> {
    let path = then.path.as_path();
    let way = check(path)?;
    let (Some(stat), Some(doubt)) = (&way.last, &way.doubt) else {
        return Ok(Sight::default());
    };
    if then.gone || path.starts_with(PROC) {
        return Ok(Sight::default());
    }
    if ![then.owner.0, me()].contains(&stat.st_uid) && then.owner.0 != UNKNOWN {
        return refuse(format!(
            "this directory belongs to user {} now, and others can have put it into {}; look at it, and bring the old one back, or let nobody else write there and restart again",
            stat.st_uid,
            doubt.display()
        ));
    }
    Ok(Sight {
        file: Some(Seen::from(stat)),
        dir: way.dir,
        doubtful: true,
        ..Sight::default()
    })
}

/// The file that has the name of `object`, whose contents are in the checkpoint, where those may be written into it.
fn to_overwrite(object: &FileObject) -> Result<Sight, Fault> {
    let path = object.path.as_path();
    let way = check(path)?;
    let file = way.last.as_ref().filter(|stat| way.leads_to(object, stat)).map(Seen::from);
    Ok(Sight {
        file,
        dir: way.dir,
        doubtful: way.doubt.is_some(),
        ..Sight::default()
    })
}

/// Refuses a path on which another user has put a symbolic link.
pub fn check_path(path: &Path) -> Result<(), Refusal> {
    check(path).map(drop).map_err(|e| e.of(0, path.display().to_string()))
}

fn check(path: &Path) -> Result<Way, Fault> {
    // One that cannot be looked at is somebody else's to report.
    let way = Way::to(path, false).unwrap_or_else(|error| {
        tracing::warn!(%error, path = %path.display(), "cannot be looked at");
        Way::default()
    });
    match &way.link {
        Some(link) => refuse(format!(
            "the symbolic link {} on the way to it is another user's; remove it, or make it your own (chown -h)",
            link.display()
        )),
        None => Ok(way),
    }
}

/// How a path leads to what is there.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// What is there, if anything.
    pub(super) last: Option<fd::Stat>,
    /// The first directory on it in which others could have chosen what is there.
    pub(super) doubt: Option<PathBuf>,
    /// The first symbolic link on it that is another user's.
    pub(super) link: Option<PathBuf>,
    /// The directory of what is there.
    pub(super) dir: Option<Seen>,
}

impl Way {
    /// Goes along `path`, as far as it leads, where `follow` is set through a link at its end too.
    pub(super) fn to(path: &Path, follow: bool) -> io::Result<Self> {
        // What is mounted only when somebody comes along (autofs) is not mounted for a descriptor that is none for reading.
        let _ = fd::stat(path, follow);
        let mut way = Self::default();
        let mut rest: Vec<OsString> = parts(path);
        let (mut dir, mut at) = (root()?, PathBuf::from("/"));
        let mut links = 0;
        while let Some(name) = rest.pop() {
            let above = fd::fstat(dir.as_raw_fd())?;
            way.dir = rest.is_empty().then(|| Seen::from(&above));
            let next = match fd::find_in(&dir, &name) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    way.judge(&above, None, &at);
                    return Ok(way);
                }
                found => found?,
            };
            let stat = fd::fstat(next.as_raw_fd())?;
            way.judge(&above, Some(&stat), &at);
            let is_link = stat.st_mode & libc::S_IFMT == libc::S_IFLNK;
            if is_link && (follow || !rest.is_empty()) {
                links += 1;
                if links > MOST_LINKS {
                    return Err(io::Error::from_raw_os_error(libc::ELOOP));
                }
                if ![0, me()].contains(&stat.st_uid) {
                    way.link.get_or_insert(at.join(&name));
                }
                let target = fd::readlink_of(&next)?;
                if target.is_absolute() {
                    (dir, at) = (root()?, PathBuf::from("/"));
                }
                rest.extend(parts(&target));
                continue;
            }
            if rest.is_empty() {
                way.last = Some(stat);
                return Ok(way);
            }
            at.push(&name);
            dir = next;
        }
        way.last = Some(fd::fstat(dir.as_raw_fd())?);
        Ok(way)
    }

    /// Takes note of whether others could have put what `found` is into directory `above`.
    fn judge(&mut self, above: &fd::Stat, found: Option<&fd::Stat>, at: &Path) {
        let trusted = |stat: &fd::Stat| [0, me()].contains(&stat.st_uid);
        let kept = above.st_mode & libc::S_ISVTX != 0 && found.is_some_and(trusted);
        if !trusted(above) || above.st_mode & 0o022 != 0 && !kept {
            self.doubt.get_or_insert(at.to_owned());
        }
    }

    /// What is said of `stat`, to which it leads and which may not be taken for `object`.
    pub(super) fn doubts(&self, object: &FileObject, stat: &fd::Stat) -> String {
        let why = match (&self.link, &self.doubt) {
            (Some(link), _) => format!("the symbolic link {} on the way to it is another user's", link.display()),
            _ if stat.st_nlink > object.links.max(1) => "it has more names than then".to_owned(),
            (None, Some(dir)) => format!("others can have put it into {}", dir.display()),
            (None, None) => format!("it belongs to user {}", stat.st_uid),
        };
        format!(
            "is another file than at the checkpoint, and {why}: it is not written; look at it, and bring the old one back, or let nobody else write there and restart again"
        )
    }

    /// Whether what it leads to is the file of the checkpoint, or one that only the user or root can have put in its place.
    pub(super) fn leads_to(&self, object: &FileObject, stat: &fd::Stat) -> bool {
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG || self.link.is_some() {
            return false;
        }
        let then = object.owner.0;
        let whose = stat.st_uid == then || stat.st_uid == me() || then == UNKNOWN;
        // File systems have other numbers on another host, and after another start.
        let same = whose && object.ids.iter().any(|id| id.ino == stat.st_ino);
        let put = self.doubt.is_none() && (whose || stat.st_uid == 0) && stat.st_nlink <= object.links.max(1);
        same || put
    }
}

fn root() -> io::Result<OwnedFd> {
    fd::open(Path::new("/"), libc::O_PATH | libc::O_DIRECTORY, 0)
}

/// The names in `path`, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|c| match c {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        _ => None,
    });
    names.collect()
}

/// Whether length and time are those of the checkpoint.
pub(super) fn unchanged(object: &FileObject, stat: &fd::Stat) -> bool {
    u64::try_from(stat.st_size) == Ok(object.bytes) && fd::mtime_ns(stat) == object.mtime_ns
}

/// Verifies a file whose contents are not in the checkpoint, and that it is the file which the job had open, where it
/// is going to be written.
pub(super) fn check_named(object: &FileObject) -> Result<Sight, Fault> {
    let path = object.path.as_path();
    let advice = if object.written {
        "bring it back, or launch with --save-open-files (all, or a larger size)"
    } else {
        "bring it back; a larger one that the job has made is saved with --save-open-files"
    };
    let way = match Way::to(path, !object.written) {
        Ok(way) => way,
        Err(e) => return refuse(format!("the file was open and is gone ({e}); {advice}")),
    };
    let Some(stat) = &way.last else {
        return refuse(format!("the file was open and is gone; {advice}"));
    };
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return refuse(format!("is not a regular file any more; {advice}"));
    }
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    if bytes < object.bytes {
        return refuse(format!("has {bytes} bytes, {} at the checkpoint; {advice}", object.bytes));
    }
    let known = way.leads_to(object, stat);
    let sight = Sight {
        file: Some(Seen::from(stat)),
        dir: way.dir,
        doubtful: way.doubt.is_some(),
        ..Sight::default()
    };
    if object.written {
        return if known { Ok(sight) } else { refuse(way.doubts(object, stat)) };
    }
    if known && unchanged(object, stat) {
        return Ok(sight);
    }
    let Some(print) = object.print else {
        return refuse(format!("has changed since the checkpoint; {advice}"));
    };
    let found = Seen::from(stat).find(path)?;
    let file = fd::reopen(found.as_raw_fd(), libc::O_RDONLY).at("open")?;
    if Print::of(&file, object.bytes).at("read")? != print {
        return refuse(format!("has changed since the checkpoint; {advice}"));
    }
    Ok(sight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, lchown, symlink, PermissionsExt};

    /// A directory in which only this user makes anything, and on the way to which nobody else does.
    fn place(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("belay-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn it_is_known_where_others_could_have_chosen_what_lies_there() {
        let dir = place("way");
        let inner = dir.join("inner");
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(inner.join("file"), "x").unwrap();
        let doubt = |path: &str| Way::to(&dir.join(path), false).unwrap().doubt;
        let mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        assert_eq!((doubt("inner/file"), doubt("inner/gone")), (None, None));
        mode(&inner, 0o777);
        assert_eq!(doubt("inner/file"), Some(inner.clone()));
        mode(&inner, 0o1777);
        assert_eq!((doubt("inner/file"), doubt("inner/gone")), (None, Some(inner.clone())));
        mode(&inner, 0o755);
        symlink("inner", dir.join("link")).unwrap();
        assert_eq!(doubt("link/file"), None);
        assert!(Way::to(&dir.join("link"), false)
            .unwrap()
            .last
            .is_some_and(|s| s.st_mode & libc::S_IFMT == libc::S_IFLNK));
        symlink("loop", dir.join("loop")).unwrap();
        assert!(Way::to(&dir.join("loop/file"), false).is_err());
        if me() == 0 {
            chown(&inner, Some(4242), None).unwrap();
            assert_eq!(doubt("inner/file"), Some(inner.clone()));
            chown(&inner, Some(0), None).unwrap();
            lchown(dir.join("link"), Some(4242), None).unwrap();
            assert!(check(&dir.join("link/file"))
                .unwrap_err()
                .to_string()
                .contains("another user's"));
            assert!(check(&dir.join("inner/file")).is_ok());
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
