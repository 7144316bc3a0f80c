//! Limits of other processes.

use crate::stop::stopped::Process;
use crate::CaptureError;
use belay_kernel::limits;

const NONE: u64 = libc::RLIM_INFINITY;

/// What a process may have of memory: its name, and how a shell names it.
const OF_MEMORY: [(u32, &str, &str); 2] = [
    (libc::RLIMIT_AS, "limit for its address space (RLIMIT_AS)", "ulimit -v"),
    (libc::RLIMIT_DATA, "limit for its data (RLIMIT_DATA)", "ulimit -d"),
];

/// Soft and hard limit `resource` of a process.
pub(crate) fn rlimit(pid: i32, resource: u32) -> (u64, u64) {
    limits::of(pid, resource).unwrap_or_default()
}

/// Sets soft and hard limit `resource` of a process; whether that was allowed.
pub(crate) fn set_rlimit(pid: i32, resource: u32, limit: (u64, u64)) -> bool {
    limits::set(pid, resource, limit).is_ok()
}

/// Raises what a stopped process may have of memory, as far as that is allowed: what is put into it, and into its copy,
/// is not the program's.
pub(crate) fn raise(process: &mut Process) {
    for (resource, ..) in OF_MEMORY {
        let (soft, hard) = rlimit(process.pid, resource);
        let raised = |limit| set_rlimit(process.pid, resource, limit);
        if soft != NONE && (raised((NONE, NONE)) || hard > soft && raised((hard, hard))) {
            process.raised.push((resource, (soft, hard)));
        }
    }
}

/// Makes what [`raise`] has raised what it was.
pub(crate) fn lower(process: &mut Process) {
    for (resource, limit) in std::mem::take(&mut process.raised) {
        // This fails only for a process that has been killed meanwhile.
        if !set_rlimit(process.pid, resource, limit) {
            tracing::warn!(pid = process.pid, resource, "a limit stays raised");
        }
    }
}

/// Limit `resource` of a stopped process, as it is when it runs.
pub(crate) fn own(process: &Process, resource: u32) -> (u64, u64) {
    let raised = process.raised.iter().find(|(r, _)| *r == resource);
    raised.map_or_else(|| rlimit(process.pid, resource), |(_, limit)| *limit)
}

/// Why there was no room in the memory of a process or its copy, where that is for a limit which could not be lifted.
pub(crate) fn too_low(pid: i32) -> Option<CaptureError> {
    let (_, name, command) = OF_MEMORY
        .into_iter()
        .find(|(resource, ..)| rlimit(pid, *resource).1 != NONE)?;
    let reason = format!("leaves no room for a checkpoint; raise it ({command}, prlimit)");
    Some(CaptureError::refuse(pid, name, reason))
}
