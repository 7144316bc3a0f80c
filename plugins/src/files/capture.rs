//! Capture of files: one object per inode, contents where they would otherwise be lost.

use super::named::{is_volatile, without_deleted};
use super::sought::{look, FileSet, Open, Sought};
use super::{closed, linked, unasked, FileObject, Origin, Print, PROC};
use crate::content::{may_be_swapped_out, Content};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::locks;
use crate::model::{DescId, FsPath};
use crate::renamed::Renamed;
use crate::session::{Found, Session};
use crate::sys::fd;
use crate::sys::view::{Source, View};
use belay_image::model::ObjectId;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const PROC_MAGIC: i64 = 0x9fa0;
const FUSE_MAGIC: i64 = 0x6573_5546;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// `memfd_secret`: nobody but its process can read it.
pub(crate) const SECRETMEM_MAGIC: i64 = 0x5345_434d;

/// A file that is only read is saved up to this length, bytes, where it would not outlive the job.
const UNASKED_LIMIT: u64 = 64 << 20;

/// Captures a description of a regular file: its place among the files.
pub(super) fn capture(s: &mut Session<'_>, (id, raw): (DescId, RawFd), magic: i64) -> Result<usize, Fault> {
    let found = &s.found[id];
    let writes = found.access() != libc::O_RDONLY;
    // A kernel without the call has no answer, and such a file is told of by the restart.
    if writes && fd::is_protected(raw).unwrap_or(false) {
        return refuse("is open for writing, and has an attribute by which a restart could not put it back (chattr +a or +i): take that away (chattr -ai)");
    }
    let oid = ObjectId {
        dev: found.stat.st_dev,
        ino: found.stat.st_ino,
    };
    let files: &mut FileSet = s.sets.of();
    let at = match files.find(oid) {
        Some(at) => at,
        None => {
            let object = object_of((found, raw), oid, magic, &mut s.renamed)?;
            let holder = found.holder;
            files.add(Sought {
                object,
                desc: Some(id),
                windows: Vec::new(),
                mapped_writable: false,
                open: Some(Open::new(raw, magic, s.launched)),
                holder,
                whole: false,
            })
        }
    };
    let sought = &mut files.objects[at];
    sought.object.written |= writes;
    if let (true, Some(open)) = (writes, &mut sought.open) {
        open.add(found)?;
    }
    Ok(at)
}

/// The object behind a description.
fn object_of((found, raw): (&Found, RawFd), oid: ObjectId, magic: i64, renamed: &mut Renamed) -> Result<FileObject, Fault> {
    let (path, origin) = locate((found, raw), oid, magic, renamed)?;
    Ok(FileObject {
        ids: vec![oid],
        path: FsPath(path),
        origin,
        mode: found.stat.st_mode & 0o7777,
        owner: (found.stat.st_uid, found.stat.st_gid),
        links: found.stat.st_nlink,
        bytes: u64::try_from(found.stat.st_size).unwrap_or(0),
        mtime_ns: fd::mtime_ns(&found.stat),
        atime_ns: Some(fd::atime_ns(&found.stat)),
        written: false,
        content: None,
        print: None,
        parents: Vec::new(),
        closed: false,
    })
}

/// Splits the name the kernel shows into path and origin.
fn locate((found, raw): (&Found, RawFd), oid: ObjectId, magic: i64, renamed: &mut Renamed) -> Result<(PathBuf, Origin), Fault> {
    let shown = found.link.as_path();
    let bare = without_deleted(shown);
    if found.stat.st_nlink == 0 || bare != shown {
        if let Some(name) = bare.as_os_str().as_bytes().strip_prefix(b"/memfd:") {
            let seals = fd::seals(raw).at("read seals")?;
            let huge = if magic == HUGETLBFS_MAGIC {
                let size = u64::try_from(found.stat.st_blksize).unwrap_or(0).max(1);
                libc::MFD_HUGETLB | (size.ilog2() << 26)
            } else {
                0
            };
            return Ok((PathBuf::from(OsStr::from_bytes(name)), Origin::Memfd { seals, huge }));
        }
    }
    let here = fd::stat(shown, false).is_ok_and(|st| st.st_dev == oid.dev && st.st_ino == oid.ino);
    if here {
        return Ok((shown.to_owned(), Origin::Named));
    }
    if found.stat.st_nlink > 0 {
        if let Some(now) = renamed.of_file(bare, oid) {
            return Ok((now, Origin::Named));
        }
    }
    let tmpfile = bare.file_name() == Some(OsStr::new(&format!("#{}", oid.ino)));
    Ok((bare.to_owned(), Origin::Deleted { tmpfile }))
}

/// Reads what must be read, when all descriptions and mappings are known.
pub(super) fn contents(s: &mut Session<'_>, out: &mut Vec<FileObject>) -> Result<(), Refusal> {
    let mut set: FileSet = s.sets.take().unwrap_or_default();
    linked::find(s, &mut set)?;
    let open = set.objects.len();
    closed::find(s, &mut set);
    let unasked = unasked::choose(s, &set);
    for (at, sought) in set.objects.iter_mut().enumerate() {
        let (pid, name) = (sought.holder.pid, format!("file {}", sought.object.path));
        match read(s, sought, at >= open || unasked.contains(&at)) {
            // One that nobody has open may go, or be somebody else's: it is saved where it can be read.
            Ok(object) if at < open || object.content.is_some() => out.push(object),
            Err(e) if at < open => return Err(e.of(pid, name)),
            Ok(_) | Err(_) => {}
        }
    }
    s.sets.put(set);
    Ok(())
}

/// Reads the contents of one, where they must be saved, or are `unasked`.
fn read(s: &mut Session<'_>, sought: &mut Sought, unasked: bool) -> Result<FileObject, Fault> {
    let mut object = sought.object.clone();
    let file = look(s, sought);
    if let (None, Ok(fd)) = (sought.desc, &file) {
        let stat = fd::fstat(fd.as_raw_fd()).at("stat")?;
        object.bytes = u64::try_from(stat.st_size).unwrap_or(0);
        object.mode = stat.st_mode & 0o7777;
        object.owner = (stat.st_uid, stat.st_gid);
        (object.mtime_ns, object.atime_ns) = (fd::mtime_ns(&stat), Some(fd::atime_ns(&stat)));
    }
    let must = match object.origin {
        Origin::Named => {
            let file_system = file.as_ref().ok().and_then(|f| fd::fs_magic(f.as_raw_fd()).ok());
            let volatile = is_volatile(object.path.as_path(), file_system);
            let mapped = !sought.windows.is_empty();
            // A file that nobody has open for writing is checked at restart, not put back, where it was there before
            // the job: it is input. One that the job has made it may delete as well, when it has read it. Such files
            // are small, as a rule; the copy of a large one would keep the job waiting at every checkpoint, so it needs
            // the user's word.
            let made = sought.open.is_some_and(|open| open.made);
            let small = s.saves_all() || object.bytes <= UNASKED_LIMIT;
            let ours = sought.desc.is_some() && (object.written || (made && small));
            let over = !object.written
                && object.bytes <= UNASKED_LIMIT
                && file_system.is_some_and(|magic| is_over_proc(object.path.as_path(), magic));
            over || sought.mapped_writable || ((s.saves_all() || volatile) && ours) || (volatile && (object.written || mapped))
        }
        Origin::Deleted { .. } | Origin::Memfd { .. } | Origin::Anonymous => true,
    };
    let is_read = must || unasked || !object.written;
    let source = is_read.then(|| file.and_then(|file| source(s, sought, &file, object.bytes)));
    let mut whole = false;
    let content = match source {
        Some(Ok(source)) if must || unasked => {
            whole = true;
            Some(Content::of_file(&*source, object.bytes, &mut s.contents)?)
        }
        Some(Ok(source)) => {
            object.print = Some(Print::of(&*source, object.bytes).at("read the beginning and the end")?);
            None
        }
        Some(Err(_)) if must && !sought.windows.is_empty() => {
            // Where the object ends is known for these only, and a page of another one that nobody has may lie behind its end.
            let inside = s
                .inside
                .as_deref_mut()
                .filter(|_| object.origin == Origin::Anonymous && !may_be_swapped_out());
            Some(Content::of_memory(&sought.windows, object.bytes, inside, &mut s.contents)?)
        }
        Some(Err(e)) if must => return refuse(format!("its contents must be saved, but it cannot be read: {e}")),
        Some(Err(_)) | None => None,
    };
    if let Some(content) = content {
        object.bytes = content.bytes;
        object.content = Some(content);
        if object.origin == Origin::Named || matches!(object.origin, Origin::Deleted { .. }) {
            object.parents = super::parents(object.path.as_path());
        }
    }
    sought.whole = whole;
    Ok(object)
}

/// What the first `bytes` bytes of the object, to which `file` leads, are read from: a description of the job's own
/// where one is open for reading, else a new one.
fn source(s: &Session<'_>, sought: &Sought, file: &OwnedFd, bytes: u64) -> io::Result<Box<dyn Source>> {
    if bytes == 0 {
        return Ok(Box::new(View::default()));
    }
    let on_it = || sought.desc.into_iter().flat_map(|id| s.on_same_inode(id));
    let may_read = |id: &&DescId| s.found[**id].flags & libc::O_PATH == 0 && s.found[**id].access() != libc::O_WRONLY;
    let readable = on_it().find(may_read).map(|id| s.take(*id).map_err(io::Error::other));
    let readable = readable.transpose()?;
    // To map a file in huge pages would take some of them.
    let mappable = readable
        .as_ref()
        .filter(|f| fd::fs_magic(f.raw()).is_ok_and(|m| m != HUGETLBFS_MAGIC));
    if let Some(view) = mappable.and_then(|f| View::of(f.raw(), bytes).ok()) {
        return Ok(Box::new(view));
    }
    if on_it().any(|id| locks::is_leased_for_writing(&s.found[*id])) {
        return Err(io::Error::other(
            "a process holds a write lease on it, which another opening would break; open it for reading too before the lease is taken",
        ));
    }
    let opened = fd::open_unnoticed(
        &fd::self_path(file.as_raw_fd()),
        libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY,
    );
    let source = match readable {
        Some(readable) if opened.is_err() => detached(fd::dup_from(readable.raw(), 0)?)?,
        _ => opened?,
    };
    Ok(Box::new(source))
}

/// A copy of a description that cannot be opened anew: reading it must not move the processes' offset, so only files that need no
/// `lseek` to be read pass here.
fn detached(fd: OwnedFd) -> io::Result<OwnedFd> {
    let copy = fd::memfd(Path::new("copy"), 0)?;
    let mut buf = vec![0u8; 1 << 20];
    let mut at = 0;
    loop {
        let n = fd::read_at(fd.as_raw_fd(), &mut buf, at)?;
        if n == 0 {
            return Ok(copy);
        }
        fd::write_at(copy.as_raw_fd(), &buf[..n], at)?;
        at += n as u64;
    }
}

/// Whether the file is mounted over a name of the kernel's, as a restart does to keep what a host is to the job:
/// another machine, and the next restart, have another one there.
fn is_over_proc(path: &Path, file_system: i64) -> bool {
    // File systems in user space make up anew what is read (lxcfs).
    path.starts_with(PROC) && ![PROC_MAGIC, FUSE_MAGIC].contains(&file_system)
}
