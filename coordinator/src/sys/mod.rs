//! The system calls of the event loop, as safe functions.

mod events;
mod locks;
mod processes;

pub use belay_kernel::process::{fork, reap, wait};
pub use belay_kernel::signals::{kill, wait_for, Disposition, Signal, SignalFd, SignalSet};
pub use events::{poll, poll_within, readable_within, Timer, Wake};
pub use locks::{lock, lock_shared, lock_within, unlock};
pub use processes::{
    become_subreaper, drop_file_capabilities, exit_like, group_barrier, job_control, parent, write_large_files, JobControl,
};

pub use belay_storage::store::this_host as host;

use crate::failure::plain;
use belay_kernel::numbers;
use rustix::fs::{Access, AtFlags, MemfdFlags, Mode, OFlags, StatVfsMountFlags, CWD};
use rustix::io::{fcntl_getfd, FdFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::Pid;
use rustix::termios::{tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp, OptionalActions, Termios};
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::path::Path;

/// The controlling terminal's foreground process group; `None` without a terminal.
pub fn terminal_group() -> Option<i32> {
    let tty = std::fs::File::open("/dev/tty").ok()?;
    tcgetpgrp(&tty).ok().map(|group| group.as_raw_nonzero().get())
}

/// If this process's group has the terminal, gives it to process group `group`.
pub fn hand_over_terminal(group: i32) {
    if let Some(tty) = own_terminal() {
        // A group that is gone leaves the terminal where it is.
        let _ = Pid::from_raw(group).map(|group| tcsetpgrp(&tty, group));
    }
}

/// The modes of the controlling terminal, as a program finds them when it begins.
#[derive(Debug)]
pub struct TerminalModes(Termios);

impl TerminalModes {
    /// Those of now; `None` without a terminal, or where another process group has it.
    pub fn found() -> Option<Self> {
        tcgetattr(own_terminal()?).ok().map(Self)
    }

    /// Puts them back, unless another process group has the terminal by now.
    pub fn put_back(&self) {
        if let Some(tty) = own_terminal() {
            let _ = tcsetattr(&tty, OptionalActions::Drain, &self.0);
        }
    }
}

/// The controlling terminal, where this process's group has it.
fn own_terminal() -> Option<std::fs::File> {
    let tty = std::fs::File::open("/dev/tty").ok()?;
    let owner = tcgetpgrp(&tty).ok()?;
    (owner.as_raw_nonzero().get() == belay_kernel::process::group()).then_some(tty)
}

/// A pair of connected sockets that keep messages apart.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// Sends one message; never raises SIGPIPE.
pub fn send(socket: BorrowedFd<'_>, message: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, message, SendFlags::NOSIGNAL)?)
}

/// Receives one message; 0 at the end. `wait` says whether to wait for one.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
    let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    Ok(rustix::net::recv(socket, buffer, flags)?.0)
}

/// Closes every descriptor from 3 on that would have been inherited by the command: it has its own copies by now.
pub fn close_inherited() {
    let is_inherited = |fd: &RawFd| {
        let flags = numbers::lend(*fd).and_then(|fd| Ok(fcntl_getfd(fd)?));
        *fd > 2 && flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
    };
    let all = belay_kernel::proc::fds(std::process::id().cast_signed()).unwrap_or_default();
    for fd in all.into_iter().filter(is_inherited) {
        // This program opens everything with close-on-exec, so no object here owns it.
        let _ = numbers::close(fd, fd);
    }
}

/// Opens `/dev/null` in place of standard descriptors that are closed, so that nothing of ours lands there. The command
/// sees them closed.
pub fn fill_standard_descriptors() {
    for fd in 0..3 {
        if numbers::lend(fd).is_ok_and(|fd| fcntl_getfd(fd).is_err()) {
            // The lowest free number is `fd`.
            let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
            let _ = null.map(IntoRawFd::into_raw_fd);
        }
    }
}

/// Puts `/dev/null` in place of standard descriptor `target`.
pub fn replace_by_null(target: RawFd) -> io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    // Whoever uses `target` goes on with the null device.
    numbers::replace_standard(target, &null)
}

/// A file in memory, which is not passed on to what is executed.
pub fn memory_file(name: &str) -> io::Result<std::fs::File> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

/// The effective user.
pub fn euid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The effective group.
pub fn egid() -> u32 {
    rustix::process::getegid().as_raw()
}

/// Whether the file at `path` has the extended attribute `name`.
pub fn has_attribute(path: &Path, name: &str) -> bool {
    rustix::fs::getxattr(path, name, &mut [0u8; 0][..]).is_ok()
}

/// Whether the calling process, with its effective identity, has `access` to the file at `path`.
pub(crate) fn may(access: Access, path: &Path) -> bool {
    rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS).is_ok()
}

/// Whether the calling process may make files in directory `path`.
pub fn may_write(path: &Path) -> bool {
    may(Access::WRITE_OK | Access::EXEC_OK, path)
}

/// Whether executing the file at `path` never changes identity: its file system is mounted `nosuid`, or this process
/// may gain no privileges.
pub fn ignores_setuid(path: &Path) -> bool {
    let is_mounted_so = || rustix::fs::statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOSUID));
    rustix::thread::no_new_privs().is_ok_and(|set| set) || is_mounted_so()
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

/// Threads that write the memory of the processes beside them: half of the processors, the others are the program's. On
/// a machine with 16 processors 16 were no faster than 8 (`docs/benchmarks.md`).
pub fn writers() -> u32 {
    (processors() / 2).clamp(2, 64)
}

/// Writes one line to standard error. A terminal in `tostop` mode must not stop the agent for it.
pub fn say(line: &str) {
    let mask = SignalSet::of([libc::SIGTTOU]).block();
    let text = format!("belay: {}\n", plain(line));
    // What cannot be said (descriptor closed, disk full) is in the log.
    let _ = numbers::lend(2).map(|fd| rustix::io::write(fd, text.as_bytes()));
    mask.set_mask();
}
