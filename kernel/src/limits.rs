//! Limits of the calling process.

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
