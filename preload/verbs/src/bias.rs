//! A lock, and a way into the gate with it, that cost the thread that uses them alone no locked instruction.
//!
//! The first thread that takes the lock becomes its *owner*. It says with a plain store that it is busy, and looks
//! whether it still is the owner; that is all, also of the gate. Whoever comes later takes the lock away: has `held`,
//! strikes the owner off, makes every thread pass a barrier (`membarrier`), and waits until the owner is not busy. It is
//! the owner then, unless there were too many already: then the lock is an ordinary one from there on. Each owner has a
//! flag of its own, because one that was struck off may set and clear it at any later time, when it finds out.
//!
//! Who shuts the gate strikes all owners off in the same way ([`Biased::strike`]). Struck off, they go in as everybody
//! does, and are owners again when they find the gate open.
//!
//! Why at most one thread is in, and none while the gate is shut: README.md.

use crate::gate::{self, Inside, Slot};
use crate::lock::spin;
use crate::sync::{compiler_fence, everybody_passes, own_slot, yield_now, AtomicBool, AtomicUsize, Ordering};
use std::cell::{Cell, UnsafeCell};
use std::ops::{Deref, DerefMut};
use std::ptr::null;

/// Owners that a lock may have had: the thread that has set all up is often another than the one that works then.
const OWNERS: usize = 4;
/// In the word of an owner: the how many-th it is; without an owner the next one's.
const NUMBER: usize = 7;
/// It is no owner until it finds the gate open. Also where there is none.
const STRUCK: usize = 8;

const _: () = assert!(std::mem::align_of::<Slot>() > NUMBER | STRUCK);

/// Guards a value.
pub(crate) struct Biased<T> {
    /// The owner's slot, its number, and whether it is struck off. Changed by whoever has `held`.
    owner: AtomicUsize,
    /// Of each owner: whether it is in. Written by that one.
    busy: [AtomicBool; OWNERS],
    held: AtomicBool,
    /// The flag of whoever keeps the lock.
    kept: UnsafeCell<*const AtomicBool>,
    value: UnsafeCell<T>,
}

// SAFETY: the value and `kept` are reached by one thread at a time.
unsafe impl<T> Sync for Biased<T> {}
// SAFETY: values are plain memory and pointers to shadows, which belong to no thread.
unsafe impl<T> Send for Biased<T> {}

impl<T: Default> Default for Biased<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Biased<T> {
    pub(crate) fn new(value: T) -> Self {
        Biased {
            owner: AtomicUsize::new(STRUCK),
            busy: Default::default(),
            held: AtomicBool::new(false),
            kept: UnsafeCell::new(null()),
            value: UnsafeCell::new(value),
        }
    }

    /// Goes in, when the gate is open, takes the lock and does this. For the hot path.
    #[inline]
    pub(crate) fn enter<R>(&self, then: impl FnOnce(&mut T) -> R) -> R {
        match self.as_owner() {
            Some(mut held) => then(&mut held),
            None => self.enter_as_anybody(then),
        }
    }

    #[inline(never)]
    fn enter_as_anybody<R>(&self, then: impl FnOnce(&mut T) -> R) -> R {
        let _inside = Inside::enter();
        then(&mut self.lock())
    }

    /// Takes the lock: inside the gate.
    #[inline]
    pub(crate) fn lock(&self) -> Held<'_, T> {
        self.as_owner().unwrap_or_else(|| self.take())
    }

    #[inline]
    fn as_owner(&self) -> Option<Held<'_, T>> {
        let owner = self.owner.load(Ordering::Relaxed);
        // A thread without a slot is nobody's owner: where there is none, the word is STRUCK at least.
        if owner & !NUMBER != own_slot::<Slot>() as usize {
            return None;
        }
        let flag = self.flag(owner & NUMBER);
        // Busy already: a handler of a signal has interrupted it, and waits, as it does for any lock.
        if flag.load(Ordering::Relaxed) {
            return None;
        }
        flag.store(true, Ordering::Relaxed);
        // Whoever strikes this thread off makes it pass a barrier.
        compiler_fence(Ordering::SeqCst);
        if self.owner.load(Ordering::Acquire) == owner {
            return Some(Held { lock: self, flag });
        }
        flag.store(false, Ordering::Release);
        None
    }

    #[inline]
    fn flag(&self, number: usize) -> &AtomicBool {
        &self.busy[number % OWNERS]
    }

    /// Takes it from whoever has it.
    #[cold]
    fn take(&self) -> Held<'_, T> {
        spin(|| self.try_held());
        let everybody = Held {
            lock: self,
            flag: &self.held,
        };
        // Nobody is inside while the library's own thread acts.
        if gate::is_keeper() {
            return everybody;
        }
        let word = self.owner.load(Ordering::Relaxed);
        let (owner, mut number) = (word & !(NUMBER | STRUCK), word & NUMBER);
        let own = std::ptr::from_ref(gate::slot()) as usize;
        self.owner.store(word | STRUCK, Ordering::SeqCst);
        if owner != 0 {
            if owner != own {
                everybody_passes();
            }
            spin(|| !self.flag(number).load(Ordering::Acquire));
            if owner != own {
                number += 1;
                self.owner.store(STRUCK | number, Ordering::Relaxed);
            }
        }
        if number == OWNERS || !gate::may_be_fast() {
            return everybody;
        }
        let flag = self.flag(number);
        flag.store(true, Ordering::Relaxed);
        self.owner.store(own | number, Ordering::Release);
        // Given back.
        drop(everybody);
        Held { lock: self, flag }
    }

    fn try_held(&self) -> bool {
        let take = || self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        !self.held.load(Ordering::Relaxed) && take().is_ok()
    }

    /// The value, for whoever has taken the lock and kept it: it is given back when this is dropped.
    ///
    /// # Safety
    /// The caller holds the lock.
    #[inline]
    pub(crate) unsafe fn held(&self) -> Held<'_, T> {
        Held {
            lock: self,
            flag: &**self.kept.get(),
        }
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

/// What the gate does to a lock, whatever it guards.
pub(crate) trait Struck {
    /// Strikes the owner off. None while somebody else has the lock; whether there was one that was not struck off.
    fn strike(&self) -> Option<bool>;
    /// Nobody has it, and nobody is about to find out that it is not the owner any more.
    fn is_free(&self) -> bool;
}

impl<T> Struck for Biased<T> {
    fn strike(&self) -> Option<bool> {
        if !self.try_held() {
            return None;
        }
        let word = self.owner.load(Ordering::Relaxed);
        self.owner.store(word | STRUCK, Ordering::SeqCst);
        self.held.store(false, Ordering::Release);
        Some(word & STRUCK == 0)
    }

    fn is_free(&self) -> bool {
        let flags = self.busy.iter().chain([&self.held]);
        flags.into_iter().all(|f| !f.load(Ordering::Acquire))
    }
}

/// Lets nobody in past the gate any more. False when it takes longer than `go_on` allows.
pub(crate) fn strike_all<'a, L: Iterator<Item = &'a dyn Struck>>(locks: impl Fn() -> L, go_on: impl Fn() -> bool) -> bool {
    let wait = |done: &dyn Fn() -> bool| {
        while !done() {
            if !go_on() {
                return false;
            }
            yield_now();
        }
        true
    };
    let owned = Cell::new(false);
    let strike = |lock: &dyn Struck| lock.strike().inspect(|had| owned.set(owned.get() | had)).is_some();
    if !locks().all(|lock| wait(&|| strike(lock))) {
        return false;
    }
    if owned.get() {
        everybody_passes();
    }
    locks().all(|lock| wait(&|| lock.is_free()))
}

/// The value, as long as the lock is held.
pub(crate) struct Held<'a, T> {
    lock: &'a Biased<T>,
    /// What says that it is.
    flag: &'a AtomicBool,
}

impl<T> Held<'_, T> {
    /// Keeps the lock taken.
    #[inline]
    pub(crate) fn keep(self) {
        // SAFETY: the lock is held.
        unsafe { *self.lock.kept.get() = self.flag };
        std::mem::forget(self);
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.flag.store(false, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "bias/tests.rs"]
mod tests;
