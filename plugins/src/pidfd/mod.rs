//! pidfd: the process it names.
//!
//! It can be opened only when that process exists, so it is made in each process that has it once all processes exist; one whose process has
//! ended and been waited for is made from a child of the agent that then ends.

use crate::builder::Builder;
use crate::fault::{At, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart, Place};
use crate::model::{DescId, Description, Slot};
use crate::session::Session;
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

/// The kind.
pub(crate) struct Pidfd;

/// `PID_FS_MAGIC`: where they are files (Linux 6.9).
const PIDFS: i64 = 0x5049_4446;

impl Kind for Pidfd {
    const NAME: &'static str = "Pidfd";
    const VERSION: u32 = 1;
    type State = PidfdState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        match look {
            Look::Anonymous(name) => *name == "pidfd",
            Look::Regular(file_system) => *file_system == PIDFS,
            _ => false,
        }
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<PidfdState, Fault> {
        capture(s, seen.id)
    }

    /// Makes the one of a process that is gone.
    fn rebuild(_: &mut Builder<'_>, _: &Description, state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
        if state.pid.is_some() {
            return Ok(None);
        }
        with_short_lived(|pid| open(pid, state.flags & libc::O_NONBLOCK)).map(Some)
    }

    /// Makes one whose process exists now.
    fn install_late(_: &Place<'_>, _: &Slot, state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
        state.pid.map(|pid| open(pid, state.flags)).transpose()
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, settle, install_own, complete);
}

fn capture(s: &mut Session<'_>, id: DescId) -> Result<PidfdState, Fault> {
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

fn open(pid: i32, flags: i32) -> Result<OwnedFd, Fault> {
    // SAFETY: pidfd_open takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, flags) };
    let fd = check(i32::try_from(fd).unwrap_or(-1)).at(format!("pidfd_open of process {pid}"))?;
    // SAFETY: the kernel has just returned this number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
