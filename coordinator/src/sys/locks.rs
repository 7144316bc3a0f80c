//! Locks of files (`flock`), with and without waiting.

use belay_kernel::signals;
use rustix::fs::{flock, FlockOperation};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Takes (`LOCK_EX`) the lock of `file`; without `wait` fails with `WouldBlock` when another process holds it.
pub fn lock(file: BorrowedFd<'_>, wait: bool) -> io::Result<()> {
    let how = if wait {
        FlockOperation::LockExclusive
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    Ok(flock(file, how)?)
}

/// Takes the lock of `file` together with others who do so (`LOCK_SH`); fails with `WouldBlock` when a process holds it alone.
pub fn lock_shared(file: BorrowedFd<'_>) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockShared)?)
}

/// Gives the lock of `file` back, for every process that shares the open file.
pub fn unlock(file: BorrowedFd<'_>) {
    // There is nothing that could fail.
    let _ = flock(file, FlockOperation::Unlock);
}

/// Waits for the lock of `file`, but no longer than `limit`; whether it was taken.
pub fn lock_within(file: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    match signals::interrupted_after(limit, || lock(file, true)) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signals::SignalSet;
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
