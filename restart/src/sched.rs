//! Scheduling, limits and other attributes that the agent may set from outside. A value that this machine or user does not allow is noted, not fatal:
//! it changes how fast the job runs, not what it computes.

use belay_image::model::{Process, Thread};
use std::io;

const SCHED_FLAG_RESET_ON_FORK: u64 = 1;
const IOPRIO_WHO_PROCESS: i32 = 1;
const AFFINITY_WORDS: usize = 128;

#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// What every restored thread has inherited from the agent.
pub(crate) struct Defaults {
    nice: i32,
    affinity: Vec<u64>,
}

impl Defaults {
    /// The agent's own.
    pub(crate) fn own() -> Self {
        // SAFETY: takes numbers only.
        let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let mut mask = vec![0u64; AFFINITY_WORDS];
        // SAFETY: the kernel writes at most the length given.
        let n = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, mask.len() * 8, mask.as_mut_ptr()) };
        mask.truncate(usize::try_from(n).unwrap_or(0) / 8);
        Self { nice, affinity: mask }
    }
}

fn note(result: io::Result<()>, id: i32, what: &str) {
    if let Err(e) = result {
        tracing::warn!(task = id, error = %e, "{what} not restored");
    }
}

fn check(ret: libc::c_long) -> io::Result<()> {
    belay_kernel::check(ret).map(drop)
}

/// Scheduling of thread `t`.
pub(crate) fn thread(t: &Thread, defaults: &Defaults) {
    let s = &t.sched;
    if s.nice != defaults.nice {
        // On its own: `sched_setattr` ignores it for SCHED_IDLE.
        // SAFETY: takes numbers only.
        let r = unsafe { libc::setpriority(libc::PRIO_PROCESS, t.tid.unsigned_abs(), s.nice) };
        note(check(r.into()), t.tid, "nice value");
    }
    if s.policy != 0 || s.reset_on_fork {
        let attr = SchedAttr {
            size: size_of::<SchedAttr>() as u32,
            policy: s.policy.unsigned_abs(),
            flags: if s.reset_on_fork { SCHED_FLAG_RESET_ON_FORK } else { 0 },
            nice: s.nice,
            priority: s.rt_priority.unsigned_abs(),
            ..SchedAttr::default()
        };
        // SAFETY: a live structure of the size it names.
        let r = unsafe { libc::syscall(libc::SYS_sched_setattr, t.tid, &raw const attr, 0) };
        note(check(r), t.tid, "scheduling policy");
    }
    let trim = |m: &[u64]| m.iter().rposition(|w| *w != 0).map_or(0, |n| n + 1);
    let (wanted, have) = (
        &t.affinity[..trim(&t.affinity)],
        &defaults.affinity[..trim(&defaults.affinity)],
    );
    if !wanted.is_empty() && wanted != have {
        // SAFETY: a live array of that length.
        let r = unsafe { libc::syscall(libc::SYS_sched_setaffinity, t.tid, size_of_val(wanted), wanted.as_ptr()) };
        note(
            check(r),
            t.tid,
            "processor affinity (not available here; the thread may run on all)",
        );
    }
    if t.ioprio != 0 {
        // SAFETY: takes numbers only.
        let r = unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, t.tid, t.ioprio) };
        note(check(r), t.tid, "I/O priority");
    }
}

/// Limits and the like of process `p`.
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
}

/// Sets a limit; when the hard limit cannot be raised, the soft one is set as high as possible.
fn limit(pid: i32, resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let mut old = libc::rlimit64 {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let new = libc::rlimit64 {
        rlim_cur: soft,
        rlim_max: hard,
    };
    // SAFETY: live structures.
    check(unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, std::ptr::null::<u8>(), &raw mut old) })?;
    if old.rlim_cur == soft && old.rlim_max == hard {
        return Ok(());
    }
    // SAFETY: live structures.
    let r = check(unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, &raw const new, std::ptr::null::<u8>()) });
    if r.is_err() {
        let best = libc::rlimit64 {
            rlim_cur: soft.min(old.rlim_max),
            rlim_max: old.rlim_max.min(hard),
        };
        // SAFETY: live structures.
        check(unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, &raw const best, std::ptr::null::<u8>()) })?;
    }
    r
}
