//! What a process of the job would inherit from who restarts it, and is set again only where it is not the kernel's
//! default (`setarch -R belay restart`, `chrt -b 0 belay restart`): the agent gives it up before it makes them.

use crate::{state, tree};
use belay_image::model::{Job, Process};
use belay_kernel::sched::{self, Attributes, UTIL_CLAMP};
use belay_kernel::{prctl, process};
use rustix::process::{set_time_stamp_counter_readability, time_stamp_counter_readability, TimeStampCounterReadability};
use rustix::thread::{no_new_privs, CapabilitySet};
use std::io;

const PR_MCE_KILL_DEFAULT: i32 = 2;
/// Bounds of the utilization of a thread that has asked for none, and how it asks for none.
const NO_CLAMPS: (u32, u32) = (0, 1024);
const CLEAR: u32 = u32::MAX;

/// Gives it up. What cannot be is named: then the job has it too.
pub(crate) fn give_up(job: &Job) {
    let wants = |p: &Process| tree::is_live(p) && p.threads.iter().any(|t| !state::whose(p, t).0.no_new_privs);
    if no_new_privs().is_ok_and(|now| now) && job.processes.iter().any(wants) {
        let why = "nobody can take it back: set-user-ID programs give its processes no privileges";
        note(Err(io::Error::other(why)), "no_new_privs");
    }
    note(capabilities(), "inheritable capabilities");
    // The agent needs none of what it can change.
    if process::domain().is_ok_and(|now| now > 0) {
        note(process::leave_domain(), "execution domain");
    }
    note(scheduling(), "scheduling policy");
    for (number, what) in [
        (prctl::NO_HUGE_PAGES, "huge pages"),
        (prctl::MERGED, "merging of equal pages"),
        (prctl::SERVES_IO, "being one that serves I/O"),
    ] {
        // What the kernel does not know, or only a capability may ask for, is as usual.
        if number.get().is_ok_and(|now| now > 0) {
            note(number.set(0), what);
        }
    }
    if prctl::MACHINE_CHECK.get().is_ok_and(|now| now != PR_MCE_KILL_DEFAULT) {
        note(prctl::MACHINE_CHECK.set(0), "what a machine check does");
    }
    if time_stamp_counter_readability().is_ok_and(|now| now == TimeStampCounterReadability::RaiseSIGSEGV) {
        let readable = set_time_stamp_counter_readability(TimeStampCounterReadability::Readable);
        note(readable.map_err(io::Error::from), "no time-stamp counter");
    }
}

/// No capabilities that programs of the job would inherit, which are those that are ambient too.
fn capabilities() -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    if sets.inheritable.is_empty() {
        return Ok(());
    }
    sets.inheritable = CapabilitySet::empty();
    Ok(rustix::thread::set_capabilities(None, sets)?)
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
