//! Memory shared with another process, which may write to it at any time.

use belay_abi::words::{self, Words};
use belay_abi::{access, index, restore};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicU8, Ordering};

/// A value in memory that others may write to: only atomic operations change it, and all its bytes are valid.
///
/// # Safety
/// That is so.
pub unsafe trait Parts: Sync {}

// SAFETY: an atomic integer.
unsafe impl Parts for AtomicU8 {}
// SAFETY: as above.
unsafe impl Parts for AtomicU32 {}
// SAFETY: as above.
unsafe impl Parts for AtomicI32 {}
// SAFETY: as above.
unsafe impl Parts for AtomicU64 {}
// SAFETY: it has no others.
unsafe impl<T: Parts, const N: usize> Parts for [T; N] {}
// SAFETY: a row of words, each of which is read and written by an atomic operation.
unsafe impl<T: Words + Send> Parts for words::Shared<T> {}

/// A structure of such values, with all its fields.
#[macro_export]
macro_rules! parts {
    ($kind:ty { $($field:ident),* $(,)? }) => {
        // SAFETY: it has no other fields than these, and they are such values: that is looked at below.
        unsafe impl $crate::shared::Parts for $kind {}
        const _: () = {
            type Whole = $kind;
            const fn is<T: $crate::shared::Parts>(_: &T) {}
            const fn all(Whole { $($field),* }: &Whole) {
                $(is($field);)*
            }
            let _: fn(&Whole) = all;
        };
    };
}

parts!(restore::Control { stage, reports });
parts!(restore::Slot {
    state,
    step,
    index,
    errno,
    parked,
    arrived,
    filled,
    next_fill,
    made,
    helper_tid,
    uffd,
    text_bytes,
    area,
    times,
    text
});
parts!(access::Page {
    magic,
    version,
    owner,
    descriptor,
    watched,
    busy,
    faults,
    changes,
    site,
    want,
    here,
    head,
    reserved,
    open,
    dead_count,
    dataset_count,
    site_count,
    forked,
    whole_at,
    datasets,
    sites,
    dead,
    marks,
    ring,
    point,
    point_want,
    point_here,
    point_at,
    point_took,
    point_turn,
    payload_bytes,
    payload,
    shares
});
parts!(index::Entry { key, high, location });

/// Memory of this process that others may have too. What is read of it is what was there at some moment.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: what is in it is copied by `copy`, or read and written by atomic operations.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Copies bytes, one of whose places others may read and write meanwhile, in this process too. So it is no matter of the
/// compiler's, which takes for granted that nobody does: whatever is copied is what was there at some moment.
///
/// # Safety
/// Both places have so many bytes, and no byte in common.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: as promised by the caller. The direction flag is clear, as the calling convention wants it.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

impl Memory {
    /// The `bytes` bytes at `base`, in which no reference leads.
    ///
    /// # Safety
    /// They stay there as long as the value lives.
    pub(crate) unsafe fn at_base(base: NonNull<u8>, bytes: usize) -> Self {
        Self { base, bytes }
    }

    fn part(&self, at: usize, bytes: usize) -> *mut u8 {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: it lies inside.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// The address and the length of all of it.
    pub fn range(&self) -> (*mut u8, usize) {
        (self.base.as_ptr(), self.bytes)
    }

    /// Copies what is from `at` on to `to`.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let from = self.part(at, to.len());
        // SAFETY: it lies inside, and `to` elsewhere.
        unsafe { copy(from, to.as_mut_ptr(), to.len()) };
    }

    /// Copies `data` to what is from `at` on, which must be writable.
    pub fn write(&self, at: usize, data: &[u8]) {
        let to = self.part(at, data.len());
        // SAFETY: as above.
        unsafe { copy(data.as_ptr(), to, data.len()) };
    }

    /// Which pages of the `bytes` bytes from page boundary `at` on are resident, in bit 0 of a byte of `out` for each (`mincore`).
    pub fn resident(&self, at: usize, bytes: usize, out: &mut [u8]) -> io::Result<()> {
        assert!(out.len() >= bytes.div_ceil(4096));
        let from = self.part(at, bytes);
        // SAFETY: `out` has one byte for each page.
        crate::check(unsafe { libc::mincore(from.cast(), bytes, out.as_mut_ptr()) }.into()).map(drop)
    }
}

/// An error where a mapping of `bytes` of `file` would be longer than that: one of huge pages has whole ones only.
pub(crate) fn maps_no_more(file: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let of = rustix::fs::fstatfs(file)?;
    let page = of.f_bsize.cast_unsigned();
    match of.f_type == libc::HUGETLBFS_MAGIC && !bytes.is_multiple_of(page) {
        true => Err(io::Error::other(format!("its pages have {page} bytes"))),
        false => Ok(()),
    }
}

/// Memory that is mapped shared: the first bytes of a file, or what children have too.
#[derive(Debug)]
pub struct Shared(Memory);

impl Deref for Shared {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.0
    }
}

impl Shared {
    /// Maps the first `bytes` of `file`, which must have them for as long as the value lives.
    pub fn map(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        maps_no_more(file, bytes as u64)?;
        Self::mapped(bytes, libc::MAP_SHARED, file.as_raw_fd())
    }

    /// Zeros, which children of this process share.
    pub fn with_children(bytes: usize) -> io::Result<Self> {
        Self::mapped(bytes, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
    }

    /// The same without memory set aside for it: what is not used takes none.
    pub fn unreserved_with_children(bytes: usize) -> io::Result<Self> {
        Self::mapped(bytes, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    fn mapped(bytes: usize, flags: i32, file: RawFd) -> io::Result<Self> {
        let read_write = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, flags, file, 0) };
        match NonNull::new(base.cast::<u8>()) {
            // SAFETY: the mapping belongs to the value.
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Self(unsafe { Memory::at_base(base, bytes) })),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Ends the mapping; says why where that fails.
    pub fn unmap(self) -> io::Result<()> {
        let this = std::mem::ManuallyDrop::new(self);
        this.end()
    }

    fn end(&self) -> io::Result<()> {
        let (base, bytes) = self.0.range();
        // SAFETY: the mapping made in `mapped`, to which nothing refers any more: both callers are the last.
        crate::check(unsafe { libc::munmap(base.cast(), bytes) }.into()).map(drop)
    }

    /// The value at this offset, a multiple of its alignment.
    pub fn part<T: Parts>(&self, at: usize) -> &T {
        &self.parts(at, 1)[0]
    }

    /// So many values from this offset on, a multiple of their alignment.
    pub fn parts<T: Parts>(&self, at: usize, count: usize) -> &[T] {
        assert!(at.is_multiple_of(align_of::<T>()) && align_of::<T>() <= 4096);
        let bytes = count.checked_mul(size_of::<T>());
        let first = self.0.part(at, bytes.unwrap_or(usize::MAX));
        // SAFETY: aligned, in the mapping, which lives as long as `self`; any bytes are valid, and only atomic operations
        // change them.
        unsafe { std::slice::from_raw_parts(first.cast(), count) }
    }

    /// The value at the beginning of a mapping that stays as long as the process lives.
    pub fn leak<T: Parts>(self) -> &'static T {
        let stays = std::mem::ManuallyDrop::new(self);
        let at = std::ptr::from_ref(stays.part(0));
        // SAFETY: nobody ends the mapping any more.
        unsafe { &*at }
    }

    /// The word of 4 bytes at this offset, which must be a multiple of 4 and inside.
    pub fn half(&self, at: usize) -> &AtomicU32 {
        self.part(at)
    }

    /// The word of 8 bytes at this offset, which must be a multiple of 8 and inside.
    pub fn word(&self, at: usize) -> &AtomicU64 {
        self.part(at)
    }

    /// The words from this offset on, each as it is at a moment.
    pub fn words<const N: usize>(&self, at: usize) -> [u64; N] {
        std::array::from_fn(|n| self.word(at + n * size_of::<u64>()).load(Ordering::Relaxed))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_share_what_is_written() {
        let shared = Shared::with_children(3 * 4096).unwrap();
        let wrote = crate::apart::child(|| {
            shared.write(4090, b"across pages");
            shared.word(0).store(9, Ordering::Relaxed);
            0
        });
        assert_eq!(wrote.unwrap().wait(0).unwrap(), 0);
        let mut back = [0; 12];
        shared.read(4090, &mut back);
        assert_eq!((&back, shared.word(0).load(Ordering::Relaxed)), (b"across pages", 9));
        let mut there = [0; 3];
        shared.resident(0, 3 * 4096, &mut there).unwrap();
        assert_eq!(there.map(|b| b & 1), [1, 1, 0]);
        shared.unmap().unwrap();
    }
}
