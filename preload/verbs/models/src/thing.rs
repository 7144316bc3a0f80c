//! What the models' threads change.

use crate::machine::pass;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

/// Something that one thread at a time may change: loom finds two that do, and one that does not see the other's change.
pub(crate) struct Thing {
    times: UnsafeCell<u32>,
    /// Changed with it, so that loom goes through the orders of changes: it knows of none where threads have no word in
    /// common.
    word: AtomicUsize,
}

// SAFETY: that is what is to be found out.
unsafe impl Send for Thing {}
// SAFETY: as above.
unsafe impl Sync for Thing {}

impl Thing {
    pub(crate) fn new() -> Self {
        Thing {
            times: UnsafeCell::new(0),
            word: AtomicUsize::new(0),
        }
    }

    /// In two steps, between which the kernel may come in.
    pub(crate) fn change(&self) {
        let step = || {
            self.word.fetch_add(1, Relaxed);
            // SAFETY: loom looks.
            self.times.with_mut(|n| unsafe { *n += 1 });
        };
        step();
        pass();
        step();
    }

    /// How often it was changed.
    pub(crate) fn times(&self) -> u32 {
        // SAFETY: loom looks.
        self.times.with(|n| unsafe { *n / 2 })
    }
}

std::thread_local! {
    /// What nobody may touch while the gate is shut.
    pub(crate) static THINGS: std::cell::RefCell<Vec<Arc<Thing>>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Changes all of these.
pub(crate) fn touch_all() {
    let things = THINGS.with(|t| t.borrow().clone());
    things.iter().for_each(|thing| thing.change());
}

/// What is done before a gate that is shut opens: nobody is inside yet.
pub(crate) fn before_it_opens() {
    touch_all();
}
