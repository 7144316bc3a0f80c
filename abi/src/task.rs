//! Making tasks that share the caller's memory.

use crate::restore::CloneArgs;
use core::arch::asm;

const CLONE3: usize = 435;

/// Makes a task that runs `entry(arg)` on the stack named in `args`. Returns its identifier or a negative error.
///
/// # Safety
/// The stack is nobody else's, `args` are valid, and `entry` never returns.
pub unsafe fn spawn(args: &CloneArgs, entry: extern "C" fn(usize) -> !, arg: usize) -> isize {
    let ret: isize;
    // SAFETY: the parent continues behind the block with all other registers intact; the child starts on its own stack
    // and calls `entry`.
    unsafe {
        asm!("syscall",
             "test rax, rax",
             "jnz 2f",
             "xor ebp, ebp",
             "mov rdi, rdx",
             "call r8",
             "ud2",
             "2:",
             inlateout("rax") CLONE3 as isize => ret,
             in("rdi") args, in("rsi") size_of::<CloneArgs>(), in("rdx") arg, in("r8") entry,
             lateout("rcx") _, lateout("r11") _);
    }
    ret
}
