//! Rebuild of files: bring each inode to its captured state, then open descriptions on it.

use super::{make_parents, owner, FileObject, Origin, Print};
use crate::content::{Content, PageSource};
use crate::fault::{refuse, At, Fault};
use crate::keep::{HoldId, Lent, Store};
use crate::rebuild::Builder;
use crate::sys::fd;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// An inode in its captured state.
#[derive(Debug)]
pub(crate) struct BuiltFile {
    /// For an inode without name: a descriptor on it,
    anchor: Option<OwnedFd>,
    /// which is held with the descriptions later.
    held: Option<HoldId>,
    path: PathBuf,
    mode: u32,
}

/// Brings one inode to its captured state.
pub(crate) fn prepare(object: &FileObject, pages: &dyn PageSource) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    if let (Origin::Named, Some(content)) = (&object.origin, &object.content) {
        return restore_named(object, content, pages);
    }
    let anchor = match &object.origin {
        Origin::Named => {
            check_named(object)?;
            None
        }
        Origin::Deleted { tmpfile } => Some(make_deleted(object, *tmpfile)?),
        Origin::Memfd { seals, huge } => Some(make_memfd(path, *seals, *huge, object.mode)?),
        Origin::Anonymous => Some(make_memfd(Path::new(super::ANONYMOUS), libc::F_SEAL_SEAL, 0, 0o600)?),
    };
    if let Some(a) = &anchor {
        if let Some(content) = &object.content {
            fd::truncate(a.as_raw_fd(), content.bytes).at("set the length")?;
            match object.origin {
                // Files in huge pages cannot be written, only mapped.
                Origin::Memfd { huge, .. } if huge != 0 => content.fill_mapped(a.as_raw_fd(), pages)?,
                _ => content.fill(a.as_raw_fd(), pages)?,
            }
        }
        if let Origin::Deleted { .. } = object.origin {
            // Writing takes set-user-ID bits away.
            own(a, object)?;
        }
        // Of some that nobody has open they are not known.
        if object.atime_ns.is_some() {
            set_times(a, object)?;
        }
        if let Origin::Memfd { seals, .. } = object.origin {
            // Sealing against writing must wait until the processes have mapped it: see `Rebuilder::finish`.
            let now = seals & !(libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL);
            if now != 0 {
                fd::fcntl(a.as_raw_fd(), libc::F_ADD_SEALS, now).at("add seals")?;
            }
        }
    }
    Ok(BuiltFile {
        anchor,
        held: None,
        path: path.to_owned(),
        mode: object.mode,
    })
}

impl BuiltFile {
    /// A new description on it.
    pub(crate) fn open(&self, flags: i32, made: &Store) -> Result<OwnedFd, Fault> {
        match self.anchor(made)? {
            Some(a) => self.open_at(&fd::self_path(a.raw()), flags),
            None => self.open_at(&self.path, flags),
        }
    }

    fn open_at(&self, path: &Path, flags: i32) -> Result<OwnedFd, Fault> {
        // O_PATH and creation flags have no place here; O_ASYNC is set with the owner.
        const KEPT: i32 = libc::O_ACCMODE
            | libc::O_APPEND
            | libc::O_NONBLOCK
            | libc::O_DSYNC
            | libc::O_SYNC
            | libc::O_DIRECT
            | libc::O_NOATIME
            | libc::O_LARGEFILE;
        let flags = (flags & KEPT) | libc::O_NOCTTY;
        match fd::open(path, flags, 0) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => self.open_protected(path, flags),
            opened => opened,
        }
        .at("open")
    }

    /// Opens a file of our own whose mode forbids it (a program may create a read-only file and write it through the first descriptor).
    fn open_protected(&self, path: &Path, flags: i32) -> io::Result<OwnedFd> {
        let mode = |m: u32| std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(m));
        mode(self.mode | 0o600)?;
        let opened = fd::open(path, flags, 0);
        mode(self.mode)?;
        opened
    }

    /// The same, with its descriptor among those that `b` holds.
    pub(crate) fn held(self, b: &mut Builder<'_>) -> Result<Self, Fault> {
        let held = self.anchor.map(|a| b.hold(a)).transpose()?;
        Ok(Self {
            anchor: None,
            held,
            ..self
        })
    }

    /// A descriptor on an inode without name.
    fn anchor(&self, made: &Store) -> Result<Option<Lent>, Fault> {
        match (&self.anchor, self.held) {
            (Some(own), _) => Ok(Some(Lent::Own(own.as_raw_fd()))),
            (None, Some(held)) => made.lend(held),
            (None, None) => Ok(None),
        }
    }

    /// Adds the seals that forbid writing, and the seal against more seals.
    pub(crate) fn seal(&self, object: &FileObject, made: &Store) -> Result<(), Fault> {
        let Origin::Memfd { seals, .. } = &object.origin else {
            return Ok(());
        };
        let Some(a) = self.anchor(made)? else { return Ok(()) };
        let has = fd::fcntl(a.raw(), libc::F_GET_SEALS, 0).at("read seals")?;
        if seals & !has != 0 {
            fd::fcntl(a.raw(), libc::F_ADD_SEALS, seals & !has).at("add seals")?;
        }
        Ok(())
    }
}

/// Gives the file of the old name its saved contents, making it and the directories above it again where they are gone.
///
/// Contents are written into the file itself only where it is the file of the checkpoint under no more names than then. Otherwise the name
/// belongs to another file by now, or this one got a second name: what it holds under that name was made after the checkpoint and is not
/// ours to change, so a new file takes the old name; one that may not be written any more keeps it, and the new file has none.
fn restore_named(object: &FileObject, content: &Content, pages: &dyn PageSource) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    let built = BuiltFile {
        anchor: None,
        held: None,
        path: path.to_owned(),
        mode: object.mode,
    };
    make_parents(&object.parents)?;
    let here = match fd::stat(path, false) {
        Ok(stat) if stat.st_mode & libc::S_IFMT != libc::S_IFREG => return refuse("is not a regular file any more; move it away"),
        Ok(stat) => Some(stat),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e).at("stat"),
    };
    let same = |st: &fd::Stat| object.ids.iter().any(|id| id.ino == st.st_ino) && st.st_nlink <= object.links;
    if !object.written && here.as_ref().is_some_and(|st| same(st) && unchanged(object, st)) {
        return Ok(built);
    }
    if !here.as_ref().is_some_and(same) {
        match make_fresh(object, content, pages, here.is_some()) {
            // The directory may be one in which the job cannot make files; then what is there is overwritten.
            Err(Fault::Call { source, .. }) if here.is_some() && source.kind() == io::ErrorKind::PermissionDenied => {}
            made => return made,
        }
    }
    let file = match built.open_at(path, libc::O_RDWR) {
        // It is somebody else's by now: given away, or another file with the number of the old one.
        Err(Fault::Call { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            return make_new(object, content, pages, |_| false);
        }
        opened => opened?,
    };
    content.restore(file.as_raw_fd(), pages)?;
    set_times(&file, object)?;
    Ok(built)
}

/// Makes the file anew. Where it was somebody else's and its name is `taken`, it stays without one: what others have put there is not ours to replace.
fn make_fresh(object: &FileObject, content: &Content, pages: &dyn PageSource, taken: bool) -> Result<BuiltFile, Fault> {
    make_new(object, content, pages, |is_ours| is_ours || !taken)
}

/// Makes the file anew beside its place, and moves it there if it is `named`, which is told whether it is ours, so that a restart that is killed leaves no half of it.
fn make_new(
    object: &FileObject,
    content: &Content,
    pages: &dyn PageSource,
    named: impl Fn(bool) -> bool,
) -> Result<BuiltFile, Fault> {
    let (file, name) = file_beside(object.path.as_path())?;
    let done: Result<_, Fault> = (|| {
        content.restore(file.as_raw_fd(), pages)?;
        let mode = own(&file, object)?;
        set_times(&file, object)?;
        let named = named(mode.is_some());
        if named {
            std::fs::rename(&name, object.path.as_path()).at("move it to its place")?;
        } else {
            std::fs::remove_file(&name).at(format!("delete {name:?} again"))?;
        }
        Ok((mode, named))
    })();
    if done.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&name);
    }
    let (mode, named) = done?;
    Ok(BuiltFile {
        anchor: (!named).then_some(file),
        held: None,
        path: object.path.as_path().to_owned(),
        mode: mode.unwrap_or(owner::private(object.mode)),
    })
}

/// Sets the times of last access and modification; by the latter `make` and its like judge a file.
fn set_times(file: &OwnedFd, object: &FileObject) -> Result<(), Fault> {
    let as_it_is = libc::timespec {
        tv_sec: 0,
        tv_nsec: libc::UTIME_OMIT,
    };
    let times = [object.atime_ns.map_or(as_it_is, timespec), timespec(object.mtime_ns)];
    // SAFETY: `times` holds the two entries the call reads.
    crate::sys::check(unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) }).at("set its time")?;
    Ok(())
}

fn timespec(ns: i64) -> libc::timespec {
    libc::timespec {
        tv_sec: ns.div_euclid(1_000_000_000),
        tv_nsec: ns.rem_euclid(1_000_000_000),
    }
}

/// Whether length and time are those of the checkpoint.
fn unchanged(object: &FileObject, stat: &fd::Stat) -> bool {
    u64::try_from(stat.st_size) == Ok(object.bytes) && fd::mtime_ns(stat) == object.mtime_ns
}

/// Verifies a file whose contents are not in the checkpoint, and cuts off what was appended since.
fn check_named(object: &FileObject) -> Result<(), Fault> {
    let path = object.path.as_path();
    let advice = if object.written {
        "bring it back, or launch with --save-open-files"
    } else {
        "bring it back; one that the job has made is saved with --save-open-files"
    };
    let stat = match fd::stat(path, true) {
        Ok(stat) => stat,
        Err(e) => return refuse(format!("the file was open and is gone ({e}); {advice}")),
    };
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return refuse(format!("is not a regular file any more; {advice}"));
    }
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    if bytes < object.bytes {
        return refuse(format!("has {bytes} bytes, {} at the checkpoint; {advice}", object.bytes));
    }
    if object.written {
        if bytes > object.bytes {
            let built = BuiltFile {
                anchor: None,
                held: None,
                path: path.to_owned(),
                mode: object.mode,
            };
            let file = built.open_at(path, libc::O_WRONLY)?;
            fd::truncate(file.as_raw_fd(), object.bytes).at("cut it to its length at the checkpoint")?;
            set_times(&file, object)?;
        }
        return Ok(());
    }
    if unchanged(object, &stat) {
        return Ok(());
    }
    let Some(print) = object.print else {
        return refuse(format!("has changed since the checkpoint; {advice}"));
    };
    let file = fd::open(path, libc::O_RDONLY, 0).at("open")?;
    if Print::of(&file, object.bytes).at("read")? != print {
        return refuse(format!("has changed since the checkpoint; {advice}"));
    }
    Ok(())
}

/// A file without name in the directory where it was. One that is only read may have been the system's, in a directory that is not the job's to write: then it is a memfd.
fn make_deleted(object: &FileObject, tmpfile: bool) -> Result<OwnedFd, Fault> {
    match make_nameless(object, tmpfile) {
        Err(Fault::Call { source, .. })
            if !tmpfile && !object.written && matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) =>
        {
            let name = object.path.as_path().file_name().unwrap_or_default();
            make_memfd(Path::new(name), libc::F_SEAL_SEAL, 0, object.mode)
        }
        made => made,
    }
}

fn make_nameless(object: &FileObject, tmpfile: bool) -> Result<OwnedFd, Fault> {
    make_parents(&object.parents)?;
    let path = object.path.as_path();
    let dir = path.parent().unwrap_or(Path::new("/"));
    let file = if tmpfile {
        fd::open(dir, libc::O_RDWR | libc::O_TMPFILE, 0o600).at(format!("make a file without name in {dir:?}"))?
    } else {
        let (file, name) = match fd::open(path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW, 0o600) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => file_beside(path)?,
            made => (made.at("make the deleted file again")?, path.to_owned()),
        };
        std::fs::remove_file(&name).at(format!("delete {name:?} again"))?;
        file
    };
    Ok(file)
}

/// Gives an open file its owner and mode, as [`owner::give`].
fn own(file: &OwnedFd, object: &FileObject) -> Result<Option<u32>, Fault> {
    owner::give(file.as_raw_fd(), object.owner, object.mode).at("set its owner and mode")
}

/// A name beside `path`, for the time of the rebuild.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".belay-{}", std::process::id()));
    PathBuf::from(name)
}

/// A new file beside `path`, with its name.
fn file_beside(path: &Path) -> Result<(OwnedFd, PathBuf), Fault> {
    make_beside(path, |name| {
        fd::open(name, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW, 0o600)
    })
}

/// What `make` makes, and fails to make where something is, under a name beside `path`; with that name. In a directory where others may make files they know that name beforehand: what is there already is never opened,
/// and removed only where it is our own, left behind by a restart that was killed.
pub(crate) fn make_beside<T>(path: &Path, make: impl Fn(&Path) -> io::Result<T>) -> Result<(T, PathBuf), Fault> {
    let name = beside(path);
    let made = match make(&name) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            // SAFETY: has no preconditions.
            let me = unsafe { libc::geteuid() };
            if fd::stat(&name, false).at(format!("stat {name:?}"))?.st_uid != me {
                return refuse(format!("{name:?} belongs to another user and is in the way; move it away"));
            }
            std::fs::remove_file(&name).at(format!("remove {name:?}"))?;
            make(&name)
        }
        made => made,
    };
    Ok((made.at(format!("make {name:?}"))?, name))
}

fn make_memfd(name: &Path, seals: i32, huge: u32, mode: u32) -> Result<OwnedFd, Fault> {
    let sealing = if seals & libc::F_SEAL_SEAL != 0 && seals == libc::F_SEAL_SEAL {
        0
    } else {
        libc::MFD_ALLOW_SEALING
    };
    let executable = if mode & 0o111 != 0 { libc::MFD_EXEC } else { 0 };
    let file = match fd::memfd(name, sealing | huge | executable) {
        // Kernels before 6.3 do not know MFD_EXEC; there every memfd is executable.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => fd::memfd(name, sealing | huge),
        made => made,
    }
    .at("memfd_create")?;
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(fd::self_path(file.as_raw_fd()), permissions).at("set its mode")?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_known_beforehand_is_never_opened() {
        let dir = std::env::temp_dir().join(format!("belay-beside-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("data");
        let name = beside(&path);
        // A file that somebody holds open, or has linked to another, must not become the job's.
        std::fs::write(&name, b"old").unwrap();
        let held = std::fs::File::open(&name).unwrap();
        let (file, made) = file_beside(&path).unwrap();
        fd::write_at(file.as_raw_fd(), b"secret", 0).unwrap();
        assert_eq!(made, name);
        assert_eq!(held.metadata().unwrap().len(), 3);
        // A link is replaced, not followed.
        std::fs::remove_file(&name).unwrap();
        std::fs::write(dir.join("victim"), b"victim").unwrap();
        std::os::unix::fs::symlink(dir.join("victim"), &name).unwrap();
        file_beside(&path).unwrap();
        assert_eq!(std::fs::read(dir.join("victim")).unwrap(), b"victim");
        // SAFETY: has no preconditions.
        if unsafe { libc::geteuid() } == 0 {
            std::os::unix::fs::lchown(&name, Some(65534), Some(65534)).unwrap();
            let refused = file_beside(&path).unwrap_err().to_string();
            assert!(refused.contains("another user"), "{refused}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
