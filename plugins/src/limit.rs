//! How many descriptors a process may have.

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use std::os::fd::RawFd;

/// Numbers in a row that a process needs beside its own while it is restarted: for the files that its memory lies in,
/// and for what it is restarted with.
pub(crate) const NEEDED: usize = 64;

/// The soft limit on descriptors raised to the hard one.
#[derive(Debug)]
pub(crate) struct RaisedLimit(Option<Rlimit>);

impl RaisedLimit {
    /// The number of descriptors to which the limit can be raised.
    pub(crate) fn highest() -> RawFd {
        let limit = getrlimit(Resource::Nofile).maximum;
        limit.and_then(|most| RawFd::try_from(most).ok()).unwrap_or(RawFd::MAX)
    }

    /// Raises it; a failure shows when a descriptor cannot be duplicated.
    pub(crate) fn raise() -> Self {
        let old = getrlimit(Resource::Nofile);
        let hard = old.maximum.unwrap_or(u64::MAX);
        // Root may go beyond: the job can have more descriptors in all than a single process may.
        let most = std::fs::read_to_string("/proc/sys/fs/nr_open")
            .ok()
            .and_then(|n| n.trim().parse().ok());
        let raised = [most.unwrap_or(hard).max(hard), hard].into_iter().any(|n| {
            let most = (n != u64::MAX).then_some(n);
            let new = Rlimit {
                current: most,
                maximum: most,
            };
            setrlimit(Resource::Nofile, new).is_ok()
        });
        Self(raised.then_some(old))
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        if let Some(old) = self.0 {
            if let Err(error) = setrlimit(Resource::Nofile, old) {
                tracing::warn!(%error, "could not lower the descriptor limit again");
            }
        }
    }
}
