//! The kernel's futexes: threads that sleep on a word.

use crate::machine::{await_waking, go_to_sleep, is_gone, knock, leave, own_task, pass, wake_sleepers, yield_now};
use crate::words::AtomicU32;
use std::sync::atomic::Ordering;

/// As a futex: sleeps until it is woken, if the word has this value.
pub(crate) fn sleep(word: &AtomicU32, value: u32) {
    pass();
    let Some(own) = own_task() else { return };
    go_to_sleep(own, std::ptr::from_ref(word) as usize);
    // Who wakes takes the lock after the change: either the change is seen here, or he finds the sleeper.
    knock();
    if word.load(Ordering::SeqCst) != value {
        leave(own);
        return;
    }
    await_waking(own);
}

/// As a futex with a time: it may always be over.
pub(crate) fn sleep_shortly(_: &AtomicU32, _: u32) {
    yield_now();
}

/// Wakes whoever sleeps.
pub(crate) fn wake(word: &AtomicU32) {
    wake_some(word, usize::MAX);
}

/// As the kernel where the holder of a word has died.
pub(crate) fn wake_one(word: &AtomicU32) {
    wake_some(word, 1);
}

fn wake_some(word: &AtomicU32, most: usize) {
    pass();
    if is_gone() {
        return;
    }
    knock();
    wake_sleepers(std::ptr::from_ref(word) as usize, most);
}
