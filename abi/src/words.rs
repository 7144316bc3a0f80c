//! Values in memory that several processes share.

use core::cell::UnsafeCell;
use core::fmt;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering};

/// A value that is a row of words of 8 bytes.
///
/// # Safety
/// Its size is a multiple of 8, it has no padding, and all bytes are valid. (Its alignment is 8 at most: that is looked at.)
pub unsafe trait Words: Copy {}

// SAFETY: 40 single bytes.
unsafe impl Words for [u8; 40] {}

/// A value that others may read and write at any time, word by word: what is read while it is being written is partly of
/// before. It lies as the value does, at a multiple of 8.
#[repr(C, align(8))]
pub struct Shared<T>(UnsafeCell<T>);

// SAFETY: every access is by atomic operations, as of a row of `AtomicU64`.
unsafe impl<T: Words + Send> Sync for Shared<T> {}

impl<T: Words> Shared<T> {
    const COUNT: usize = {
        assert!(size_of::<T>().is_multiple_of(8) && align_of::<T>() <= 8);
        size_of::<T>() / 8
    };

    /// It begins with this value.
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Word `at` of it, of which it has so many.
    #[inline]
    pub fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < Self::COUNT);
        // SAFETY: it lies inside, at a multiple of 8; any value is valid, and nobody refers to it otherwise.
        unsafe { &*self.0.get().cast::<AtomicU64>().add(at) }
    }

    /// The value.
    #[inline]
    pub fn get(&self) -> T {
        let mut out = MaybeUninit::<T>::uninit();
        for at in 0..Self::COUNT {
            let word = self.word(at).load(Ordering::Relaxed);
            // SAFETY: it lies inside `out`.
            unsafe { out.as_mut_ptr().cast::<u64>().add(at).write_unaligned(word) };
        }
        // SAFETY: all of it has been written, and all bytes are valid.
        unsafe { out.assume_init() }
    }

    /// Replaces it.
    #[inline]
    pub fn set(&self, value: &T) {
        for at in 0..Self::COUNT {
            // SAFETY: it lies inside `value`, which has no padding.
            let word = unsafe { (&raw const *value).cast::<u64>().add(at).read_unaligned() };
            self.word(at).store(word, Ordering::Relaxed);
        }
    }
}

impl<T: Words + fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Value {
        number: u64,
        halves: [u32; 2],
        bytes: [u8; 8],
    }

    // SAFETY: integers, 24 bytes of them.
    unsafe impl Words for Value {}

    #[test]
    fn a_value_is_its_words() {
        let value = |number| Value {
            number,
            halves: [1, 2],
            bytes: *b"in place",
        };
        let shared = Shared::new(value(3));
        shared.set(&value(4));
        assert_eq!((shared.get(), shared.word(0).load(Ordering::Relaxed)), (value(4), 4));
        assert_eq!(shared.word(1).load(Ordering::Relaxed), 1 | 2 << 32);
        assert_eq!((size_of::<Shared<[u8; 40]>>(), align_of::<Shared<[u8; 40]>>()), (40, 8));
    }
}
