//! What a call returns.

use belay_recall::HistoryError;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, CString};

/// A call that has failed: a positive errno value, and why.
pub(crate) struct Failure {
    pub(crate) errno: c_int,
    pub(crate) why: String,
}

impl Failure {
    pub(crate) fn new(errno: c_int, why: &str) -> Self {
        Self { errno, why: why.into() }
    }

    pub(crate) fn no_device() -> Self {
        Self::new(libc::ENODEV, "this library knows no devices")
    }

    pub(crate) fn invalid(why: &str) -> Self {
        Self::new(libc::EINVAL, why)
    }
}

impl From<HistoryError> for Failure {
    fn from(e: HistoryError) -> Self {
        Self {
            errno: e.errno(),
            why: e.to_string(),
        }
    }
}

thread_local! {
    static WHY: RefCell<CString> = RefCell::default();
    /// The last failure was that of a call in another one.
    static NESTED: Cell<bool> = const { Cell::new(false) };
}

/// The answer to a call in the middle of another one of its thread: nothing is allocated, and no lock taken.
pub(crate) fn nested() -> c_int {
    let _ = NESTED.try_with(|nested| nested.set(true));
    -libc::EDEADLK
}

/// The number for the program.
pub(crate) fn answer(result: Result<(), Failure>) -> c_int {
    let Err(failure) = result else { return 0 };
    let why = CString::new(failure.why).unwrap_or_default();
    // A call from a destructor of thread-local data finds none, and leaves no words.
    let _ = WHY.try_with(|w| *w.borrow_mut() = why);
    let _ = NESTED.try_with(|nested| nested.set(false));
    -failure.errno
}

#[no_mangle]
extern "C" fn belay_error() -> *const c_char {
    if NESTED.try_with(Cell::get).unwrap_or(false) {
        return c"a handler of a signal calls belay in the middle of a call of its thread".as_ptr();
    }
    WHY.try_with(|w| w.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
