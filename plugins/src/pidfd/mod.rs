//! pidfd: the process it names.
//!
//! It can be opened only when that process exists, so it is made in each process that has it once all processes exist;
//! one whose process has ended and been waited for is made from a child of the agent that then ends.

use crate::builder::Builder;
use crate::fault::{At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart, Place};
use crate::model::{DescId, Description, Descriptors, Slot};
use crate::session::Session;
use crate::sys::fd;
use belay_kernel::apart;
use belay_kernel::numbers::{self, lend};
use belay_kernel::pidfd::{self, exit_status};
use rustix::io::Errno;
use rustix::process::{setrlimit, Resource, Rlimit};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

/// A pidfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PidfdState {
    /// The process (or thread), `None` when it has ended and been waited for.
    pid: Option<i32>,
    /// O_NONBLOCK and O_EXCL (PIDFD_THREAD), as `pidfd_open` takes them.
    flags: i32,
    /// Of one that has ended, where the kernel tells.
    #[serde(default)]
    ended: Ended,
}

/// What can still be asked about a process that has ended and been waited for.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Ended {
    /// The inode that all its pidfds have, and no others (Linux 6.9).
    inode: Option<u64>,
    /// How it ended, as `wait` tells it (PIDFD_INFO_EXIT, Linux 6.15).
    status: Option<i32>,
}

/// Pidfds of processes that have ended, by inode: made together, each is taken by one description.
#[derive(Debug, Default)]
struct Siblings(HashMap<u64, Vec<(i32, OwnedFd)>>);

impl PidfdState {
    /// The task that it names, if it must be there.
    pub(crate) fn task(&self) -> Option<i32> {
        self.pid
    }
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

    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        let late = out.each::<PidfdState>().filter(|(_, state)| state.pid.is_some());
        let why = "in flight in a socket, so that it cannot be made before its process is there";
        refusals.extend(s.too_late(late.map(|(id, _)| id), why));
    }

    /// Makes the one of a process that is gone, with all others of that process.
    fn rebuild(b: &mut Builder<'_>, _: &Description, state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
        if state.pid.is_some() {
            return Ok(None);
        }
        let Some(inode) = state.ended.inode else {
            return with_short_lived(state.ended.status, |pid| open(pid, state.flags)).map(Some);
        };
        if !b.sets.of::<Siblings>().0.contains_key(&inode) {
            let all = b.descriptors.each::<PidfdState>().map(|(_, state)| state);
            let of_it = all.filter(|other| other.ended.inode == Some(inode));
            let made = with_short_lived(state.ended.status, |pid| {
                let each = of_it.map(|other| Ok((other.flags, open(pid, other.flags)?)));
                each.collect::<Result<Vec<_>, Fault>>()
            });
            b.sets.of::<Siblings>().0.insert(inode, made?);
        }
        let siblings = b.sets.of::<Siblings>().0.entry(inode).or_default();
        let at = siblings.iter().position(|(flags, _)| *flags == state.flags);
        Ok(at.map(|at| siblings.swap_remove(at).1))
    }

    /// Makes one whose process exists now.
    fn install_late(_: &Place<'_>, _: &Slot, state: &PidfdState) -> Result<Option<OwnedFd>, Fault> {
        state.pid.map(|pid| open(pid, state.flags)).transpose()
    }

    /// That a process can have ended so.
    fn check(state: &PidfdState, _: &Descriptors) -> Result<(), String> {
        const NEVER: [i32; 4] = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
        let ends = |status| libc::WIFEXITED(status) || libc::WIFSIGNALED(status) && !NEVER.contains(&libc::WTERMSIG(status));
        match state.ended.status {
            Some(status) if !ends(status) => Err(format!("no process ends with status {status}")),
            _ => Ok(()),
        }
    }

    nothing!(survey, contents, check_part, numbers, ways, prepare, join, refill);
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
    let lives = pid > 0 && known;
    let flags = (found.flags & libc::O_NONBLOCK) | thread;
    let mut ended = Ended::default();
    if !lives {
        let taken = s.take(id)?;
        let is_file = fd::fs_magic(taken.raw()).at("read the type of its file system")? == PIDFS;
        ended.inode = is_file.then_some(found.stat.st_ino);
        ended.status = lend(taken.raw()).ok().and_then(exit_status);
    }
    Ok(PidfdState {
        pid: lives.then_some(pid),
        flags,
        ended,
    })
}

/// What `make` makes of a process that has ended, as `status` says (by SIGKILL, where it says nothing), and been waited
/// for when this function returns.
pub(crate) fn with_short_lived<T>(status: Option<i32>, make: impl FnOnce(i32) -> Result<T, Fault>) -> Result<T, Fault> {
    let (until, told) = fd::pipe(libc::O_CLOEXEC).at("pipe")?;
    let child = apart::child(|| {
        // What the parent closes must be closed here too.
        let _ = numbers::close(told.as_raw_fd(), told.as_raw_fd());
        end_after(&until, status.unwrap_or(libc::SIGKILL))
    });
    let child = child.at("fork")?;
    let made = make(child.pid());
    drop(told);
    child.wait(0).at("wait for a child")?;
    made
}

/// Ends as `status` says when nobody can write to the pipe any more: when the parent wants it or has ended.
fn end_after(pipe: &OwnedFd, status: i32) -> ! {
    let no_core = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let _ = setrlimit(Resource::Core, no_core);
    while rustix::io::read(pipe, &mut [0]) == Err(Errno::INTR) {}
    if libc::WIFSIGNALED(status) {
        apart::end_by(libc::WTERMSIG(status));
    }
    apart::end(libc::WEXITSTATUS(status))
}

fn open(pid: i32, flags: i32) -> Result<OwnedFd, Fault> {
    pidfd::open_with(pid, flags).at(format!("pidfd_open of process {pid}"))
}
