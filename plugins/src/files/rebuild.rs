//! Rebuild of files: bring each inode to its captured state, then open descriptions on it.

use super::sight::{Copies, Seen, Sight};
use super::way::{check_named, unchanged};
use super::{owner, FileObject, Origin, Sights, PROC};
use crate::builder::Builder;
use crate::content::{Content, PageSource};
use crate::fault::{refuse, At, Fault};
use crate::keep::{HoldId, Lent, Store};
use crate::sys::fd;
use rustix::fs::{futimens, Timestamps, UTIME_OMIT};
use rustix::time::Timespec;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// Linux 6.3. On an executable file it is one against writing too.
const F_SEAL_EXEC: i32 = 0x20;

/// An inode in its captured state.
#[derive(Debug)]
pub(crate) struct BuiltFile {
    /// For an inode without name: a descriptor on it,
    anchor: Option<OwnedFd>,
    /// which is held with the descriptions later.
    held: Option<HoldId>,
    /// For one with a name: which file it is.
    seen: Option<Seen>,
    /// The descriptor is that of the description which made it (O_TMPFILE).
    is_maker: bool,
    path: PathBuf,
    mode: u32,
}

/// Brings one inode to its captured state; `sight` is what was at its path before the restart began, `maker` the flags
/// of the description that made it (O_TMPFILE).
pub(super) fn prepare(
    object: &FileObject,
    maker: Option<i32>,
    (sight, sights): (Sight, &Sights),
    (pages, copies): (&dyn PageSource, &Copies<'_>),
) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    if sight.stored {
        return copied(object, copies);
    }
    let anchor = match (&object.origin, &object.content) {
        // Was mounted over a name of the kernel's, where no file can be made.
        (Origin::Named, Some(_)) if path.starts_with(PROC) => Some(make_memfd(path, 0, 0, object.mode)?),
        (Origin::Named, Some(content)) if object.closed => return make_again(object, content, (sight, sights), pages),
        (Origin::Named, Some(content)) => return restore_named(object, content, sights.make(&object.parents, sight)?, pages),
        (Origin::Named, None) => return cut_back(object, sight),
        (Origin::Deleted { tmpfile }, _) => Some(make_deleted(object, (*tmpfile, maker), sights.make(&object.parents, sight)?)?),
        (Origin::Memfd { seals, huge }, _) => Some(make_memfd(path, *seals, *huge, object.mode)?),
        (Origin::Anonymous, _) => Some(make_memfd(Path::new(super::ANONYMOUS), libc::F_SEAL_SEAL, 0, 0o600)?),
    };
    let mut mode = object.mode;
    if let Some(a) = &anchor {
        if let Some(content) = &object.content {
            fd::truncate(a.as_raw_fd(), content.bytes).at("set the length")?;
            match object.origin {
                // Files in huge pages cannot be written, only mapped.
                Origin::Memfd { huge, .. } if huge != 0 => content.fill_mapped(a.as_raw_fd(), pages)?,
                _ => content.fill(a.as_raw_fd(), pages)?,
            }
        }
        if let Origin::Deleted { .. } | Origin::Memfd { .. } = object.origin {
            // Writing takes set-user-ID bits away.
            mode = own(a, object)?.unwrap_or(owner::private(mode));
        }
        // Of some that nobody has open they are not known.
        if object.atime_ns.is_some() {
            set_times(a, object)?;
        }
        if let Origin::Memfd { seals, .. } = object.origin {
            // Sealing against writing must wait until the processes have mapped it: see `Rebuilder::finish`.
            let now = seals & !(libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE | F_SEAL_EXEC | libc::F_SEAL_SEAL);
            if now != 0 {
                fd::add_seals(a.as_raw_fd(), now).at("add seals")?;
            }
        }
    }
    Ok(BuiltFile {
        anchor,
        held: None,
        seen: None,
        is_maker: maker.is_some(),
        path: path.to_owned(),
        mode,
    })
}

/// A file that is not here as it was, but mapped, so that the checkpoint has it.
fn copied(object: &FileObject, copies: &Copies<'_>) -> Result<BuiltFile, Fault> {
    let Some(copy) = copies(&object.key()) else {
        return refuse("the file was open and is gone, and its copy too");
    };
    Ok(BuiltFile {
        anchor: Some(fd::dup_from(copy, 0).at("duplicate")?),
        ..BuiltFile::named(object, None)
    })
}

impl BuiltFile {
    /// That of `object` at its path, where what may be taken for it was `seen`.
    fn named(object: &FileObject, seen: Option<Seen>) -> Self {
        Self {
            anchor: None,
            held: None,
            seen,
            is_maker: false,
            path: object.path.as_path().to_owned(),
            mode: object.mode,
        }
    }

    /// A new description on it.
    pub(crate) fn open(&self, flags: i32, made: &Store) -> Result<OwnedFd, Fault> {
        match self.anchor(made)? {
            Some(a) if self.is_maker && flags & libc::O_TMPFILE == libc::O_TMPFILE => fd::dup_from(a.raw(), 0).at("duplicate"),
            // What has no name is opened by a link of the kernel's.
            Some(a) => self.open_at(&fd::self_path(a.raw()), flags & !libc::O_NOFOLLOW, a.raw()),
            None => self.open_seen(flags),
        }
    }

    /// The description that made it, of a file of memory. The kernel does not count that one among those that write: a
    /// second one keeps the file from being executed.
    pub(super) fn open_made(&self, flags: i32, made: &Store) -> Result<OwnedFd, Fault> {
        match self.anchor(made)? {
            Some(a) => fd::dup_from(a.raw(), 0).at("duplicate"),
            None => self.open(flags, made),
        }
    }

    /// To be mapped shared.
    pub(crate) fn open_to_map(&self, object: &FileObject, may_write: bool, made: &Store) -> Result<OwnedFd, Fault> {
        match (&object.origin, may_write) {
            (Origin::Memfd { .. }, true) => self.open_made(libc::O_RDWR, made),
            (_, true) => self.open(libc::O_RDWR, made),
            (_, false) => self.open(libc::O_RDONLY, made),
        }
    }

    /// The same as [`BuiltFile::open`] of one with a name, which must be the file that was seen.
    fn open_seen(&self, flags: i32) -> Result<OwnedFd, Fault> {
        let Some(seen) = self.seen else {
            return refuse("there is no file of that name");
        };
        let found = seen.find(&self.path)?;
        if flags & libc::O_NOFOLLOW == 0 {
            return self.open_at(&fd::self_path(found.as_raw_fd()), flags, found.as_raw_fd());
        }
        // Only a name can be opened so, and something else may have it by now, which must not keep us waiting.
        let opened = self.open_at(&self.path, flags | libc::O_NONBLOCK, found.as_raw_fd())?;
        seen.must_be(&opened)?;
        Ok(opened)
    }

    /// Opens `path`, by which `found` has been found.
    fn open_at(&self, path: &Path, flags: i32, found: RawFd) -> Result<OwnedFd, Fault> {
        // O_PATH and creation flags have no place here; O_ASYNC is set with the owner.
        const KEPT: i32 = libc::O_ACCMODE
            | libc::O_APPEND
            | libc::O_NONBLOCK
            | libc::O_DSYNC
            | libc::O_SYNC
            | libc::O_DIRECT
            | libc::O_NOATIME
            | libc::O_NOFOLLOW
            | libc::O_LARGEFILE;
        let flags = (flags & KEPT) | libc::O_NOCTTY;
        match fd::open(path, flags, 0) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => self.open_protected(path, flags, found),
            opened => opened,
        }
        .at("open")
    }

    /// Opens a file of our own whose mode forbids it (a program may create a read-only file and write it through the
    /// first descriptor). Only what was `found` gets another mode, whatever `path` leads to by now.
    fn open_protected(&self, path: &Path, flags: i32, found: RawFd) -> io::Result<OwnedFd> {
        let mode = |m: u32| std::fs::set_permissions(fd::self_path(found), std::os::unix::fs::PermissionsExt::from_mode(m));
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
        let has = fd::seals(a.raw()).at("read seals")?;
        if seals & !has != 0 {
            fd::add_seals(a.raw(), seals & !has).at("add seals")?;
        }
        Ok(())
    }
}

/// Makes a file that nobody had open again, where nothing has its name. That it cannot be made is no reason to fail: the
/// job may never ask for it.
fn make_again(
    object: &FileObject,
    content: &Content,
    (sight, sights): (Sight, &Sights),
    pages: &dyn PageSource,
) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    if fd::stat(path, false).is_err() {
        let made = sights
            .make(&object.parents, sight)
            .and_then(|sight| make_fresh(object, content, (sight, pages), false));
        match made {
            Err(Fault::Image(e)) => return Err(e.into()),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a temporary file of the job is gone and cannot be made again")
            }
            Ok(_) => {}
        }
    }
    Ok(BuiltFile::named(object, None))
}

/// Gives the file of the old name its saved contents, making it and the directories above it again where they are gone.
///
/// Contents are written into the file itself only where it is the file of the checkpoint under no more names than then.
/// Otherwise the name belongs to another file by now, or this one got a second name: what it holds under that name was
/// made after the checkpoint and is not ours to change, so a new file takes the old name; one that may not be written
/// any more keeps it, and the new file has none.
fn restore_named(object: &FileObject, content: &Content, sight: Sight, pages: &dyn PageSource) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    let here = match fd::stat(path, false) {
        Ok(stat) if stat.st_mode & libc::S_IFMT != libc::S_IFREG => return refuse("is not a regular file any more; move it away"),
        Ok(stat) => Some(stat),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e).at("stat"),
    };
    // What may be written: the file of the checkpoint, or one that nobody else can have put there.
    let seen = sight
        .file
        .filter(|seen| here.as_ref().is_some_and(|st| seen.is(Seen::from(st))));
    let built = BuiltFile::named(object, seen);
    let same = |st: &fd::Stat| seen.is_some() && object.ids.iter().any(|id| id.ino == st.st_ino) && st.st_nlink <= object.links;
    if !object.written && here.as_ref().is_some_and(|st| same(st) && unchanged(object, st)) {
        return Ok(built);
    }
    if !here.as_ref().is_some_and(same) {
        match make_fresh(object, content, (sight, pages), here.is_some()) {
            // The directory may be one in which the job cannot make files; then what is there is overwritten.
            Err(Fault::Call { source, .. }) if seen.is_some() && source.kind() == io::ErrorKind::PermissionDenied => {}
            made => return made,
        }
    }
    let file = match built.open_seen(libc::O_RDWR) {
        // It is somebody else's by now: given away, or another file with the number of the old one.
        Err(Fault::Call { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            return make_new(object, content, (sight, pages), |_| Named::Not);
        }
        opened => opened?,
    };
    content.restore(file.as_raw_fd(), pages)?;
    set_times(&file, object)?;
    Ok(built)
}

/// Makes the file anew. Where it was somebody else's and its name is `taken`, it stays without one: what others have
/// put there is not ours to replace. Nor is what lies in a directory that was missing.
fn make_fresh(object: &FileObject, content: &Content, from: (Sight, &dyn PageSource), taken: bool) -> Result<BuiltFile, Fault> {
    let fresh = from.0.fresh;
    make_new(object, content, from, |is_ours| match (taken, is_ours && !fresh) {
        (false, _) => Named::New,
        (true, true) => Named::Over,
        (true, false) => Named::Not,
    })
}

/// How a file that was made anew gets its name.
enum Named {
    /// Where nothing has it.
    New,
    /// Whatever has it.
    Over,
    Not,
}

/// Makes the file anew beside its place, and moves it there if it is to be `named`, which is told whether it is ours,
/// so that a restart that is killed leaves no half of it.
fn make_new(
    object: &FileObject,
    content: &Content,
    (sight, pages): (Sight, &dyn PageSource),
    named: impl Fn(bool) -> Named,
) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    let above = sight.above(path)?;
    let (file, name) = file_beside(&above, path)?;
    let done: Result<_, Fault> = (|| {
        content.restore(file.as_raw_fd(), pages)?;
        let mode = own(&file, object)?;
        set_times(&file, object)?;
        let named = match named(mode.is_some()) {
            Named::Over => fd::rename_at(&above, &name, path).map(|()| true),
            Named::New => match fd::rename_new_at(&above, &name, path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                moved => moved.map(|()| true),
            },
            Named::Not => Ok(false),
        };
        let named = named.at("move it to its place")?;
        if !named {
            fd::unlink_at(&above, &name).at(format!("delete {name:?} again"))?;
        }
        Ok((mode, named))
    })();
    if done.is_err() {
        // The first error is the one to report.
        let _ = fd::unlink_at(&above, &name);
    }
    let (mode, named) = done?;
    if !named {
        tracing::warn!(path = %path.display(), "the name leads to a file that is not the job's to replace: the job goes on with its own, which has no name");
    }
    let seen = Seen::of(&file).at("stat")?;
    Ok(BuiltFile {
        anchor: (!named).then_some(file),
        held: None,
        seen: named.then_some(seen),
        is_maker: false,
        path: path.to_owned(),
        mode: mode.unwrap_or(owner::private(object.mode)),
    })
}

/// Sets the times of last access and modification; by the latter `make` and its like judge a file.
fn set_times(file: &OwnedFd, object: &FileObject) -> Result<(), Fault> {
    let as_it_is = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_OMIT,
    };
    let times = Timestamps {
        last_access: object.atime_ns.map_or(as_it_is, timespec),
        last_modification: timespec(object.mtime_ns),
    };
    futimens(file, &times).map_err(io::Error::from).at("set its time")
}

fn timespec(ns: i64) -> Timespec {
    Timespec {
        tv_sec: ns.div_euclid(1_000_000_000),
        tv_nsec: ns.rem_euclid(1_000_000_000),
    }
}

/// Cuts off what was appended since the checkpoint to a file whose contents are not in it.
fn cut_back(object: &FileObject, sight: Sight) -> Result<BuiltFile, Fault> {
    let path = object.path.as_path();
    let replaced = |seen: Seen| !object.written && seen.find(path).is_err();
    let seen = match sight.file {
        // Another part of the job, which restarts here too, may have made it anew. It is only read.
        Some(seen) if !replaced(seen) => Some(seen),
        _ => check_named(object)?.file,
    };
    let built = BuiltFile::named(object, seen);
    let Some(found) = seen.map(|seen| seen.find(path)).transpose()? else {
        return refuse("there is no file of that name");
    };
    let bytes = fd::fstat(found.as_raw_fd()).at("stat")?.st_size;
    if object.written && u64::try_from(bytes).is_ok_and(|bytes| bytes > object.bytes) {
        let file = built.open_seen(libc::O_WRONLY)?;
        fd::truncate(file.as_raw_fd(), object.bytes).at("cut it to its length at the checkpoint")?;
        set_times(&file, object)?;
    }
    Ok(built)
}

/// A file without name in the directory where it was. One that is only read may have been the system's, in a directory
/// that is not the job's to write: then it is a memfd.
fn make_deleted(object: &FileObject, made: (bool, Option<i32>), sight: Sight) -> Result<OwnedFd, Fault> {
    match make_nameless(object, made, sight) {
        Err(Fault::Call { source, .. })
            if !made.0 && !object.written && matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) =>
        {
            let name = object.path.as_path().file_name().unwrap_or_default();
            make_memfd(Path::new(name), libc::F_SEAL_SEAL, 0, object.mode)
        }
        made => made,
    }
}

fn make_nameless(object: &FileObject, (tmpfile, maker): (bool, Option<i32>), sight: Sight) -> Result<OwnedFd, Fault> {
    let path = object.path.as_path();
    let above = sight.above(path)?;
    let file = if tmpfile {
        // Those that can be set later would be in the way of filling it.
        const KEPT: i32 = libc::O_ACCMODE | libc::O_DSYNC | libc::O_SYNC | libc::O_LARGEFILE;
        let dir = fd::self_path(above.as_raw_fd());
        fd::open(
            &dir,
            maker.map_or(libc::O_RDWR, |flags| flags & KEPT) | libc::O_TMPFILE,
            0o600,
        )
        .at(format!("make a file without name beside {path:?}"))?
    } else {
        let (file, name) = match fd::create_at(&above, path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => file_beside(&above, path)?,
            made => (made.at("make the deleted file again")?, path.to_owned()),
        };
        fd::unlink_at(&above, &name).at(format!("delete {name:?} again"))?;
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

/// A new file beside `path`, in directory `above`, with its name.
fn file_beside(above: &OwnedFd, path: &Path) -> Result<(OwnedFd, PathBuf), Fault> {
    make_beside(above, path, |name| fd::create_at(above, name))
}

/// What `make` makes, and fails to make where something is, under a name beside `path` in directory `above`; with that
/// name. In a directory where others may make files they know that name beforehand: what is there already is never
/// opened, and removed only where it is our own, left behind by a restart that was killed.
pub(crate) fn make_beside<T>(above: &OwnedFd, path: &Path, make: impl Fn(&Path) -> io::Result<T>) -> Result<(T, PathBuf), Fault> {
    let name = beside(path);
    let made = match make(&name) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let me = rustix::process::geteuid().as_raw();
            let there = fd::find_at(above, &name).and_then(|there| fd::fstat(there.as_raw_fd()));
            if there.at(format!("stat {name:?}"))?.st_uid != me {
                return refuse(format!("{name:?} belongs to another user and is in the way; move it away"));
            }
            fd::unlink_at(above, &name).at(format!("remove {name:?}"))?;
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
mod tests;
