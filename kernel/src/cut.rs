//! System calls that a stop has cut short: they have returned what they had done by then, where without the stop they
//! would have done all.
//!
//! A task cannot be made to carry such a call on from outside: nobody who could add up what both parts have done may
//! stay until it has ended. So it issues the rest of the call from a few instructions in the unused end of its vDSO,
//! which add what was done before, put the arguments back and return to where the call was issued. They need nobody. At
//! the next stop the task is taken out of there again, and stands in its own call, which has been cut later: an image
//! knows of none of this. A signal handler that has interrupted the rest returns into the call's end.

mod done;
mod place;
mod rest;

use crate::masks::ERESTARTNOHAND;
use crate::ptrace::{self, Regs};
use crate::vm;
use place::Slot;
use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};

/// Where a rest was issued, by thread. Held while a place is looked for, too: tasks of other tracers may have the same memory.
static ISSUED: Mutex<Option<HashMap<i32, u64>>> = Mutex::new(None);

/// How much of another stack than the call's is looked at, above its pointer, bytes.
const OTHER_STACK: u64 = 64 * 1024;
/// Most that is looked at of the call's own stack, bytes.
const OWN_STACK: u64 = 1024 * 1024;

/// Whether a task that stands in a stop with these registers may be in a call that was cut short.
pub fn may_be(regs: &Regs) -> bool {
    rest::asked(regs).is_some_and(|asked| (1..asked).contains(&regs.rax)) || rest::in_pieces(regs)
}

/// Makes stopped task `tid`, whose registers are `regs`, issue the rest of the call that was cut short, when it goes
/// on. Nothing happens where the call would have ended there by itself, where a signal has ended it, or where there is
/// no room.
pub fn carry_on(tid: i32, regs: &Regs) -> io::Result<()> {
    let Some(rest) = rest::of(tid, regs) else { return Ok(()) };
    let mut issued = ISSUED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(at) = place::free(tid) else { return Ok(()) };
    ptrace::write_code(tid, at, &Slot::new(tid, regs).code())?;
    issued.get_or_insert_default().insert(tid, at);
    // As if the rest had been interrupted: a handler that is to run before it has begun ends it, too.
    ptrace::set_regs(
        tid,
        &Regs {
            rip: at + place::SYSCALL_BYTES,
            rax: ERESTARTNOHAND.cast_unsigned(),
            ..rest
        },
    )
}

/// Takes task `tid`, stopped with `regs`, out of the rest of a call, and changes `regs` so that it stands in its own
/// call. A handler that has interrupted the rest is led back into the call's end.
pub fn take_back(tid: i32, regs: &mut Regs) -> io::Result<()> {
    let mut issued = ISSUED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(at) = issued.as_mut().and_then(|all| all.remove(&tid)) else {
        return Ok(());
    };
    // Other code since an exec.
    let Some(slot) = Slot::read(tid, at) else { return Ok(()) };
    if let Some(own) = slot.own(at, regs) {
        *regs = own;
        ptrace::set_regs(tid, regs)?;
    } else {
        let (low, high) = match slot.rsp.checked_sub(regs.rsp) {
            Some(deep) if deep < OWN_STACK => (regs.rsp, slot.rsp),
            _ => (regs.rsp, regs.rsp + OTHER_STACK),
        };
        let mut stack = vec![0; (high - low) as usize];
        let read = vm::read_some(tid, low, &mut stack).unwrap_or(0);
        for (offset, words) in done::frames(&stack[..read], &slot, at) {
            vm::write(tid, low + offset as u64, &words)?;
        }
    }
    ptrace::write_code(tid, at, &[0; place::BYTES])
}
