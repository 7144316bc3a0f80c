//! System V shared memory, semaphores and message queues.
//!
//! At restart the job has an IPC namespace of its own, so every object gets its old identifier through `/proc/sys/kernel/*_next_id`. A segment
//! that was removed while attached is made with its identifier, attached by the processes, and removed again by [`remove_pending`].

mod lists;
mod queues;
mod segments;
mod semaphores;
mod undo;

use crate::capture::Session;
use crate::content::PageSource;
use crate::fault::{refuse, At, Fault};
use crate::model::Holder;
use belay_image::blobs::BlobReader;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::sync::OnceLock;

/// All System V objects of the job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SysV {
    segments: Vec<segments::Segment>,
    semaphores: Vec<semaphores::SemaphoreSet>,
    queues: Vec<queues::Queue>,
    /// Processes that have one list of what is to be undone (CLONE_SYSVSEM).
    #[serde(default)]
    sharers: Vec<Vec<i32>>,
}

impl SysV {
    /// Whether there are no objects that are certainly the job's.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.semaphores.iter().all(|s| s.guessed) && self.queues.is_empty()
    }

    /// Whether two processes have one list of what is to be undone.
    pub(crate) fn share_undo(&self, pid: i32, other: i32) -> bool {
        self.sharers.iter().any(|list| list.contains(&pid) && list.contains(&other))
    }
}

/// Identity common to all kinds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Common {
    id: i32,
    key: i32,
    mode: u32,
    owner: (u32, u32),
}

fn common(id: i32, p: &libc::ipc_perm) -> Common {
    Common {
        id,
        key: p.__key,
        mode: u32::from(p.mode) & 0o777,
        owner: (p.uid, p.gid),
    }
}

/// Set in the agent of a restarted job, which has an IPC namespace of its own: everything in it is the job's, but for these semaphore sets, which had only been guessed to be.
static OWN_NAMESPACE: OnceLock<BTreeSet<i32>> = OnceLock::new();

/// Called where the IPC namespace is the job's own.
pub(crate) fn owns_namespace(v: &SysV) {
    let guessed = v.semaphores.iter().filter(|s| s.guessed).map(|s| s.common.id);
    OWN_NAMESPACE.get_or_init(|| guessed.collect());
}

/// An object that could not be captured.
type Failed = (Holder, String, Fault);

/// Captures the segments the job has attached, and every object of the namespace that a process of the job made or used last.
pub(crate) fn capture(s: &mut Session<'_>, out: &mut SysV) -> Result<(), Failed> {
    let pids: BTreeSet<i32> = s.processes.iter().map(|p| p.pid).collect();
    semaphores::capture(s, &pids, out)?;
    queues::capture(s, &pids, &mut out.queues)?;
    segments::capture(s, &pids, &mut out.segments)
}

/// Takes what was found out about `name`; where it is none of the job's after all, a note is.
fn taken<T>(s: &mut Session<'_>, name: String, found: Result<T, Fault>) -> Result<Option<T>, Failed> {
    match found {
        Ok(object) => Ok(Some(object)),
        Err(e) if is_foreign(&e) => {
            s.notes.push(format!("{name} is not readable: {e}; it is not restored"));
            Ok(None)
        }
        Err(e) => Err(failed(name, e)),
    }
}

fn failed(name: impl Into<String>, e: Fault) -> Failed {
    (Holder { pid: 0, fd: -1 }, name.into(), e)
}

/// Whether an object that no process has attached is none of the job's after all: its mode keeps the job's user out, or it is gone. (Whose it is can
/// only be guessed from process numbers, which come around again.)
fn is_foreign(e: &Fault) -> bool {
    matches!(e, Fault::Call { source, .. } if matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EIDRM | libc::EINVAL)))
}

/// Whether an object belongs to the agent's user. Process numbers come around again: one of another user is none of ours, whoever had its maker's number.
fn is_own(owner: i64, creator: i64) -> bool {
    // SAFETY: takes nothing and cannot fail.
    let me = i64::from(unsafe { libc::geteuid() });
    owner == me || creator == me
}

fn one_of(pids: &BTreeSet<i32>, pid: i64) -> bool {
    i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid))
}

/// Makes everything again in the present (fresh) IPC namespace. `tell` is given a line for the user where something is not as it was.
pub(crate) fn rebuild(v: &SysV, (blobs, pages): (&BlobReader, &dyn PageSource), tell: &dyn Fn(&str)) -> Result<(), Fault> {
    v.segments.iter().try_for_each(|s| s.rebuild(pages))?;
    v.semaphores.iter().try_for_each(|s| s.rebuild(tell))?;
    v.queues.iter().try_for_each(|q| q.rebuild(blobs))
}

/// In process `pid`: notes down what it had for semaphores.
pub(crate) fn install(v: &SysV, pid: i32) -> Result<(), crate::Refusal> {
    v.semaphores.iter().try_for_each(|set| set.install(pid))
}

/// Marks the segments for removal again that were so at capture, now that the processes have attached them.
pub(crate) fn remove_pending(v: &SysV) -> Result<(), Fault> {
    v.segments.iter().try_for_each(segments::Segment::remove_pending)
}

/// Lets `set` give an object its mode and owner. An owner that does not exist in the user namespace of a restart cannot be given; then the object stays the user's own.
fn set_perm(c: &Common, mut set: impl FnMut(u32, (u32, u32)) -> io::Result<i32>) -> io::Result<i32> {
    match set(c.mode, c.owner) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: takes nothing and cannot fail.
            let user = unsafe { libc::geteuid() };
            // SAFETY: as above.
            let group = unsafe { libc::getegid() };
            set(c.mode, (user, group))
        }
        done => done,
    }
}

fn change(p: &mut libc::ipc_perm, mode: u32, owner: (u32, u32)) {
    p.mode = mode as _;
    (p.uid, p.gid) = owner;
}

/// Makes an object with identifier `id`.
fn same_id(kind: &str, id: i32, make: impl FnOnce() -> i32) -> Result<(), Fault> {
    std::fs::write(format!("/proc/sys/kernel/{kind}_next_id"), id.to_string()).at(format!("ask for {kind} identifier {id}"))?;
    let got = crate::sys::check(make()).at(format!("make {kind} object {id}"))?;
    if got != id {
        return refuse(format!(
            "{kind} object got identifier {got} instead of {id}; restart in an IPC namespace of its own"
        ));
    }
    Ok(())
}
