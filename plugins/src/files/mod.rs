//! Regular files, memory files and shared anonymous memory: everything that is an inode with bytes.
//!
//! A [`FileObject`] is one inode, however many descriptions and mappings refer to it. Capture collects objects from
//! descriptors (here) and from shared mappings (`shm`), and decides at the end, when it is known who writes, whether
//! the contents must be in the checkpoint.

mod capture;
mod closed;
pub(crate) mod directories;
mod linked;
mod named;
pub(crate) mod owner;
pub(crate) mod path;
mod rebuild;
pub(crate) mod scaffold;
mod sessions;
pub(crate) mod sight;
mod sought;
mod unasked;
mod watched;
pub(crate) mod way;

use crate::builder::{Builder, Built};
use crate::content::Content;
use crate::fault::{refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, Ways};
use crate::model::{Description, Descriptors, Directory, FsPath};
use crate::session::Session;
use crate::state::Part;
use crate::sys::fd;
use crate::sys::view::Source;
use belay_image::model::ObjectId;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

pub(crate) use capture::SECRETMEM_MAGIC;
pub(crate) use directories::{entered, make_parents, parents, working};
pub(crate) use named::{is_named, is_volatile, without_deleted};
pub(crate) use rebuild::{make_beside, BuiltFile};
pub(crate) use scaffold::Scaffold;
pub(crate) use sessions::sessions;
pub(crate) use sight::{Key, Seen, Sight, Sights};
pub(crate) use sought::{FileSet, Sought};

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
    /// Nobody had it open: it is made again where it is gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) closed: bool,
}

impl Descriptors {
    /// The files that are open or mapped: the name of each, and what it is.
    pub fn files(&self) -> impl Iterator<Item = (&Path, &[ObjectId])> {
        self.list::<FileObject>()
            .iter()
            .map(|f| (f.path.0.as_path(), f.ids.as_slice()))
    }
}

impl Part for Vec<FileObject> {
    const KEY: &'static str = "files";
}

/// A description of a file: which of them.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct File(usize);

/// The kind.
pub(crate) struct Files;

impl Kind for Files {
    const NAME: &'static str = "File";
    const VERSION: u32 = 1;
    type State = File;
    type Part = Vec<FileObject>;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Regular(file_system) if *file_system != SECRETMEM_MAGIC)
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<File, Fault> {
        let Look::Regular(file_system) = seen.look else {
            return refuse("is no regular file");
        };
        capture::capture(s, (seen.id, seen.raw()), file_system).map(File)
    }

    fn contents(s: &mut Session<'_>, out: &mut Descriptors) -> Result<(), Refusal> {
        capture::contents(s, out.parts.of())
    }

    fn check(File(at): &File, d: &Descriptors) -> Result<(), String> {
        Descriptors::is_one_of(*at, d.list::<FileObject>())
    }

    fn check_part(files: &Vec<FileObject>, _: &Descriptors) -> Result<(), String> {
        files.iter().try_for_each(FileObject::check)
    }

    fn ways(d: &Descriptors, out: &mut Ways) {
        let parents = d.list::<FileObject>().iter().flat_map(|f| f.parents.iter().cloned());
        out.parents.extend(parents);
    }

    fn prepare(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let d = b.descriptors;
        let mut built = Vec::new();
        for (at, o) in d.list::<FileObject>().iter().enumerate() {
            let made = rebuild::prepare(o, maker(d, at), (b.sights.get(at), b.sights), (b.pages, b.copies));
            let made = made.and_then(|f| f.held(b));
            built.push(made.map_err(|e| e.of(0, format!("file {}", o.path)))?);
        }
        b.sets.put(built);
        Ok(())
    }

    /// A new description on it, at its offset.
    fn rebuild(b: &mut Builder<'_>, desc: &Description, File(at): &File) -> Result<Option<OwnedFd>, Fault> {
        let Some(built) = b.sets.get::<Vec<BuiltFile>>().and_then(|all| all.get(*at)) else {
            return refuse("the image refers to an object that it does not have");
        };
        let fd = match is_maker_of_memory(b.descriptors, *at, desc) {
            true => built.open_made(desc.flags, &b.made)?,
            false => built.open(desc.flags, &b.made)?,
        };
        if desc.pos != 0 {
            fd::go_to(fd.as_raw_fd(), desc.pos).at("set the offset")?;
        }
        Ok(Some(fd))
    }

    /// Adds seals against writing.
    fn complete(d: &Descriptors, built: &Built) -> Result<(), Refusal> {
        let all = built.sets.get::<Vec<BuiltFile>>().map_or(&[][..], Vec::as_slice);
        let mut both = d.list::<FileObject>().iter().zip(all);
        both.try_for_each(|(object, file)| {
            let sealed = file.seal(object, &built.made);
            sealed.map_err(|e| e.of(0, format!("memfd {}", object.path)))
        })
    }

    nothing!(
        survey,
        finish,
        numbers,
        join,
        refill,
        install,
        install_late,
        settle,
        install_own
    );
}

/// Flags of the description that made file `at` without a name (O_TMPFILE): it has them as long as it lives.
fn maker(d: &Descriptors, at: usize) -> Option<i32> {
    if !matches!(d.list::<FileObject>().get(at)?.origin, Origin::Deleted { tmpfile: true }) {
        return None;
    }
    let flags = d
        .each::<File>()
        .filter(|(_, file)| file.0 == at)
        .map(|(id, _)| d.descriptions[id].flags);
    flags.into_iter().find(|flags| flags & libc::O_TMPFILE == libc::O_TMPFILE)
}

/// Whether a description is taken for the one that made file `at` of memory (`memfd_create`): the first that it may be.
/// While there is no other that writes, such a file can be executed.
fn is_maker_of_memory(d: &Descriptors, at: usize, desc: &Description) -> bool {
    let may_be = |desc: &Description| desc.flags & (libc::O_ACCMODE | libc::O_DSYNC) == libc::O_RDWR;
    let mut all = d
        .each::<File>()
        .filter(|(_, file)| file.0 == at)
        .map(|(id, _)| &d.descriptions[id]);
    let memory = matches!(
        d.list::<FileObject>().get(at),
        Some(FileObject {
            origin: Origin::Memfd { .. },
            ..
        })
    );
    memory && all.find(|desc| may_be(desc)).is_some_and(|first| std::ptr::eq(first, desc))
}

impl FileObject {
    /// What is wrong with what is told of it.
    fn check(&self) -> Result<(), String> {
        if self.path.as_path().as_os_str().as_encoded_bytes().contains(&0) {
            return Err(format!("file {}: no path of a file", self.path));
        }
        let bytes = self.content.map_or(self.bytes, |content| content.bytes.max(self.bytes));
        if i64::try_from(bytes).is_err() || self.content.is_some_and(|content| !content.is_possible()) {
            return Err(format!("file {}: {bytes} bytes, more than any file", self.path));
        }
        Ok(())
    }

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
