//! What needs assembly: leaving this program for the restorer.

/// Where a task goes in the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    entry: u64,
    plans: [u64; 2],
    stack_top: u64,
}

impl Place {
    /// `entry` with two arguments, the plans of the process and of the thread (0: the main one), on a stack that ends at
    /// `stack_top`.
    ///
    /// # Safety
    /// `entry` is the restorer's entry, the arguments are what it takes, and the stack lies in its area. Who goes there
    /// has done all that it is to do in this program.
    pub(crate) unsafe fn new(entry: u64, plans: [u64; 2], stack_top: u64) -> Self {
        Self { entry, plans, stack_top }
    }

    /// Leaves this program.
    pub(crate) fn go(self) -> ! {
        let [plan, thread] = self.plans;
        // SAFETY: control does not come back; who has made the place vouches for it. The pushed word aligns the stack as a
        // call would.
        unsafe {
            std::arch::asm!("mov rsp, {stack}", "xor ebp, ebp", "push rbp", "jmp {entry}",
                stack = in(reg) self.stack_top, entry = in(reg) self.entry, in("rdi") plan, in("rsi") thread, options(noreturn));
        }
    }
}
