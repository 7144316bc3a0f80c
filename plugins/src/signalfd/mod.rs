//! signalfd: a set of signals. Pending signals belong to the processes, not to the descriptor.

use crate::capture::Found;
use crate::fault::{At, Fault};
use crate::model::Description;
use serde::{Deserialize, Serialize};
use std::os::fd::{FromRawFd, OwnedFd};

/// A signalfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SignalfdState {
    mask: u64,
}

/// Captures it.
pub(crate) fn capture(found: &Found) -> Result<SignalfdState, Fault> {
    Ok(SignalfdState {
        mask: found.info.number("sigmask:", 16).at("read fdinfo")?,
    })
}

/// Makes it again.
pub(crate) fn rebuild(d: &Description, state: &SignalfdState) -> Result<OwnedFd, Fault> {
    let flags = libc::SFD_CLOEXEC | (d.flags & libc::O_NONBLOCK);
    // The kernel's set is 8 bytes, libc's is larger: the call is made directly.
    // SAFETY: the mask is valid for reading 8 bytes.
    let fd = unsafe { libc::syscall(libc::SYS_signalfd4, -1, &raw const state.mask, 8, flags) };
    let fd = crate::sys::check(i32::try_from(fd).unwrap_or(-1)).at("signalfd")?;
    // SAFETY: the kernel has just returned this number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
