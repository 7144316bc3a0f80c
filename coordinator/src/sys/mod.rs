//! The system calls of the event loop, as safe functions.

mod events;
mod locks;
mod processes;
mod signals;

pub use events::{poll, poll_within, readable_within, Timer, Wake};
pub use locks::{lock, lock_shared, lock_within, unlock};
pub use processes::{
    become_subreaper, drop_file_capabilities, exit_like, fork, group_barrier, job_control, kill, parent, pass_on, reap, wait,
    write_large_files, JobControl,
};
pub use signals::{wait_for, Disposition, Signal, SignalFd, SignalSet};

pub use belay_storage::store::this_host as host;

use crate::failure::plain;
use belay_kernel::check;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn fd(ret: i32) -> io::Result<OwnedFd> {
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(ret) })
}

/// The controlling terminal's foreground process group; `None` without a terminal.
pub fn terminal_group() -> Option<i32> {
    let tty = std::fs::File::open("/dev/tty").ok()?;
    // SAFETY: takes numbers only.
    let group = unsafe { libc::tcgetpgrp(tty.as_raw_fd()) };
    (group > 0).then_some(group)
}

/// If this process's group has the terminal, gives it to process group `group`.
pub fn hand_over_terminal(group: i32) {
    // SAFETY: has no preconditions.
    let own = unsafe { libc::getpgrp() };
    if terminal_group() != Some(own) {
        return;
    }
    if let Ok(tty) = std::fs::File::open("/dev/tty") {
        // SAFETY: takes numbers only. A group that is gone leaves the terminal where it is.
        unsafe { libc::tcsetpgrp(tty.as_raw_fd(), group) };
    }
}

/// A pair of connected sockets that keep messages apart.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [-1; 2];
    // SAFETY: `pair` is valid for writing two descriptors.
    let r = unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, pair.as_mut_ptr()) };
    check(r.into())?;
    Ok((fd(pair[0])?, fd(pair[1])?))
}

/// Sends one message; never raises SIGPIPE.
pub fn send(socket: BorrowedFd<'_>, message: &[u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for reading its length.
    let n = unsafe { libc::send(socket.as_raw_fd(), message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Receives one message; 0 at the end. `wait` says whether to wait for one.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
    let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: the buffer is valid for writing its length.
    let n = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Closes every descriptor from 3 on that would have been inherited by the command: it has its own copies by now.
pub fn close_inherited() {
    for fd in belay_kernel::proc::fds(std::process::id().cast_signed()).unwrap_or_default() {
        // SAFETY: takes numbers only.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        if fd > 2 && flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            // SAFETY: this program opens everything with close-on-exec, so the descriptor was inherited and no object here owns it.
            unsafe { libc::close(fd) };
        }
    }
}

/// Opens `/dev/null` in place of standard descriptors that are closed, so that nothing of ours lands there. The command
/// sees them closed.
pub fn fill_standard_descriptors() {
    for fd in 0..3 {
        // SAFETY: takes numbers only.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            // SAFETY: the path is a zero-terminated string. The lowest free number is `fd`.
            unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        }
    }
}

/// Puts `/dev/null` in place of descriptor `target`.
pub fn replace_by_null(target: RawFd) -> io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    // SAFETY: both are descriptors; whoever uses `target` goes on with the null device.
    check(unsafe { libc::dup2(null.as_raw_fd(), target) }.into()).map(drop)
}

/// A file in memory, which is not passed on to what is executed.
pub fn memory_file(name: &CStr) -> io::Result<std::fs::File> {
    // SAFETY: the name is a string that lives as long as the call.
    fd(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) }).map(Into::into)
}

/// The effective user.
pub fn euid() -> u32 {
    // SAFETY: has no preconditions.
    unsafe { libc::geteuid() }
}

/// The effective group.
pub fn egid() -> u32 {
    // SAFETY: has no preconditions.
    unsafe { libc::getegid() }
}

/// Whether the file at `path` has the extended attribute `name`.
pub fn has_attribute(path: &Path, name: &CStr) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: both are zero-terminated strings, and no value is asked for.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) >= 0 }
}

/// Whether the calling process may make files in directory `path`.
pub fn may_write(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: the path is a zero-terminated string.
    unsafe { libc::eaccess(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
}

/// Whether executing the file at `path` never changes identity: its file system is mounted `nosuid`, or this process
/// may gain no privileges.
pub fn ignores_setuid(path: &Path) -> bool {
    // SAFETY: takes numbers only.
    if unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } == 1 {
        return true;
    }
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: statvfs is plain data, for which zero is a valid value.
    let mut fs: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is zero-terminated, `fs` is valid for writing.
    let r = unsafe { libc::statvfs(path.as_ptr(), &raw mut fs) };
    r == 0 && fs.f_flag & libc::ST_NOSUID != 0
}

/// Seconds since the epoch.
pub fn now_unix_s() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// Processors that this process may use.
pub(crate) fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Writes one line to standard error. A terminal in `tostop` mode must not stop the agent for it.
pub fn say(line: &str) {
    let mask = SignalSet::of([libc::SIGTTOU]).block();
    let text = format!("belay: {}\n", plain(line));
    // SAFETY: the buffer is valid for reading its length. What cannot be said (descriptor closed, disk full) is in the log.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    mask.set_mask();
}
