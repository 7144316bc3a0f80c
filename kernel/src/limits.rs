//! Limits of processes.

use crate::check;
use std::io;

/// Limit `resource` of process `pid`: soft and hard.
pub fn of(pid: i32, resource: u32) -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is live; no new limit is given.
    check(unsafe { libc::prlimit(pid, resource, std::ptr::null(), &raw mut limit) }.into())?;
    Ok((limit.rlim_cur, limit.rlim_max))
}

/// Sets it.
pub fn set(pid: i32, resource: u32, (rlim_cur, rlim_max): (u64, u64)) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur, rlim_max };
    // SAFETY: `limit` is live, and only read.
    check(unsafe { libc::prlimit(pid, resource, &raw const limit, std::ptr::null_mut()) }.into()).map(drop)
}

/// Limits that have been raised, as they were.
#[derive(Debug, Default)]
pub struct Raised(Vec<(u32, libc::rlimit)>);

impl Raised {
    /// Raises limit `resource` as far as the process may, and with the capability for that to `wanted`, where that is more.
    pub fn raise(&mut self, resource: u32, wanted: u64) {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the kernel writes to a live structure.
        if unsafe { libc::getrlimit(resource, &mut limit) } != 0 {
            return;
        }
        for most in [wanted.max(limit.rlim_max), limit.rlim_max] {
            let raised = libc::rlimit {
                rlim_cur: most,
                rlim_max: most,
            };
            if limit.rlim_cur == most {
                return;
            }
            // SAFETY: a live structure.
            if unsafe { libc::setrlimit(resource, &raised) } == 0 {
                self.0.push((resource, limit));
                return;
            }
        }
    }

    /// Makes them again what they were.
    pub fn undo(self) {
        for (resource, limit) in self.0 {
            // SAFETY: a live structure.
            unsafe { libc::setrlimit(resource, &limit) };
        }
    }
}

/// Raises the limit of descriptors as far as the process may. An agent has some for each process and each host of its
/// job, and the limit that users have is of the time of `select`.
pub fn raise_descriptors() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes to a live structure.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: a live structure.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soft() -> u64 {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the kernel writes to a live structure.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_RSS, &mut limit) }, 0);
        limit.rlim_cur
    }

    #[test]
    fn a_limit_is_raised_and_put_back() {
        let low = libc::rlimit {
            rlim_cur: 1 << 40,
            rlim_max: 1 << 41,
        };
        // SAFETY: a live structure. No kernel of today looks at this limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_RSS, &low) }, 0);
        let mut raised = Raised::default();
        raised.raise(libc::RLIMIT_RSS, 0);
        assert_eq!(soft(), 1 << 41);
        raised.undo();
        assert_eq!(soft(), 1 << 40);
    }
}
