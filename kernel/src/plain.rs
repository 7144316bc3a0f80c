//! Values that the kernel can read and write as they lie in memory.

/// A value without padding, of which all bytes are valid.
///
/// # Safety
/// That is so.
pub unsafe trait Plain: Copy {
    /// The value with all bytes zero.
    fn zero() -> Self {
        // SAFETY: all bytes are valid, says who implements it.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: integers have neither padding nor invalid bytes.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: nothing lies between the elements of an array.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}
// SAFETY: two integers of the same size.
unsafe impl Plain for libc::timeval {}
// SAFETY: eight single bytes, then integers of four.
unsafe impl Plain for libc::tcp_info {}
// SAFETY: as above.
unsafe impl Plain for libc::linger {}
