//! Raw x86-64 system calls. Results are the kernel's: negative values from -4095 to -1 are errors.
//!
//! Nothing here touches `errno` or any other libc state.

use core::arch::asm;

/// Issues a system call with six arguments.
///
/// # Safety
/// The call must be sound for the arguments given: memory the kernel reads or writes is valid, and mappings that Rust
/// code relies on stay in place.
#[inline(always)]
pub unsafe fn raw6(nr: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let ret: isize;
    // SAFETY: the caller vouches for the arguments; the clobbers are those of the x86-64 system call convention.
    unsafe {
        asm!("syscall", inlateout("rax") nr => ret, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    ret
}

/// Issues a system call with up to six arguments, each cast to `usize`; those not given are 0.
///
/// # Safety
/// As for [`raw6`].
#[macro_export]
macro_rules! syscall {
    ($nr:expr) => { $crate::syscall::raw6($nr, 0, 0, 0, 0, 0, 0) };
    ($nr:expr, $a:expr) => { $crate::syscall::raw6($nr, $a as usize, 0, 0, 0, 0, 0) };
    ($nr:expr, $a:expr, $b:expr) => { $crate::syscall::raw6($nr, $a as usize, $b as usize, 0, 0, 0, 0) };
    ($nr:expr, $a:expr, $b:expr, $c:expr) => { $crate::syscall::raw6($nr, $a as usize, $b as usize, $c as usize, 0, 0, 0) };
    ($nr:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
        $crate::syscall::raw6($nr, $a as usize, $b as usize, $c as usize, $d as usize, 0, 0)
    };
    ($nr:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr) => {
        $crate::syscall::raw6($nr, $a as usize, $b as usize, $c as usize, $d as usize, $e as usize, 0)
    };
    ($nr:expr, $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr) => {
        $crate::syscall::raw6($nr, $a as usize, $b as usize, $c as usize, $d as usize, $e as usize, $f as usize)
    };
}

/// Defines what a `no_std` binary of this workspace needs besides its entry: the panic handler and the memory functions that the
/// compiler calls. Use once per binary.
#[macro_export]
macro_rules! freestanding {
    () => {
        #[panic_handler]
        fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
            // A fault the agent sees as SIGILL at this address; nothing of the application may run after it.
            // SAFETY: ud2 raises SIGILL.
            unsafe { core::arch::asm!("ud2", options(noreturn, nostack)) }
        }
        /// The precompiled `core` refers to it; with `panic = "abort"` nothing calls it.
        #[no_mangle]
        extern "C" fn rust_eh_personality() {}

        core::arch::global_asm!(
            ".globl memcpy, memmove, memset, memcmp, bcmp",
            "memcpy: mov rax, rdi; mov rcx, rdx; rep movsb; ret",
            "memmove: mov rax, rdi; mov rcx, rdx; cmp rdi, rsi; jbe 1f; lea r8, [rsi+rdx]; cmp rdi, r8; jae 1f",
            "std; lea rdi, [rdi+rdx-1]; lea rsi, [rsi+rdx-1]; rep movsb; cld; ret",
            "1: rep movsb; ret",
            "memset: mov r8, rdi; mov eax, esi; mov rcx, rdx; rep stosb; mov rax, r8; ret",
            "memcmp:",
            "bcmp: xor eax, eax; test rdx, rdx; je 3f",
            "2: movzx eax, byte ptr [rdi]; movzx ecx, byte ptr [rsi]; sub eax, ecx; jne 3f; inc rdi; inc rsi; dec rdx; jne 2b",
            "3: ret",
        );
    };
}
