//! The library's atomic words, as loom has them.

use crate::machine::{is_gone, pass, stored};
use loom::sync::atomic;
use std::sync::atomic::Ordering;

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
