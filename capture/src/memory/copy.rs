//! The snapshot child as a process: whether it is the one that was made, what it has inherited, and its end.

use crate::memory::control::ControlMemory;
use crate::state::draft::Draft;
use crate::state::limits::{rlimit, set_rlimit};
use belay_kernel::{pidfd, proc};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

const PAGE: u64 = 4096;

/// A snapshot child, and the memory that it shares with the agent. It ends with this value.
#[derive(Debug)]
pub(crate) struct SnapshotChild {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) control: ControlMemory,
}

impl SnapshotChild {
    /// Whether it has ended.
    pub(crate) fn is_gone(&self) -> bool {
        pidfd::gone_within(self.pidfd.as_fd(), Duration::ZERO)
    }
}

impl Drop for SnapshotChild {
    fn drop(&mut self) {
        // Where it has ended by itself its number may be somebody else's.
        if let Err(error) = pidfd::send_signal(self.pidfd.as_fd(), libc::SIGKILL) {
            tracing::trace!(pid = self.pid, %error, "snapshot process was not ended");
        }
        // The agent must not take it for a process of the job.
        pidfd::wait_gone(self.pidfd.as_fd());
    }
}

/// Whether snapshot child `pid` has inherited all mappings of the stopped thread `task`, but for so many bytes of them that
/// were left out: it has as many pages of address space, and the one page of control memory that it maps as the first thing.
/// Had it mapped that and lacked another, or not mapped it yet, it would have less: then its mappings say which.
pub(crate) fn is_whole(pid: i32, task: i32, left_out: u64) -> std::io::Result<bool> {
    Ok(proc::pages(pid)? + left_out / PAGE == proc::pages(task)? + 1)
}

/// Addresses of the mappings that snapshot child `pid` has inherited. Its control memory, with inode number `control`,
/// may lie where one that was left out has been.
pub(crate) fn inherited(pid: i32, control: u64) -> std::io::Result<Vec<(u64, u64)>> {
    let maps = proc::maps(pid)?;
    let inherited = maps
        .iter()
        .filter(|m| m.ino != control || !m.name.as_encoded_bytes().starts_with(b"/memfd:belay-control"));
    Ok(inherited.map(|m| (m.start, m.end)).collect())
}

/// Whether `pid` is a child of the agent with the user of the process in `draft`, as its snapshot child is.
pub(crate) fn is_copy_of(pid: i32, draft: &Draft) -> bool {
    let agent = std::process::id().cast_signed();
    let user = proc::Status::read(pid).map(|s| s.list("Uid"));
    proc::stat(pid).is_ok_and(|s| s.ppid == agent) && user.is_ok_and(|u| u == draft.status.list("Uid"))
}

/// Whether snapshot child `pid` may write files of any size: it has the limit of its process (RLIMIT_FSIZE), which is
/// lifted where that is allowed.
pub(crate) fn may_write(pid: i32) -> bool {
    const NONE: u64 = libc::RLIM_INFINITY;
    let (soft, hard) = rlimit(pid, libc::RLIMIT_FSIZE);
    soft == NONE
        || set_rlimit(pid, libc::RLIMIT_FSIZE, (NONE, NONE))
        || (hard == NONE && set_rlimit(pid, libc::RLIMIT_FSIZE, (NONE, hard)))
}

/// Whether `at` lies in one of `ranges`, which are in ascending order. Two mappings of the process can be one in its
/// copy, where the injected area lay beside one like it.
pub(crate) fn covers(ranges: &[(u64, u64)], at: u64) -> bool {
    let next = ranges.partition_point(|r| r.1 <= at);
    ranges.get(next).is_some_and(|r| r.0 <= at)
}

/// Ends snapshot child `pid`, which has not been waited for.
pub(crate) fn kill(pid: i32) {
    belay_kernel::signals::kill(pid, libc::SIGKILL);
}
