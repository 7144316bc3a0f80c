//! System calls that have another mask of blocked signals in force while they wait (`ppoll`, `pselect`, `epoll_pwait`,
//! `io_pgetevents`, `sigsuspend`).
//!
//! A call that a stop has interrupted is begun anew by its task, and until it is inside again the task's own mask is in
//! force: a signal that only the call blocks would be delivered there. So the task goes back into the call under the
//! call's mask, and gets its own one where the kernel has not begun the call yet.

use crate::proc::Status;
use crate::ptrace::{self, Event, Regs};
use crate::vm;
use std::io;

/// What the kernel says of a call that is to be begun anew unless a handler is to run.
pub const ERESTARTNOHAND: i64 = -514;

const EINTR: i64 = -4;

/// Some calls answer an interruption with EINTR at once instead of asking to be restarted (`epoll_wait`, `semop`,
/// `sigtimedwait`, sockets with a time-out). A task that stands at its return from such a call was interrupted by our
/// stop, for no handler has run yet. ERESTARTNOHAND tells the kernel what the others say: start the call again unless a
/// handler is to run now, and only then return EINTR. Returns whether the registers were changed.
pub fn hide_interruption(regs: &mut Regs) -> bool {
    let interrupted = regs.orig_rax.cast_signed() >= 0 && regs.rax.cast_signed() == EINTR;
    if interrupted {
        regs.rax = ERESTARTNOHAND.cast_unsigned();
    }
    interrupted
}

/// Length of the instruction `syscall`.
const SYSCALL_BYTES: u64 = 2;

/// Where a call is told its mask.
enum Place {
    Address(u64),
    /// Address of a structure that begins with the address.
    Indirect(u64),
}

fn place(regs: &Regs) -> Option<Place> {
    match regs.orig_rax {
        // rt_sigsuspend
        130 => Some(Place::Address(regs.rdi)),
        // ppoll
        271 => Some(Place::Address(regs.r10)),
        // epoll_pwait, epoll_pwait2
        281 | 441 => Some(Place::Address(regs.r8)),
        // pselect6, io_pgetevents
        270 | 333 => Some(Place::Indirect(regs.r9)),
        _ => None,
    }
}

/// The mask of the call that task `tid`, stopped with these registers, will begin anew, where it blocks what the task's
/// own mask does not.
pub fn of_call(tid: i32, regs: &Regs, own: u64) -> Option<u64> {
    let place = place(regs).filter(|_| regs.rax.cast_signed() == ERESTARTNOHAND)?;
    let word = |address: u64| {
        let mut raw = [0; 8];
        let read = address != 0 && vm::read(tid, address, &mut raw).is_ok();
        read.then(|| u64::from_le_bytes(raw))
    };
    let mask = match place {
        Place::Address(at) => word(at)?,
        Place::Indirect(at) => word(word(at)?)?,
    };
    let never_blocked = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);
    (mask & !own & !never_blocked != 0).then_some(mask)
}

/// Leads stopped task `tid`, whose registers are `regs`, into the call that it begins anew, with `mask` in force, and
/// stops it there, before the kernel has begun the call, with its `own` mask. Returns the stop in which it stands: at
/// the call, or where it is about to receive a signal that ends the call.
pub fn enter(tid: i32, regs: &Regs, mask: u64, own: u64) -> io::Result<Event> {
    // As the kernel does it, which is not asked to where the task stands at the end of another call.
    let again = Regs {
        rip: regs.rip - SYSCALL_BYTES,
        rax: regs.orig_rax,
        orig_rax: u64::MAX,
        ..*regs
    };
    ptrace::set_regs(tid, &again)?;
    ptrace::set_sigmask(tid, mask)?;
    loop {
        ptrace::cont_to_syscall(tid)?;
        let event = ptrace::next(tid)?;
        match event {
            Event::Ended(_) => return Ok(event),
            Event::Signal(signal) if means_nothing(tid, signal) => continue,
            Event::Syscall => {}
            // The kernel ends the call for the handler's sake.
            _ => ptrace::set_regs(tid, regs)?,
        }
        return ptrace::set_sigmask(tid, own).map(|()| event);
    }
}

/// Whether the task ignores the signal, of which only a tracer is told then.
fn means_nothing(tid: i32, signal: i32) -> bool {
    let Ok(status) = Status::read(tid) else { return false };
    let has = |key: &str| status.hex(key).is_some_and(|mask| mask >> (signal - 1) & 1 != 0);
    let by_default = matches!(signal, libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH);
    has("SigIgn") || by_default && !has("SigCgt")
}

/// A signalfd of the signals of `mask`. (The kernel's set is 8 bytes, the C library's is larger: the call is made directly.)
pub fn signalfd(mask: u64, flags: i32) -> std::io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: the mask is valid for reading 8 bytes.
    let fd = crate::check(unsafe { libc::syscall(libc::SYS_signalfd4, -1, &raw const mask, size_of_val(&mask), flags) })?;
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd as std::os::fd::RawFd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_counts_where_it_blocks_more_and_the_call_is_begun_anew() {
        let me = std::process::id().cast_signed();
        let (mask, size) = (1u64 << 9 | 1 << (libc::SIGKILL - 1), 8u64);
        let indirect = [(&raw const mask) as u64, size];
        let mut regs = ptrace::no_regs();
        (regs.orig_rax, regs.rax, regs.r8) = (281, ERESTARTNOHAND.cast_unsigned(), (&raw const mask) as u64);
        assert_eq!(of_call(me, &regs, 0), Some(mask));
        assert_eq!(of_call(me, &regs, 1 << 9), None);
        (regs.orig_rax, regs.r9) = (270, indirect.as_ptr() as u64);
        assert_eq!(of_call(me, &regs, 1 << 3), Some(mask));
        regs.r9 = 0;
        assert_eq!(of_call(me, &regs, 0), None);
        (regs.orig_rax, regs.rax) = (281, 1);
        assert_eq!(of_call(me, &regs, 0), None);
    }
}
