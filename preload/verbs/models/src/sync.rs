//! As the library's own module of this name: what `gate`, `bias`, `lock` and `queue` have of processor and kernel.
//!
//! loom has no total order of accesses that are sequentially consistent, only of fences: it finds more than there is.

pub(crate) use crate::futex::{sleep, sleep_shortly, wake};
pub(crate) use crate::machine::{at_end_of_thread, everybody_passes, own_slot, set_own_slot, yield_now};
pub(crate) use crate::statics::{constant, of_threads, statics};
pub(crate) use crate::words::{compiler_fence, fence, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
pub(crate) use std::sync::atomic::Ordering;

pub(crate) fn spin_loop() {
    yield_now();
}

/// Whether [`everybody_passes`] is the kernel's work.
pub(crate) fn register() -> bool {
    crate::machine::has_barrier()
}
