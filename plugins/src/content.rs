//! Contents of files and shared memory, as pages of the checkpoint like those of processes: what is stored already is
//! not stored again. Holes and zero pages are left out.

use crate::fault::{refuse, At, Fault};
use crate::inside::Inside;
use crate::sys::fd;
use crate::sys::view::Source;
use belay_image::extents::{Extent, PAGE};
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use belay_kernel::numbers::lend;
use belay_kernel::shared::{Memory, Shared};
use belay_kernel::vm;
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, RawFd};

/// Largest piece read at once.
const PIECE: usize = 1 << 20;
/// So many bytes' pages are asked about at once.
const ASKED_AT_ONCE: u64 = 1 << 30;
/// The end of all contents.
const LAST: u64 = u64::MAX - (1 << 32);
/// What is looked at for zeros.
const UNIT: usize = PAGE as usize;

/// Where contents go at a checkpoint.
pub trait PageSink: std::fmt::Debug {
    /// Stores `pages`, whole pages that lie at `at` of all contents. Each page is given once, the job stands still meanwhile.
    fn store(&mut self, at: u64, pages: &[u8]) -> Result<(), ImageError>;
}

/// Where they come from at a restart.
pub trait PageSource: std::fmt::Debug {
    /// What is stored in this range of all contents, ascending; the rest is zero.
    fn within(&self, range: Range<u64>) -> Vec<Extent>;

    /// Reads these pages, at most 1 MiB, and compares them with their hashes.
    fn read(&self, part: &Extent, into: &mut Buffer) -> Result<(), ImageError>;
}

/// The contents of a generation, one behind the other.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    sink: &'a mut dyn PageSink,
    end: u64,
}

impl<'a> Contents<'a> {
    pub(crate) fn new(sink: &'a mut dyn PageSink) -> Self {
        Self { sink, end: 0 }
    }

    /// The place of contents of this length.
    fn place(&mut self, bytes: u64) -> Result<Content, Fault> {
        let at = self.end;
        let end = bytes
            .checked_next_multiple_of(PAGE)
            .and_then(|b| at.checked_add(b))
            .filter(|end| *end <= LAST);
        self.end = match end {
            Some(end) => end,
            None => return refuse(format!("its length is {bytes} bytes")),
        };
        Ok(Content { bytes, at })
    }
}

/// Saved contents.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Content {
    /// Length in bytes.
    pub(crate) bytes: u64,
    /// Where they begin among all contents of the generation, bytes.
    at: u64,
}

impl Content {
    /// Whether contents of this length can lie there.
    pub(crate) fn is_possible(&self) -> bool {
        let length = self.bytes.checked_next_multiple_of(PAGE);
        length
            .and_then(|length| self.at.checked_add(length))
            .is_some_and(|end| end <= LAST)
    }

    /// Stores the pages of `data` that are not zero; it lies at `offset`, where a page begins.
    fn add(&self, offset: u64, data: &[u8], all: &mut Contents<'_>) -> Result<(), Fault> {
        let mut from = 0;
        while from < data.len() {
            let zero = is_zero(&data[from..from + UNIT]);
            let alike = |unit: &&[u8]| is_zero(unit) == zero;
            let to = from + data[from..].chunks(UNIT).take_while(alike).count() * UNIT;
            if !zero {
                all.sink.store(self.at + offset + from as u64, &data[from..to])?;
            }
            from = to;
        }
        Ok(())
    }

    /// Reads `bytes` bytes of `file`.
    pub(crate) fn of_file(file: &dyn Source, bytes: u64, all: &mut Contents<'_>) -> Result<Self, Fault> {
        let out = all.place(bytes)?;
        let mut buf = vec![0u8; PIECE.min(usize::try_from(bytes).unwrap_or(PIECE).next_multiple_of(UNIT))];
        let mut at = 0;
        while at < bytes {
            let (from, to) = match file.data(at, bytes).at("find data")? {
                Some(range) => range,
                None => break,
            };
            // A block of the file system may be smaller than a page.
            at = at.max(from - from % PAGE);
            while at < to {
                let want = usize::try_from(bytes.min(to.next_multiple_of(PAGE)) - at)
                    .unwrap_or(PIECE)
                    .min(buf.len());
                let n = file.read_at(&mut buf[..want], at).at("read contents")?;
                if n == 0 {
                    return Ok(out);
                }
                let whole = n.next_multiple_of(UNIT);
                buf[n..whole].fill(0);
                out.add(at, &buf[..whole], all)?;
                at += whole as u64;
            }
        }
        Ok(out)
    }

    /// Reads the object, which has at least `least` bytes, through the memory of processes that map it; where `inside`
    /// can ask them, without touching pages that it does not have: to read those would make them.
    pub(crate) fn of_memory(
        windows: &[Window],
        least: u64,
        mut inside: Option<&mut (dyn Inside + '_)>,
        all: &mut Contents<'_>,
    ) -> Result<Self, Fault> {
        let mut windows = windows.to_vec();
        windows.sort_by_key(|w| w.offset);
        let most = windows.iter().map(|w| w.offset + w.bytes).max().unwrap_or(0);
        let mut out = all.place(most.max(least))?;
        out.bytes = least;
        let mut buf = vec![0u8; PIECE];
        let mut at = 0;
        for w in windows {
            let end = w.offset + w.bytes;
            at = at.max(w.offset);
            while at < end {
                let length = (end - at).min(ASKED_AT_ONCE);
                let address = w.address + (at - w.offset);
                let resident = inside
                    .as_mut()
                    .and_then(|inside| inside.resident(w.pid, address, length).ok());
                let runs = match &resident {
                    Some(resident) => runs(resident),
                    None => vec![(0, length)],
                };
                for (from, to) in runs {
                    out.of_run(&w, (at + from, at + to), &mut buf, all)?;
                }
                at += length;
            }
        }
        Ok(out)
    }

    /// Reads what lies at `at` to `end` of the object through window `w`.
    fn of_run(&mut self, w: &Window, (mut at, end): (u64, u64), buf: &mut [u8], all: &mut Contents<'_>) -> Result<(), Fault> {
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(PIECE).min(buf.len());
            let address = w.address + (at - w.offset);
            let n =
                read_memory(w.pid, &mut buf[..want], address).at(format!("read memory of process {} at {address:#x}", w.pid))?;
            self.add(at, &buf[..n], all)?;
            at += n as u64;
            self.bytes = self.bytes.max(at);
            if n == 0 {
                at += PAGE;
            }
        }
        Ok(())
    }

    /// Reads `bytes` bytes of the caller's own mapping `memory`, without touching pages that were never written. A program
    /// outside the job may write them meanwhile: whatever is copied is what is stored.
    pub(crate) fn of_mapping(memory: &Memory, bytes: usize, all: &mut Contents<'_>) -> Result<Self, Fault> {
        let out = all.place(bytes as u64)?;
        let mapped = bytes.next_multiple_of(UNIT);
        let mut resident = vec![0u8; PIECE / UNIT];
        let mut buf = vec![0u8; PIECE.min(mapped)];
        let swap = may_be_swapped_out();
        let mut at = 0;
        while at < mapped {
            let len = (mapped - at).min(PIECE);
            memory
                .resident(at, len, &mut resident)
                .at("ask for resident pages (mincore)")?;
            if swap {
                resident.fill(1);
            }
            for (from, to) in runs(&resident[..len / UNIT]) {
                let (from, to) = (from as usize, to as usize);
                let run = &mut buf[..to - from];
                memory.read(at + from, run);
                out.add((at + from) as u64, run, all)?;
            }
            at += len;
        }
        Ok(out)
    }

    /// What is stored of it.
    fn stored(&self, from: &dyn PageSource) -> Result<Vec<Extent>, Fault> {
        let end = self
            .at
            .checked_add(self.bytes)
            .filter(|end| *end <= LAST && self.at.is_multiple_of(PAGE));
        match end {
            // What the neighbours have joined begins before and ends behind it.
            Some(_) if self.bytes == 0 => Ok(Vec::new()),
            Some(end) => Ok(from.within(self.at..end)),
            None => refuse("the image places contents behind the end of all"),
        }
    }

    /// Reads what is stored, piece by piece: offset and bytes, none of them behind the end.
    fn pieces(&self, from: &dyn PageSource, mut each: impl FnMut(u64, &[u8]) -> Result<(), Fault>) -> Result<(), Fault> {
        let mut buf = Buffer::default();
        for e in self.stored(from)? {
            for at in (e.vaddr..e.end()).step_by(PIECE) {
                from.read(&e.part(at, at + PIECE as u64), &mut buf)?;
                let left = (self.at + self.bytes).saturating_sub(at);
                let bytes = usize::try_from(left).unwrap_or(buf.len()).min(buf.len());
                each(at - self.at, &buf[..bytes])?;
            }
        }
        Ok(())
    }

    /// Makes `file` (opened for writing) equal to the saved contents.
    pub(crate) fn restore(&self, file: RawFd, from: &dyn PageSource) -> Result<(), Fault> {
        // Where they are damaged, the file stays as it is.
        self.pieces(from, |_, _| Ok(()))?;
        // A length that the file system does not have leaves it so too.
        fd::truncate(file, self.bytes).at("set the length")?;
        fd::truncate(file, 0).at("empty the file")?;
        fd::truncate(file, self.bytes).at("set the length")?;
        self.fill(file, from)
    }

    /// Writes what is stored into `file`, which already has its length and is zero elsewhere.
    pub(crate) fn fill(&self, file: RawFd, from: &dyn PageSource) -> Result<(), Fault> {
        self.pieces(from, |offset, data| fd::write_at(file, data, offset).at("write contents"))
    }

    /// As [`Content::fill`], through a mapping.
    pub(crate) fn fill_mapped(&self, file: RawFd, from: &dyn PageSource) -> Result<(), Fault> {
        let bytes = usize::try_from(self.bytes).map_err(|_| Fault::Refused("too large to be mapped".into()))?;
        if self.stored(from)?.is_empty() {
            return Ok(());
        }
        let map = lend(file).and_then(|file| Shared::map(file.as_fd(), bytes));
        let map = map.at("map it (are there enough free huge pages?)")?;
        let filled = self.fill_memory(&map, from);
        map.unmap().at("unmap it")?;
        filled
    }

    /// Copies what is stored to `memory`, which is zero and can be written.
    pub(crate) fn fill_memory(&self, memory: &Memory, from: &dyn PageSource) -> Result<(), Fault> {
        let room = (memory.range().1 as u64).min(self.bytes);
        self.pieces(from, |offset, data| {
            let end = offset.checked_add(data.len() as u64).filter(|end| *end <= room);
            let (Some(_), Ok(at)) = (end, usize::try_from(offset)) else {
                return refuse("the image places contents behind the end of the object");
            };
            memory.write(at, data);
            Ok(())
        })
    }
}

/// A part of an object as one process maps it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// A thread of the process.
    pub(crate) pid: i32,
    /// Address of the first byte.
    pub(crate) address: u64,
    /// Offset of that byte in the object.
    pub(crate) offset: u64,
    /// Length.
    pub(crate) bytes: u64,
}

/// The runs of pages that are there, as offsets, where `resident` says of each page in bit 0 whether it is.
fn runs(resident: &[u8]) -> Vec<(u64, u64)> {
    let mut page = 0;
    let chunks = resident.chunk_by(|a, b| a & 1 == b & 1).filter_map(|chunk| {
        let from = page;
        page += chunk.len() as u64;
        (chunk[0] & 1 != 0).then_some((from * PAGE, page * PAGE))
    });
    chunks.collect()
}

/// Whether a page of shared memory may be swapped out: then it is not resident, and yet not zero.
pub(crate) fn may_be_swapped_out() -> bool {
    std::fs::read_to_string("/proc/swaps").map_or(true, |t| t.lines().count() > 1)
}

/// Whether `data` holds only zero bytes.
pub(crate) fn is_zero(data: &[u8]) -> bool {
    let (words, rest) = data.as_chunks::<16>();
    words.iter().all(|w| u128::from_ne_bytes(*w) == 0) && rest.iter().all(|b| *b == 0)
}

/// Reads memory of process `pid`. A short count means that what follows lies behind the end of the mapped object.
fn read_memory(pid: i32, buf: &mut [u8], address: u64) -> io::Result<usize> {
    // The kernel transfers whole remote elements only: all at once, or else as far as the pages go.
    match vm::read_elements(pid, address, buf.len(), buf) {
        Ok(n) if n == buf.len() => return Ok(n),
        _ => {}
    }
    match vm::read_elements(pid, address, UNIT, buf) {
        Err(e) if e.raw_os_error() == Some(libc::EFAULT) => read_protected(pid, buf, address),
        done => done,
    }
}

/// As [`read_memory`], for a page that the process itself may not read now (PROT_NONE).
fn read_protected(pid: i32, buf: &mut [u8], address: u64) -> io::Result<usize> {
    let mem = std::fs::File::open(format!("/proc/{pid}/mem"))?;
    let page = UNIT.min(buf.len());
    match std::os::unix::fs::FileExt::read_at(&mem, &mut buf[..page], address) {
        Err(e) if e.raw_os_error() == Some(libc::EIO) => Ok(0),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Kept;
    use std::os::fd::AsRawFd;

    fn file(bytes: u64, data: &[(u64, &[u8])]) -> std::os::fd::OwnedFd {
        let file = fd::memfd(std::path::Path::new("t"), 0).unwrap();
        fd::truncate(file.as_raw_fd(), bytes).unwrap();
        for (at, data) in data {
            fd::write_at(file.as_raw_fd(), data, *at).unwrap();
        }
        file
    }

    #[test]
    fn a_length_that_the_file_system_does_not_have_leaves_the_file_as_it_was() {
        let text = b"what is there";
        let there = file(text.len() as u64, &[(0, text)]);
        let huge = Content { bytes: 1 << 63, at: 0 };
        assert!(huge.is_possible() && huge.restore(there.as_raw_fd(), &Kept::default()).is_err());
        let mut back = [0; 64];
        let n = fd::read_at(there.as_raw_fd(), &mut back, 0).unwrap();
        assert_eq!(&back[..n], text);
    }

    #[test]
    fn sparse_contents_come_back_and_holes_cost_nothing() {
        let (a, b, bytes) = (vec![7u8; 5000], vec![9u8; 3], 3 << 40);
        let first = file(100, &[(0, b"one of a hundred bytes")]);
        let second = file(bytes, &[(12345, &a), (bytes - 3, &b)]);
        let mut kept = Kept::default();
        let mut all = Contents::new(&mut kept);
        let one = Content::of_file(&first, 100, &mut all).unwrap();
        let two = Content::of_file(&second, bytes, &mut all).unwrap();
        assert_eq!(kept.within(0..u64::MAX).len(), 1 + 2 + 1);
        let copy = file(0, &[(0, &[1; 100_000])]);
        two.restore(copy.as_raw_fd(), &kept).unwrap();
        let mut back = vec![1u8; 20_000];
        fd::read_at(copy.as_raw_fd(), &mut back, 0).unwrap();
        assert!(is_zero(&back[..12345]) && back[12345..17345] == a[..] && is_zero(&back[17345..]));
        let mut tail = [0u8; 3];
        fd::read_at(copy.as_raw_fd(), &mut tail, bytes - 3).unwrap();
        assert_eq!(tail, [9; 3]);
        assert_eq!(fd::fstat(copy.as_raw_fd()).unwrap().st_size, i64::try_from(bytes).unwrap());
        let shared = Shared::with_children(100).unwrap();
        one.fill_memory(&shared, &kept).unwrap();
        let mut memory = [0u8; 100];
        shared.read(0, &mut memory);
        assert_eq!(&memory[..22], b"one of a hundred bytes");
    }

    #[test]
    fn contents_behind_the_end_of_all_are_refused() {
        let copy = file(2, &[]);
        for at in [u64::MAX, u64::MAX - 1, 1, LAST] {
            let content = Content { bytes: 2, at };
            assert!(content.fill(copy.as_raw_fd(), &Kept::default()).is_err(), "{at}");
        }
        let mut kept = Kept::default();
        let mut all = Contents::new(&mut kept);
        assert!(all.place(u64::MAX - 1).is_err() && all.place(1 << 62).is_ok());
    }
}
