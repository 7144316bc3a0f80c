//! Waiting for ptrace stops: each one is announced to the agent by SIGCHLD.

use belay_kernel::signals::{self, SignalSet};
use std::time::Duration;

/// Blocks SIGCHLD while it lives, so that it can be waited for; on drop restores the mask and, since SIGCHLDs meant for
/// the caller's own loop have been consumed, raises one.
#[derive(Debug)]
pub(crate) struct ChildSignals {
    old: SignalSet,
}

fn child_set() -> SignalSet {
    SignalSet::of([libc::SIGCHLD])
}

impl ChildSignals {
    /// Blocks SIGCHLD in the calling thread.
    pub(crate) fn block() -> Self {
        let old = child_set().block();
        Self { old }
    }
}

impl Drop for ChildSignals {
    fn drop(&mut self) {
        signals::kill(std::process::id().cast_signed(), libc::SIGCHLD);
        self.old.set_mask();
    }
}

/// Returns when a SIGCHLD arrives, or after `limit`.
pub(crate) fn wait_for_child(limit: Duration) {
    signals::take_within(&child_set(), limit);
}
