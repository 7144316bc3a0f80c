//! Processes of belay's own: made by forking, and replaced by a program.

use crate::check;
use std::ffi::{CStr, CString};
use std::io;

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

/// Executes `program` with `arguments`, the first of which is its name, as `execvp` does, with `variable` (`NAME=VALUE`)
/// in the environment beside what is there. Returns why it could not.
///
/// # Safety
/// The calling process has one thread only.
pub unsafe fn execute(program: &CStr, arguments: &[&CStr], variable: Option<CString>) -> io::Error {
    if let Some(variable) = variable {
        // SAFETY: no other thread looks at the environment; the text is given away and never freed.
        unsafe { libc::putenv(variable.into_raw()) };
    }
    let mut pointers: Vec<*const libc::c_char> = arguments.iter().map(|a| a.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: the pointers are zero-terminated strings, the last one is null.
    unsafe { libc::execvp(program.as_ptr(), pointers.as_ptr()) };
    io::Error::last_os_error()
}

/// Ends this process at once, without what is done at an exit.
pub fn end(status: i32) -> ! {
    // SAFETY: takes a number only.
    unsafe { libc::_exit(status) }
}

/// Whether executing this program has changed identity or capabilities (`AT_SECURE`).
pub fn is_secure() -> bool {
    // SAFETY: takes a number only.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Calls `handler` before each `fork` of the C library, in the thread that forks. It cannot be taken back.
pub fn before_fork(handler: extern "C" fn()) -> io::Result<()> {
    // SAFETY: a function, which lives as long as the process.
    match unsafe { libc::pthread_atfork(Some(handler), None, None) } {
        0 => Ok(()),
        e => Err(io::Error::from_raw_os_error(e)),
    }
}

/// Reaps one child that has ended, or a traced thread: its number and status word.
pub fn reap() -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: `status` is valid for writing.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WALL) };
    (pid > 0).then_some((pid, status))
}

/// Waits until child `pid` has ended and reaps it: its status word.
pub fn wait(pid: i32) -> io::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for writing.
        match check(unsafe { libc::waitpid(pid, &raw mut status, 0) }.into()) {
            Ok(_) => return Ok(status),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The process group of this process; 0 where its leader is in another PID namespace.
pub fn group() -> i32 {
    // SAFETY: has no preconditions.
    unsafe { libc::getpgrp() }
}

/// The process group of process `pid`.
pub fn group_of(pid: i32) -> io::Result<i32> {
    // SAFETY: takes a number only.
    check(unsafe { libc::getpgid(pid) }.into()).map(|group| group as i32)
}

/// The session of this process; 0 where its leader is in another PID namespace.
pub fn session() -> i32 {
    // SAFETY: takes a number only.
    unsafe { libc::getsid(0) }
}

/// The execution domain of this process (`personality`).
pub fn domain() -> io::Result<u32> {
    const ASK: libc::c_ulong = 0xffff_ffff;
    // SAFETY: takes a number, by which nothing is changed.
    check(unsafe { libc::personality(ASK) }.into()).map(|domain| domain as u32)
}

/// Makes it the usual one.
pub fn leave_domain() -> io::Result<()> {
    // SAFETY: takes a number. Nothing can rely on what other domains change: they are for later mappings and programs.
    check(unsafe { libc::personality(0) }.into()).map(drop)
}

/// Puts process `pid`, 0: this one, into process group `group`, 0: one that it leads.
pub fn set_group(pid: i32, group: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::setpgid(pid, group) }.into()).map(drop)
}

/// Asks to be in process group `group`, as this process is.
pub fn stay_in_group(group: i32) {
    // It changes nothing.
    let _ = set_group(0, group);
}
