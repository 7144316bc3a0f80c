//! eventfd: a counter and a mode.

use crate::capture::Found;
use crate::fault::{At, Fault};
use crate::model::Description;
use crate::sys::fd;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd};

/// An eventfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct EventfdState {
    count: u64,
    semaphore: bool,
}

/// Captures it.
pub(crate) fn capture(found: &Found) -> Result<EventfdState, Fault> {
    Ok(EventfdState {
        count: found.info.number("eventfd-count:", 16).at("read fdinfo")?,
        // Kernels before 6.5 do not tell; there semaphores are restored as plain counters.
        semaphore: found.info.number("eventfd-semaphore:", 10).is_ok_and(|v| v == 1),
    })
}

/// Makes it again.
pub(crate) fn rebuild(d: &Description, state: &EventfdState) -> Result<OwnedFd, Fault> {
    let mode = if state.semaphore { libc::EFD_SEMAPHORE } else { 0 };
    let fd = fd::eventfd(0, mode | (d.flags & libc::O_NONBLOCK)).at("eventfd")?;
    if state.count != 0 {
        fd::write(fd.as_raw_fd(), &state.count.to_ne_bytes()).at("set the counter")?;
    }
    Ok(fd)
}
