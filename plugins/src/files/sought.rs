//! The files found so far, whose contents have not been read yet.

use super::named::made_since;
use super::{FileObject, Origin};
use crate::content::Window;
use crate::env::ProcessView;
use crate::fault::{At, Fault};
use crate::model::{DescId, Directory, FsPath, Holder};
use crate::session::{Found, Session};
use crate::sys::fd;
use belay_image::model::ObjectId;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The files found so far.
#[derive(Debug, Default)]
pub(crate) struct FileSet {
    /// Objects with how they can be read.
    pub(crate) objects: Vec<Sought>,
    by_id: HashMap<ObjectId, usize>,
}

/// A file whose contents have not been read yet.
#[derive(Debug)]
pub(crate) struct Sought {
    /// The object.
    pub(crate) object: FileObject,
    /// A description on it.
    pub(crate) desc: Option<DescId>,
    /// Where processes map it shared.
    pub(crate) windows: Vec<Window>,
    /// Whether one of those may be written through.
    pub(crate) mapped_writable: bool,
    /// What is known of a file that is open.
    pub(super) open: Option<Open>,
    /// A user, for messages.
    pub(crate) holder: Holder,
    /// The checkpoint has all of its contents.
    pub(crate) whole: bool,
}

impl FileSet {
    /// The object with this identity.
    pub(crate) fn find(&self, id: ObjectId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// Those without a name that `processes` map privately, and whose contents the checkpoint has.
    pub(crate) fn private(&self, processes: &[ProcessView]) -> BTreeSet<ObjectId> {
        let mapped = processes.iter().flat_map(|p| &p.private);
        let is_whole = |id: &&ObjectId| {
            let found = self.find(**id).map(|at| &self.objects[at]);
            found.is_some_and(|f| f.whole && f.object.origin != Origin::Named)
        };
        mapped.filter(is_whole).copied().collect()
    }

    /// Adds an object.
    pub(crate) fn add(&mut self, sought: Sought) -> usize {
        let at = self.objects.len();
        for id in &sought.object.ids {
            self.by_id.insert(*id, at);
        }
        self.objects.push(sought);
        at
    }

    /// Makes `id` another name of object `at`.
    pub(crate) fn alias(&mut self, id: ObjectId, at: usize) {
        self.by_id.insert(id, at);
        self.objects[at].object.ids.push(id);
    }
}

impl Sought {
    /// An object known only from mappings.
    pub(crate) fn mapped(id: ObjectId, path: PathBuf, origin: Origin, holder: Holder) -> Self {
        let stat = (origin == Origin::Named).then(|| fd::stat(&path, true).ok()).flatten();
        let parents: Vec<Directory> = Vec::new();
        Self {
            object: FileObject {
                ids: vec![id],
                path: FsPath(path),
                origin,
                mode: stat.as_ref().map_or(0o600, |s| s.st_mode & 0o7777),
                owner: stat.as_ref().map_or((0, 0), |s| (s.st_uid, s.st_gid)),
                links: stat.as_ref().map_or(0, |s| s.st_nlink),
                bytes: stat.as_ref().map_or(0, |s| u64::try_from(s.st_size).unwrap_or(0)),
                mtime_ns: stat.as_ref().map_or(0, fd::mtime_ns),
                atime_ns: stat.as_ref().map(fd::atime_ns),
                written: false,
                content: None,
                print: None,
                parents,
                closed: false,
            },
            desc: None,
            windows: Vec::new(),
            mapped_writable: false,
            open: None,
            holder,
            whole: false,
        }
    }
}

/// What the descriptions of a file tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    pub(super) file_system: i64,
    /// It was made since the launch.
    pub(super) made: bool,
    /// One of them may write where there are bytes already.
    pub(super) overwrites: bool,
}

impl Open {
    /// That of a file which one of the agent's descriptors leads to, in a job that was launched then.
    pub(super) fn new(raw: RawFd, file_system: i64, launched: SystemTime) -> Self {
        Self {
            file_system,
            made: made_since(raw, launched),
            overwrites: false,
        }
    }

    /// Adds a description on it that may write.
    ///
    /// One that can only write and stands at the end, as that of a program which writes its results one after the
    /// other, is taken to stay there: it is cut back, and the program writes the same again.
    pub(super) fn add(&mut self, found: &Found) -> Result<(), Fault> {
        let may_read = found.access() == libc::O_RDWR;
        let is_at_end = found.info.pos().at("read fdinfo")? == found.stat.st_size;
        self.overwrites |= found.flags & libc::O_APPEND == 0 && (may_read || !is_at_end);
        Ok(())
    }
}

/// A descriptor that leads to the object, to look at it: nobody is told of that.
pub(super) fn look(s: &Session<'_>, sought: &Sought) -> io::Result<OwnedFd> {
    if let Some(id) = sought.desc {
        let taken = s.take(id).map_err(io::Error::other)?;
        return fd::dup_from(taken.raw(), 0);
    }
    let is_it = |fd: OwnedFd| -> io::Result<OwnedFd> {
        let st = fd::fstat(fd.as_raw_fd())?;
        let same = |id: &ObjectId| id.ino == st.st_ino && (id.dev == st.st_dev || sought.object.origin == Origin::Named);
        if sought.object.ids.iter().any(same) {
            Ok(fd)
        } else {
            Err(io::Error::from_raw_os_error(libc::ESTALE))
        }
    };
    if sought.object.origin == Origin::Named {
        return fd::open(sought.object.path.as_path(), libc::O_PATH, 0).and_then(is_it);
    }
    // Needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE in the initial user namespace.
    let w = sought.windows.first().ok_or(io::ErrorKind::NotFound)?;
    let (start, end) = s
        .processes
        .iter()
        .filter(|p| p.task == w.pid)
        .flat_map(|p| &p.shared)
        .find(|m| m.start == w.address)
        .map(|m| (m.start, m.end))
        .ok_or(io::ErrorKind::NotFound)?;
    let mapping = format!("/proc/{}/map_files/{start:x}-{end:x}", w.pid);
    fd::open(Path::new(&mapping), libc::O_PATH, 0).and_then(is_it)
}
