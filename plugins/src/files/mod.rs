//! Regular files, memory files and shared anonymous memory: everything that is an inode with bytes.
//!
//! A [`FileObject`] is one inode, however many descriptions and mappings refer to it. Capture collects objects from descriptors (here) and
//! from shared mappings (`shm`), and decides at the end, when it is known who writes, whether the contents must be in the checkpoint.

mod capture;
mod directories;
pub(crate) mod owner;
pub(crate) mod path;
mod rebuild;
mod sessions;
pub(crate) mod way;

use crate::content::Content;
use crate::model::FsPath;
use crate::sys::view::Source;
use belay_image::model::ObjectId;
use serde::{Deserialize, Serialize};

pub(crate) use capture::{capture, finish, is_named, is_volatile, without_deleted, FileSet, Sought};
pub(crate) use directories::{entered, make_parents, parents, working, Directory, Scaffold};
pub(crate) use rebuild::{make_beside, maker, prepare, BuiltFile};
pub(crate) use sessions::sessions;
pub(crate) use way::{Copies, Key, Seen, Sight, Sights};

/// One inode.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FileObject {
    /// Its identity, first as `fstat` reports it, then as `/proc/PID/maps` does where that differs.
    pub(crate) ids: Vec<ObjectId>,
    /// Its name (without " (deleted)").
    pub(crate) path: FsPath,
    /// How it is reached.
    pub(crate) origin: Origin,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Owner and group.
    pub(crate) owner: (u32, u32),
    /// Number of names.
    pub(crate) links: u64,
    /// Length at capture.
    pub(crate) bytes: u64,
    /// Modification time at capture.
    pub(crate) mtime_ns: i64,
    /// Time of last access, where that is known.
    #[serde(default)]
    pub(crate) atime_ns: Option<i64>,
    /// Whether some process has it open for writing or mapped shared and writable.
    pub(crate) written: bool,
    /// Contents, where they belong to the checkpoint.
    pub(crate) content: Option<Content>,
    /// Fingerprint of a file that is only read, to notice changes.
    pub(crate) print: Option<Print>,
    /// Directories above it, outermost first, to be made again where they are gone. Only with contents.
    pub(crate) parents: Vec<Directory>,
}

impl FileObject {
    /// As what the checkpoint may have it for another reason.
    pub(crate) fn key(&self) -> Key<'_> {
        (self.path.as_path(), self.bytes, self.mtime_ns)
    }
}

/// Where names are the kernel's.
const PROC: &str = "/proc";

/// Name of the memfd that stands for shared anonymous memory after a restart.
pub(crate) const ANONYMOUS: &str = "anonymous";

/// How a file is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Origin {
    /// By its name.
    Named,
    /// It has been deleted; `tmpfile` where it never had a name (O_TMPFILE).
    Deleted {
        /// Made by O_TMPFILE.
        tmpfile: bool,
    },
    /// `memfd_create`.
    Memfd {
        /// `F_GET_SEALS`.
        seals: i32,
        /// MFD_HUGETLB and the page size as `memfd_create` takes them, 0 for ordinary pages.
        huge: u32,
    },
    /// Shared anonymous memory (`mmap` with MAP_SHARED and MAP_ANONYMOUS).
    Anonymous,
}

/// Checksums of the first and the last 64 KiB of a file's captured length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Print {
    /// XXH3-64 of the beginning.
    pub(crate) head: u64,
    /// XXH3-64 of the end.
    pub(crate) tail: u64,
}

impl Print {
    /// Computes it for the first `bytes` bytes of `file`.
    pub(crate) fn of(file: &dyn Source, bytes: u64) -> std::io::Result<Self> {
        let mut buf = vec![0u8; usize::try_from(bytes.min(64 * 1024)).map_err(std::io::Error::other)?];
        let mut sum = |at| -> std::io::Result<u64> {
            let n = file.read_at(&mut buf, at)?;
            Ok(belay_image::checksum(&buf[..n]))
        };
        Ok(Self {
            head: sum(0)?,
            tail: sum(bytes.saturating_sub(64 * 1024))?,
        })
    }
}
