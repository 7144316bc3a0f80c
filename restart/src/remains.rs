//! What lives on of a job that nobody attends any more: agent and front were killed, and the program was not. Its
//! restarted copy would run beside it.
//!
//! Nothing of belay is in the program, and the lock of the job directory ends with those who hold it. But the image
//! knows which processes there were, by number and time of start, and those live here or they do not. What was started
//! since, by parents that have ended, is not found.

use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_image::model::{Job, Process};
use belay_kernel::pidfd;
use belay_kernel::proc::{self, born, hung, Dying, Family, END_LIMIT};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Processes that have been killed may still be ending.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often is looked whether those that were killed do something.
const LOOK: Duration = Duration::from_secs(1);

/// A process of the job that lives.
struct Remains<'a> {
    process: &'a Process,
    fd: OwnedFd,
}

/// Refuses to restart `job` beside itself; `end` says that what is left of it is ended instead.
pub(crate) fn clear(job: &Job, end: bool) -> Outcome<()> {
    let agent = job.agent;
    // Somebody restarts a copy of the job directory: that is a job of its own.
    let attended = is_there(agent.pid, agent.started) || is_there(agent.front, agent.front_started);
    if attended || job.boot_id != proc::text("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim() {
        return Ok(());
    }
    let mut living = find(job);
    // Nobody but those that stand in for remote shells, which are belay's own and wait for the agent's word.
    if living.iter().all(Remains::is_belay) {
        let end = |r: &Remains<'_>| signal(&r.fd, libc::SIGKILL);
        living
            .iter()
            .try_for_each(end)
            .map_err(|e| RestartError::at("end what is left of the job", e))?;
    }
    let deadline = Instant::now() + PATIENCE;
    living.retain(|r| !pidfd::gone_within(r.fd.as_fd(), deadline.saturating_duration_since(Instant::now())));
    if living.is_empty() {
        return Ok(());
    }
    if end {
        return kill(living).map_err(|e| RestartError::at("end what is left of the job", e));
    }
    let named: Vec<String> = living.iter().map(Remains::name).collect();
    Err(RestartError::Lives {
        reason: format!(
            "{} of this job still run{} here, and belay's processes that attended to it were killed: end {} (kill -9), then restart",
            named.join(", "),
            if living.len() == 1 { "s" } else { "" },
            if living.len() == 1 { "it" } else { "them" },
        ),
    })
}

fn is_there(pid: i32, started: u64) -> bool {
    started != 0 && born(pid) == Some(started)
}

fn find(job: &Job) -> Vec<Remains<'_>> {
    job.processes.iter().filter_map(Remains::of).collect()
}

impl<'a> Remains<'a> {
    fn of(process: &'a Process) -> Option<Self> {
        let Process { pid, started, .. } = *process;
        // The number is its own as long as the descriptor, which was opened before, says that it lives.
        let fd = pidfd::open(pid).ok()?;
        let stat = proc::stat(pid).ok()?;
        (started != 0 && stat.starttime == started && !stat.is_dead()).then_some(Self { process, fd })
    }

    /// Whether it runs this program.
    fn is_belay(&self) -> bool {
        let program = |exe: String| std::fs::metadata(exe).ok().map(|m| (m.dev(), m.ino()));
        let own = program("/proc/self/exe".into());
        own.is_some() && program(format!("/proc/{}/exe", self.process.pid)) == own
    }

    fn name(&self) -> String {
        format!("process {} ({})", self.process.pid, self.process.comm)
    }
}

/// Kills `living` and all that they have started.
fn kill(living: Vec<Remains<'_>>) -> io::Result<()> {
    for r in &living {
        sys::say(&format!(
            "{} of this job still runs, and belay's processes that attended to it were killed: it is ended, because the job is restarted",
            r.name()
        ));
    }
    let mut all: BTreeMap<i32, OwnedFd> = living.into_iter().map(|r| (r.process.pid, r.fd)).collect();
    // Who is stopped starts nobody, and leaves nobody to others.
    let mut next: Vec<i32> = all.keys().copied().collect();
    while !next.is_empty() {
        for fd in next.iter().filter_map(|pid| all.get(pid)) {
            signal(fd, libc::SIGSTOP)?;
        }
        let mut family = Family::default();
        let below = |pid: &i32| family.descendants_but(*pid, &[]).unwrap_or_default();
        let below: BTreeSet<i32> = all.keys().flat_map(below).map(|(pid, _)| pid).collect();
        next = below.into_iter().filter(|pid| !all.contains_key(pid)).collect();
        all.extend(next.iter().filter_map(|pid| Some((*pid, pidfd::open(*pid).ok()?))));
        next.retain(|pid| all.contains_key(pid));
    }
    for fd in all.values() {
        signal(fd, libc::SIGKILL)?;
    }
    let mut dying = Dying::default();
    while let Some((pid, fd)) = all.pop_first() {
        if !pidfd::gone_within(fd.as_fd(), LOOK) {
            all.insert(pid, fd);
            let left: Vec<i32> = all.keys().copied().collect();
            if dying.is_stuck(&left, END_LIMIT) {
                return Err(hung(left.into_iter()));
            }
        }
    }
    Ok(())
}

fn signal(fd: &OwnedFd, signal: i32) -> io::Result<()> {
    match pidfd::send_signal(fd.as_fd(), signal) {
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        sent => sent,
    }
}
