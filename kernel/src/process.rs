//! Processes of belay's own: made by forking, and replaced by a program.

use crate::check;
use belay_abi::restore::CloneArgs;
use std::ffi::{CStr, CString};
use std::io;
use std::time::{Duration, Instant};

/// How long a thread that has been joined may take to be gone for the kernel too.
const GONE: Duration = Duration::from_secs(5);

const CLONE_CHILD_SETTID: u64 = 0x0100_0000;
const CLONE_CHILD_CLEARTID: u64 = 0x0020_0000;
/// What a forked process may share with its maker without harm to either.
const HARMLESS: u64 = (libc::CLONE_PARENT | libc::CLONE_FS | libc::CLONE_SYSVSEM) as u64;
/// Namespaces of its own.
const NAMESPACES: u64 = (libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUSER) as u64;

/// Whether the calling process has one thread. Nothing is allocated.
fn has_one_thread() -> io::Result<bool> {
    // SAFETY: takes a number. The kernel refuses this to a process with several threads; to one with one it does nothing.
    match check(unsafe { libc::unshare(libc::CLONE_THREAD) }.into()) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        // A filter that knows no flags. The directory has a link from each thread, beside two as every one.
        Err(_) => Ok(rustix::fs::stat(c"/proc/self/task")?.st_nlink == 3),
    }
}

/// An error unless the calling process has one thread: no other can make one then before the caller itself does.
fn only_with_one_thread() -> io::Result<()> {
    let begin = Instant::now();
    while !has_one_thread()? {
        if begin.elapsed() > GONE {
            return Err(io::Error::other("the process has several threads"));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// Forks. The child gets `None`. It is an error where the calling process has several threads: a lock could be left held
/// in the child.
pub fn fork() -> io::Result<Option<i32>> {
    only_with_one_thread()?;
    // SAFETY: with one thread no lock can be left held in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

/// Forks with `clone3`, and with those `flags` that leave the child a table of descriptors and memory of its own; its end
/// raises `exit_signal`, and its identifier is `id` (0: any). In the child the result is 0. It is an error where the
/// calling process has several threads.
pub fn fork_as(flags: i32, exit_signal: i32, id: i32) -> io::Result<i32> {
    if flags as u64 & !(HARMLESS | NAMESPACES) != 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    fork3(flags as u64, exit_signal, id)
}

/// The same with `CLONE_FILES`: both have one table of descriptors.
///
/// # Safety
/// Neither closes what the other uses.
pub unsafe fn fork_with_table(flags: i32, exit_signal: i32, id: i32) -> io::Result<i32> {
    if flags as u64 & !HARMLESS != 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    fork3(flags as u64 | libc::CLONE_FILES as u64, exit_signal, id)
}

/// libc keeps the thread identifier in its thread descriptor; the kernel is asked to update it there, as libc's own
/// `fork` does.
fn fork3(flags: u64, exit_signal: i32, id: i32) -> io::Result<i32> {
    only_with_one_thread()?;
    let known = rustix::thread::get_clear_child_tid_address().ok().flatten();
    let args = CloneArgs {
        flags: flags | known.map_or(0, |_| CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID),
        child_tid: known.map_or(0, |at| at.as_ptr() as u64),
        exit_signal: exit_signal as u64,
        set_tid: (&raw const id) as u64 * u64::from(id != 0),
        set_tid_size: u64::from(id != 0),
        ..CloneArgs::default()
    };
    // SAFETY: no memory is shared (CLONE_VM): both sides return here, each with its own copy, and no lock was held by
    // another thread. Identifiers are read and written where they lie.
    let r = unsafe { belay_abi::syscall!(libc::SYS_clone3 as usize, &raw const args, size_of::<CloneArgs>()) };
    match i32::try_from(r) {
        Ok(pid) if pid >= 0 => Ok(pid),
        error => Err(io::Error::from_raw_os_error(error.map_or(libc::EINVAL, |e| -e))),
    }
}

/// Executes `program` with `arguments`, the first of which is its name, as `execvp` does, with `variable` (`NAME=VALUE`)
/// in the environment beside what is there. Returns why it could not; it cannot where the calling process has several
/// threads, which could look at the environment meanwhile.
pub fn execute(program: &CStr, arguments: &[&CStr], variable: Option<CString>) -> io::Error {
    if let Err(e) = only_with_one_thread() {
        return e;
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apart;

    #[test]
    fn only_one_thread_forks() {
        // A process that runs tests has several.
        assert!(!has_one_thread().unwrap());
        let alone = || {
            let of_table = fork_as(libc::CLONE_FILES, 0, 0).is_err() && fork_as(libc::CLONE_VM, 0, 0).is_err();
            match fork_as(libc::CLONE_PARENT, 0, 0) {
                Ok(0) => end(0),
                made => i32::from(made.is_err() || !of_table),
            }
        };
        assert_eq!(apart::child(alone).unwrap().wait(0).unwrap(), 0);
        let child = apart::child(|| match fork() {
            Ok(None) => end(5),
            Ok(Some(pid)) => wait(pid).unwrap_or(0) >> 8,
            Err(_) => 1,
        });
        assert_eq!(child.unwrap().wait(0).unwrap(), 5 << 8);
    }
}
