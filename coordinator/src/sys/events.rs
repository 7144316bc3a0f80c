//! What the event loop waits on: timers, wake-ups, poll.

use super::fd;
use belay_kernel::check;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// A timer on the monotonic clock.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not armed.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes numbers only.
        fd(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) }).map(Self)
    }

    /// Arms the timer: first after `first`, then every `period` (once when zero). `None` disarms it.
    pub fn set(&self, first: Option<Duration>, period: Duration) -> io::Result<()> {
        let spec = |d: Duration| libc::timespec {
            tv_sec: d.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: d.subsec_nanos().into(),
        };
        let value = libc::itimerspec {
            it_value: spec(first.map_or(Duration::ZERO, |d| d.max(Duration::from_nanos(1)))),
            it_interval: spec(period),
        };
        // SAFETY: `value` is valid for reading, and the old value is not asked for.
        check(unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const value, std::ptr::null_mut()) }.into()).map(drop)
    }

    /// Takes the expiry; the number of expiries since the last call.
    pub fn take(&self) -> u64 {
        read_counter(&self.0)
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Lets another thread wake the event loop.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// A wake-up channel.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes numbers only.
        fd(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(Self)
    }

    /// Another handle on the same channel.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Wakes the loop.
    pub fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the buffer is valid for reading; a counter that is full already wakes the loop as well.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Takes the wake-ups.
    pub fn take(&self) {
        read_counter(&self.0);
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn read_counter(fd: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    // SAFETY: the buffer is valid for writing its length.
    let n = unsafe { libc::read(fd.as_raw_fd(), value.as_mut_ptr().cast(), value.len()) };
    if n == 8 {
        u64::from_ne_bytes(value)
    } else {
        0
    }
}

/// Whether descriptor `fd` can be read within `limit`; also when its other end is gone.
pub fn readable_within(fd: RawFd, limit: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one live pollfd.
    match unsafe { libc::poll(&raw mut poll, 1, ms) } {
        n if n >= 0 => Ok(n > 0),
        _ => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(false),
            e => Err(e),
        },
    }
}

/// Waits until one of `fds` (descriptor, events) is ready; returns what happened at each.
pub fn poll(fds: &[(RawFd, i16)]) -> io::Result<Vec<i16>> {
    loop {
        match poll_within(fds, None) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// The same, but waits no longer than `limit`. A signal may end the wait (`Interrupted`).
pub fn poll_within(fds: &[(RawFd, i16)], limit: Option<Duration>) -> io::Result<Vec<i16>> {
    let entry = |(fd, events): &(RawFd, i16)| libc::pollfd {
        fd: *fd,
        events: *events,
        revents: 0,
    };
    let mut set: Vec<libc::pollfd> = fds.iter().map(entry).collect();
    let ms = |d: Duration| i32::try_from(d.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: `set` is valid for its length.
    let n = unsafe { libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, limit.map_or(-1, ms)) };
    check(n.into())?;
    Ok(set.iter().map(|p| p.revents).collect())
}
