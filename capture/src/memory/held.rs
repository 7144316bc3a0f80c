//! Files that no path leads to, which the agent has open: deleted programs, and what a restart has made itself.

use belay_image::identity::{self, Nameless};
use belay_image::model::FileIdentity;
use belay_image::name::Name;
use belay_kernel::proc::{self, Map};
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// What the kernel puts behind the name of a file that has been removed.
pub(crate) const DELETED: &[u8] = b" (deleted)";

/// The files that no path leads to.
static NAMELESS: RwLock<Vec<Nameless>> = RwLock::new(Vec::new());

/// What `then` says of the one that `find` finds.
pub(crate) fn nameless<T>(find: impl Fn(&Nameless) -> bool, then: impl FnOnce(&Nameless) -> T) -> Option<T> {
    let all = NAMELESS.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|n| find(n)).map(then)
}

/// Files that processes of this agent's job map, made by its restart.
pub fn adopt(files: Vec<Nameless>) {
    NAMELESS.write().unwrap_or_else(PoisonError::into_inner).extend(files);
}

/// The path that the mapped file had, and what it is, where the agent has it open.
pub(crate) fn of_map(map: &Map) -> Option<(Name, FileIdentity)> {
    nameless(
        |n| (n.dev, n.ino) == (map.dev, map.ino),
        |n| (n.path.clone(), n.identity.clone()),
    )
}

/// The same of whether it is one.
pub(crate) fn is_held(map: &Map) -> bool {
    nameless(|n| (n.dev, n.ino) == (map.dev, map.ino), |_| ()).is_some()
}

/// The path of the program of `task`. One that has been deleted is opened.
pub(crate) fn executable(task: i32) -> PathBuf {
    let link = proc::link(task, "exe");
    let none = NAMELESS.read().unwrap_or_else(PoisonError::into_inner).is_empty();
    let deleted = link.as_os_str().as_bytes().ends_with(DELETED);
    if none && !deleted {
        return link;
    }
    let path = format!("/proc/{task}/exe");
    let Ok(meta) = std::fs::metadata(&path) else { return link };
    if let Some(path) = nameless(
        |n| (n.dev, n.ino) == (meta.dev(), meta.ino()),
        |n| n.path.as_path().to_owned(),
    ) {
        return path;
    }
    if deleted {
        match hold(&link, Path::new(&path)) {
            Ok(n) => adopt(vec![n]),
            Err(error) => tracing::debug!(task, %error, "the deleted program cannot be opened"),
        }
    }
    link
}

/// Opens the file that has had the name `name`, and is at `path` now.
fn hold(name: &Path, path: &Path) -> io::Result<Nameless> {
    let file = identity::open(path)?;
    let meta = file.metadata()?;
    Ok(Nameless {
        dev: meta.dev(),
        ino: meta.ino(),
        path: name.to_owned().into(),
        identity: FileIdentity::of_open(&file)?,
        mode: meta.mode() & 0o777,
        file: Arc::new(file),
    })
}

/// Closes those of which `needed` says that no process has them any more.
pub(crate) fn retain(needed: impl Fn(&Nameless) -> bool) {
    NAMELESS.write().unwrap_or_else(PoisonError::into_inner).retain(needed);
}

/// Which file a path has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inode {
    dev: u64,
    pub(crate) ino: u64,
    ctime: (i64, i64),
}

impl Inode {
    pub(crate) fn of(meta: &Metadata) -> Self {
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            ctime: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Whether both are the same file, changed or not.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        (self.dev, self.ino) == (other.dev, other.ino)
    }
}
