//! The processes of the job, for status and for ending it.

use belay_kernel::proc;
use belay_wire::{ProcessStatus, Status};
use std::collections::HashMap;

/// Name that the copies of processes give themselves.
const SNAPSHOT: &str = "belay-snapshot";

/// The snapshot processes among the children of `agent`.
pub(crate) fn snapshots(agent: i32) -> Vec<i32> {
    let mut children = proc::children(agent).unwrap_or_default();
    children.retain(|pid| proc::stat(*pid).is_ok_and(|s| s.comm == SNAPSHOT));
    children
}

/// Live processes of the job below `agent`, without its children `outside` and what these have started.
pub(crate) fn live(agent: i32, outside: &[i32]) -> Vec<i32> {
    let snapshots = snapshots(agent);
    let all = proc::Family::default().descendants_but(agent, outside).unwrap_or_default();
    all.into_iter()
        .map(|(pid, _)| pid)
        .filter(|pid| !snapshots.contains(pid))
        .filter(|pid| proc::stat(*pid).is_ok_and(|s| !s.is_dead()))
        .collect()
}

/// Describes the live descendants of `agent`, which are those of `part`.
pub(crate) fn describe(agent: i32, outside: &[i32], part: u64) -> Vec<ProcessStatus> {
    let host = crate::sys::host();
    live(agent, outside)
        .into_iter()
        .filter_map(|pid| {
            let stat = proc::stat(pid).ok()?;
            let command = proc::command_line(pid).unwrap_or_else(|| format!("[{}]", stat.comm.display()));
            Some(ProcessStatus {
                pid,
                host_pid: None,
                host: host.clone(),
                part,
                command,
                threads: stat.num_threads,
                resident_bytes: stat.rss_pages * 4096,
            })
        })
        .collect()
}

/// Fills in what only the caller can see: the PIDs that agent and processes have in the caller's PID namespace. `agent`
/// is the agent's PID there.
pub fn host_pids(status: &mut Status, agent: i32) {
    if agent <= 0 {
        return;
    }
    let inner = |pid: i32| proc::Status::read(pid).ok().and_then(|s| s.list("NSpid").last().copied());
    let mut host: HashMap<i64, i32> = HashMap::new();
    for (pid, _) in proc::descendants(agent).unwrap_or_default() {
        if let Some(i) = inner(pid) {
            host.insert(i, pid);
        }
    }
    for p in status.processes.iter_mut().filter(|p| p.part == 0) {
        p.host_pid = host.get(&i64::from(p.pid)).copied();
    }
    if let Some(a) = &mut status.agent {
        a.host_pid = Some(agent);
    }
}
