//! System V shared memory, semaphores and message queues.
//!
//! At restart the job has an IPC namespace of its own, so every object gets its old identifier through
//! `/proc/sys/kernel/*_next_id`. A segment that was removed while attached is made with its identifier, attached by the
//! processes, and removed again.

mod limits;
mod lists;
mod queues;
mod segments;
mod semaphores;
mod undo;
mod whose;

use crate::builder::{Builder, Built};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::kind::{nothing, Kind, Never};
use crate::model::Descriptors;
use crate::session::Session;
use crate::state::Part;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::sync::OnceLock;
use whose::Guesses;

/// All System V objects of the job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SysV {
    segments: Vec<segments::Segment>,
    semaphores: Vec<semaphores::SemaphoreSet>,
    queues: Vec<queues::Queue>,
    /// Processes that have one list of what is to be undone (CLONE_SYSVSEM).
    #[serde(default)]
    sharers: Vec<Vec<i32>>,
    /// Of the namespace.
    #[serde(default)]
    limits: limits::Limits,
}

impl SysV {
    /// Whether there are no objects that are certainly the job's.
    pub(crate) fn is_empty(&self) -> bool {
        let certain = self.segments.iter().any(|s| !s.guessed) || self.queues.iter().any(|q| !q.guessed);
        !certain && self.semaphores.iter().all(|s| s.guessed)
    }

    /// Whether two processes have one list of what is to be undone.
    pub(crate) fn share_undo(&self, pid: i32, other: i32) -> bool {
        self.sharers.iter().any(|list| list.contains(&pid) && list.contains(&other))
    }
}

impl Part for SysV {
    const KEY: &'static str = "sysv";
}

/// The kind.
pub(crate) struct SystemV;

impl Kind for SystemV {
    const NAME: &'static str = "SystemV";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = SysV;

    /// Captures the segments the job has attached, every object of the namespace that a process of the job made or used
    /// last, and those that are guessed to be the job's.
    fn contents(s: &mut Session<'_>, out: &mut Descriptors) -> Result<(), Refusal> {
        let out: &mut SysV = out.parts.of();
        let pids: BTreeSet<i32> = s.processes.iter().map(|p| p.pid).collect();
        out.limits = limits::Limits::here();
        semaphores::capture(s, &pids, out)?;
        queues::capture(s, &pids, &mut out.queues)?;
        segments::capture(s, &pids, &mut out.segments)
    }

    /// Makes everything again in the present (fresh) IPC namespace.
    fn prepare(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let Some(v) = b.descriptors.parts.get::<SysV>() else {
            return Ok(());
        };
        if OWN_NAMESPACE.get().is_some() {
            v.limits.set();
        }
        let made = v.segments.iter().try_for_each(|s| s.rebuild(b.pages, b.tell));
        let made = made.and_then(|()| v.semaphores.iter().try_for_each(|s| s.rebuild(b.tell)));
        let made = made.and_then(|()| v.queues.iter().try_for_each(|q| q.rebuild(b.blobs, b.tell)));
        made.map_err(|e| e.of(0, "System V objects"))
    }

    /// Notes down what the process had for semaphores.
    fn install_own(d: &Descriptors, _: &Built, pid: i32) -> Result<(), Refusal> {
        let sets = d.parts.get::<SysV>().map_or(&[][..], |v| &v.semaphores);
        sets.iter().try_for_each(|set| set.install(pid))
    }

    /// Marks the segments for removal again that were so at capture, now that the processes have attached them.
    fn complete(d: &Descriptors, _: &Built) -> Result<(), Refusal> {
        let segments = d.parts.get::<SysV>().map_or(&[][..], |v| &v.segments);
        let marked = segments.iter().try_for_each(segments::Segment::remove_pending);
        marked.map_err(|e| e.of(0, "System V segment"))
    }

    nothing!(survey, recognise, capture, finish, check, check_part, numbers, ways, rebuild, join, refill);
    nothing!(install, install_late, settle);
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

/// Set in the agent of a restarted job, which has an IPC namespace of its own: everything in it is the job's, but for
/// what had only been guessed to be and that nobody has used since.
static OWN_NAMESPACE: OnceLock<Guesses> = OnceLock::new();

/// Called where the IPC namespace is the job's own.
pub(crate) fn owns_namespace(v: &SysV) {
    OWN_NAMESPACE.get_or_init(|| Guesses::of(v));
}

/// Takes what was found out about `name`; where it is none of the job's after all, a note is. What is only guessed to
/// be the job's is left where it cannot be had.
fn taken<T>(s: &mut Session<'_>, (name, guessed): (String, bool), found: Result<T, Fault>) -> Result<Option<T>, Refusal> {
    match found {
        Ok(object) => Ok(Some(object)),
        Err(error) if guessed => {
            tracing::debug!(%error, "{name} is taken for that of another program");
            Ok(None)
        }
        Err(e) if is_foreign(&e) => {
            s.notes.push(format!("{name} is not readable: {e}; it is not restored"));
            Ok(None)
        }
        Err(e) => Err(failed(name, e)),
    }
}

fn failed(name: impl Into<String>, e: Fault) -> Refusal {
    e.of(0, name)
}

/// Whether an object that no process has attached is none of the job's after all: its mode keeps the job's user out, or
/// it is gone. (Whose it is can only be guessed from process numbers, which come around again.)
fn is_foreign(e: &Fault) -> bool {
    matches!(e, Fault::Call { source, .. } if matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EIDRM | libc::EINVAL)))
}

/// Whether an object belongs to the agent's user. Process numbers come around again: one of another user is none of
/// ours, whoever had its maker's number.
fn is_own(owner: i64, creator: i64) -> bool {
    let me = i64::from(rustix::process::geteuid().as_raw());
    owner == me || creator == me
}

/// Lets `set` give an object its mode and owner. An owner that does not exist in the user namespace of a restart cannot
/// be given; then the object stays the user's own.
fn set_perm(c: &Common, mut set: impl FnMut(u32, (u32, u32)) -> io::Result<()>) -> io::Result<()> {
    match set(c.mode, c.owner) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let user = rustix::process::geteuid().as_raw();
            let group = rustix::process::getegid().as_raw();
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
fn same_id(kind: &str, id: i32, make: impl FnOnce() -> io::Result<i32>) -> Result<(), Fault> {
    std::fs::write(format!("/proc/sys/kernel/{kind}_next_id"), id.to_string()).at(format!("ask for {kind} identifier {id}"))?;
    let got = make().at(format!("make {kind} object {id}"))?;
    if got != id {
        return refuse(format!(
            "{kind} object got identifier {got} instead of {id}; restart in an IPC namespace of its own"
        ));
    }
    Ok(())
}
