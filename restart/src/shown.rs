//! The user, IPC and PID namespaces that restored processes are shown: those of before, though a restart puts them into others.
//!
//! Programs compare their numbers (`stat` of `/proc/self/ns/KIND`) with those which others told them: ranks of Open MPI
//! (user) and of MPICH (UCX: IPC and PID) by them decide in MPI_Init how they exchange messages. A mount upon that name
//! shows what another `/proc` tells, one mount for each kind and process; the kernel removes it when the process ends.
//! One that is started later gets its mounts before it executes a program (`lead`). The namespaces themselves stay what
//! they are, and `/proc/PID/task/TID/ns/KIND` says so.

use crate::namespace::Way;
use crate::tree;
use belay_image::model::Process;
use belay_kernel::proc::Status;
use rustix::fs::CWD;
use rustix::mount::{move_mount, open_tree, MoveMountFlags, OpenTreeFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Names in `/proc/PID/ns` of what is shown, and the numbers that a process saw there.
type Kind = (&'static str, fn(&Process) -> u64);
const KINDS: [Kind; 3] = [
    ("user", |p| p.user_namespace),
    ("ipc", |p| p.ipc_namespace),
    ("pid", |p| p.pid_namespace),
];

/// Descriptors of the namespaces that are to be shown, with their names.
pub(crate) type Outer = Vec<(&'static str, OwnedFd)>;

/// In the front, before there are others.
pub(crate) fn outer(way: Way) -> Outer {
    let open = |name| Some((name, std::fs::File::open(format!("/proc/self/ns/{name}")).ok()?.into()));
    let kinds = KINDS.iter().filter(|_| way != Way::Initial);
    kinds.filter_map(|(name, _)| open(*name)).collect()
}

/// In PID 1, once there is a `/proc` of the new PID namespace: shows `outer` as its own. What other processes are shown
/// is taken from here.
pub(crate) fn begin(outer: Outer) {
    let shown = outer.iter().map(|(name, fd)| put(fd.as_fd(), "", 1, name));
    shown.fold(Ok(()), Result::and).unwrap_or_else(|e| report(&e));
}

/// In the agent, before descriptors are opened.
pub(crate) struct Shown {
    /// The kinds of which the job is in another one than the restarting command, and has seen the number of that, which is told.
    kinds: Vec<(&'static str, u64)>,
}

impl Shown {
    /// Shows the agent what the processes of the job will be shown; none where they are in the same namespaces as
    /// before. What none of them has seen helps nobody: parts of a job that meet on one host would be taken for one.
    pub(crate) fn new(way: Way, processes: &[Process]) -> Option<Self> {
        let agent = std::process::id().cast_signed();
        let begin = |(name, saw): &Kind| -> io::Result<Option<(&'static str, u64)>> {
            let outer = number(1, name)?;
            // Images of before do not say.
            let mut live = processes.iter().filter(|p| tree::is_live(p));
            let is_known = live.any(|p| [0, outer].contains(&saw(p)));
            if number(agent, name)? == outer || !is_known {
                return Ok(None);
            }
            copy_to(agent, name)?;
            Ok(Some((name, outer)))
        };
        let kinds = KINDS.iter().filter(|_| way != Way::Initial);
        let kinds: Vec<_> = kinds
            .filter_map(|kind| begin(kind).inspect_err(report).ok().flatten())
            .collect();
        (!kinds.is_empty()).then_some(Self { kinds })
    }

    /// Shows them to the processes with these numbers, all the same, whatever each of them saw.
    pub(crate) fn show(&self, live: impl Iterator<Item = i32>) {
        let show = |pid: i32| {
            let shown = self.kinds.iter().map(|(name, _)| copy_to(pid, name));
            shown.fold(Ok(()), Result::and)
        };
        // One failure is as good as many.
        let shown = live.map(show).fold(Ok(()), Result::and);
        shown.unwrap_or_else(|e| report(&e));
    }

    /// Shows them to the process of thread `tid`, which is about to execute a program, unless they are shown to it.
    pub(crate) fn show_new(&self, tid: u32) {
        let status = Status::read(tid.cast_signed());
        let Some(pid) = status.ok().and_then(|s| i32::try_from(*s.list("Tgid").first()?).ok()) else {
            return;
        };
        for (name, outer) in &self.kinds {
            if number(pid, name).is_ok_and(|n| n != *outer) {
                copy_to(pid, name).unwrap_or_else(|e| report(&e));
            }
        }
    }
}

/// The job does without.
fn report(error: &io::Error) {
    tracing::warn!(%error, "the job sees other namespaces than before");
}

fn number(pid: i32, kind: &str) -> io::Result<u64> {
    std::fs::metadata(format!("/proc/{pid}/ns/{kind}")).map(|m| m.ino())
}

/// Mounts what PID 1 is shown upon the same name of `pid`.
fn copy_to(pid: i32, kind: &str) -> io::Result<()> {
    put(CWD, &format!("/proc/1/ns/{kind}"), pid, kind)
}

/// Mounts what `from` leads to (`dir` itself where it is empty) upon the name of the namespace of this kind of `pid`.
fn put(dir: BorrowedFd<'_>, from: &str, pid: i32, kind: &str) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(dir, from, flags)?;
    let to = format!("/proc/{pid}/ns/{kind}");
    // The name, a link, is not followed.
    Ok(move_mount(tree, c"", CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}
