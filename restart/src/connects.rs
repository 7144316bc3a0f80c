//! Interrupted `connect` calls.
//!
//! A blocking `connect` that was interrupted waits on when it is issued anew, because the kernel remembers that the
//! attempt is under way. A socket that the restart has connected does not remember: it would answer EISCONN. So such a
//! call has returned when the program goes on.

use belay_image::model::Process;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOHAND: i64 = -514;
const CONNECT: u64 = 42;
/// Length of the `syscall` instruction.
const SYSCALL_BYTES: u64 = 2;
/// Positions in `struct user_regs_struct` of rax, of the first argument (rdi), of the call's number (orig_rax), of the
/// instruction pointer.
const RAX: usize = 10;
const RDI: usize = 14;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;

/// Lets every interrupted `connect` return 0 whose socket `is_connected` (process, thread, descriptor).
pub(crate) fn finish(processes: &mut [Process], is_connected: impl Fn(i32, i32, i32) -> bool) {
    for process in processes {
        for thread in &mut process.threads {
            let regs = &mut thread.regs;
            let word = |at: usize| regs.get(at).copied().unwrap_or(0);
            let result = word(RAX);
            // The kernel has set it back to the call already, where it was stopped once more before it got there.
            let set_back = result == CONNECT;
            let interrupted = set_back || [ERESTARTSYS, ERESTARTNOHAND].contains(&result.cast_signed());
            // The descriptor is the low half of the register.
            let fd = word(RDI) as u32;
            if word(ORIG_RAX) == CONNECT && interrupted && is_connected(process.pid, thread.tid, fd.cast_signed()) {
                if set_back {
                    regs[RIP] += SYSCALL_BYTES;
                }
                regs[RAX] = 0;
                // No call is under way any more.
                regs[ORIG_RAX] = u64::MAX;
            }
        }
    }
}
