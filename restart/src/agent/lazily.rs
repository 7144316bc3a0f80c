//! With `--lazy`: what is filled while the job runs, and the processes that do that.

use crate::fail::{Outcome, RestartError};
use crate::filling::Filling;
use crate::kin::Share;
use crate::later::{self, Later};
use crate::namespace::Way;
use crate::spawn::Forest;
use crate::{pager, sys};
use belay_image::extents::Extent;
use belay_image::model::{Job, Process};
use belay_kernel::pidfd;
use belay_plugins::{Group, Rebuilder};
use belay_storage::chunk::Chunk;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

/// So many processes fill memory.
pub(super) const PROCESSES: usize = 2;

/// Whether memory can be filled while the job runs; the user is told why not.
pub(super) fn is_possible(way: Way, group: Option<&dyn Group>) -> bool {
    let why = later::hindrance(way, group.is_some());
    if let Some(why) = &why {
        tracing::warn!(why, "not lazy");
        sys::say(&format!("--lazy: {why}: all memory is read before the program goes on"));
    }
    why.is_none()
}

/// What of memory is filled later, by PID. What processes have in common is there when they are made.
pub(super) fn leave_for_later(
    job: &Job,
    extents: &mut HashMap<i32, Vec<Extent>>,
    shares: &mut HashMap<i32, Share>,
    (rebuilder, early): (&Rebuilder, &HashSet<i32>),
) -> HashMap<i32, Later> {
    let mut out = HashMap::new();
    let own = |p: &Process| has_own_descriptors(p, job, rebuilder, early);
    let may_be = |p: &&Process| later::may_be(p, &job.processes, own, rebuilder.uses_gpu(p.pid));
    for p in job.processes.iter().filter(may_be) {
        let Some(pages) = extents.get_mut(&p.pid) else { continue };
        let share = shares.get_mut(&p.pid);
        let kept = share.as_ref().map_or(&[][..], |s| s.kept.as_slice());
        out.extend(later::split(&p.vmas, &later::touched(p), kept, pages).map(|later| (p.pid, later)));
        if let Some(share) = share {
            share.rest.clone_from(pages);
        }
    }
    out
}

/// Whether no other process or thread has a table of descriptors in common with `p`, or one of its own in it.
fn has_own_descriptors(p: &Process, job: &Job, rebuilder: &Rebuilder, early: &HashSet<i32>) -> bool {
    let owner = |q: &Process| rebuilder.table_owner(q.pid);
    let shared = job.processes.iter().any(|q| q.pid != p.pid && owner(q) == p.pid);
    owner(p) == p.pid && !shared && !p.threads.iter().any(|t| early.contains(&t.tid))
}

/// Makes the processes that fill memory, with the descriptors by which those of the job wait for it.
pub(super) fn begin(
    forest: &Forest<'_>,
    numbers: Option<[i32; PROCESSES]>,
    chunks: &HashMap<u32, Chunk>,
    processes: &[(usize, i32, OwnedFd)],
) -> Outcome<Option<Filling>> {
    let mut taken = Vec::new();
    for (i, pid, process) in processes.iter().filter(|(_, pid, _)| forest.later.contains_key(pid)) {
        let uffd = forest.shared.slot(*i).uffd.load(Ordering::Acquire);
        let uffd = pidfd::getfd(process.as_fd(), uffd);
        taken.push((
            *pid,
            uffd.map_err(|e| RestartError::at("spawn", format!("process {pid}: take its userfaultfd: {e}")))?,
        ));
    }
    let numbers = numbers.filter(|_| !taken.is_empty());
    numbers
        .map(|numbers| pager::begin(taken, forest.later, chunks, numbers))
        .transpose()
}
