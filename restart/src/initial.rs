//! Restart without namespaces of its own: in the machine's, with CAP_CHECKPOINT_RESTORE, where an ordinary user may not
//! make user namespaces.
//!
//! Every process and thread gets its old number among all others of the machine, so each number must be free; that is
//! checked first, and the check names the one that is not. What namespaces would give is missing: the monotonic clock
//! is the machine's, and System V objects and POSIX message queues, which would mix with those of others, are refused.
//! No PID 1 ends what a failed restart leaves, so the front does.

use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_image::model::{Job, Process};
use belay_kernel::{proc, process};
use belay_plugins::Descriptors;
use rustix::process::Signal;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

/// How long a process that has ended may take to be collected by its parent, which is none of ours.
const COLLECTED: Duration = Duration::from_secs(2);

/// Checks that the job can be restarted here.
pub(crate) fn check(job: &Job, descriptors: &Descriptors) -> Outcome<()> {
    if let Some(object) = descriptors.of_ipc_namespace() {
        return Err(RestartError::Forbidden {
            reason: format!(
                "the job uses {object}, which need an IPC namespace of their own, and this user may not make namespaces: allow user namespaces, or restart as root"
            ),
        });
    }
    let (group, session) = (process::group(), process::session());
    let mut wanted = numbers(job);
    // The group and session that the job is started in.
    wanted.remove(&group);
    wanted.remove(&session);
    let begin = Instant::now();
    wanted.into_iter().try_for_each(|id| until_free(id, begin))
}

/// Makes sure that `id` is free. The processes of a job that has just been killed are there until their parents have
/// noticed, and their numbers for a moment longer than can be seen, so only a process that is given the number proves
/// it.
fn until_free(id: i32, begin: Instant) -> Outcome<()> {
    loop {
        match sys::fork(0, 0, id) {
            Ok(0) => sys::exit_now(0),
            Ok(pid) => {
                return sys::wait(pid, libc::__WALL)
                    .map(drop)
                    .map_err(|e| RestartError::at("restart", e))
            }
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            Err(e) => return Err(RestartError::at("spawn", format!("process {id}: {e}"))),
        }
        let holder = holders().remove(&id);
        if holder.as_ref().is_some_and(|h| !h.dead) || begin.elapsed() > COLLECTED {
            return Err(RestartError::Forbidden {
                reason: format!(
                    "process identifier {id} is in use by {}, and without user namespaces the job needs its old ones: end that, allow user namespaces, or restart as root",
                    holder.map_or_else(|| "a process that cannot be seen here".to_owned(), |h| h.what)
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Who has a number.
struct Holder {
    what: String,
    /// It has ended, and its parent has not noticed.
    dead: bool,
}

/// All numbers in use: of processes, threads, process groups and sessions.
fn holders() -> BTreeMap<i32, Holder> {
    let mut out: BTreeMap<i32, Holder> = BTreeMap::new();
    let mut add = |id: i32, what: String, dead: bool| match out.entry(id) {
        Entry::Vacant(free) => drop(free.insert(Holder { what, dead })),
        Entry::Occupied(mut known) if known.get().dead && !dead => drop(known.insert(Holder { what, dead })),
        Entry::Occupied(_) => {}
    };
    for pid in proc::pids().unwrap_or_default() {
        let Ok(s) = proc::stat(pid) else { continue };
        for tid in proc::tasks(pid).unwrap_or_default() {
            let kind = if tid == pid { "process" } else { "a thread of process" };
            add(tid, format!("{kind} {pid} ({})", s.comm.display()), s.is_dead());
        }
        add(
            s.pgrp,
            format!("the process group of process {pid} ({})", s.comm.display()),
            s.is_dead(),
        );
        add(
            s.session,
            format!("the session of process {pid} ({})", s.comm.display()),
            s.is_dead(),
        );
    }
    out
}

/// Every number that the job needs: processes and threads, and groups and sessions, whose leaders are made again for a
/// moment. The agent's own session is the present one whatever its number was.
fn numbers(job: &Job) -> BTreeSet<i32> {
    let of = |p: &Process| {
        let threads = p.threads.iter().map(|t| t.tid);
        threads.chain([p.pid, p.pgid, p.sid]).collect::<Vec<_>>()
    };
    let mut out: BTreeSet<i32> = job.processes.iter().flat_map(of).collect();
    out.extend([job.agent.pid, job.agent.pgid]);
    out.remove(&job.agent.sid);
    out.retain(|id| *id > 0);
    out
}

/// All numbers in use, for temporary processes to stay clear of.
pub(crate) fn taken() -> BTreeSet<i32> {
    holders().into_keys().collect()
}

/// Ends the calling process with its parent (`on`), or no longer.
pub(crate) fn end_with_parent(on: bool) -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(on.then_some(Signal::KILL))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{waitid, Pid, WaitId, WaitIdOptions};

    #[test]
    fn numbers_in_use_are_found_with_their_users() {
        let me = std::process::id().cast_signed();
        let child = belay_kernel::apart::child(|| 0).unwrap().pid();
        // It stays to be collected.
        let stays = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_raw(child).unwrap()), stays).unwrap();
        let all = holders();
        assert!(!all[&me].dead && all[&me].what.contains(&format!("process {me} (")));
        assert!(all[&child].dead);
        sys::wait(child, 0).unwrap();
        assert!(taken().contains(&me) && !taken().contains(&child));
    }
}
