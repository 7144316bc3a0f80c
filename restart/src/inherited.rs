//! What a process of the job would inherit from who restarts it, and is set again only where it is not the kernel's
//! default (`setarch -R belay restart`, `chrt -b 0 belay restart`): the agent gives it up before it makes them.

use crate::{state, tree};
use belay_image::model::{Job, Process};
use belay_kernel::sched::{self, Attributes, UTIL_CLAMP};
use std::io;

const PR_GET_TSC: i32 = 25;
const PR_SET_TSC: i32 = 26;
const PR_TSC_ENABLE: u64 = 1;
const PR_TSC_SIGSEGV: i32 = 2;
const PR_MCE_KILL: i32 = 33;
const PR_MCE_KILL_CLEAR: u64 = 0;
const PR_MCE_KILL_GET: i32 = 34;
const PR_MCE_KILL_DEFAULT: i32 = 2;
const PR_GET_NO_NEW_PRIVS: i32 = 39;
const PR_SET_THP_DISABLE: i32 = 41;
const PR_GET_THP_DISABLE: i32 = 42;
const PR_SET_IO_FLUSHER: i32 = 57;
const PR_GET_IO_FLUSHER: i32 = 58;
const PR_SET_MEMORY_MERGE: i32 = 67;
const PR_GET_MEMORY_MERGE: i32 = 68;
const CAP_VERSION_3: u32 = 0x2008_0522;
const ASK: u64 = 0xffff_ffff;
/// Bounds of the utilization of a thread that has asked for none, and how it asks for none.
const NO_CLAMPS: (u32, u32) = (0, 1024);
const CLEAR: u32 = u32::MAX;

/// Gives it up. What cannot be is named: then the job has it too.
pub(crate) fn give_up(job: &Job) {
    let wants = |p: &Process| tree::is_live(p) && p.threads.iter().any(|t| !state::whose(p, t).0.no_new_privs);
    if prctl(PR_GET_NO_NEW_PRIVS, 0).is_ok_and(|now| now > 0) && job.processes.iter().any(wants) {
        let why = "nobody can take it back: set-user-ID programs give its processes no privileges";
        note(Err(io::Error::other(why)), "no_new_privs");
    }
    note(capabilities(), "inheritable capabilities");
    // SAFETY: takes a number.
    if unsafe { libc::personality(ASK) } > 0 {
        // SAFETY: as above. The agent needs none of what it can change.
        note(
            belay_kernel::check(unsafe { libc::personality(0) }.into()).map(drop),
            "execution domain",
        );
    }
    note(scheduling(), "scheduling policy");
    for (get, set, what) in [
        (PR_GET_THP_DISABLE, PR_SET_THP_DISABLE, "huge pages"),
        (PR_GET_MEMORY_MERGE, PR_SET_MEMORY_MERGE, "merging of equal pages"),
        (PR_GET_IO_FLUSHER, PR_SET_IO_FLUSHER, "being one that serves I/O"),
    ] {
        // What the kernel does not know, or only a capability may ask for, is as usual.
        if prctl(get, 0).is_ok_and(|now| now > 0) {
            note(prctl(set, 0).map(drop), what);
        }
    }
    if prctl(PR_MCE_KILL_GET, 0).is_ok_and(|now| now != PR_MCE_KILL_DEFAULT) {
        note(prctl(PR_MCE_KILL, PR_MCE_KILL_CLEAR).map(drop), "what a machine check does");
    }
    let mut tsc = 0;
    // SAFETY: `tsc` is valid for writing.
    if unsafe { libc::prctl(PR_GET_TSC, &raw mut tsc) } == 0 && tsc == PR_TSC_SIGSEGV {
        note(prctl(PR_SET_TSC, PR_TSC_ENABLE).map(drop), "no time-stamp counter");
    }
}

fn prctl(what: i32, argument: u64) -> io::Result<i32> {
    // SAFETY: those that are asked for here take numbers only.
    let done = belay_kernel::check(unsafe { libc::syscall(libc::SYS_prctl, what, argument, 0, 0, 0) })?;
    Ok(i32::try_from(done).unwrap_or(-1))
}

/// No capabilities that programs of the job would inherit, which are those that are ambient too.
fn capabilities() -> io::Result<()> {
    // Of each half of the sets: effective, permitted, inheritable.
    let (header, mut sets) = ([CAP_VERSION_3, 0], [[0u32; 3]; 2]);
    // SAFETY: both have the sizes of the kernel's structures of this version, and `sets` is valid for writing.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) })?;
    if sets.iter().all(|half| half[2] == 0) {
        return Ok(());
    }
    sets.iter_mut().for_each(|half| half[2] = 0);
    // SAFETY: as above.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) }).map(drop)
}

/// The policy of everybody, with the kernel's own time slice and without bounds of utilization.
fn scheduling() -> io::Result<()> {
    let now = sched::get(0)?;
    let clamped = ![NO_CLAMPS, (0, 0)].contains(&(now.util_min, now.util_max));
    let wanted = Attributes {
        nice: now.nice,
        flags: if clamped { UTIL_CLAMP } else { 0 },
        util_min: CLEAR,
        util_max: CLEAR,
        ..Attributes::default()
    };
    sched::set(0, &wanted)
}

fn note(result: io::Result<()>, what: &str) {
    if let Err(error) = result {
        tracing::warn!(%error, "the job inherits from its restart: {what}");
    }
}
