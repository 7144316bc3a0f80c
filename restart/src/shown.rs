//! The user namespace that restored processes are shown: that of before, though a restart by an ordinary user puts them into another one.
//!
//! Programs compare its number (`stat` of `/proc/self/ns/user`) with that which others told them: ranks of Open MPI by it decide in MPI_Init how they exchange large
//! messages. A mount upon that name shows what another `/proc` tells, one mount for each process; the kernel removes it when the process ends. The namespace itself
//! stays what it is, and `/proc/PID/task/TID/ns/user` says so.

use crate::namespace::Way;
use crate::sys;
use belay_image::model::Process;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

const OPEN_TREE_CLONE: libc::c_int = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_int = 4;

/// In the front, before there is another: the user namespace that is to be shown.
pub(crate) fn outer(way: Way) -> Option<OwnedFd> {
    let open = || std::fs::File::open("/proc/self/ns/user").map(OwnedFd::from);
    (way == Way::UserNamespace).then(open)?.ok()
}

/// In PID 1, once there is a `/proc` of the new PID namespace: shows `outer` as its own. What other processes are shown is taken from here.
pub(crate) fn begin(outer: OwnedFd) {
    put(outer.as_raw_fd(), c"", 1).unwrap_or_else(|e| report(&e));
}

/// In the agent, before descriptors are opened.
pub(crate) struct Shown {
    /// Number of the namespace that the job is in.
    inner: u64,
    /// Number of that which the restarting command is in.
    outer: u64,
}

impl Shown {
    /// Shows the agent what its processes will be shown; none where they are in the same namespace as before.
    pub(crate) fn new(way: Way) -> Option<Self> {
        let begin = || -> io::Result<Self> {
            let agent = std::process::id().cast_signed();
            let (inner, outer) = (number(agent)?, number(1)?);
            if inner != outer {
                copy_to(agent)?;
            }
            Ok(Self { inner, outer })
        };
        let shown = (way == Way::UserNamespace).then(begin)?;
        shown.inspect_err(report).ok().filter(|s| s.inner != s.outer)
    }

    /// Shows each of the processes what it saw before.
    pub(crate) fn show<'a>(&self, live: impl Iterator<Item = &'a Process>) {
        // Images of before do not say.
        let wanted = live.filter(|p| [0, self.outer].contains(&p.user_namespace));
        // One failure is as good as many.
        wanted
            .map(|p| copy_to(p.pid))
            .fold(Ok(()), Result::and)
            .unwrap_or_else(|e| report(&e));
    }
}

/// The job does without.
fn report(error: &io::Error) {
    tracing::warn!(%error, "the job sees another user namespace than before");
}

fn number(pid: i32) -> io::Result<u64> {
    std::fs::metadata(format!("/proc/{pid}/ns/user")).map(|m| m.ino())
}

/// Mounts what PID 1 is shown upon the same name of `pid`.
fn copy_to(pid: i32) -> io::Result<()> {
    put(libc::AT_FDCWD, c"/proc/1/ns/user", pid)
}

/// Mounts what `from` leads to (`dir` itself where it is empty) upon the name of the user namespace of `pid`.
fn put(dir: RawFd, from: &CStr, pid: i32) -> io::Result<()> {
    let flags = OPEN_TREE_CLONE | libc::AT_EMPTY_PATH | libc::O_CLOEXEC;
    // SAFETY: a live, terminated string.
    let fd = sys::libc_result(unsafe { libc::syscall(libc::SYS_open_tree, dir, from.as_ptr(), flags) } as libc::c_int)?;
    // SAFETY: the kernel has just returned it.
    let tree = unsafe { OwnedFd::from_raw_fd(fd) };
    let to = CString::new(format!("/proc/{pid}/ns/user")).map_err(io::Error::other)?;
    let (tree, here, flags) = (tree.as_raw_fd(), libc::AT_FDCWD, MOVE_MOUNT_F_EMPTY_PATH);
    // SAFETY: live, terminated strings. The name, a link, is not followed.
    let moved = unsafe { libc::syscall(libc::SYS_move_mount, tree, c"".as_ptr(), here, to.as_ptr(), flags) };
    sys::libc_result(moved as libc::c_int).map(drop)
}
