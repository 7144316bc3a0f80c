//! Locks of files (`flock`), with and without waiting.

use super::signals::{Disposition, SignalSet};
use belay_kernel::check;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Takes (`LOCK_EX`) the lock of `file`; without `wait` fails with `WouldBlock` when another process holds it.
pub fn lock(file: BorrowedFd<'_>, wait: bool) -> io::Result<()> {
    let how = if wait { libc::LOCK_EX } else { libc::LOCK_EX | libc::LOCK_NB };
    // SAFETY: takes numbers only.
    check(unsafe { libc::flock(file.as_raw_fd(), how) }.into()).map(drop)
}

/// Takes the lock of `file` together with others who do so (`LOCK_SH`); fails with `WouldBlock` when a process holds it alone.
pub fn lock_shared(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) }.into()).map(drop)
}

/// Gives the lock of `file` back, for every process that shares the open file.
pub fn unlock(file: BorrowedFd<'_>) {
    // SAFETY: takes numbers only.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
}

/// Waits for the lock of `file`, but no longer than `limit`; whether it was taken. SIGALRM ends the wait, in this thread only.
pub fn lock_within(file: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    extern "C" fn interrupt(_: i32) {}
    // The disposition is that of all threads.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let handler: extern "C" fn(i32) = interrupt;
    let old = Disposition::replace(libc::SIGALRM, handler as libc::sighandler_t);
    let mask = SignalSet::of([libc::SIGALRM]).unblock();
    let result = Alarm::set(limit).and_then(|alarm| {
        let result = lock(file, true);
        drop(alarm);
        result
    });
    mask.set_mask();
    old.restore();
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
    }
}

/// Sends SIGALRM to the thread that has set it, until it is dropped.
struct Alarm(libc::timer_t);

impl Alarm {
    fn set(limit: Duration) -> io::Result<Self> {
        // SAFETY: sigevent is plain data, for which zero is a valid value.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        // SAFETY: has no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer: libc::timer_t = std::ptr::null_mut();
        // SAFETY: both structures are valid.
        check(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) }.into())?;
        let alarm = Self(timer);
        let spec = |d: Duration| libc::timespec {
            tv_sec: d.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: d.subsec_nanos().into(),
        };
        let value = libc::itimerspec {
            it_value: spec(limit.max(Duration::from_nanos(1))),
            // For a signal that comes before the wait begins.
            it_interval: spec(Duration::from_millis(50)),
        };
        // SAFETY: the timer exists, `value` is valid for reading, and the old value is not asked for.
        check(unsafe { libc::timer_settime(alarm.0, 0, &raw const value, std::ptr::null_mut()) }.into())?;
        Ok(alarm)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and nobody uses it any more.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    #[test]
    fn a_lock_is_waited_for_in_any_thread_and_with_the_signal_blocked() {
        let path = std::env::temp_dir().join(format!("belay-flock-{}", std::process::id()));
        let (a, b) = (File::create(&path).unwrap(), File::create(&path).unwrap());
        lock(a.as_fd(), false).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                let alarm = SignalSet::of([libc::SIGALRM]);
                alarm.block();
                assert!(!lock_within(b.as_fd(), Duration::from_millis(10)).unwrap());
                // The next wait is as good as the first.
                s.spawn(|| unlock(a.as_fd()));
                assert!(lock_within(b.as_fd(), Duration::from_secs(600)).unwrap());
                assert!(alarm.block().has(libc::SIGALRM), "the mask is as it was");
            });
        });
        std::fs::remove_file(path).unwrap();
    }
}
