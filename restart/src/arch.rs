//! What touches raw addresses or needs assembly: placing the restorer, leaving this program for it.

use std::io;
use std::os::fd::RawFd;

const RSEQ_FLAG_UNREGISTER: usize = 1;
const RSEQ_SIGNATURE: usize = 0x5305_3053;
const AT_RSEQ_FEATURE_SIZE: libc::c_ulong = 27;

/// Maps exactly `base..base + bytes`, private anonymous or `fd` shared; fails when something is mapped there.
pub(crate) fn map_fixed(base: u64, bytes: u64, prot: i32, fd: Option<RawFd>) -> io::Result<()> {
    let kind = if fd.is_some() {
        libc::MAP_SHARED
    } else {
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
    };
    // SAFETY: MAP_FIXED_NOREPLACE touches no existing mapping.
    let at = unsafe {
        libc::mmap(
            base as *mut libc::c_void,
            bytes as usize,
            prot,
            kind | libc::MAP_FIXED_NOREPLACE,
            fd.unwrap_or(-1),
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Maps memory where a process of the job had some; fails when something is mapped there.
pub(crate) fn map_early(base: u64, bytes: u64, flags: i32) -> io::Result<()> {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE | flags;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: MAP_FIXED_NOREPLACE touches no existing mapping.
    let at = unsafe { libc::mmap(base as *mut libc::c_void, bytes as usize, prot, kind, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Advises the kernel about memory that was mapped early.
pub(crate) fn advise(base: u64, bytes: u64, advice: i32) -> io::Result<()> {
    // SAFETY: callers give advice that changes no contents.
    crate::sys::libc_result(unsafe { libc::madvise(base as *mut libc::c_void, bytes as usize, advice) }).map(drop)
}

/// Unmaps a part of the restorer's area.
pub(crate) fn unmap(base: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: callers pass parts of the area, which no Rust object lives in.
    crate::sys::libc_result(unsafe { libc::munmap(base as *mut libc::c_void, bytes as usize) }).map(drop)
}

/// Changes the protection of a part of the restorer's area.
pub(crate) fn protect(base: u64, bytes: u64, prot: i32) -> io::Result<()> {
    // SAFETY: callers pass parts of the area, which no Rust object lives in.
    crate::sys::libc_result(unsafe { libc::mprotect(base as *mut libc::c_void, bytes as usize, prot) }).map(drop)
}

/// Copies `data` to address `base`.
///
/// # Safety
/// The range is mapped for writing and belongs to the caller.
pub(crate) unsafe fn copy_to(base: u64, data: &[u8]) {
    // SAFETY: the caller vouches for the target; `data` lies elsewhere.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), base as *mut u8, data.len()) }
}

/// Takes back the registration for restartable sequences that libc made: the kernel kills a process whose registered
/// area is unmapped.
pub(crate) fn unregister_rseq() -> io::Result<()> {
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
    let base: isize;
    // SAFETY: reads the thread pointer, which x86-64 keeps at offset 0 of the thread block.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) base, options(nostack, readonly, preserves_flags)) };
    let area = base.wrapping_add(offset) as usize;
    // SAFETY: reads a number.
    let feature = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) } as usize;
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    // glibc registers 32 bytes, later versions what the kernel names, rounded up.
    for bytes in [32, feature, feature.next_multiple_of(32)] {
        // SAFETY: unregistering changes no memory that Rust code relies on.
        let r = unsafe { belay_abi::syscall!(libc::SYS_rseq as usize, area, bytes, RSEQ_FLAG_UNREGISTER, RSEQ_SIGNATURE) };
        match crate::sys::raw(r) {
            Ok(_) => return Ok(()),
            Err(e) => last = e,
        }
    }
    // glibc says by size 0 that nothing is registered (disabled by a tunable, or an old kernel).
    let size = symbol(c"__rseq_size");
    // SAFETY: glibc documents it as an unsigned int.
    if !size.is_null() && unsafe { size.cast::<u32>().read() } == 0 {
        return Ok(());
    }
    Err(last)
}

/// Leaves this program: jumps to `entry` with two arguments, on a stack that ends at `stack_top`.
///
/// # Safety
/// `entry` is the restorer's entry, the arguments are what it takes, and the stack lies in its area.
pub(crate) unsafe fn jump(entry: u64, [plan, thread]: [u64; 2], stack_top: u64) -> ! {
    // SAFETY: control does not come back; the caller vouches for the addresses. The pushed word aligns the stack as a call would.
    unsafe {
        std::arch::asm!("mov rsp, {stack}", "xor ebp, ebp", "push rbp", "jmp {entry}",
            stack = in(reg) stack_top, entry = in(reg) entry, in("rdi") plan, in("rsi") thread, options(noreturn));
    }
}
