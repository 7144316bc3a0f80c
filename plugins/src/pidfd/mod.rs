//! pidfd: the process it names.
//!
//! It can be opened only when that process exists, so it is made in each process that has it once all processes exist; one whose process has
//! ended and been waited for is made from a child of the agent that then ends.

use crate::capture::Session;
use crate::fault::{At, Fault};
use crate::model::DescId;
use crate::sys::check;
use serde::{Deserialize, Serialize};
use std::os::fd::{FromRawFd, OwnedFd};

/// A pidfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PidfdState {
    /// The process (or thread), `None` when it has ended and been waited for.
    pid: Option<i32>,
    /// O_NONBLOCK and O_EXCL (PIDFD_THREAD), as `pidfd_open` takes them.
    flags: i32,
}

impl PidfdState {
    /// Whether it is made when all processes exist.
    pub(crate) fn is_late(&self) -> bool {
        self.pid.is_some()
    }
}

/// Captures it.
pub(crate) fn capture(s: &mut Session<'_>, id: DescId) -> Result<PidfdState, Fault> {
    let found = &s.found[id];
    let text = found.info.one("Pid:").at("read fdinfo")?;
    let pid: i32 = text
        .parse()
        .map_err(|_| Fault::Refused(format!("fdinfo: process {text:?}")))?;
    let thread = found.flags & libc::O_EXCL;
    let known = s.will_have(pid);
    if pid > 0 && !known {
        s.notes.push(format!(
            "process {}: fd {}: process {pid} is not part of the job; after a restart its pidfd shows that it has ended",
            found.holder.pid, found.holder.fd
        ));
    }
    Ok(PidfdState {
        pid: (pid > 0 && known).then_some(pid),
        flags: (found.flags & libc::O_NONBLOCK) | thread,
    })
}

/// Makes the one of a process that is gone; `None` for others.
pub(crate) fn rebuild(state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
    if state.pid.is_some() {
        return Ok(None);
    }
    with_short_lived(|pid| open(pid, state.flags & libc::O_NONBLOCK)).map(Some)
}

/// What `make` makes of a process that has ended and been waited for when this function returns.
pub(crate) fn with_short_lived<T>(make: impl FnOnce(i32) -> Result<T, Fault>) -> Result<T, Fault> {
    // SAFETY: the child runs nothing of the parent's.
    let child = check(unsafe { libc::fork() }).at("fork")?;
    if child == 0 {
        // SAFETY: these calls take numbers only; the child ends by SIGKILL, at the latest when its parent does.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
    let made = make(child);
    let mut status = 0;
    // SAFETY: `status` is valid for writing; the child is ours.
    check(unsafe { libc::kill(child, libc::SIGKILL) }).at("end a child")?;
    // SAFETY: as above.
    check(unsafe { libc::waitpid(child, &mut status, 0) }).at("wait for a child")?;
    made
}

/// Makes one whose process exists now.
pub(crate) fn late(state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
    state.pid.map(|pid| open(pid, state.flags)).transpose()
}

fn open(pid: i32, flags: i32) -> Result<OwnedFd, Fault> {
    // SAFETY: pidfd_open takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
    let fd = check(i32::try_from(fd).unwrap_or(-1)).at(format!("pidfd_open of process {pid}"))?;
    // SAFETY: the kernel has just returned this number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
