//! A start from the arrays of another run, which may have had another number of processes: an export of global arrays.
//! Nothing in it is trusted.

use crate::page;
use crate::writer::Writer;
use belay_access::block::MAX_DIMS;
use belay_access::global::{Part, Run};
use belay_access::index::{Global, Portable, FROM, INDEX};
use belay_access::shape::Shape;
use rustix::fs::{fstat, open, openat, FileType, Mode, OFlags};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Longest index that is read, bytes.
const MOST_INDEX: u64 = 64 << 20;
/// Bytes of elements that lie apart from each other in memory, read at once.
const WINDOW: u64 = 1 << 16;

/// Why a program does not start from an export.
#[derive(Debug, Error)]
pub enum StartError {
    /// Something cannot be read.
    #[error("read {0}: {1}")]
    Read(PathBuf, #[source] io::Error),
    /// The index is none.
    #[error("{0} is not the index of an export: {1}")]
    Index(PathBuf, String),
    /// There are no global arrays in the export.
    #[error("{0} has no point that programs start from: it was not exported with arrays of which processes declare their parts")]
    NoPoint(PathBuf),
    /// The payload is another one.
    #[error("the payload of the export has {0} bytes, and the program asks for {1}")]
    Payload(usize, usize),
    /// The array is not there.
    #[error("the export has no array {0}")]
    Missing(String),
    /// It is another one.
    #[error("array {0} {1}")]
    Other(String, String),
    /// Another thread declares something.
    #[error(transparent)]
    Declare(#[from] crate::DeclareError),
}

impl StartError {
    /// The errno value nearest to it.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Read(_, e) => e.raw_os_error().unwrap_or(libc::EIO),
            Self::Missing(_) => libc::ENOENT,
            Self::Declare(e) => e.errno(),
            Self::Index(..) | Self::NoPoint(_) | Self::Payload(..) | Self::Other(..) => libc::EINVAL,
        }
    }
}

/// An export that can be started from.
#[derive(Debug)]
pub struct Export {
    dir: OwnedFd,
    at: PathBuf,
    index: Portable,
}

/// The export that the environment names; none where it names none.
pub fn named() -> Option<PathBuf> {
    std::env::var_os(FROM).filter(|at| !at.is_empty()).map(PathBuf::from)
}

impl Export {
    /// Opens the export at `at`.
    pub fn open(at: &Path) -> Result<Self, StartError> {
        let fail = |e: io::Error| StartError::Read(at.to_owned(), e);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open(at, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        let path = at.join(INDEX);
        let fail = |e: io::Error| StartError::Read(path.clone(), e);
        let (file, bytes) = file_in(&dir, INDEX).map_err(fail)?;
        let wrong = |why: String| StartError::Index(path.clone(), why);
        if bytes > MOST_INDEX {
            return Err(wrong(format!("it has more than {MOST_INDEX} bytes")));
        }
        let mut text = Vec::new();
        file.take(MOST_INDEX).read_to_end(&mut text).map_err(fail)?;
        let index: Portable = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
        if index.point.is_none() {
            return Err(StartError::NoPoint(at.to_owned()));
        }
        let at = at.to_owned();
        Ok(Self { dir, at, index })
    }

    /// Fills what this process has declared as parts of global arrays, ghosts too; the payload, which has so many bytes.
    pub fn fill(&self, payload: usize) -> Result<Vec<u8>, StartError> {
        let point = self.index.point.as_ref().and_then(|point| point.bytes());
        let wrong = || StartError::Index(self.at.join(INDEX), "its payload is none".into());
        let point = point.ok_or_else(wrong)?;
        if point.len() != payload {
            return Err(StartError::Payload(point.len(), payload));
        }
        for (name, shape, part) in parts()? {
            let global = self.index.global.iter().find(|g| g.name == name);
            let global = global.ok_or_else(|| StartError::Missing(name.clone()))?;
            self.fill_one(global, &shape, &part)?;
        }
        Ok(point)
    }

    fn fill_one(&self, global: &Global, shape: &Shape, part: &Part) -> Result<(), StartError> {
        let other = |what: String| Err(StartError::Other(global.name.clone(), what));
        let Some((sides, bytes)) = global.checked() else {
            return other("has a size in the export that cannot be, or a file that lies elsewhere".into());
        };
        if global.elem != shape.elem {
            let [old, new] = [global.elem, shape.elem];
            return other(format!("has {old} bytes an element in the export, and {new} in the program"));
        }
        if sides != part.global() {
            let [old, new] = [sides, part.global()].map(|sides| times(&sides));
            return other(format!("has {old} elements in the export, and {new} in the program"));
        }
        let path = self.at.join(&global.file);
        let fail = |e: io::Error| StartError::Read(path.clone(), e);
        let (file, length) = file_in(&self.dir, &global.file).map_err(fail)?;
        if length != bytes {
            return other(format!("has a file of {length} bytes instead of {bytes}"));
        }
        let Some(covered) = part.covered() else { return Ok(()) };
        part.try_runs(&covered, &mut |run| read(&file, shape.elem, run)).map_err(fail)
    }
}

/// A regular file of this name in a directory, and its length.
fn file_in(dir: impl AsFd, name: &str) -> io::Result<(File, u64)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = openat(dir, name, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok((file.into(), u64::try_from(stat.st_size).unwrap_or(0)))
}

/// What this process has declared as parts of global arrays.
fn parts() -> Result<Vec<(String, Shape, Part)>, StartError> {
    let Some(page) = page::get() else { return Ok(Vec::new()) };
    let writer = Writer::begin(page)?;
    let mut out = Vec::new();
    for number in 1..=page.dataset_count().load(std::sync::atomic::Ordering::Relaxed) {
        let (dataset, share) = (writer.known(number)?, writer.share_of(number));
        if dataset.address == 0 || share.global[0] == 0 {
            continue;
        }
        let name = String::from_utf8_lossy(dataset.name.split(|b| *b == 0).next().unwrap_or_default());
        let shape = Shape::new(dataset.address, dataset.elem, dataset.extent, dataset.stride);
        let shape = shape.map_err(crate::DeclareError::from)?;
        let part = Part::new(shape, share.global, share.lower, (share.lo, share.hi));
        out.push((name.into_owned(), shape, part.map_err(crate::DeclareError::from)?));
    }
    Ok(out)
}

/// Reads elements into memory that the program has declared to be an array's.
fn read(file: &File, elem: u64, run: Run) -> io::Result<()> {
    if run.step == elem || run.count == 1 {
        return read_at(file, run.address as *mut u8, run.count * elem, run.offset);
    }
    let at_once = (WINDOW / elem).max(1);
    let mut window = vec![0; (at_once.min(run.count) * elem) as usize];
    let mut done = 0;
    while done < run.count {
        let some = at_once.min(run.count - done);
        read_at(file, window.as_mut_ptr(), some * elem, run.offset + done * elem)?;
        for (n, one) in (done..done + some).zip(window.chunks_exact(elem as usize)) {
            // SAFETY: an element of an array that the program has declared: memory of its own, which nobody else uses now.
            unsafe { std::ptr::copy_nonoverlapping(one.as_ptr(), (run.address + n * run.step) as *mut u8, one.len()) };
        }
        done += some;
    }
    Ok(())
}

/// Reads so many bytes from `offset` on.
fn read_at(file: &File, to: *mut u8, bytes: u64, offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        let (at, offset) = (to.wrapping_add(done as usize), (offset + done) as i64);
        // SAFETY: the kernel looks whether the memory is there; it is the caller's window, or an array that the program has
        // declared, which nobody else uses now.
        let read = unsafe { libc::pread(file.as_raw_fd(), at.cast(), (bytes - done) as usize, offset) };
        match u64::try_from(read) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

/// Elements in each dimension, as people write it.
fn times(sides: &[u64; MAX_DIMS]) -> String {
    let dims = sides.iter().rposition(|n| *n != 1).map_or(1, |last| last + 1);
    let sides: Vec<String> = sides[..dims].iter().map(u64::to_string).collect();
    sides.join(" x ")
}
