//! Parents inside `vfork`: they cannot be stopped until their child has called exec or ended, and nobody can read all
//! of their registers.

use crate::stop::listing::Listing;
use crate::CaptureError;
use belay_kernel::{kcmp, proc};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long a task may take to reach its stop before the checkpoint is given up.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// Thread `tid` of process `pid` waits for `child`.
#[derive(Debug, Clone, Copy)]
struct Wait {
    pid: i32,
    tid: i32,
    child: i32,
}

fn share_memory(a: i32, b: i32) -> bool {
    kcmp::compare(a, b, kcmp::Object::Vm).is_ok_and(|o| o.is_eq())
}

/// Whether a thread that waits uninterruptibly may do so in a call that makes a process, not for a disk.
fn may_be_making(tid: i32) -> bool {
    let call = proc::text(format!("/proc/{tid}/syscall")).ok();
    let number = call.and_then(|c| c.split_whitespace().next()?.parse::<i64>().ok());
    number.is_none_or(|n| [libc::SYS_vfork, libc::SYS_clone, libc::SYS_clone3].contains(&n))
}

/// The children of process `pid` for which its thread `tid` waits: they share its memory, and it cannot be stopped.
pub(crate) fn children(pid: i32, tid: i32) -> Vec<i32> {
    if !proc::stat(tid).is_ok_and(|s| s.state == 'D') || !may_be_making(tid) {
        return Vec::new();
    }
    let mut children = proc::children(pid).unwrap_or_default();
    children.retain(|child| share_memory(tid, *child));
    children
}

fn waits(listing: &Listing) -> Vec<Wait> {
    let shares = |(child, parent, _): &&(i32, i32, Vec<i32>)| share_memory(*parent, *child);
    let parents: BTreeSet<i32> = listing
        .processes
        .iter()
        .filter(shares)
        .map(|(_, parent, _)| *parent)
        .collect();
    let parents = listing.processes.iter().filter(|(pid, ..)| parents.contains(pid));
    let threads = parents.flat_map(|(pid, _, tids)| tids.iter().map(move |tid| (*pid, *tid)));
    threads
        .flat_map(|(pid, tid)| children(pid, tid).into_iter().map(move |child| Wait { pid, tid, child }))
        .collect()
}

/// Lists the descendants of `agent` but its children `outside` and what they have started, and waits, while they run,
/// until no thread that was then in `vfork` still waits for the same child.
pub(crate) fn outlast(agent: i32, outside: &[i32]) -> Result<Listing, CaptureError> {
    let listing = Listing::make(agent, outside)?;
    let begin = Instant::now();
    let mut waits = waits(&listing);
    if waits.is_empty() {
        return Ok(listing);
    }
    while let Some(Wait { pid, tid, child }) = waits.first().copied() {
        if begin.elapsed() > LIMIT {
            return Err(CaptureError::refuse(
                pid,
                format!("thread {tid}"),
                format!(
                    "waits in vfork for process {child}, which has neither called exec nor ended for {} s; try again",
                    LIMIT.as_secs()
                ),
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
        waits.retain(|w| children(w.pid, w.tid).contains(&w.child));
    }
    Listing::make(agent, outside)
}
