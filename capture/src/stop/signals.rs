//! Waiting for ptrace stops: each one is announced to the agent by SIGCHLD.

use std::time::Duration;

/// Blocks SIGCHLD while it lives, so that it can be waited for; on drop restores the mask and, since SIGCHLDs meant for
/// the caller's own loop have been consumed, raises one.
#[derive(Debug)]
pub(crate) struct ChildSignals {
    old: libc::sigset_t,
}

fn child_set() -> libc::sigset_t {
    // SAFETY: sigemptyset initialises the set; SIGCHLD is a valid signal.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        set
    }
}

impl ChildSignals {
    /// Blocks SIGCHLD in the calling thread.
    pub(crate) fn block() -> Self {
        let set = child_set();
        // SAFETY: both sets are live.
        let old = unsafe {
            let mut old = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut old);
            old
        };
        Self { old }
    }
}

impl Drop for ChildSignals {
    fn drop(&mut self) {
        // SAFETY: a signal to ourselves, then the mask that was in force before.
        unsafe {
            libc::kill(libc::getpid(), libc::SIGCHLD);
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.old, std::ptr::null_mut());
        }
    }
}

/// Returns when a SIGCHLD arrives, or after `limit`.
pub(crate) fn wait_for_child(limit: Duration) {
    let set = child_set();
    let timeout = libc::timespec {
        tv_sec: 0,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // SAFETY: set and time-out are live; no siginfo is asked for.
    unsafe { libc::sigtimedwait(&set, std::ptr::null_mut(), &timeout) };
}
