//! A call of a thread, with what may come in its middle: the handler of a signal, and the end of the thread.

use crate::error::{answer, nested, Failure};
use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is in a call.
struct Inside(PhantomData<*const ()>);

impl Inside {
    /// Nothing if it has been in one.
    fn enter() -> Option<Self> {
        // One from a destructor of thread-local data is the only one there can be.
        let was = INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(false);
        (!was).then_some(Self(PhantomData))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}

extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// The calling thread cannot be ended by another one: it would keep the turn of a history, and what it has begun.
struct NotCancelled {
    before: c_int,
    of: PhantomData<*const ()>,
}

impl NotCancelled {
    fn begin() -> Self {
        let mut before = 0;
        // SAFETY: room for a number. It cannot fail.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Self { before, of: PhantomData }
    }
}

impl Drop for NotCancelled {
    fn drop(&mut self) {
        // SAFETY: what it was.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Carries a call out. In a handler of a signal that has come in the middle of another one it could wait for what its own
/// thread holds.
pub(crate) fn call(what: impl FnOnce() -> Result<(), Failure>) -> c_int {
    question(|| what().map(|()| false))
}

/// The same for one that answers yes or no.
pub(crate) fn question(what: impl FnOnce() -> Result<bool, Failure>) -> c_int {
    let Some(_inside) = Inside::enter() else { return nested() };
    match what() {
        Ok(yes) => c_int::from(yes),
        Err(failure) => answer(Err(failure)),
    }
}

/// The same for one that reads or writes files: a thread that is to end does so after it.
pub(crate) fn whole_call(what: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let _not_cancelled = NotCancelled::begin();
    call(what)
}
