//! pidfd: the process it names.
//!
//! It can be opened only when that process exists, so it is made in each process that has it once all processes exist; one whose process has
//! ended and been waited for is made from a child of the agent that ends at once.

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
    let agent = std::process::id().cast_signed();
    let known = pid == agent || s.processes.iter().any(|p| p.pid == pid || is_thread_or_zombie(p.pid, pid));
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

/// Whether `target` is a thread of `pid`, or its child that has ended and not been waited for.
fn is_thread_or_zombie(pid: i32, target: i32) -> bool {
    let thread = std::path::Path::new(&format!("/proc/{pid}/task/{target}")).exists();
    thread || belay_kernel::proc::stat(target).is_ok_and(|st| st.state == 'Z' && st.ppid == pid)
}

/// Makes the one of a process that is gone; `None` for others.
pub(crate) fn rebuild(state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
    if state.pid.is_some() {
        return Ok(None);
    }
    // SAFETY: the child only ends.
    let child = check(unsafe { libc::fork() }).at("fork")?;
    if child == 0 {
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let fd = open(child, state.flags & libc::O_NONBLOCK);
    let mut status = 0;
    // SAFETY: `status` is valid for writing; the child is ours.
    check(unsafe { libc::waitpid(child, &mut status, 0) }).at("wait for a child")?;
    fd.map(Some)
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
