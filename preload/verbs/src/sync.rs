//! What keeps threads apart, as the processor and the kernel have it. `gate`, `bias`, `lock` and `shadow/queue` have it
//! from here alone: the models (`models`) take these files with another such module, in which all that threads may see
//! of each other is gone through.

pub(crate) use crate::arch::{own_slot, set_own_slot};
pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{compiler_fence, fence, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::thread::yield_now;

use std::sync::OnceLock;
use std::time::Duration;

/// Words that all threads have.
macro_rules! statics {
    ($($all:item)*) => { $($all)* };
}

/// Words that each thread has for itself.
macro_rules! of_threads {
    ($(#[$about:meta])* static $name:ident: $type:ty = $first:expr;) => {
        thread_local! {
            $(#[$about])*
            static $name: $type = const { $first };
        }
    };
}

/// A function that makes words, before the program begins where it has to.
macro_rules! constant {
    ($shown:vis fn $($rest:tt)*) => { $shown const fn $($rest)* };
}
pub(crate) use {constant, of_threads, statics};

/// Asks the kernel for a barrier in every thread of the process.
fn membarrier(command: i32) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
const PRIVATE_EXPEDITED: i32 = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: i32 = 1 << 4;

/// Whether [`everybody_passes`] will be the kernel's work.
pub(crate) fn register() -> bool {
    membarrier(REGISTER_PRIVATE_EXPEDITED)
}

/// Makes every thread of the process pass a barrier: of what a thread stores, and then loads without one of its own,
/// either the store is seen from here on, or the load sees what was stored before this was called.
pub(crate) fn everybody_passes() {
    fence(Ordering::SeqCst);
    // A process that was restarted may not be registered.
    let passed = || membarrier(PRIVATE_EXPEDITED) || register() && membarrier(PRIVATE_EXPEDITED);
    if !passed() {
        // The program has forbidden it since. No processor keeps a store back for so long.
        std::thread::sleep(LONGER_THAN_A_STORE);
    }
    fence(Ordering::SeqCst);
}
const LONGER_THAN_A_STORE: Duration = Duration::from_millis(1);

/// Sleeps until the word has another value, at most.
pub(crate) fn sleep(word: &AtomicU32, value: u32) {
    wait(word, value, std::ptr::null());
}

/// The same, for a moment at most.
pub(crate) fn sleep_shortly(word: &AtomicU32, value: u32) {
    const MOMENT: libc::timespec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    wait(word, value, &MOMENT);
}

fn wait(word: &AtomicU32, value: u32, time: *const libc::timespec) {
    // SAFETY: a futex of this process, and a time or none.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, time) };
}

/// Wakes whoever sleeps.
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: a futex of this process.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

type Destructor = unsafe extern "C" fn(*mut libc::c_void);

/// Calls this with this when the calling thread ends, and lets the child of a fork know that it is one.
///
/// # Safety
/// `then` may be called with `what` at any later time. It is the same function each time.
pub(crate) unsafe fn at_end_of_thread(then: Destructor, what: *const libc::c_void) {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a key of our own, and a handler that is there as long as the library.
        let error = unsafe {
            libc::pthread_atfork(None, None, Some(crate::control::after_fork));
            libc::pthread_key_create(&mut key, Some(then))
        };
        // The program may have all keys that there are.
        (error == 0).then_some(key)
    });
    if let Some(key) = key {
        // SAFETY: a key that was made.
        unsafe { libc::pthread_setspecific(*key, what) };
    }
}
