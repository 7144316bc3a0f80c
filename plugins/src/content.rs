//! Contents of files and shared memory: streamed in pieces, holes and zero pages left out.

use crate::fault::{At, Fault};
use crate::sys::fd;
use crate::Inside;
use belay_image::blobs::{BlobReader, BlobRef, BlobWriter};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::RawFd;

/// Largest piece read at once.
const PIECE: usize = 1 << 20;
/// Zero runs shorter than this are stored with the data around them.
const GAP: usize = 64 * 1024;
/// So many bytes' pages are asked about at once.
const ASKED_AT_ONCE: u64 = 1 << 30;
/// Granularity at which zero runs are looked for.
const UNIT: usize = 4096;

/// Saved contents: a length and the pieces that are not zero.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Content {
    /// Length in bytes.
    pub(crate) bytes: u64,
    /// (offset, data), ascending.
    pub(crate) pieces: Vec<(u64, BlobRef)>,
}

impl Content {
    /// Stores the non-zero runs of `data`, which lies at `offset`.
    fn add(&mut self, offset: u64, data: &[u8], blobs: &mut BlobWriter) -> Result<(), Fault> {
        let mut run: Option<(usize, usize)> = None;
        for (i, unit) in data.chunks(UNIT).enumerate() {
            if is_zero(unit) {
                continue;
            }
            let (from, to) = (i * UNIT, i * UNIT + unit.len());
            match &mut run {
                Some((_, end)) if from - *end < GAP => *end = to,
                _ => {
                    if let Some((a, b)) = run {
                        self.pieces.push((offset + a as u64, blobs.put(&data[a..b])?));
                    }
                    run = Some((from, to));
                }
            }
        }
        if let Some((a, b)) = run {
            self.pieces.push((offset + a as u64, blobs.put(&data[a..b])?));
        }
        Ok(())
    }

    /// Reads `bytes` bytes through `file`, a description of the caller's own (its offset moves).
    pub(crate) fn of_file(file: RawFd, bytes: u64, blobs: &mut BlobWriter) -> Result<Self, Fault> {
        let mut out = Content {
            bytes,
            pieces: Vec::new(),
        };
        let mut buf = vec![0u8; PIECE.min(usize::try_from(bytes).unwrap_or(PIECE))];
        let mut at = 0;
        while at < bytes {
            let (from, to) = match data_range(file, at, bytes).at("find data")? {
                Some(range) => range,
                None => break,
            };
            at = from;
            while at < to {
                let want = usize::try_from(to - at).unwrap_or(PIECE).min(buf.len());
                let n = fd::read_at(file, &mut buf[..want], at).at("read contents")?;
                if n == 0 {
                    return Ok(out);
                }
                out.add(at, &buf[..n], blobs)?;
                at += n as u64;
            }
        }
        Ok(out)
    }

    /// Reads the object through the memory of processes that map it; where `inside` can ask them, without touching pages that it does not have: to read those would make them.
    pub(crate) fn of_memory(
        windows: &[Window],
        mut inside: Option<&mut (dyn Inside + '_)>,
        blobs: &mut BlobWriter,
    ) -> Result<Self, Fault> {
        let mut windows = windows.to_vec();
        windows.sort_by_key(|w| w.offset);
        let mut out = Content::default();
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
                    Some(resident) => runs(resident, length),
                    None => vec![(0, length)],
                };
                for (from, to) in runs {
                    out.of_run(&w, (at + from, at + to), &mut buf, blobs)?;
                }
                at += length;
            }
        }
        Ok(out)
    }

    /// Reads what lies at `at` to `end` of the object through window `w`.
    fn of_run(&mut self, w: &Window, (mut at, end): (u64, u64), buf: &mut [u8], blobs: &mut BlobWriter) -> Result<(), Fault> {
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(PIECE).min(buf.len());
            let address = w.address + (at - w.offset);
            let n =
                read_memory(w.pid, &mut buf[..want], address).at(format!("read memory of process {} at {address:#x}", w.pid))?;
            self.add(at, &buf[..n], blobs)?;
            at += n as u64;
            self.bytes = self.bytes.max(at);
            if n == 0 {
                at += UNIT as u64;
            }
        }
        Ok(())
    }

    /// Reads `bytes` bytes of the caller's own mapping at `base`, without touching pages that were never written.
    pub(crate) fn of_mapping(base: *const u8, bytes: usize, blobs: &mut BlobWriter) -> Result<Self, Fault> {
        let mut out = Content {
            bytes: bytes as u64,
            pieces: Vec::new(),
        };
        let mut resident = vec![0u8; PIECE / UNIT];
        let swap = may_be_swapped_out();
        let mut at = 0;
        while at < bytes {
            let len = (bytes - at).min(PIECE);
            // SAFETY: `at` is within the mapping that the caller owns.
            let piece = unsafe { base.add(at) };
            // SAFETY: `resident` has one byte for each page of the piece.
            let known = unsafe { libc::mincore(piece.cast_mut().cast(), len, resident.as_mut_ptr()) };
            crate::sys::check(known).at("ask for resident pages (mincore)")?;
            if swap {
                resident.fill(1);
            }
            for (from, to) in runs(&resident[..len.div_ceil(UNIT)], len as u64) {
                let (from, to) = (from as usize, to as usize);
                // SAFETY: the pages lie within the mapping, and the processes that share it are stopped.
                let run = unsafe { std::slice::from_raw_parts(piece.add(from), to - from) };
                out.add((at + from) as u64, run, blobs)?;
            }
            at += len;
        }
        Ok(out)
    }

    /// Makes `file` (opened for writing) equal to the saved contents.
    pub(crate) fn restore(&self, file: RawFd, blobs: &BlobReader) -> Result<(), Fault> {
        fd::truncate(file, 0).at("empty the file")?;
        fd::truncate(file, self.bytes).at("set the length")?;
        self.fill(file, blobs)
    }

    /// Writes the pieces into `file`, which already has its length and is zero elsewhere.
    pub(crate) fn fill(&self, file: RawFd, blobs: &BlobReader) -> Result<(), Fault> {
        for (offset, piece) in &self.pieces {
            fd::write_at(file, &blobs.get(piece)?, *offset).at("write contents")?;
        }
        Ok(())
    }

    /// As [`Content::fill`], through a mapping.
    pub(crate) fn fill_mapped(&self, file: RawFd, blobs: &BlobReader) -> Result<(), Fault> {
        let bytes = usize::try_from(self.bytes).map_err(|_| Fault::Refused("too large to be mapped".into()))?;
        if self.pieces.is_empty() || bytes == 0 {
            return Ok(());
        }
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, file, 0) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).at("map it (are there enough free huge pages?)");
        }
        // SAFETY: the mapping has `bytes` bytes, and nobody else uses it.
        let filled = unsafe { self.fill_memory(map.cast(), blobs) };
        // SAFETY: the mapping made above, to which nothing refers any more.
        crate::sys::check(unsafe { libc::munmap(map, bytes) }).at("unmap it")?;
        filled
    }

    /// Copies the pieces to memory at `base`, which has room for `self.bytes` bytes and is zero.
    ///
    /// # Safety
    /// `base` must be valid for writing that many bytes.
    pub(crate) unsafe fn fill_memory(&self, base: *mut u8, blobs: &BlobReader) -> Result<(), Fault> {
        for (offset, piece) in &self.pieces {
            let data = blobs.get(piece)?;
            let end = offset.checked_add(data.len() as u64).filter(|end| *end <= self.bytes);
            let (Some(_), Ok(at)) = (end, usize::try_from(*offset)) else {
                return crate::fault::refuse("the image places contents behind the end of the object");
            };
            // SAFETY: `at` plus the length of `data` is at most `self.bytes`, which the caller vouches for.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), base.add(at), data.len()) };
        }
        Ok(())
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

/// The runs of pages that are there, as offsets, where `resident` says of each of the pages of `bytes` bytes in bit 0 whether it is.
fn runs(resident: &[u8], bytes: u64) -> Vec<(u64, u64)> {
    let offset = |page: usize| (page * UNIT) as u64;
    let mut page = 0;
    let chunks = resident.chunk_by(|a, b| a & 1 == b & 1).filter_map(|chunk| {
        let from = page;
        page += chunk.len();
        (chunk[0] & 1 != 0).then(|| (offset(from), offset(page).min(bytes)))
    });
    chunks.collect()
}

/// Whether a page of shared memory may be swapped out: then it is not resident, and yet not zero.
pub(crate) fn may_be_swapped_out() -> bool {
    std::fs::read_to_string("/proc/swaps").map_or(true, |t| t.lines().count() > 1)
}

/// Whether `data` holds only zero bytes.
pub(crate) fn is_zero(data: &[u8]) -> bool {
    // SAFETY: any bytes are valid `u128` values.
    let (head, words, tail) = unsafe { data.align_to::<u128>() };
    head.iter().all(|b| *b == 0) && words.iter().all(|w| *w == 0) && tail.iter().all(|b| *b == 0)
}

/// The next range of `file` at or behind `at` that may hold data.
fn data_range(file: RawFd, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
    let start = i64::try_from(at).map_err(io::Error::other)?;
    let from = match fd::seek(file, start, libc::SEEK_DATA) {
        Ok(from) => from,
        Err(e) => {
            return match e.raw_os_error() {
                Some(libc::ENXIO) => Ok(None),
                Some(libc::EINVAL) => Ok(Some((at, bytes))),
                _ => Err(e),
            }
        }
    };
    let to = fd::seek(file, from, libc::SEEK_HOLE)?;
    let (from, to) = (from.unsigned_abs(), to.unsigned_abs().min(bytes));
    Ok((from < to).then_some((from, to)))
}

/// Reads memory of process `pid`. A short count means that what follows lies behind the end of the mapped object.
fn read_memory(pid: i32, buf: &mut [u8], address: u64) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // The kernel transfers whole remote elements only, so each page is an element of its own.
    let mut remote = Vec::with_capacity(buf.len() / UNIT + 1);
    let mut done = 0;
    while done < buf.len() && remote.len() < 1024 {
        let at = address + done as u64;
        let len = (UNIT - (at as usize) % UNIT).min(buf.len() - done);
        remote.push(libc::iovec {
            iov_base: at as *mut libc::c_void,
            iov_len: len,
        });
        done += len;
    }
    // SAFETY: `local` describes `buf`; the remote addresses are checked by the kernel.
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    match crate::sys::check_len(n) {
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
    use std::os::fd::AsRawFd;

    #[test]
    fn sparse_contents_come_back_and_holes_cost_nothing() {
        let path = std::env::temp_dir().join(format!("belay-content-{}", std::process::id()));
        let mut blobs = BlobWriter::create(&path).unwrap();
        let source = fd::memfd(std::path::Path::new("t"), 0).unwrap();
        let (a, b) = (vec![7u8; 5000], vec![9u8; 3]);
        let bytes = 3 << 40;
        fd::truncate(source.as_raw_fd(), bytes).unwrap();
        fd::write_at(source.as_raw_fd(), &a, 12345).unwrap();
        fd::write_at(source.as_raw_fd(), &b, bytes - 3).unwrap();
        let c = Content::of_file(source.as_raw_fd(), bytes, &mut blobs).unwrap();
        assert!(blobs.bytes() < 64 * 1024, "{} bytes stored", blobs.bytes());
        let reader = BlobReader::open(&path).unwrap();
        let copy = fd::memfd(std::path::Path::new("t"), 0).unwrap();
        fd::write_at(copy.as_raw_fd(), &[1; 100_000], 0).unwrap();
        c.restore(copy.as_raw_fd(), &reader).unwrap();
        let mut back = vec![1u8; 20_000];
        fd::read_at(copy.as_raw_fd(), &mut back, 0).unwrap();
        assert!(is_zero(&back[..12345]) && back[12345..17345] == a[..] && is_zero(&back[17345..]));
        let mut tail = [0u8; 3];
        fd::read_at(copy.as_raw_fd(), &mut tail, bytes - 3).unwrap();
        assert_eq!(tail, [9; 3]);
        assert_eq!(fd::fstat(copy.as_raw_fd()).unwrap().st_size, i64::try_from(bytes).unwrap());
        std::fs::remove_file(&path).unwrap();
    }
}
