//! Private memory of whole pages, apart from the allocator: large, and given back at once.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Zeros at first, which nobody else has. Pages are taken when they are used for the first time.
#[derive(Debug)]
pub struct Pages {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the value owns the memory as a vector does; what is done by way of `base` is for who does it to keep apart.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// So many bytes, at least one.
    pub fn new(bytes: usize) -> io::Result<Self> {
        Self::mapped(bytes, 0)
    }

    /// The same without memory set aside for it (`MAP_NORESERVE`).
    pub fn unreserved(bytes: usize) -> io::Result<Self> {
        Self::mapped(bytes, libc::MAP_NORESERVE)
    }

    fn mapped(bytes: usize, flags: i32) -> io::Result<Self> {
        let (read_write, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        if isize::try_from(bytes).is_err() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, read_write, flags, -1, 0) };
        match NonNull::new(base.cast()) {
            Some(found) if base != libc::MAP_FAILED => Ok(Self { base: found, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Asks for large pages, or for none; where that fails it only is slower.
    pub fn huge(&self, wanted: bool) {
        let advice = if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: advice about this mapping, which changes no contents.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, advice) };
    }

    /// A child that is forked finds zeros there (`MADV_WIPEONFORK`).
    pub fn wipe_on_fork(&self) -> io::Result<()> {
        // SAFETY: advice about this mapping: all-zero bytes are as good there as any.
        let advised = unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, libc::MADV_WIPEONFORK) };
        crate::check(advised.into()).map(drop)
    }

    /// The address of the first byte, for who keeps uses of parts apart by other means than a borrow of all.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// All of it as words; bytes at the end that make none are left out.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: it begins at a page boundary, lives as long as `self`, which is borrowed alone, and any value is valid.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast(), self.bytes / size_of::<u64>()) }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `mapped`, to which nothing refers any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A reference that can be set, and is none at first.
#[derive(Debug)]
pub struct Reference<T: 'static>(AtomicPtr<T>, PhantomData<&'static T>);

impl<T: Sync> Reference<T> {
    /// One that is none yet.
    pub const fn none() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()), PhantomData)
    }

    /// One that a child finds to be none when it has been forked, by whatever call.
    pub fn wiped_on_fork() -> io::Result<&'static Self> {
        let memory = Pages::new(4096)?;
        memory.wipe_on_fork()?;
        let place = memory.base.cast();
        std::mem::forget(memory);
        // SAFETY: memory that is never given back, and that nothing else leads to; zeros are a null pointer, which is none.
        Ok(unsafe { place.as_ref() })
    }

    /// What it is.
    #[inline]
    pub fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or what `set` was given.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Sets it.
    pub fn set(&self, to: &'static T) {
        self.0.store(ptr::from_ref(to).cast_mut(), Ordering::Release);
    }
}

/// Whether there is memory from page boundary `start` on, so many bytes, whoever's that is.
pub fn are_mapped(start: u64, bytes: u64) -> bool {
    let mut in_core = [0u8; 64];
    let most = in_core.len() as u64 * 4096;
    (0..bytes).step_by(most as usize).all(|at| {
        let bytes = most.min(bytes - at) as usize;
        // SAFETY: it looks at no memory, and has room for an answer for each page.
        unsafe { libc::mincore(start.wrapping_add(at) as *mut libc::c_void, bytes, in_core.as_mut_ptr()) == 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_bytes_are_the_same_memory() {
        let mut pages = Pages::unreserved(3 * 4096).unwrap();
        pages.huge(false);
        pages[4096] = 7;
        assert_eq!(
            (pages.len(), pages.words_mut()[512], pages.words_mut().len()),
            (3 * 4096, 7, 1536)
        );
        let (start, bytes) = (pages.base().as_ptr() as u64, pages.len() as u64);
        assert!(are_mapped(start, bytes));
        drop(pages);
        assert!(!are_mapped(start, bytes));
        assert!(Pages::new(0).is_err() && Pages::new(usize::MAX).is_err());
    }

    #[test]
    fn a_child_has_no_reference() {
        static VALUE: u8 = 7;
        let reference = Reference::wiped_on_fork().unwrap();
        assert_eq!(reference.get(), None);
        reference.set(&VALUE);
        let child = crate::apart::child(|| i32::from(reference.get().is_some()));
        assert_eq!((child.unwrap().wait(0).unwrap(), reference.get()), (0, Some(&7)));
    }
}
