//! What touches raw addresses or needs assembly: placing the restorer, leaving this program for it.

use std::io;

/// Advises the kernel about memory that was mapped early.
pub(crate) fn advise(base: u64, bytes: u64, advice: i32) -> io::Result<()> {
    // SAFETY: callers give advice that changes no contents.
    belay_kernel::check(unsafe { libc::madvise(base as *mut libc::c_void, bytes as usize, advice) }.into()).map(drop)
}

/// Unmaps a part of the restorer's area.
pub(crate) fn unmap(base: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: callers pass parts of the area, which no Rust object lives in.
    belay_kernel::check(unsafe { libc::munmap(base as *mut libc::c_void, bytes as usize) }.into()).map(drop)
}

/// Changes the protection of a part of the restorer's area.
pub(crate) fn protect(base: u64, bytes: u64, prot: i32) -> io::Result<()> {
    // SAFETY: callers pass parts of the area, which no Rust object lives in.
    belay_kernel::check(unsafe { libc::mprotect(base as *mut libc::c_void, bytes as usize, prot) }.into()).map(drop)
}

/// Copies `data` to address `base`.
///
/// # Safety
/// The range is mapped for writing and belongs to the caller.
pub(crate) unsafe fn copy_to(base: u64, data: &[u8]) {
    // SAFETY: the caller vouches for the target; `data` lies elsewhere.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), base as *mut u8, data.len()) }
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
