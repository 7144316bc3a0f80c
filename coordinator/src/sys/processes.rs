//! Processes: reaping, signalling, forking, ending.

use super::{Disposition, Signal, SignalSet};
use belay_kernel::check;
use std::io;

/// Reaps one child that has ended, or a traced thread: its number and status word.
pub fn reap() -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: `status` is valid for writing.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WALL) };
    (pid > 0).then_some((pid, status))
}

/// Lets the caller write files as large as it is allowed to be let (RLIMIT_FSIZE): a program may have been given a
/// limit together with its agent (`ulimit -f`), whose files are larger than those of the program. What is too large for
/// the hard limit as well is an error (EFBIG) and not the end of the agent.
pub fn write_large_files() {
    const NONE: u64 = libc::RLIM_INFINITY;
    Disposition::replace(libc::SIGXFSZ, libc::SIG_IGN);
    let mut now = libc::rlimit {
        rlim_cur: NONE,
        rlim_max: NONE,
    };
    // SAFETY: the structure is valid for reading and writing.
    unsafe {
        if libc::setrlimit(libc::RLIMIT_FSIZE, &raw const now) != 0 && libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut now) == 0 {
            now.rlim_cur = now.rlim_max;
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const now);
        }
    }
}

/// Waits until child `pid` has ended and reaps it.
pub fn wait(pid: i32) -> io::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for writing.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
            return Ok(status);
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// What job control did to a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobControl {
    /// It was stopped by this signal.
    Stopped(i32),
    /// It was continued.
    Continued,
}

/// What job control did to child `pid` since the last call, if anything.
pub fn job_control(pid: i32) -> Option<JobControl> {
    // SAFETY: siginfo_t is plain data, for which zero is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let id = libc::id_t::try_from(pid).ok()?;
    let what = libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG;
    // SAFETY: `info` is valid for writing.
    let r = unsafe { libc::waitid(libc::P_PID, id, &raw mut info, what) };
    // SAFETY: waitid has filled the structure with a child's state, or left the zeroes.
    let (child, status) = unsafe { (info.si_pid(), info.si_status()) };
    match info.si_code {
        _ if r != 0 || child != pid => None,
        libc::CLD_STOPPED => Some(JobControl::Stopped(status)),
        libc::CLD_CONTINUED => Some(JobControl::Continued),
        _ => None, // a stop of the tracer's own
    }
}

/// The parent of this process.
pub fn parent() -> i32 {
    // SAFETY: has no preconditions.
    unsafe { libc::getppid() }
}

/// Sends `signal`; a process that is gone is no error.
pub fn kill(pid: i32, signal: i32) {
    // SAFETY: takes numbers only.
    unsafe { libc::kill(pid, signal) };
}

/// Sends `signal` on as it was received, with the value of `sigqueue`.
pub fn pass_on(pid: i32, signal: Signal) {
    if signal.code == libc::SI_QUEUE {
        let value = libc::sigval {
            sival_ptr: std::ptr::without_provenance_mut(usize::try_from(signal.value.cast_unsigned()).unwrap_or(0)),
        };
        // SAFETY: takes numbers only; the value is passed on, not followed.
        unsafe { libc::sigqueue(pid, signal.number, value) };
    } else {
        kill(pid, signal.number);
    }
}

/// When this returns, every signal to a process group that another process in it has received already was also sent to
/// this process: the kernel sends to all members under the lock that `setpgid` takes, whether it succeeds or not.
pub fn group_barrier() {
    // SAFETY: takes numbers only, and changes nothing.
    unsafe { libc::setpgid(0, libc::getpgrp()) };
}

/// Gives up the capabilities that the program file has brought, and becomes a process again that its children may look
/// at. Does nothing where it brought none.
pub fn drop_file_capabilities() -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    // SAFETY: takes a number only.
    if unsafe { libc::getauxval(libc::AT_SECURE) } == 0 {
        return Ok(());
    }
    let header = [VERSION_3, 0];
    let none = [0u32; 6];
    // SAFETY: both arrays have the sizes of the kernel's structures of this version.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) }.into()).map(drop)
}

/// Makes this process the one that orphaned descendants are given to.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }.into()).map(drop)
}

/// Forks. The child gets `None`.
///
/// # Safety
/// The calling process has one thread only.
pub unsafe fn fork() -> io::Result<Option<i32>> {
    // SAFETY: with one thread no lock can be left held in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

/// Ends this process as the command ended: with the same status, or by the same signal (without a core file of its own).
pub fn exit_like(status: i32) -> ! {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the structure is valid for reading.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
        Disposition::replace(signal, libc::SIG_DFL);
        // SAFETY: takes numbers only; the signal is delivered when the mask is lifted below.
        unsafe { libc::raise(signal) };
        SignalSet::of([]).set_mask();
        std::process::exit(128 + signal);
    }
    std::process::exit(libc::WEXITSTATUS(status))
}
