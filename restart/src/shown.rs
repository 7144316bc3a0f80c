//! The user, IPC and PID namespaces that restored processes are shown: those of before, though a restart puts them into others.
//!
//! Programs compare their numbers (`stat` of `/proc/self/ns/KIND`) with those which others told them: ranks of Open MPI
//! (user) and of MPICH (UCX: IPC and PID) by them decide in MPI_Init how they exchange messages. A mount upon that name
//! shows what another `/proc` tells, one mount for each kind and process; the kernel removes it when the process ends.
//! One that is started later gets its mounts before it executes a program (`lead`). The namespaces themselves stay what
//! they are, and `/proc/PID/task/TID/ns/KIND` says so.

use crate::namespace::Way;
use crate::{sys, tree};
use belay_image::model::Process;
use belay_kernel::proc::Status;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

const OPEN_TREE_CLONE: libc::c_int = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_int = 4;

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
    let shown = outer.iter().map(|(name, fd)| put(fd.as_raw_fd(), c"", 1, name));
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
    let from = CString::new(format!("/proc/1/ns/{kind}")).map_err(io::Error::other)?;
    put(libc::AT_FDCWD, &from, pid, kind)
}

/// Mounts what `from` leads to (`dir` itself where it is empty) upon the name of the namespace of this kind of `pid`.
fn put(dir: RawFd, from: &CStr, pid: i32, kind: &str) -> io::Result<()> {
    let flags = OPEN_TREE_CLONE | libc::AT_EMPTY_PATH | libc::O_CLOEXEC;
    // SAFETY: a live, terminated string.
    let fd = sys::libc_result(unsafe { libc::syscall(libc::SYS_open_tree, dir, from.as_ptr(), flags) } as libc::c_int)?;
    // SAFETY: the kernel has just returned it.
    let tree = unsafe { OwnedFd::from_raw_fd(fd) };
    let to = CString::new(format!("/proc/{pid}/ns/{kind}")).map_err(io::Error::other)?;
    let (tree, here, flags) = (tree.as_raw_fd(), libc::AT_FDCWD, MOVE_MOUNT_F_EMPTY_PATH);
    // SAFETY: live, terminated strings. The name, a link, is not followed.
    let moved = unsafe { libc::syscall(libc::SYS_move_mount, tree, c"".as_ptr(), here, to.as_ptr(), flags) };
    sys::libc_result(moved as libc::c_int).map(drop)
}
