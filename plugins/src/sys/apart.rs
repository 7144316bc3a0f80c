//! Runs what must not be left half done in a process of its own, which goes on when the agent is killed. The process shares the agent's memory, and the
//! calling thread stands still meanwhile; so nothing is copied, however large the agent is.

use super::check;
use std::io;

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
    // SAFETY: the child runs on a stack of its own that lives until it has ended: with CLONE_VFORK the caller waits for it. It raises no signal when it ends.
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
