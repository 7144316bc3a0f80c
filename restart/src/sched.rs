//! Scheduling, limits and other attributes that the agent may set from outside. A value that this machine or user does
//! not allow is noted, not fatal: it changes how fast the job runs, not what it computes.

use belay_image::attributes::{Policy, SchedMore};
use belay_image::model::{Job, Process, Thread};
use belay_kernel::limits::{self, Raised};
use belay_kernel::proc::Status;
use belay_kernel::sched::{self, Attributes, RESET_ON_FORK, UTIL_CLAMP};
use rustix::process::{getpriority_process, setpriority_process, Pid};
use std::io;
use std::time::Duration;

/// How often the kernel lets ordinary users set the nice value of a session.
const AGAIN: Duration = Duration::from_millis(110);
/// How often it comes again: others, who do the same, may have been first.
const TIMES: u32 = 10;

/// What every restored thread has inherited from the agent.
pub(crate) struct Defaults {
    nice: i32,
    ioprio: i32,
    processors: Processors,
}

/// Masks of processors, one bit each.
struct Processors {
    /// What the job was given at the checkpoint; empty where that is not known.
    then: Vec<u64>,
    /// What the restart is given.
    now: Vec<u64>,
}

impl Defaults {
    /// The agent's own, of a job that was given the processors `then`.
    pub(crate) fn own(then: &[u64]) -> Self {
        Self {
            nice: getpriority_process(None).unwrap_or(-1),
            ioprio: sched::io_priority(0).unwrap_or(0),
            processors: Processors {
                then: then.to_vec(),
                now: sched::processors().unwrap_or_default(),
            },
        }
    }
}

fn note(result: io::Result<()>, id: i32, what: &str) {
    if let Err(e) = result {
        tracing::warn!(task = id, error = %e, "{what} not restored");
    }
}

/// Scheduling of thread `t`.
pub(crate) fn thread(t: &Thread, defaults: &Defaults) {
    let s = &t.sched;
    if s.nice != defaults.nice {
        // On its own: `sched_setattr` ignores it for SCHED_IDLE.
        let set = setpriority_process(Pid::from_raw(t.tid), s.nice);
        note(set.map_err(io::Error::from), t.tid, "nice value");
    }
    if s.policy != 0 || s.reset_on_fork || s.more != SchedMore::default() {
        let [runtime, deadline, period] = s.more.times;
        let clamps = if s.more.clamps.is_some() { UTIL_CLAMP } else { 0 };
        let (util_min, util_max) = s.more.clamps.unwrap_or_default();
        let wanted = Attributes {
            policy: s.policy.unsigned_abs(),
            flags: s.more.flags | clamps | if s.reset_on_fork { RESET_ON_FORK } else { 0 },
            nice: s.nice,
            priority: s.rt_priority.unsigned_abs(),
            runtime,
            deadline,
            period,
            util_min,
            util_max,
            ..Attributes::default()
        };
        note(sched::set(t.tid, &wanted), t.tid, "scheduling policy");
    }
    affinity(t, &defaults.processors);
    if t.ioprio != defaults.ioprio {
        note(sched::set_io_priority(t.tid, t.ioprio), t.tid, "I/O priority");
    }
}

/// The processors of thread `t`: those to which it has restricted itself, as far as the restart is given them.
fn affinity(t: &Thread, processors: &Processors) {
    let Some((mask, whole)) = processors.allowed(&t.affinity) else {
        return;
    };
    let set = sched::set_processors(t.tid, &mask);
    let lacks = || Err(io::Error::other("the restart is not given so many processors"));
    let done = set.and_then(|()| if whole { Ok(()) } else { lacks() });
    note(done, t.tid, "processor affinity");
}

impl Processors {
    /// What a thread that `wanted` these processors gets, or where that would be none, all that are given; and whether
    /// it is as many. `None` where it wants nothing.
    ///
    /// Where the restart is given others than the job was, as by a batch system on a shared node, each is replaced by the
    /// one in the same place: the first by the first, and so on, and from the beginning again where there are fewer. So
    /// threads that were kept apart stay so.
    fn allowed(&self, wanted: &[u64]) -> Option<(Vec<u64>, bool)> {
        if wanted.iter().all(|w| *w == 0) {
            return None;
        }
        let given: Vec<usize> = set_bits(&self.now).collect();
        let is_given = |bit| given.binary_search(&bit).is_ok();
        let moves = !self.then.is_empty() && !set_bits(&self.then).all(is_given);
        let places: Vec<usize> = if moves {
            let had = set_bits(&self.then).enumerate();
            had.filter(|(_, bit)| has(wanted, *bit)).map(|(place, _)| place).collect()
        } else {
            let has_place = |bit| given.binary_search(&bit).ok();
            set_bits(wanted).filter_map(has_place).collect()
        };
        let mut mask = vec![0; self.now.len()];
        for place in &places {
            if let Some(bit) = place.checked_rem(given.len()).map(|place| given[place]) {
                mask[bit / 64] |= 1 << (bit % 64);
            }
        }
        let whole = set_bits(&mask).count() == set_bits(wanted).count();
        Some((if places.is_empty() { self.now.clone() } else { mask }, whole))
    }
}

/// Whether `mask` has `bit`.
fn has(mask: &[u64], bit: usize) -> bool {
    mask.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 != 0)
}

/// The bits of `mask`, in ascending order.
fn set_bits(mask: &[u64]) -> impl Iterator<Item = usize> + '_ {
    (0..mask.len() * 64).filter(|bit| has(mask, *bit))
}

/// Raises limits of the restart under which a process of the job would be denied what it has, or needs while it is made.
/// Each gets its own when all is there. Before namespaces are made: a user namespace keeps some of these limits.
pub(crate) fn make_room(job: &Job) -> Raised {
    let mut raised = Raised::default();
    for resource in [
        libc::RLIMIT_DATA,
        libc::RLIMIT_FSIZE,
        libc::RLIMIT_NPROC,
        libc::RLIMIT_MEMLOCK,
        libc::RLIMIT_AS,
        libc::RLIMIT_SIGPENDING,
        libc::RLIMIT_MSGQUEUE,
        libc::RLIMIT_NICE,
        libc::RLIMIT_RTPRIO,
    ] {
        let of_process = |p: &Process| p.rlimits.get(resource as usize).map(|(_, hard)| *hard);
        raised.raise(resource, job.processes.iter().filter_map(of_process).max().unwrap_or(0));
    }
    raised
}

/// Limits and the like of process `p`, once its threads are scheduled.
pub(crate) fn process(p: &Process) {
    for (resource, (soft, hard)) in (0u32..).zip(&p.rlimits) {
        note(
            limit(p.pid, resource, *soft, *hard),
            p.pid,
            &format!("resource limit {resource}"),
        );
    }
    let path = format!("/proc/{}/oom_score_adj", p.pid);
    let now = std::fs::read_to_string(&path).ok().and_then(|s| s.trim().parse::<i32>().ok());
    if now != Some(p.oom_score_adj) {
        note(std::fs::write(&path, p.oom_score_adj.to_string()), p.pid, "oom_score_adj");
    }
    if let Some(filter) = p.coredump_filter {
        let path = format!("/proc/{}/coredump_filter", p.pid);
        note(std::fs::write(path, filter.to_string()), p.pid, "what a core dump holds");
    }
    if let Some(nice) = p.session_nice.filter(|nice| *nice != 0) {
        note(session(p.pid, nice), p.pid, "nice value of the session (autogroup)");
    }
}

/// Says where memory of `p` shall lie on nodes that are not to be had here: it lies on the others that are named, or
/// where the kernel puts it.
pub(crate) fn nodes(p: &Process, here: &[u64]) {
    let policies = p.threads.iter().filter_map(|t| t.policy.as_ref());
    let named = policies.chain(p.placements.iter().map(|placement| &placement.policy));
    let lacks = |policy: &Policy| {
        let mut words = policy.nodes.iter().zip(here.iter().chain(std::iter::repeat(&0)));
        words.any(|(wanted, here)| wanted & !here != 0)
    };
    if named.into_iter().any(lacks) {
        tracing::warn!(
            task = p.pid,
            "memory policy not restored as it was: it names nodes that are not to be had here"
        );
    }
}

/// The memory nodes that may be used here.
pub(crate) fn memory_nodes() -> Vec<u64> {
    let status = Status::read(std::process::id().cast_signed()).ok();
    let text = status.as_ref().and_then(|s| s.text("Mems_allowed")).unwrap_or_default();
    // Groups of 32 nodes, the highest first.
    let groups: Vec<u64> = text.rsplit(',').map(|g| u64::from_str_radix(g, 16).unwrap_or(0)).collect();
    groups
        .chunks(2)
        .map(|pair| pair.iter().rev().fold(0, |w, g| w << 32 | g))
        .collect()
}

/// Sets the nice value of the session that process `pid` is in. An ordinary user may do so to one session of the
/// machine in a tenth of a second, and is told to come again.
fn session(pid: i32, nice: i32) -> io::Result<()> {
    let mut left = TIMES;
    loop {
        match std::fs::write(format!("/proc/{pid}/autogroup"), nice.to_string()) {
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) && left > 0 => {
                left -= 1;
                std::thread::sleep(AGAIN);
            }
            done => return done,
        }
    }
}

/// Sets a limit; when the hard limit cannot be raised, the soft one is set as high as possible.
fn limit(pid: i32, resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let old = limits::of(pid, resource)?;
    if old == (soft, hard) {
        return Ok(());
    }
    let r = limits::set(pid, resource, (soft, hard));
    if r.is_err() {
        limits::set(pid, resource, (soft.min(old.1), old.1.min(hard)))?;
    }
    r
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a thread that wants these gets, where the job was given `then`, and is given `now`.
    fn allowed(wanted: &[u64], then: &[u64], now: &[u64]) -> Option<(Vec<u64>, bool)> {
        let (then, now) = (then.to_vec(), now.to_vec());
        Processors { then, now }.allowed(wanted)
    }

    #[test]
    fn processors_that_are_not_given_are_not_taken() {
        for then in [&[][..], &[0b0110]] {
            assert_eq!(allowed(&[], then, &[0b1110]), None, "what is given");
            assert_eq!(allowed(&[0b0110], then, &[0b1111]), Some((vec![0b0110], true)));
        }
        assert_eq!(allowed(&[0b0110], &[], &[0b1100, 1]), Some((vec![0b0100, 0], false)));
        assert_eq!(
            allowed(&[0b0011, 7], &[], &[0b1100]),
            Some((vec![0b1100], false)),
            "none of them"
        );
        assert_eq!(allowed(&[0b0011, 1], &[], &[0b0001]), Some((vec![0b0001], false)));
        assert_eq!(allowed(&[0b0100], &[0b0100], &[]), Some((vec![], false)));
    }

    #[test]
    fn others_than_before_are_taken_by_their_places() {
        // Four processors from 60 on, where it had the first four.
        let (then, now) = (&[0b1111][..], &[0xf << 60][..]);
        let of_one = |bit: u32| allowed(&[1 << bit], then, now);
        for place in 0..4 {
            assert_eq!(of_one(place), Some((vec![1 << (60 + place)], true)));
        }
        assert_eq!(allowed(&[0b0110], then, now), Some((vec![6 << 60], true)));
        // Partly others: a half stays a half.
        assert_eq!(allowed(&[0b0011], then, &[0b11_1100]), Some((vec![0b1100], true)));
        assert_eq!(allowed(&[0b1100], then, &[0b11_1100]), Some((vec![0b11_0000], true)));
        // Fewer: none is left out, and none gets what is not given.
        assert_eq!(allowed(&[0b1000], then, &[0b10100]), Some((vec![0b10000], true)));
        assert_eq!(allowed(&[0b0111], then, &[0b10100]), Some((vec![0b10100], false)));
        // It had taken one that the job was not given.
        assert_eq!(allowed(&[1 << 9], then, now), Some((vec![0xf << 60], false)));
    }
}
