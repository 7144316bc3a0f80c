//! Interrupted system calls: which call a task stands in, in terms that survive a restart.
//!
//! When the kernel interrupts a call whose time-out is relative (`nanosleep`, `poll`, `futex`), it keeps the time that
//! is left to itself and answers ERESTART_RESTARTBLOCK; when the task goes on, it makes it issue `restart_syscall`
//! instead. That is what a task needs that goes on after a checkpoint. An image needs the original call, because the
//! kept state is gone. After the first interruption the task stands in `restart_syscall`, and the number of the
//! original call can no longer be read: so it is remembered from checkpoint to checkpoint, or found in the code in
//! front of the `syscall` instruction.

use crate::state::wait::Wait;
use belay_kernel::futex::{self, RESTART_SYSCALL};
use belay_kernel::masks::ERESTARTNOHAND;
use belay_kernel::ptrace::Regs;
use belay_kernel::vm;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

const EINTR: i64 = -4;
const ERESTART_RESTARTBLOCK: i64 = -516;
/// The calls that use a restart block: poll, nanosleep, futex, clock_nanosleep.
const RESTARTABLE: [u64; 4] = [7, 35, 202, 230];
/// How far in front of the instruction `mov $number, %eax` is looked for, bytes.
const LOOK_BACK: u64 = 32;

/// A call seen interrupted: where, and its number.
#[derive(Debug, Clone, Copy)]
struct Seen {
    rip: u64,
    rsp: u64,
    number: u64,
    /// When it was stopped there, nanoseconds on the monotonic clock.
    stopped: u64,
    /// When its time-out ends on that clock, where that is known.
    deadline: Option<u64>,
}

/// When the job was last let go, nanoseconds on the monotonic clock.
static RESUMED: AtomicU64 = AtomicU64::new(0);
/// How long a thread may take to be back in its wait when it has been let go, nanoseconds.
const BACK: u64 = 50_000_000;

static SEEN: Mutex<Option<HashMap<i32, Seen>>> = Mutex::new(None);

/// Whether the call in which a task stands is issued anew when it goes on.
pub(crate) fn begins_anew(regs: &Regs) -> bool {
    regs.orig_rax.cast_signed() >= 0 && regs.rax.cast_signed() == ERESTARTNOHAND
}

/// Whether task `tid` was stopped in a wait for a futex, into which it goes back.
pub(crate) fn waits_for_futex(tid: i32, regs: &Regs) -> bool {
    original_number(tid, regs).is_some_and(|number| futex::goes_back(number, regs))
}

/// Notes that the job has been let go.
pub(crate) fn resumed() {
    RESUMED.store(crate::clock::monotonic_ns(), Ordering::Relaxed);
}

/// How long task `tid` still has to wait, which the kernel carries on after an earlier stop and which has slept since
/// `began`: since then, and so in the same call.
pub(crate) fn carried_on(tid: i32, regs: &Regs, began: u64) -> Option<Wait> {
    let seen = SEEN.lock().ok()?;
    let seen = seen.as_ref()?.get(&tid).filter(|s| s.rip == regs.rip && s.rsp == regs.rsp)?;
    let same = (seen.stopped..=RESUMED.load(Ordering::Relaxed).saturating_add(BACK)).contains(&began);
    Wait::until(seen.deadline.filter(|_| same)?, seen.number, regs)
}

/// Notes in which call task `tid` has just been stopped, and how long it still had to wait.
pub(crate) fn note(tid: i32, regs: &Regs, wait: Option<&Wait>) {
    let Ok(mut seen) = SEEN.lock() else { return };
    let seen = seen.get_or_insert_default();
    let carried_on = regs.orig_rax == RESTART_SYSCALL;
    let number = match seen.remove(&tid) {
        Some(s) if carried_on && s.rip == regs.rip && s.rsp == regs.rsp => s.number,
        _ if carried_on || !is_carried_on(regs) => return,
        _ => regs.orig_rax,
    };
    seen.insert(
        tid,
        Seen {
            rip: regs.rip,
            rsp: regs.rsp,
            number,
            stopped: crate::clock::monotonic_ns(),
            deadline: wait.map(|w| w.deadline),
        },
    );
}

/// Whether the kernel will carry on with the call in which a task stands.
fn is_carried_on(regs: &Regs) -> bool {
    regs.orig_rax.cast_signed() >= 0 && regs.rax.cast_signed() == ERESTART_RESTARTBLOCK
}

/// The registers of task `tid` for use where the kernel's restart block is gone: the original call is issued anew, with
/// what is left of its time-out where that is known.
pub(crate) fn without_restart_block(tid: i32, regs: &Regs, wait: Option<&Wait>) -> Regs {
    let mut out = *regs;
    if is_carried_on(regs) {
        match original_number(tid, regs) {
            Some(number) => {
                out.orig_rax = number;
                out.rax = ERESTARTNOHAND.cast_unsigned();
                if let Some(wait) = wait {
                    wait.shorten(&mut out);
                }
            }
            None => out.rax = EINTR.cast_unsigned(),
        }
    }
    out
}

fn original_number(tid: i32, regs: &Regs) -> Option<u64> {
    if regs.orig_rax != RESTART_SYSCALL {
        return Some(regs.orig_rax);
    }
    let seen = SEEN.lock().ok()?;
    let known = seen.as_ref().and_then(|seen| seen.get(&tid));
    let known = known.filter(|s| s.rip == regs.rip && s.rsp == regs.rsp).map(|s| s.number);
    known.or_else(|| number_in_code(tid, regs.rip))
}

/// Forgets tasks for which `lives` is false.
pub(crate) fn forget(lives: impl Fn(i32) -> bool) {
    if let Ok(mut seen) = SEEN.lock() {
        seen.get_or_insert_default().retain(|tid, _| lives(*tid));
    }
}

/// The number that the code in front of the `syscall` instruction before `rip` loads into `eax`.
fn number_in_code(tid: i32, rip: u64) -> Option<u64> {
    let mut code = [0u8; LOOK_BACK as usize];
    vm::read(tid, rip.checked_sub(LOOK_BACK)?, &mut code).ok()?;
    last_number(&code)
}

fn last_number(code: &[u8]) -> Option<u64> {
    let mut loads = code
        .windows(5)
        .rev()
        .filter(|w| w[0] == 0xb8)
        .map(|w| u64::from(u32::from_le_bytes([w[1], w[2], w[3], w[4]])));
    loads.find(|n| RESTARTABLE.contains(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_found_in_front_of_the_instruction() {
        // mov $0xe6,%eax; mov %rdx,%r10; syscall
        assert_eq!(
            last_number(&[0x90, 0xb8, 0xe6, 0, 0, 0, 0x49, 0x89, 0xd2, 0x0f, 0x05]),
            Some(230)
        );
        assert_eq!(last_number(&[0x90; 32]), None);
        assert_eq!(last_number(&[0xb8, 1, 0, 0, 0, 0x0f, 0x05]), None);
    }

    #[test]
    fn a_call_once_seen_is_remembered_where_it_stands() {
        let mut regs = belay_kernel::ptrace::no_regs();
        (regs.orig_rax, regs.rax, regs.rip, regs.rsp) = (7, ERESTART_RESTARTBLOCK.cast_unsigned(), 0x1000, 0x2000);
        let tid = i32::MAX;
        note(tid, &regs, None);
        assert_eq!(without_restart_block(tid, &regs, None).orig_rax, 7);
        regs.orig_rax = RESTART_SYSCALL;
        let out = without_restart_block(tid, &regs, None);
        assert_eq!((out.orig_rax, out.rax.cast_signed()), (7, ERESTARTNOHAND));
        regs.rsp = 0x3000;
        assert_eq!(without_restart_block(tid, &regs, None).rax.cast_signed(), EINTR);
    }
}
