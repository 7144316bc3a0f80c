//! Memory shared with another process, which may write to it at any time.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The first bytes of a file, mapped shared.
#[derive(Debug)]
pub struct Shared {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the value alone, and what is in it is read and written by atomic operations.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps the first `bytes` of `file`, which must have them for as long as the value lives.
    pub fn map(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        let read_write = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { base, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn at<T>(&self, at: usize) -> NonNull<T> {
        assert!(at.is_multiple_of(align_of::<T>()) && at + size_of::<T>() <= self.bytes);
        // SAFETY: it lies in the mapping.
        unsafe { self.base.add(at) }.cast()
    }

    /// The word of 4 bytes at this offset, which must be a multiple of 4 and inside.
    pub fn half(&self, at: usize) -> &AtomicU32 {
        // SAFETY: aligned, in the mapping, which lives as long as `self`; any value is valid.
        unsafe { self.at::<AtomicU32>(at).as_ref() }
    }

    /// The word of 8 bytes at this offset, which must be a multiple of 8 and inside.
    pub fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { self.at::<AtomicU64>(at).as_ref() }
    }

    /// The words from this offset on, each as it is at a moment.
    pub fn words<const N: usize>(&self, at: usize) -> [u64; N] {
        std::array::from_fn(|n| self.word(at + n * size_of::<u64>()).load(Ordering::Relaxed))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, to which nothing refers any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
