//! Runs what must not be left half done in a process of its own, which goes on when the agent is killed.
//!
//! [`run`]: the process shares the agent's memory, and the calling thread stands still meanwhile; so nothing is copied,
//! however large the agent is. [`fork`]: it has a copy, and may allocate.

use super::{check, fd};
use std::io;
use std::os::fd::AsRawFd;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;

/// Room for the stack of such a process.
const STACK_BYTES: usize = 256 << 10;

/// Runs `work` there. It must neither allocate nor take a lock: another thread of a killed agent may have held it for ever.
pub(crate) fn run<W: FnMut()>(work: &mut W) -> io::Result<()> {
    extern "C" fn begin<W: FnMut()>(work: *mut libc::c_void) -> i32 {
        // SAFETY: `run` passes its own exclusive reference and waits.
        let work = unsafe { &mut *work.cast::<W>() };
        work();
        0
    }
    let mut stack = vec![0u128; STACK_BYTES / size_of::<u128>()];
    let top = stack.as_mut_ptr_range().end.cast();
    let blocked = Blocked::all()?;
    let arg = std::ptr::from_mut(work).cast();
    // SAFETY: the child runs on a stack of its own that lives until it has ended: with CLONE_VFORK the caller waits for
    // it. It raises no signal when it ends.
    let pid = check(unsafe { libc::clone(begin::<W>, top, libc::CLONE_VM | libc::CLONE_VFORK, arg) });
    drop(blocked);
    let pid = pid?;
    loop {
        // SAFETY: no status is asked for.
        match check(unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) }) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            _ => return Ok(()),
        }
    }
}

/// Runs `work` in a copy of this process, and returns what it has to say.
pub(crate) fn fork(work: impl FnOnce() -> Vec<u8>) -> io::Result<Vec<u8>> {
    let said = fd::memfd(Path::new("belay-apart"), 0)?;
    let blocked = Blocked::all()?;
    // SAFETY: the child runs `work` and ends without returning; the C library makes its allocator usable there.
    let pid = check(unsafe { libc::fork() })?;
    if pid == 0 {
        let done = catch_unwind(AssertUnwindSafe(|| fd::write_at(said.as_raw_fd(), &work(), 0).is_ok()));
        // SAFETY: ends the process at once, without what the original still has to do.
        unsafe { libc::_exit(i32::from(!done.unwrap_or(false))) };
    }
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for writing.
        match check(unsafe { libc::waitpid(pid, &mut status, 0) }) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            waited => {
                waited?;
                break;
            }
        }
    }
    drop(blocked);
    if status != 0 {
        return Err(io::Error::other(format!(
            "the process that did it has ended with status {status:#x}"
        )));
    }
    let bytes = usize::try_from(fd::fstat(said.as_raw_fd())?.st_size).map_err(io::Error::other)?;
    let mut all = vec![0; bytes];
    fd::read_at(said.as_raw_fd(), &mut all, 0)?;
    Ok(all)
}

/// All signals of this thread, and of what it makes, are blocked while this lives.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> io::Result<Self> {
        // SAFETY: all-zero bytes are a valid value of this plain C type.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        let mut all = before;
        // SAFETY: `all` is valid for writing.
        unsafe { libc::sigfillset(&mut all) };
        // SAFETY: both sets are valid.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before) } {
            0 => Ok(Self(before)),
            e => Err(io::Error::from_raw_os_error(e)),
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one of before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}
