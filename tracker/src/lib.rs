//! Declared accesses, inside the program: what its loops do to its datasets goes into a page that the agent reads
//! (`belay_abi::access`). What the agent makes of it is in `belay-access`.
//!
//! [`enter`] and [`leave`] allocate nothing and wait for no lock: a thread that finds another one writing says so, and
//! the agent then takes everything for alive. Where nothing has been declared, or no agent looks, they return at once.
//! A child that was forked declares anew.
//!
//! | module | contents |
//! |---|---|
//! | `page` | the page: made, found again, not had by children |
//! | `writer` | who writes to it |
//! | `verify` | finds declarations that are not true, where that is asked for: nothing is recorded then |
//! | `point` | the program's own point, at which it waits for a checkpoint |
//! | `start` | arrays filled from those of another run |
//! | `dead` | memory that a restart has not brought back, given its access rights when it is overwritten |
//! | `segv` | the handler of SIGSEGV, by which a touch of such memory is told, and those that are verified |

mod dead;
mod page;
mod point;
mod segv;
pub mod start;
mod verify;
mod writer;

use belay_abi::access::{self, Dataset, Page, Share, BOTH, DIMS, MOST_PAYLOAD, MOST_USES, READ, WRITE};
use belay_access::global::{self, PartError};
use belay_access::shape::{Shape, ShapeError};
use belay_access::trace::Mode;
use belay_kernel::futex;
pub use point::point;
use std::io;
use std::sync::atomic::{compiler_fence, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use writer::{Record, Writer};

/// The site of the loop that the program is in, where it is recorded; else 0.
static INSIDE: AtomicU32 = AtomicU32::new(0);

/// The site of the last loop that began, recorded or not.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Longest wait of a loop for the checkpoint that is to be taken before it.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// Longest name of a dataset or a site, bytes.
pub const LONGEST_NAME: usize = 31;

/// Why something was not declared.
#[derive(Debug, Error)]
pub enum DeclareError {
    /// The page cannot be made.
    #[error("make the page that the agent reads: {0}")]
    Page(#[from] io::Error),
    /// The name is no name.
    #[error("a name has 1 to {LONGEST_NAME} bytes, none of them zero")]
    Name,
    /// The dataset cannot be one.
    #[error("the dataset {0}")]
    Shape(#[from] ShapeError),
    /// It cannot be a part of a global array.
    #[error("the dataset {0}")]
    Part(#[from] PartError),
    /// The name of a global array is no text.
    #[error("the name of a global array is UTF-8")]
    Text,
    /// The payload is too long.
    #[error("the payload of a point has {MOST_PAYLOAD} bytes at most")]
    Payload,
    /// There are too many.
    #[error("there are {} already: no more can be declared", access::MOST)]
    Full,
    /// There is no dataset with this number.
    #[error("no dataset has the number {0}")]
    Unknown(u32),
    /// Another thread is declaring something, or beginning a loop.
    #[error("another thread is declaring something, or beginning a loop")]
    Busy,
}

impl DeclareError {
    /// The errno value nearest to it.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Page(e) => e.raw_os_error().unwrap_or(libc::EIO),
            Self::Name | Self::Shape(_) | Self::Part(_) | Self::Text | Self::Payload => libc::EINVAL,
            Self::Full => libc::ENOSPC,
            Self::Unknown(_) => libc::ENOENT,
            Self::Busy => libc::EBUSY,
        }
    }
}

/// A part of a dataset that a loop uses: all of it where there are no bounds.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The dataset.
    pub dataset: u32,
    /// What is done to it.
    pub mode: Mode,
    /// First element in each dimension, and one behind the last.
    pub bounds: Option<(&'a [i64], &'a [i64])>,
}

impl Part<'_> {
    /// As it is heard: bounds that can be none may have been meant in any way, so anything is done to all of the dataset.
    fn heard(self) -> Self {
        let is_none = |(lo, hi): (&[i64], &[i64])| lo.iter().zip(hi).any(|(lo, hi)| *lo < 0 || hi < lo);
        match self.bounds {
            Some(bounds) if is_none(bounds) => Self {
                mode: Mode::Both,
                bounds: None,
                ..self
            },
            _ => self,
        }
    }
}

fn name_of(name: &[u8]) -> Result<[u8; 32], DeclareError> {
    let mut out = [0; 32];
    if name.is_empty() || name.len() > LONGEST_NAME || name.contains(&0) {
        return Err(DeclareError::Name);
    }
    out[..name.len()].copy_from_slice(name);
    Ok(out)
}

/// Declares a dataset of `dims` dimensions, or says where one with this name is now; its number.
///
/// # Safety
/// It is memory of the program's as long as it is declared, in which nothing is but its elements. Where accesses are
/// verified, what a loop does not say that it uses cannot be touched, and what it says that it overwrites is.
pub unsafe fn dataset(name: &[u8], shape: &Shape, dims: usize) -> Result<u32, DeclareError> {
    let new = Dataset {
        address: shape.address,
        elem: shape.elem,
        extent: shape.extent,
        stride: shape.stride,
        keep: 0,
        dims: dims.clamp(1, DIMS) as u32,
        name: name_of(name)?,
    };
    let writer = Writer::begin(page::open()?)?;
    let number = writer.dataset(&new)?;
    writer.moved(number, new.address);
    verify::declared(&writer);
    Ok(number)
}

/// A dataset lies elsewhere from now on.
///
/// # Safety
/// As for [`dataset`].
pub unsafe fn moved(dataset: u32, address: u64) -> Result<(), DeclareError> {
    relocate(dataset, address)
}

/// A dataset is none any more.
pub fn forget(dataset: u32) -> Result<(), DeclareError> {
    relocate(dataset, 0)
}

fn relocate(dataset: u32, address: u64) -> Result<(), DeclareError> {
    let page = page::get().ok_or(DeclareError::Unknown(dataset))?;
    let writer = Writer::begin(page)?;
    let old = writer.known(dataset)?;
    if address != 0 {
        Shape::new(address, old.elem, old.extent, old.stride)?;
    }
    writer.change(dataset, &Dataset { address, ..old });
    writer.moved(dataset, address);
    verify::declared(&writer);
    Ok(())
}

/// A dataset is a part of a global array, with its own elements from `lo` up to, but without, `hi`.
pub fn part(dataset: u32, share: Share) -> Result<(), DeclareError> {
    let page = page::get().ok_or(DeclareError::Unknown(dataset))?;
    let writer = Writer::begin(page)?;
    let of = writer.known(dataset)?;
    if std::str::from_utf8(&of.name).is_err() {
        return Err(DeclareError::Text);
    }
    // One that has been given up lies nowhere.
    let shape = Shape::new(of.address.max(1), of.elem, of.extent, of.stride)?;
    global::Part::new(shape, share.global, share.lower, (share.lo, share.hi))?;
    writer.share(dataset, &share);
    Ok(())
}

/// A dataset is kept whatever loops say of it, or no more.
pub fn keep(dataset: u32, always: bool) -> Result<(), DeclareError> {
    let page = page::get().ok_or(DeclareError::Unknown(dataset))?;
    let writer = Writer::begin(page)?;
    let old = writer.known(dataset)?;
    let keep = u32::from(always);
    writer.change(dataset, &Dataset { keep, ..old });
    writer.reset();
    Ok(())
}

/// The number of a site, which is declared where it has not been.
pub fn site(name: &[u8]) -> Result<u32, DeclareError> {
    let name = name_of(name)?;
    Writer::begin(page::open()?)?.site(&name)
}

/// Tells the user something, in one piece: ranks have the same standard error.
pub fn say(to: &mut impl io::Write, what: &str) {
    // Nobody may listen.
    let _ = to.write_all(format!("belay: {what}\n").as_bytes());
}

/// Before a loop. `parts` says what it uses.
pub fn enter<'a>(site: u32, parts: impl Iterator<Item = Part<'a>> + Clone) {
    let Some(page) = page::get() else { return };
    if verify::is_on() {
        return verify::enter(page, site, parts);
    }
    if page.watched().load(Ordering::Relaxed) == 0 {
        return;
    }
    // Whoever is restarted has come here before.
    segv::install(dead::touched);
    LAST.store(site, Ordering::Relaxed);
    wait_for_stop(page, site);
    let Ok(writer) = Writer::begin(page) else { return };
    record(&writer, site, parts.clone());
    // Not before: who is stopped before its record is whole, and restarted, may lack what this loop overwrites. The
    // processor's order does not matter: a thread that is stopped has done all that comes before.
    compiler_fence(Ordering::SeqCst);
    if page.dead_count().load(Ordering::Acquire) != 0 {
        dead::revive(&writer, parts.map(Part::heard));
    }
}

/// A loop begins, and what it uses cannot be read: nothing that loops say counts from here on.
#[cold]
pub fn unheard() {
    if let Some(page) = page::get() {
        page.faults().fetch_or(access::TOO_MANY, Ordering::Relaxed);
    }
}

/// A loop ends before it has done all that it said, by an exception: what it overwrites may still be what it was.
#[cold]
pub fn abandon(site: u32) {
    let Some(page) = page::get() else { return };
    let open = page.open().load(Ordering::Relaxed);
    if let (Some(begin), Ok(writer)) = (open.checked_sub(1), Writer::begin(page)) {
        if begin < page.whole_at().load(Ordering::Relaxed) {
            // Before the restart it came to its end, or was taken to do so.
            writer::refuse(page, access::header(access::ENTER, site, 0));
        }
        writer.reset();
    }
    leave(site);
}

/// After it.
pub fn leave(site: u32) {
    if verify::is_on() {
        if let Some(page) = page::get() {
            verify::leave(page, site);
        }
        return;
    }
    if let Some(page) = page::get() {
        // Not where the loop began before anybody looked.
        if INSIDE.swap(0, Ordering::Relaxed) != site && page.watched().load(Ordering::Relaxed) == access::BEGUN {
            page.faults().fetch_or(access::NESTED, Ordering::Relaxed);
        }
        page.open().store(0, Ordering::Release);
    }
}

/// Records that a loop begins.
fn record<'a>(writer: &Writer, site: u32, parts: impl Iterator<Item = Part<'a>>) {
    let mut record = writer.enter();
    INSIDE.store(site, Ordering::Relaxed);
    let mut uses = 0;
    for part in parts {
        if uses == MOST_USES {
            writer.page.faults().fetch_or(access::TOO_MANY, Ordering::Relaxed);
            break;
        }
        write_use(&part.heard(), &mut record);
        uses += 1;
    }
    record.end(access::header(access::ENTER, site, uses));
}

/// Appends a use.
fn write_use(part: &Part<'_>, record: &mut Record<'_>) {
    let mode = match part.mode {
        Mode::Read => READ,
        Mode::Write => WRITE,
        Mode::Both => BOTH,
    };
    let Some((lo, hi)) = part.bounds else {
        return record.push(access::used(part.dataset, mode, 0));
    };
    let dims = lo.len().min(hi.len()).min(DIMS);
    let bounds = || lo.iter().zip(hi).take(dims);
    // An element of a higher number does not exist, but what is said of such ones must not be lost.
    let half = |n: &i64| i32::try_from(*n).map(|n| u64::from(n.cast_unsigned()));
    if bounds().any(|(lo, hi)| half(lo).is_err() || half(hi).is_err()) {
        return record.push(access::used(part.dataset, BOTH, 0));
    }
    record.push(access::used(part.dataset, mode, dims));
    for (lo, hi) in bounds() {
        record.push(half(lo).unwrap_or(0) | half(hi).unwrap_or(0) << 32);
    }
}

/// At the site where a checkpoint is wanted, waits for it.
fn wait_for_stop(page: Handle, site: u32) {
    let want = page.want().load(Ordering::Acquire);
    let was_here = || page.here().load(Ordering::Relaxed) & !access::GONE_ON == want;
    if want == 0 || page.site().load(Ordering::Relaxed) != site || was_here() {
        return;
    }
    page.here().store(want, Ordering::Release);
    futex::wake(page.here());
    let end = Instant::now() + LONGEST_WAIT;
    while page.want().load(Ordering::Acquire) == want {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        futex::wait(page.want(), want, left);
    }
    // Before the record: who is stopped in between is not known to begin just this loop, and loses nothing by it.
    page.here().store(want | access::GONE_ON, Ordering::Release);
}

/// The page of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle(&'static Page);

/// How many elements a dataset has in each dimension.
pub fn extent(dataset: u32) -> Result<[u64; DIMS], DeclareError> {
    let page = page::get().ok_or(DeclareError::Unknown(dataset))?;
    Ok(Writer::begin(page)?.known(dataset)?.extent)
}

/// How many dimensions a dataset has; 0 where it is none.
pub fn dims(dataset: u32) -> usize {
    page::get().map_or(0, |page| page.dims(dataset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_access::live::Verdict;
    use belay_access::trace::decode;

    #[test]
    fn a_dataset_that_is_kept_is_so_wherever_it_lies() {
        let shape = |address| Shape::new(address, 8, [16, 1, 1, 1, 1], [8, 128, 128, 128, 128]).unwrap();
        // SAFETY: nothing is verified here, so nobody looks at the memory.
        let declared = |address| unsafe { dataset(b"kept", &shape(address), 1) }.unwrap();
        let number = declared(0x10000);
        let is_kept = || Writer::begin(page::get().unwrap()).unwrap().known(number).unwrap().keep == 1;
        keep(number, true).unwrap();
        assert_eq!(declared(0x20000), number);
        assert!(is_kept());
        keep(number, false).unwrap();
        declared(0x10000);
        assert!(!is_kept());
    }

    /// What was written, each time.
    struct Pieces(Vec<Vec<u8>>);

    impl io::Write for Pieces {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.push(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_is_said_is_one_piece() {
        let mut to = Pieces(Vec::new());
        say(&mut to, "verify: loop a");
        assert_eq!(to.0, [b"belay: verify: loop a\n"]);
    }

    #[test]
    fn bounds_that_are_none_are_all_of_the_dataset() {
        for mode in [Mode::Read, Mode::Write, Mode::Both] {
            for (lo, hi, is_none) in [
                ([0, 0], [4, 0], false),
                ([3, 2], [4, 9], false),
                ([0, 0], [4, -1], true),
                ([0, 3], [4, 2], true),
                ([-1, 0], [4, 4], true),
            ] {
                let bounds = Some((&lo[..], &hi[..]));
                let heard = Part {
                    dataset: 1,
                    mode,
                    bounds,
                }
                .heard();
                let expected = if is_none { (Mode::Both, None) } else { (mode, bounds) };
                assert_eq!((heard.mode, heard.bounds), expected, "{mode:?} {lo:?} {hi:?}");
            }
        }
    }

    #[test]
    fn a_loop_that_reads_by_wrong_bounds_keeps_what_it_reads() {
        let page = page::open().unwrap();
        let writer = Writer::begin(page).unwrap();
        let begin = page.head().load(Ordering::Relaxed);
        let shape = Shape::dense(0x10000, 8, &[512]).unwrap();
        let loops = [(Mode::Read, Some((&[0][..], &[-1][..]))), (Mode::Write, None)];
        for (mode, bounds) in loops {
            record(
                &writer,
                1,
                std::iter::once(Part {
                    dataset: 1,
                    mode,
                    bounds,
                }),
            );
        }
        let words: Vec<u64> = (begin..page.head().load(Ordering::Relaxed))
            .map(|at| page.ring(at).load(Ordering::Relaxed))
            .collect();
        page.open().store(0, Ordering::Relaxed);
        drop(writer);
        let mut verdict = Verdict::new(&[(1, shape)].into());
        for record in decode(&words).unwrap() {
            verdict.happened(&record.event);
        }
        assert_eq!(verdict.dead(), []);
    }
}
