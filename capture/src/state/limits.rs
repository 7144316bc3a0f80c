//! Limits of other processes.

/// Soft and hard limit `resource` of a process.
pub(crate) fn rlimit(pid: i32, resource: u32) -> (u64, u64) {
    let mut r = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `r` is live; no new limit is given.
    unsafe { libc::prlimit(pid, resource, std::ptr::null(), &mut r) };
    (r.rlim_cur, r.rlim_max)
}

/// Sets soft and hard limit `resource` of a process; whether that was allowed.
pub(crate) fn set_rlimit(pid: i32, resource: u32, (rlim_cur, rlim_max): (u64, u64)) -> bool {
    let limits = libc::rlimit { rlim_cur, rlim_max };
    // SAFETY: `limits` is live, and only read.
    unsafe { libc::prlimit(pid, resource, &limits, std::ptr::null_mut()) == 0 }
}
