//! How many descriptors a process may have.

use std::io;
use std::os::fd::RawFd;

/// Numbers in a row that a process needs beside its own while it is restarted: for the files that its memory lies in,
/// and for what it is restarted with.
pub(crate) const NEEDED: usize = 64;

/// The soft limit on descriptors raised to the hard one.
#[derive(Debug)]
pub(crate) struct RaisedLimit(Option<libc::rlimit>);

impl RaisedLimit {
    /// The number of descriptors to which the limit can be raised.
    pub(crate) fn highest() -> RawFd {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `limit` is valid for writing.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
        RawFd::try_from(limit.rlim_max).unwrap_or(RawFd::MAX)
    }

    /// Raises it; a failure shows when a descriptor cannot be duplicated.
    pub(crate) fn raise() -> Self {
        let mut old = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `old` is valid for writing.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut old) } == -1 {
            return Self(None);
        }
        // Root may go beyond: the job can have more descriptors in all than a single process may.
        let most = std::fs::read_to_string("/proc/sys/fs/nr_open")
            .ok()
            .and_then(|n| n.trim().parse().ok());
        let raised = [most.unwrap_or(old.rlim_max).max(old.rlim_max), old.rlim_max]
            .into_iter()
            .any(|n| {
                let new = libc::rlimit {
                    rlim_cur: n,
                    rlim_max: n,
                };
                // SAFETY: `new` is valid for reading.
                unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &new) == 0 }
            });
        Self(raised.then_some(old))
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        if let Some(old) = self.0 {
            // SAFETY: `old` is valid for reading.
            let back = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &old) };
            if back == -1 {
                tracing::warn!(error = %io::Error::last_os_error(), "could not lower the descriptor limit again");
            }
        }
    }
}
