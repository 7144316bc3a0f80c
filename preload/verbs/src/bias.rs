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
//! Who waits for a thread to come out looks whether it is gone: a thread that ends in the provider leaves its flag as it was.
//!
//! Why at most one thread is in, and none while the gate is shut: README.md.

use crate::gate::{self, is_gone, own_name, Inside, Slot};
use crate::lock::spin;
use crate::sync::{compiler_fence, everybody_passes, own_slot, yield_now, AtomicUsize, Ordering};
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

/// In the flag of an owner.
const BUSY: usize = 1;

/// Guards a value.
pub(crate) struct Biased<T> {
    /// The owner's name, its number, and whether it is struck off. Changed by whoever has `held`.
    owner: AtomicUsize,
    /// Of each owner: whether it is in. Written by that one, and by whoever has `held` when it is gone.
    busy: [AtomicUsize; OWNERS],
    /// The name of whoever has it.
    held: AtomicUsize,
    /// The flag of whoever keeps the lock.
    kept: UnsafeCell<*const AtomicUsize>,
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
            held: AtomicUsize::new(0),
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

    /// Takes the lock as its owner, also outside the gate.
    #[inline]
    pub(crate) fn as_owner(&self) -> Option<Held<'_, T>> {
        let owner = self.owner.load(Ordering::Relaxed);
        // A thread without a slot is nobody's owner: where there is none, the word is STRUCK at least.
        if owner & !NUMBER != own_slot::<Slot>().addr() {
            return None;
        }
        let flag = self.flag(owner & NUMBER);
        // Busy already: a handler of a signal has interrupted it, and waits, as it does for any lock.
        if flag.load(Ordering::Relaxed) != 0 {
            return None;
        }
        flag.store(BUSY, Ordering::Relaxed);
        // Whoever strikes this thread off makes it pass a barrier.
        compiler_fence(Ordering::SeqCst);
        if self.owner.load(Ordering::Acquire) == owner {
            return Some(Held { lock: self, flag });
        }
        flag.store(0, Ordering::Release);
        None
    }

    #[inline]
    fn flag(&self, number: usize) -> &AtomicUsize {
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
        let own = own_name();
        self.owner.store(word | STRUCK, Ordering::SeqCst);
        if owner != 0 && !self.bury(word) {
            if owner != own {
                everybody_passes();
            }
            spin(|| self.flag(number).load(Ordering::Acquire) == 0 || is_gone(owner));
            // The number of one that is gone can be given again.
            if owner != own && !self.bury(word) {
                number += 1;
                self.owner.store(STRUCK | number, Ordering::Relaxed);
            }
        }
        if number == OWNERS || !gate::may_be_fast() {
            return everybody;
        }
        let flag = self.flag(number);
        flag.store(BUSY, Ordering::Relaxed);
        self.owner.store(own | number, Ordering::Release);
        // Given back.
        drop(everybody);
        Held { lock: self, flag }
    }

    /// Takes `held`, if nobody has it who lives.
    fn try_held(&self) -> bool {
        // Acquire, also where it is not taken: who finds a name looks into the slot.
        let by = self.held.load(Ordering::Acquire);
        let take = || {
            self.held
                .compare_exchange(by, own_name(), Ordering::AcqRel, Ordering::Relaxed)
        };
        (by == 0 || is_gone(by)) && take().is_ok()
    }

    /// Whether a thread had it that is gone.
    fn is_left(&self) -> bool {
        let [owner, by] = [&self.owner, &self.held].map(|w| w.load(Ordering::Acquire) & !(NUMBER | STRUCK));
        [owner, by].into_iter().any(|name| name != 0 && is_gone(name))
    }

    /// Clears the flag of an owner that is gone, for whoever has `held`. Whether it is.
    fn bury(&self, word: usize) -> bool {
        let owner = word & !(NUMBER | STRUCK);
        let gone = owner != 0 && is_gone(owner);
        if gone {
            self.flag(word & NUMBER).store(0, Ordering::Relaxed);
        }
        gone
    }

    /// Whether the calling thread has it already, by this or by what it has ended in.
    pub(crate) fn is_own(&self) -> bool {
        let (word, own) = (self.owner.load(Ordering::Relaxed), own_name());
        let owns = word & !(NUMBER | STRUCK) == own;
        owns && self.flag(word & NUMBER).load(Ordering::Relaxed) != 0 || self.held.load(Ordering::Relaxed) == own
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
    /// Nobody has it, and nobody is about to find out that it is not the owner any more; after it was struck off.
    fn is_free(&self) -> bool;
}

impl<T> Struck for Biased<T> {
    fn strike(&self) -> Option<bool> {
        if !self.try_held() {
            return None;
        }
        let word = self.owner.load(Ordering::Relaxed);
        self.owner.store(word | STRUCK, Ordering::SeqCst);
        self.bury(word);
        self.held.store(0, Ordering::Release);
        Some(word & STRUCK == 0)
    }

    fn is_free(&self) -> bool {
        let flags = self.busy.iter().chain([&self.held]);
        let free = flags.into_iter().all(|f| f.load(Ordering::Acquire) == 0);
        if !free && self.is_left() {
            // Since it was struck off.
            self.strike();
        }
        free
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
    flag: &'a AtomicUsize,
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
        self.flag.store(0, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "bias/tests.rs"]
mod tests;
