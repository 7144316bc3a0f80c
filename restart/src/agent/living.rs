//! The processes that a restart has made so far, until they run.

use crate::control::Shared;
use crate::fail::{Outcome, RestartError};
use crate::tree::Tree;
use belay_abi::restore::STATE_FAILED;
use belay_kernel::{pidfd, proc};
use belay_plugins::Group;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

/// The processes made so far.
pub(super) struct Living<'a> {
    pub(super) pidfds: Vec<(usize, i32, OwnedFd)>,
    pub(super) group: Option<&'a dyn Group>,
}

impl Living<'_> {
    /// Forgets those that are meant to end.
    pub(super) fn expect_end(&mut self, ends: impl Fn(usize) -> bool) {
        self.pidfds.retain(|(i, _, _)| !ends(*i));
    }

    /// Fails when a process has died without reporting why. Other nodes hear that this one is there: they may have come
    /// to the next meeting long before it.
    pub(super) fn glance(&self, shared: &Shared, tree: &Tree) -> Outcome<()> {
        if let Some(group) = self.group {
            group.attend();
        }
        let mut polls: Vec<libc::pollfd> = self
            .pidfds
            .iter()
            .map(|(_, _, fd)| libc::pollfd {
                fd: fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: a live array of that length.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, 0) };
        for ((i, pid, _), poll) in self.pidfds.iter().zip(&polls) {
            if poll.revents != 0 && shared.slot(*i).state.load(Ordering::Acquire) != STATE_FAILED {
                let status = proc::stat(*pid).map_or(0, |s| s.exit_code);
                let how = if libc::WIFSIGNALED(status) {
                    format!("was killed by signal {}", libc::WTERMSIG(status))
                } else {
                    format!("ended with status {}", libc::WEXITSTATUS(status))
                };
                let stage = shared.slot(*i).state.load(Ordering::Acquire);
                return Err(RestartError::at(
                    "restart",
                    format!(
                        "process {} {how} while it was being restored (stage {stage})",
                        tree.nodes[*i].pid
                    ),
                ));
            }
        }
        Ok(())
    }

    pub(super) fn kill(&self) {
        for (_, _, fd) in &self.pidfds {
            let _ = pidfd::send_signal(std::os::fd::AsFd::as_fd(fd), libc::SIGKILL);
        }
    }
}
