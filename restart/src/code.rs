//! Programs, libraries and other files that the job had mapped, where those in their places are others now, or gone:
//! copies of them, from the checkpoint.
//!
//! A copy lies in memory, in a file system of its own that is mounted nowhere: so mappings of it have the path of
//! before, and nobody reaches it who could not reach the memory of the job. Where that cannot be had it is a memfd. It
//! is never executed with other rights than those of whoever maps it, and nobody can write it.

use crate::contents::Contents;
use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_image::extents::{Extent, PAGE};
use belay_image::identity::Nameless;
use belay_image::model::{FileIdentity, MappedFile};
use belay_image::name::Name;
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use belay_plugins::{Key, PageSource};
use rustix::fs::{self, AtFlags, MemfdFlags, Mode, OFlags};
use rustix::mount::{fsconfig_create, fsmount, fsopen, FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// What the kernel puts behind the name of a file that has been removed.
const DELETED: &[u8] = b" (deleted)";
/// What is read at once.
const PIECE: u64 = 1 << 20;
/// The end of all places.
const LAST: u64 = 1 << 62;
/// Longest name of a memfd.
const MEMFD_NAME: usize = 249;

/// The stored files of a generation, and which of them this machine lacks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Code {
    pub(crate) files: Vec<MappedFile>,
    pub(crate) table: Vec<Extent>,
    pub(crate) lacking: Vec<usize>,
}

impl Code {
    /// Whether this machine lacks the file that was at this path, and all of it is stored.
    pub(crate) fn has(&self, key: &Key<'_>) -> bool {
        let lacking = self.lacking.iter().filter_map(|i| self.files.get(*i));
        lacking.into_iter().any(|f| is(f, key))
    }
}

fn is(f: &MappedFile, (path, bytes, mtime_ns): &Key<'_>) -> bool {
    f.path.as_path() == *path && (f.identity.bytes, f.identity.mtime_ns) == (*bytes, *mtime_ns) && f.is_whole()
}

/// What the processes of a restarted job map.
#[derive(Debug, Clone, Default)]
pub struct Mapped {
    /// The files that the generation holds,
    pub files: Vec<MappedFile>,
    /// and where they lie.
    pub table: Vec<Extent>,
    /// Those that were made again, because this machine lacked them.
    pub copies: Vec<Nameless>,
}

/// Whether the descriptions of files can be such.
pub(crate) fn check(files: &[MappedFile]) -> Result<(), String> {
    for f in files {
        let end = f.identity.bytes.checked_next_multiple_of(PAGE);
        let placed = end.and_then(|e| f.at.checked_add(e)).is_some_and(|e| e <= LAST);
        let whole = |p: &(u64, u64)| p.0.is_multiple_of(PAGE) && p.1.is_multiple_of(PAGE) && p.0 < p.1;
        let inside = f.parts.iter().all(|p| whole(p) && Some(p.1) <= end);
        let ascending = f.parts.windows(2).all(|w| w[0].1 <= w[1].0);
        let named = !f.path.is_empty() && !f.path.as_bytes().contains(&0);
        if !named || !placed || !f.at.is_multiple_of(PAGE) || !inside || !ascending {
            return Err(format!("the place of file {:?} is none", f.path.as_path()));
        }
    }
    Ok(())
}

/// The copies, at numbers that no process of the job uses.
#[derive(Debug, Default)]
pub(crate) struct Copies(Vec<(MappedFile, OwnedFd)>);

impl Copies {
    /// Makes a copy of each file that is lacking. What is stored of the others is not read: the first checkpoint does
    /// that, before it refers to it.
    pub(crate) fn make(code: &Code, pages: &Contents<'_>, room: &Range<RawFd>) -> Outcome<Self> {
        let lacking = code.lacking.iter().filter_map(|i| code.files.get(*i));
        lacking
            .map(|f| {
                let fail = |e| RestartError::at(format!("copy of {}", f.path), e);
                let stored = stored(f, pages)?;
                let file = copy(f, |file| fill(file, f, &stored, pages))?;
                let held = sys::dup_into(&file, room).map_err(fail)?;
                tracing::info!(path = %f.path, "not here as it was: the one of the checkpoint is mapped");
                Ok((f.clone(), held))
            })
            .collect::<Outcome<_>>()
            .map(Self)
    }

    /// The copy of this file.
    pub(crate) fn of(&self, path: &Name, identity: &FileIdentity) -> Option<RawFd> {
        let found = self.0.iter().find(|(f, _)| f.is(path, identity));
        found.map(|(_, fd)| fd.as_raw_fd())
    }

    /// The copy of a file that was open.
    pub(crate) fn of_open(&self, key: &Key<'_>) -> Option<RawFd> {
        let found = self.0.iter().find(|(f, _)| is(f, key));
        found.map(|(_, fd)| fd.as_raw_fd())
    }

    /// The copies for the agent, which closes those at the numbers where processes look for them.
    pub(crate) fn keep(self) -> io::Result<Vec<Nameless>> {
        let keep = |(f, fd): (MappedFile, OwnedFd)| {
            let file = File::from(fd).try_clone()?;
            let meta = file.metadata()?;
            Ok(Nameless {
                dev: meta.dev(),
                ino: meta.ino(),
                path: f.path,
                identity: f.identity,
                mode: f.mode,
                file: Arc::new(file),
            })
        };
        self.0.into_iter().map(keep).collect()
    }
}

/// Where its parts lie; all of them must.
fn stored(f: &MappedFile, pages: &Contents<'_>) -> Outcome<Vec<Extent>> {
    let all = f.parts.iter().flat_map(|(from, to)| pages.within(f.at + from..f.at + to));
    let all: Vec<Extent> = all.collect();
    if all.iter().map(|e| e.bytes).sum::<u64>() != f.stored() {
        return Err(ImageError::Damaged {
            path: f.path.to_string(),
            reason: "not all of it is stored".into(),
        }
        .into());
    }
    Ok(all)
}

/// Writes what is stored, and gives the file its length.
fn fill(file: &File, f: &MappedFile, stored: &[Extent], pages: &Contents<'_>) -> Outcome<()> {
    let fail = |e| RestartError::at(format!("write the copy of {}", f.path), e);
    file.set_len(f.identity.bytes).map_err(fail)?;
    read(f, stored, pages, |data, offset| file.write_all_at(data, offset).map_err(fail))
}

/// Reads what is stored, piece by piece: bytes, none of them behind the end, and offset.
fn read(f: &MappedFile, stored: &[Extent], pages: &Contents<'_>, mut each: impl FnMut(&[u8], u64) -> Outcome<()>) -> Outcome<()> {
    let mut buf = Buffer::default();
    for e in stored {
        for at in (e.vaddr..e.end()).step_by(PIECE as usize) {
            pages.read(&e.part(at, at.saturating_add(PIECE)), &mut buf)?;
            let offset = at - f.at;
            let left = usize::try_from(f.identity.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
            each(&buf[..buf.len().min(left)], offset)?;
        }
    }
    Ok(())
}

/// A new file, filled by `fill`, that can only be read and executed.
fn copy(f: &MappedFile, fill: impl Fn(&File) -> Outcome<()>) -> Outcome<File> {
    let fail = |e: io::Error| RestartError::at(format!("make a copy of {}", f.path), e);
    let modified = |file: &File| {
        let ns = Duration::from_nanos(f.identity.mtime_ns.unsigned_abs());
        let at = if f.identity.mtime_ns < 0 {
            UNIX_EPOCH.checked_sub(ns)
        } else {
            UNIX_EPOCH.checked_add(ns)
        };
        at.map_or(Ok(()), |at| file.set_modified(at))
    };
    let place = match Place::named(f.path.as_bytes()) {
        Ok(place) => place,
        Err(error) => {
            tracing::debug!(path = %f.path, %error, "no file system for a copy");
            Place::memfd(f.path.as_bytes()).map_err(fail)?
        }
    };
    fill(&place.file)?;
    modified(&place.file).map_err(fail)?;
    let mode = Mode::from_raw_mode(f.mode & 0o555 | 0o400);
    fs::fchmod(&place.file, mode).map_err(|e| fail(e.into()))?;
    place.finish(f.path.as_bytes().ends_with(DELETED)).map_err(fail)
}

/// Where a copy is made.
struct Place {
    file: File,
    /// Its directory, and its name there.
    name: Option<(OwnedFd, CString)>,
}

impl Place {
    /// A file with this path, in a file system of its own.
    fn named(path: &[u8]) -> io::Result<Self> {
        let path = path.strip_suffix(DELETED).unwrap_or(path);
        let mut parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).collect();
        let odd = |p: &&[u8]| matches!(*p, b"." | b"..");
        let name = parts.pop().filter(|_| path.starts_with(b"/"));
        let Some(name) = name.filter(|n| !odd(n) && !parts.iter().any(odd)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut dir = file_system()?;
        for part in parts {
            let part = CString::new(part)?;
            fs::mkdirat(&dir, &part, Mode::from_raw_mode(0o755))?;
            dir = open_at(&dir, &part, OFlags::PATH | OFlags::DIRECTORY)?;
        }
        let name = CString::new(name)?;
        let file = open_at(&dir, &name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        Ok(Self {
            file: file.into(),
            name: Some((dir, name)),
        })
    }

    /// A memfd that is called by its path.
    fn memfd(path: &[u8]) -> io::Result<Self> {
        let name = CString::new(&path[..path.len().min(MEMFD_NAME)])?;
        let make = |flags| fs::memfd_create(&name, MemfdFlags::CLOEXEC | flags);
        // Before Linux 6.3 they can always be executed.
        let file = make(MemfdFlags::EXEC).or_else(|_| make(MemfdFlags::empty()))?;
        Ok(Self {
            file: file.into(),
            name: None,
        })
    }

    /// The file, open for reading only: nobody executes what somebody may write.
    fn finish(self, deleted: bool) -> io::Result<File> {
        let Some((dir, name)) = self.name else {
            return File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        };
        let file = open_at(&dir, &name, OFlags::RDONLY)?;
        if deleted {
            fs::unlinkat(&dir, &name, AtFlags::empty())?;
        }
        Ok(file.into())
    }
}

fn open_at(dir: &OwnedFd, name: &CString, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(fs::openat(dir, name, flags, Mode::from_raw_mode(0o600))?)
}

/// A new file system in memory, mounted nowhere (Linux 5.2): its directory.
fn file_system() -> io::Result<OwnedFd> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    fn file(path: &str, mode: u32) -> MappedFile {
        MappedFile {
            path: path.into(),
            identity: FileIdentity {
                bytes: 5,
                mtime_ns: 0,
                build_id: None,
                xxh3: None,
            },
            mode,
            owner: None,
            at: 0,
            parts: vec![(0, PAGE)],
        }
    }

    #[test]
    fn a_copy_can_be_read_and_never_written_nor_has_it_more_rights() {
        for path in ["/usr/lib/x.so", "/usr/bin/x (deleted)", "x/../../y", "/a/../b", "/"] {
            let write = |f: &File| f.write_all_at(b"hello", 0).map_err(|e| RestartError::at("write", e));
            let mut made = copy(&file(path, 0o6755), write).unwrap();
            let mut text = String::new();
            made.read_to_string(&mut text).unwrap();
            assert_eq!((text.as_str(), made.write_at(b"x", 0).is_err()), ("hello", true));
            assert_eq!(made.metadata().unwrap().permissions().mode() & 0o7777, 0o555, "{path}");
            let shown = std::fs::read_link(format!("/proc/self/fd/{}", made.as_raw_fd())).unwrap();
            // Without rights to mount it is a memfd.
            let shown = shown.to_string_lossy().into_owned();
            assert!(shown == path || shown.starts_with("/memfd:"), "{shown} for {path}");
        }
    }

    #[test]
    fn places_that_are_none_are_refused() {
        check(&[file("/a", 0)]).unwrap();
        let bad = |change: fn(&mut MappedFile)| {
            let mut f = file("/a", 0);
            change(&mut f);
            check(&[f]).unwrap_err();
        };
        bad(|f| f.path = "".into());
        bad(|f| f.path = "/a\0b".into());
        bad(|f| f.at = 1);
        bad(|f| f.at = u64::MAX - PAGE + 1);
        bad(|f| f.identity.bytes = u64::MAX);
        bad(|f| f.parts = vec![(0, 2 * PAGE)]);
        bad(|f| f.parts = vec![(0, 5)]);
        bad(|f| f.parts = vec![(PAGE, 0)]);
        bad(|f| (f.identity.bytes, f.parts) = (3 * PAGE, vec![(PAGE, 3 * PAGE), (0, PAGE)]));
    }
}
