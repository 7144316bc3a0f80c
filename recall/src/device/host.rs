//! Memory of the host: the tier above the files, and a device where there is none.

use super::{Device, Lane};
use crate::span::copy;
use crate::Span;
use std::io;
use std::ops::Range;

/// Private memory of this process; pages are taken when they are used for the first time.
pub struct Host {
    at: *mut u8,
    len: usize,
}

// SAFETY: a mapping that lives as long as the value; who uses its bytes when is for the callers of the unsafe functions
// to keep apart.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl Host {
    /// Reserves so many bytes, at least one.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes.max(1)).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which changes no memory that there is.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: advice about the mapping just made; without large pages it only is slower.
        unsafe { libc::madvise(at, len, libc::MADV_HUGEPAGE) };
        Ok(Self { at: at.cast(), len })
    }

    /// The memory of some ranges. Those beyond the end are left out.
    pub(crate) fn spans(&self, ranges: &[Range<u64>]) -> Vec<Span> {
        let is_in = |r: &&Range<u64>| r.start <= r.end && r.end <= self.len as u64;
        let span = |r: &Range<u64>| Span::new(self.at.wrapping_add(r.start as usize), (r.end - r.start) as usize);
        ranges.iter().filter(is_in).map(span).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, which nobody can use any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

impl Device for Host {
    fn bytes(&self) -> u64 {
        self.len as u64
    }

    unsafe fn store(&self, _: Lane, from: &[Span], to: &[Range<u64>]) -> io::Result<()> {
        // SAFETY: the caller keeps both apart from other uses; the ranges are inside the mapping.
        unsafe { copy(from, &self.spans(to)) };
        Ok(())
    }

    unsafe fn load(&self, _: Lane, from: &[Range<u64>], to: &[Span]) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { copy(&self.spans(from), to) };
        Ok(())
    }
}
