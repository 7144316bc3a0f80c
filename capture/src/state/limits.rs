//! Limits of other processes.

use belay_kernel::limits;

/// Soft and hard limit `resource` of a process.
pub(crate) fn rlimit(pid: i32, resource: u32) -> (u64, u64) {
    limits::of(pid, resource).unwrap_or_default()
}

/// Sets soft and hard limit `resource` of a process; whether that was allowed.
pub(crate) fn set_rlimit(pid: i32, resource: u32, limit: (u64, u64)) -> bool {
    limits::set(pid, resource, limit).is_ok()
}
