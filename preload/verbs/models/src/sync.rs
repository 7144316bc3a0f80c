//! As the library's own module of this name: what `gate`, `bias`, `lock` and `queue` have of processor and kernel.
//!
//! loom has no total order of accesses that are sequentially consistent, only of fences: it finds more than there is.

pub(crate) use crate::machine::{
    at_end_of_thread, everybody_passes, own_slot, set_own_slot, sleep, sleep_shortly, wake, yield_now,
};
pub(crate) use std::sync::atomic::Ordering;

use crate::machine::{is_gone, pass, stored};
use loom::sync::atomic;

/// A word, before each access to which the kernel may come in between.
macro_rules! word {
    ($name:ident, $value:ty) => {
        #[derive(Default)]
        pub(crate) struct $name(atomic::$name);

        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            #[track_caller]
            pub(crate) fn load(&self, order: Ordering) -> $value {
                pass();
                if is_gone() {
                    return <$value>::default();
                }
                self.0.load(order)
            }

            #[track_caller]
            pub(crate) fn store(&self, value: $value, order: Ordering) {
                pass();
                if !is_gone() {
                    self.0.store(value, order);
                    stored();
                }
            }

            #[track_caller]
            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                pass();
                let before = self.0.swap(value, order);
                stored();
                before
            }

            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                now: $value,
                then: $value,
                done: Ordering,
                not: Ordering,
            ) -> Result<$value, $value> {
                pass();
                let exchanged = self.0.compare_exchange(now, then, done, not);
                stored();
                exchanged
            }
        }
    };
}

word!(AtomicBool, bool);
word!(AtomicU32, u32);
word!(AtomicU64, u64);
word!(AtomicUsize, usize);

pub(crate) struct AtomicPtr<T>(AtomicUsize, std::marker::PhantomData<*mut T>);

// SAFETY: a number.
unsafe impl<T> Send for AtomicPtr<T> {}
// SAFETY: a number.
unsafe impl<T> Sync for AtomicPtr<T> {}

impl<T> AtomicPtr<T> {
    pub(crate) fn new(to: *mut T) -> Self {
        Self(AtomicUsize::new(to as usize), std::marker::PhantomData)
    }

    #[track_caller]
    pub(crate) fn load(&self, order: Ordering) -> *mut T {
        self.0.load(order) as *mut T
    }

    #[track_caller]
    pub(crate) fn store(&self, to: *mut T, order: Ordering) {
        self.0.store(to as usize, order);
    }

    #[track_caller]
    pub(crate) fn compare_exchange(&self, now: *mut T, then: *mut T, done: Ordering, not: Ordering) -> Result<*mut T, *mut T> {
        let exchanged = self.0.compare_exchange(now as usize, then as usize, done, not);
        exchanged.map(|p| p as *mut T).map_err(|p| p as *mut T)
    }
}

#[track_caller]
pub(crate) fn fence(order: Ordering) {
    pass();
    if !is_gone() {
        atomic::fence(order);
    }
}

/// The compiler changes no order here, and what the processor does is not its business.
pub(crate) fn compiler_fence(_: Ordering) {}

pub(crate) fn spin_loop() {
    yield_now();
}

/// Whether [`everybody_passes`] is the kernel's work.
pub(crate) fn register() -> bool {
    crate::machine::has_barrier()
}

macro_rules! statics {
    ($($(#[$about:meta])* static $name:ident: $type:ty = $first:expr;)*) => {
        loom::lazy_static! {
            $($(#[$about])* static ref $name: $type = $first;)*
        }
    };
}

macro_rules! of_threads {
    ($(#[$about:meta])* static $name:ident: $type:ty = $first:expr;) => {
        loom::thread_local! {
            $(#[$about])*
            static $name: $type = $first;
        }
    };
}

macro_rules! constant {
    ($($all:item)*) => { $($all)* };
}
pub(crate) use {constant, of_threads, statics};
