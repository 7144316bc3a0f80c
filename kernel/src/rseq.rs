//! The registration of the calling thread for restartable sequences.

use std::io;

const RSEQ_FLAG_UNREGISTER: usize = 1;
const RSEQ_SIGNATURE: usize = 0x5305_3053;
const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;

/// Takes back the registration for restartable sequences that libc made: the kernel kills a process whose registered
/// area is unmapped.
pub fn unregister() -> io::Result<()> {
    let symbol = |name: &std::ffi::CStr| {
        // SAFETY: a live, terminated name.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
    };
    let offset = symbol(c"__rseq_offset");
    if offset.is_null() {
        return Ok(()); // a libc that does not register
    }
    // SAFETY: glibc documents it as a ptrdiff_t.
    let offset = unsafe { offset.cast::<isize>().read() };
    let area = crate::cpu::thread_block().wrapping_add_signed(offset as i64) as usize;
    // SAFETY: reads a number.
    let feature = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) } as usize;
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    // glibc registers 32 bytes, later versions what the kernel names, rounded up.
    for bytes in [32, feature, feature.next_multiple_of(32)] {
        // SAFETY: unregistering changes no memory that Rust code relies on.
        let r = unsafe { belay_abi::syscall!(libc::SYS_rseq as usize, area, bytes, RSEQ_FLAG_UNREGISTER, RSEQ_SIGNATURE) };
        if r >= 0 {
            return Ok(());
        }
        last = io::Error::from_raw_os_error(i32::try_from(-r).unwrap_or(libc::EINVAL));
    }
    // glibc says by size 0 that nothing is registered (disabled by a tunable, or an old kernel).
    let size = symbol(c"__rseq_size");
    // SAFETY: glibc documents it as an unsigned int.
    if !size.is_null() && unsafe { size.cast::<u32>().read() } == 0 {
        return Ok(());
    }
    Err(last)
}
