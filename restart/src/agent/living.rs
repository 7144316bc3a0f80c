//! The processes that a restart has made so far, until they run.

use crate::control::Shared;
use crate::fail::{ended, Outcome, RestartError};
use crate::filling::Filling;
use crate::tree::Tree;
use belay_abi::restore::STATE_FAILED;
use belay_kernel::{numbers, pidfd, proc};
use belay_plugins::Group;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

/// The processes made so far.
pub(super) struct Living<'a> {
    pub(super) pidfds: Vec<(usize, i32, OwnedFd)>,
    pub(super) group: Option<&'a dyn Group>,
    /// Those that fill memory.
    pub(super) filling: Option<Filling>,
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
        if let Some(Err(e)) = self.filling.as_ref().and_then(Filling::end) {
            return Err(e);
        }
        let mut polls: Vec<libc::pollfd> = self
            .pidfds
            .iter()
            .map(|(_, _, fd)| numbers::entry(fd.as_raw_fd(), libc::POLLIN))
            .collect();
        let _ = numbers::poll_all(&mut polls, 0);
        for ((i, pid, _), poll) in self.pidfds.iter().zip(&polls) {
            if poll.revents != 0 && shared.slot(*i).state.load(Ordering::Acquire) != STATE_FAILED {
                return Err(lost(shared, tree, *i, *pid));
            }
        }
        Ok(())
    }

    /// The same of processes that have been made and have not reported yet that they exist: they may be reading what they
    /// have in common with others.
    pub(super) fn glance_at_new(&self, shared: &Shared, tree: &Tree, which: &[usize]) -> Outcome<()> {
        self.glance(shared, tree)?;
        for i in which {
            let (slot, pid) = (shared.slot(*i), tree.nodes[*i].pid);
            if slot.made.load(Ordering::Acquire) == 0 || slot.state.load(Ordering::Acquire) != 0 {
                continue;
            }
            let lives = proc::stat(pid).is_ok_and(|s| !matches!(s.state, 'Z' | 'X'));
            // It may have reported something, and ended, since.
            if !lives && slot.state.load(Ordering::Acquire) == 0 {
                return Err(lost(shared, tree, *i, pid));
            }
        }
        Ok(())
    }

    /// Ends all that was made.
    pub(super) fn end(self) {
        for (_, _, fd) in &self.pidfds {
            let _ = pidfd::send_signal(std::os::fd::AsFd::as_fd(fd), libc::SIGKILL);
        }
        self.filling.into_iter().for_each(Filling::give_up);
    }
}

/// Process `pid`, of node `i`, has ended without reporting why.
fn lost(shared: &Shared, tree: &Tree, i: usize, pid: i32) -> RestartError {
    let how = ended(proc::stat(pid).map_or(0, |s| s.exit_code));
    let stage = shared.slot(i).state.load(Ordering::Acquire);
    let what = format!(
        "process {} {how} while it was being restored (stage {stage})",
        tree.nodes[i].pid
    );
    RestartError::at("restart", what)
}
