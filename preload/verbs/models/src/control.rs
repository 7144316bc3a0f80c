//! The words of the control page: what the agent says to the gate.

use crate::gate;
use crate::sync::{statics, wake, AtomicU32, Ordering};
use belay_abi::control::{self, WAITERS};

statics! {
    static LAST: AtomicU32 = AtomicU32::new(0);
    static HOLD: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];
}

/// The thread of the agent's that holds the words.
const AGENT: u32 = 7 | WAITERS;

fn hold(order: u32) -> &'static AtomicU32 {
    &HOLD[control::place(order)]
}

/// The agent gives an order.
pub(crate) fn give(order: u32) {
    hold(order).store(AGENT, Ordering::SeqCst);
    LAST.store(order, Ordering::SeqCst);
}

/// The agent lets go of it.
pub(crate) fn let_go(order: u32) {
    hold(order).store(0, Ordering::SeqCst);
    wake(hold(order));
}

/// The agent dies: the kernel says so in the word, and wakes one of those who wait.
pub(crate) fn die(order: u32) {
    hold(order).store(AGENT | control::DIED, Ordering::SeqCst);
    crate::futex::wake_one(hold(order));
}

pub(crate) fn wait_at_gate(by: u32) {
    wait_under(LAST.load(Ordering::SeqCst), by);
}

pub(crate) fn wait_under(order: u32, by: u32) {
    gate::wait_under(&LAST, hold(order), order, by, crate::thing::before_it_opens);
    // It looks again. What it has seen so far is not seen for ever.
    crate::sync::yield_now();
}
