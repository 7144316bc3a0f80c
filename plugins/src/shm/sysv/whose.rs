//! Whose an object is, in an IPC namespace that others use too.
//!
//! It is the job's where a live process of the job was the last to use it. One that was made since the launch by the
//! job's user, and that no living process has used last, may be what ended processes of the job have left, or what
//! nobody has used yet, or another program's: it is only guessed. It is there after a restart in an IPC namespace of
//! its own, but stands in the way of nothing.

use super::{SysV, OWN_NAMESPACE};
use crate::fault::Fault;
use belay_kernel::proc;
use rustix::time::ClockId;
use std::collections::BTreeSet;
use std::time::SystemTime;

/// What tells whose an object is.
pub(super) struct Traces {
    /// The user who made it.
    pub(super) creator: i64,
    /// Who used it last, and its maker where the kernel tells; 0 is nobody.
    pub(super) last: BTreeSet<i32>,
    /// The time of its last use or change.
    pub(super) used: i64,
    /// The time of its last change.
    pub(super) changed: i64,
}

/// Objects of a restarted job that had only been guessed to be its.
#[derive(Debug, Default)]
pub(super) struct Guesses {
    pub(super) segments: BTreeSet<i32>,
    pub(super) semaphores: BTreeSet<i32>,
    pub(super) queues: BTreeSet<i32>,
}

impl Guesses {
    pub(super) fn of(v: &SysV) -> Self {
        let ids = |all: &mut dyn Iterator<Item = (i32, bool)>| all.filter(|(_, guessed)| *guessed).map(|(id, _)| id).collect();
        Self {
            segments: ids(&mut v.segments.iter().map(|s| (s.common.id, s.guessed))),
            semaphores: ids(&mut v.semaphores.iter().map(|s| (s.common.id, s.guessed))),
            queues: ids(&mut v.queues.iter().map(|q| (q.common.id, q.guessed))),
        }
    }
}

/// A time in seconds, as the kernel tells it of objects.
pub(super) fn seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    i64::try_from(since).unwrap_or(i64::MAX)
}

/// Columns of lists that name processes.
pub(super) fn processes(columns: &[i64]) -> BTreeSet<i32> {
    columns.iter().filter_map(|pid| i32::try_from(*pid).ok()).collect()
}

/// Whether an object is only guessed to be that of the job of `pids`; `None` where it is not taken for the job's.
pub(super) fn is_guessed(traces: &Traces, pids: &BTreeSet<i32>, launched: i64) -> Option<bool> {
    let last = &traces.last;
    // Numbers come around: one of the job's can have been another's before.
    let of_job = |pid: &i32| pids.contains(pid) && proc::stat(*pid).map_or(true, |s| has_used(&s, traces.used.max(traces.changed)));
    if last.iter().any(of_job) {
        return Some(false);
    }
    let me = i64::from(rustix::process::geteuid().as_raw());
    let lives = |pid: &i32| proc::stat(*pid).is_ok_and(|s| !s.is_dead() && has_used(&s, traces.used));
    // Times are in seconds. In that of the launch the numbers of processes tell what was before, where somebody has used it.
    let maybe_since = || last.iter().all(|pid| *pid == 0) || any_after(last, std::process::id().cast_signed());
    let since = traces.changed > launched || traces.changed == launched && maybe_since();
    (traces.creator == me && since && !last.iter().any(lives)).then_some(true)
}

/// Makes an object again with `make`. Nothing depends on one that is only guessed to be the job's: where that fails,
/// `remove` takes it away, and `tell` is told why it is not there.
pub(super) fn rebuild(
    (name, guessed): (&str, bool),
    make: impl FnOnce() -> Result<(), Fault>,
    remove: impl FnOnce(),
    tell: &dyn Fn(&str),
) -> Result<(), Fault> {
    if !guessed {
        return make();
    }
    if OWN_NAMESPACE.get().is_none() {
        // If it is another program's, it is still there.
        return Ok(());
    }
    if let Err(e) = make() {
        remove();
        tell(&format!(
            "System V {name}, which may be another program's, is not made again: {e}"
        ));
    }
    Ok(())
}

/// Whether a process can have used something at time `used`, in seconds: numbers come around again, so another may have
/// had its number then.
fn has_used(process: &proc::Stat, used: i64) -> bool {
    let seconds = |clock| rustix::time::clock_gettime(clock).tv_sec;
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let began = i64::try_from(process.starttime / ticks).unwrap_or(i64::MAX);
    seconds(ClockId::Realtime) - seconds(ClockId::Boottime) + began <= used + 2
}

/// Whether one of these processes began after `other`, as far as their numbers tell.
fn any_after(pids: &BTreeSet<i32>, other: i32) -> bool {
    let numbers = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok();
    let numbers = numbers.and_then(|n| n.trim().parse().ok()).unwrap_or(32768);
    pids.iter().any(|pid| is_after(*pid, other, numbers))
}

/// Whether process `pid` began after `other`, as far as their numbers tell, of which there are `numbers`: they come around again.
fn is_after(pid: i32, other: i32, numbers: i32) -> bool {
    pid > 0 && (pid - other).rem_euclid(numbers) < numbers / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_began_later_has_not_used_an_object() {
        let me = proc::stat(std::process::id().cast_signed()).unwrap();
        let now = seconds(SystemTime::now());
        assert!(has_used(&me, now) && !has_used(&me, 0));
        let child = std::process::Command::new("sleep").arg("1000").spawn();
        let mut child = child.unwrap();
        let began = proc::stat(child.id().cast_signed()).unwrap();
        assert!(has_used(&began, now) && !has_used(&began, now - 10));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn numbers_of_processes_come_around_again() {
        assert!(is_after(32710, 32700, 32768) && is_after(473, 32700, 32768));
        assert!(!is_after(32690, 32700, 32768) && !is_after(32700, 473, 32768) && !is_after(0, 32700, 32768));
    }

    #[test]
    fn an_object_is_guessed_from_who_made_it_and_when() {
        let launched = seconds(SystemTime::now()) - 10;
        let creator = i64::from(rustix::process::geteuid().as_raw());
        let me = std::process::id().cast_signed();
        let traces = |last: &[i32], changed: i64, creator: i64| Traces {
            creator,
            last: last.iter().copied().collect(),
            used: changed,
            changed,
        };
        let job = BTreeSet::from([me]);
        let guess = |traces| is_guessed(&traces, &BTreeSet::new(), launched);
        assert_eq!(
            is_guessed(&traces(&[me, 0], launched + 10, creator + 1), &job, launched),
            Some(false),
            "used by the job"
        );
        assert_eq!(
            is_guessed(&traces(&[me], 0, creator), &job, launched),
            None,
            "used by somebody who had that number before"
        );
        assert_eq!(guess(traces(&[0], launched, creator)), Some(true), "used by nobody");
        assert_eq!(guess(traces(&[0], launched - 1, creator)), None, "there before the launch");
        assert_eq!(guess(traces(&[0], launched, creator + 1)), None, "another user's");
        assert_eq!(
            guess(traces(&[me], launched + 10, creator)),
            None,
            "used by a living process outside"
        );
    }
}
