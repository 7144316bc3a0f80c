//! A task on a stack of its own.

core::arch::global_asm!(
    // clone_on_stack(flags, stack top, function, argument): the child runs function(argument) on its own stack.
    ".globl belay_clone_on_stack",
    "belay_clone_on_stack:",
    "  mov [rsi-8], rdx",
    "  mov [rsi-16], rcx",
    "  sub rsi, 16",
    "  xor edx, edx",
    "  xor r10d, r10d",
    "  xor r8d, r8d",
    "  mov eax, 56",
    "  syscall",
    "  test rax, rax",
    "  jz 1f",
    "  ret",
    "1: xor ebp, ebp",
    "  pop rdi",
    "  pop rax",
    "  call rax",
    "  ud2",
);

extern "C" {
    /// Returns the child's PID or a negative error in the parent. In the child `function` must not return.
    pub(crate) fn belay_clone_on_stack(
        flags: usize,
        stack_top: u64,
        function: unsafe extern "C" fn(*mut u8) -> !,
        argument: *mut u8,
    ) -> isize;
}
