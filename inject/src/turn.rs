//! Turns: one thread of a process does what the others must not see half done; should the agent die meanwhile, they wait here.

use crate::libc_nr as nr;
use belay_abi::inject::{Turn, WaitTable};
use belay_abi::syscall;
use core::ptr::{addr_of_mut, null, null_mut};
use core::sync::atomic::{AtomicU32, Ordering};

const SIG_SETMASK: usize = 2;
const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;

/// Waits until the word is set. All signals are blocked; then the one that announces the end is not.
///
/// # Safety
/// `t` points to a table in the injected area.
pub(crate) unsafe fn wait(t: *mut WaitTable) {
    unsafe {
        let over = AtomicU32::from_ptr((*t).over as *mut u32);
        while over.load(Ordering::Acquire) == 0 {
            syscall!(nr::FUTEX, (*t).over, FUTEX_WAIT, 0usize, null::<u8>());
        }
        let all_but_mark = !(1u64 << ((*t).mark.signo - 1));
        syscall!(
            nr::RT_SIGPROCMASK,
            SIG_SETMASK,
            &raw const all_but_mark,
            null_mut::<u64>(),
            8usize
        );
    }
}

/// Whether all other threads wait, or will before they do anything else.
///
/// # Safety
/// `t` points to a turn in the injected area.
pub(crate) unsafe fn mine(t: *mut Turn) -> bool {
    unsafe { AtomicU32::from_ptr(addr_of_mut!((*t).go)) }.load(Ordering::Acquire) != 0
}

/// Lets the other threads go on.
///
/// # Safety
/// `t` points to a turn in the injected area.
pub(crate) unsafe fn over(t: *mut Turn) {
    unsafe {
        let word = addr_of_mut!((*t).over);
        AtomicU32::from_ptr(word).store(1, Ordering::Release);
        syscall!(nr::FUTEX, word, FUTEX_WAKE, i32::MAX);
    }
}
