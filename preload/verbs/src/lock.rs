//! A lock of our own: held for some hundred instructions, taken on the hot path, and never by a thread at the gate.

use crate::sync::{constant, spin_loop, yield_now, AtomicBool, Ordering};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};

/// How often one looks before giving the processor up.
const LOOKS: u32 = 100;

/// Waits until it is so: for as long as a lock is held.
pub(crate) fn spin(is_so: impl Fn() -> bool) {
    let mut looks: u32 = 0;
    while !is_so() {
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(LOOKS) {
            yield_now();
        } else {
            spin_loop();
        }
    }
}

/// Guards a value.
#[derive(Default)]
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time.
unsafe impl<T> Sync for Lock<T> {}
// SAFETY: values are plain memory and pointers to shadows, which belong to no thread.
unsafe impl<T> Send for Lock<T> {}

impl<T> Lock<T> {
    constant! {
        pub(crate) fn new(value: T) -> Self {
            Lock {
                held: AtomicBool::new(false),
                value: UnsafeCell::new(value),
            }
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> Held<'_, T> {
        if !self.take() {
            self.wait();
        }
        Held(self)
    }

    #[cold]
    fn wait(&self) {
        spin(|| !self.held.load(Ordering::Relaxed) && self.take());
    }

    /// Whether it was free, and is taken now.
    #[inline]
    fn take(&self) -> bool {
        let taken = self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok()
    }

    /// In the child of a fork: whoever held it is not there, and what it was doing is left to itself.
    ///
    /// # Safety
    /// No other thread is there.
    pub(crate) unsafe fn reset(&self, value: T) {
        self.value.get().write(value);
        self.held.store(false, Ordering::Release);
    }

    /// The value, without the lock.
    ///
    /// # Safety
    /// What the caller looks at is not changed meanwhile.
    #[inline]
    pub(crate) unsafe fn peek(&self) -> &T {
        &*self.value.get()
    }
}

/// The value, as long as the lock is held.
pub(crate) struct Held<'a, T>(&'a Lock<T>);

impl<T> Deref for Held<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.held.store(false, Ordering::Release);
    }
}
