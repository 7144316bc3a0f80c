//! Process descriptors: a stable name for a process, and the way to its descriptors.

use crate::ioctl;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

fn owned(ret: libc::c_long) -> io::Result<OwnedFd> {
    let fd = crate::check(ret)?;
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a descriptor for process `pid`.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes numbers only.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Opens a descriptor for thread `tid`; kernels before 6.9 have them for main threads only.
pub fn open_thread(tid: i32) -> io::Result<OwnedFd> {
    const PIDFD_THREAD: i32 = libc::O_EXCL;
    // SAFETY: pidfd_open takes numbers only.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, tid, PIDFD_THREAD) })
}

/// Opens a descriptor for process `pid` by its thread `task`, which is the main thread unless that has exited: then the
/// process's descriptors cannot be had by its own number any more, and Linux 6.9 is needed.
pub fn open_by(pid: i32, task: i32) -> io::Result<OwnedFd> {
    if task == pid {
        open(pid)
    } else {
        open_thread(task)
    }
}

/// Opens a descriptor for process or thread `pid` with the flags of `pidfd_open` as they are.
pub fn open_with(pid: i32, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes numbers only.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) })
}

/// How the process behind `pidfd` has ended, where it has and the kernel tells (Linux 6.15).
pub fn exit_status(pidfd: impl AsFd) -> Option<i32> {
    const INFO_EXIT: u64 = 1 << 3;
    let told = ioctl::exchange(pidfd, ioctl::PIDFD_INFO, [INFO_EXIT, 0, 0, 0, 0, 0, 0, 0]).ok()?;
    let [.., last] = told;
    // The last number of the last word.
    let status = (last.to_ne_bytes()[4..]).try_into().map_or(0, i32::from_ne_bytes);
    (told[0] & INFO_EXIT != 0).then_some(status)
}

/// Waits until the process or thread behind `pidfd` is gone.
pub fn wait_gone(pidfd: BorrowedFd<'_>) {
    while !poll_gone(pidfd, -1) {}
}

/// Waits until the process behind `pidfd` is gone, no longer than `limit`; whether it is.
pub fn gone_within(pidfd: BorrowedFd<'_>, limit: Duration) -> bool {
    let begin = Instant::now();
    loop {
        let left = limit.saturating_sub(begin.elapsed());
        // Rounded up, so as not to come round without a pause.
        if poll_gone(pidfd, i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)) {
            return true;
        }
        if begin.elapsed() >= limit {
            return false;
        }
    }
}

/// Waits for it for so many milliseconds (-1: for ever), or until a signal comes.
fn poll_gone(pidfd: BorrowedFd<'_>, ms: i32) -> bool {
    let mut poll = libc::pollfd {
        fd: pidfd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live pollfd.
    let n = unsafe { libc::poll(&raw mut poll, 1, ms) };
    n > 0 || (n < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted)
}

/// Duplicates descriptor `fd` of the process behind `pidfd` (needs ptrace access); close-on-exec is set on the copy.
pub fn getfd(pidfd: BorrowedFd<'_>, fd: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_getfd takes numbers only.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0) })
}

/// Sends `signal` to the process behind `pidfd`.
pub fn send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: a null siginfo means the same as kill(2).
    crate::check(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    })
    .map(drop)
}
