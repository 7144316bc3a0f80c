//! What the event loop waits on: timers, wake-ups, poll.

use belay_kernel::numbers::{entry, poll_all};
use rustix::event::{eventfd, EventfdFlags};
use rustix::time::{timerfd_create, timerfd_settime, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// A timer on the monotonic clock.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not armed.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Arms the timer: first after `first`, then every `period` (once when zero). `None` disarms it.
    pub fn set(&self, first: Option<Duration>, period: Duration) -> io::Result<()> {
        let spec = |d: Duration| Timespec {
            tv_sec: d.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: d.subsec_nanos().into(),
        };
        let value = Itimerspec {
            it_value: spec(first.map_or(Duration::ZERO, |d| d.max(Duration::from_nanos(1)))),
            it_interval: spec(period),
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &value)?;
        Ok(())
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
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Another handle on the same channel.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Wakes the loop.
    pub fn wake(&self) {
        // A counter that is full already wakes the loop as well.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
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
    match rustix::io::read(fd, &mut value) {
        Ok(8) => u64::from_ne_bytes(value),
        _ => 0,
    }
}

/// Whether descriptor `fd` can be read within `limit`; also when its other end is gone.
pub fn readable_within(fd: RawFd, limit: Duration) -> io::Result<bool> {
    let ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    match poll_all(&mut [entry(fd, libc::POLLIN)], ms) {
        Ok(n) => Ok(n > 0),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
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
    let mut set: Vec<libc::pollfd> = fds.iter().map(|(fd, events)| entry(*fd, *events)).collect();
    let ms = |d: Duration| i32::try_from(d.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    poll_all(&mut set, limit.map_or(-1, ms))?;
    Ok(set.iter().map(|p| p.revents).collect())
}
