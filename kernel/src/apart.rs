//! Processes of this process's own, for what must not be left half done or needs a process to itself: they go on when
//! this one is killed.
//!
//! [`run`]: the process shares the caller's memory, and the calling thread stands still meanwhile; so nothing is copied,
//! however large the caller is. [`fork`] and [`child`]: it has a copy, and may allocate.

use crate::check;
use crate::pages::Pages;
use rustix::fs::MemfdFlags;
use rustix::process::{waitpid, Pid, Signal, WaitOptions};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Room for the stack of such a process.
const STACK_BYTES: usize = 256 << 10;
const PAGE: usize = 4096;
/// The status of a process whose work has panicked, as of a program.
const PANICKED: i32 = 101;

/// A stack that ends at a page which nobody may touch.
struct Stack(Pages);

impl Stack {
    fn new() -> io::Result<Self> {
        let pages = Pages::new(PAGE + STACK_BYTES)?;
        // SAFETY: the first page of the mapping just made, which nothing refers to.
        check(unsafe { libc::mprotect(pages.base().as_ptr().cast(), PAGE, libc::PROT_NONE) }.into())?;
        Ok(Self(pages))
    }

    fn top(&self) -> *mut libc::c_void {
        self.0.base().as_ptr().wrapping_add(PAGE + STACK_BYTES).cast()
    }
}

/// Runs `work` there. It must neither allocate nor take a lock: another thread of a killed caller may have held it for ever.
/// It is an error when it panics. Where it ends in the middle, this process ends too: what it was about to change is half
/// changed.
pub fn run<W: FnMut()>(work: &mut W) -> io::Result<()> {
    struct Task<'a, W> {
        work: &'a mut W,
        returned: Option<bool>,
    }
    extern "C" fn begin<W: FnMut()>(task: *mut libc::c_void) -> i32 {
        // SAFETY: `run` passes its own exclusive reference and waits.
        let task = unsafe { &mut *task.cast::<Task<'_, W>>() };
        task.returned = Some(catch_unwind(AssertUnwindSafe(&mut *task.work)).is_ok());
        0
    }
    let stack = Stack::new()?;
    let mut task = Task { work, returned: None };
    let blocked = Blocked::all()?;
    let arg = (&raw mut task).cast();
    // SAFETY: the child runs on a stack of its own that lives until it has ended: with CLONE_VFORK the caller waits for
    // it. It raises no signal when it ends.
    let pid = check(unsafe { libc::clone(begin::<W>, stack.top(), libc::CLONE_VM | libc::CLONE_VFORK, arg) }.into());
    drop(blocked);
    let child = Child(pid? as i32);
    // It has ended; that somebody else has waited for it does no harm.
    while child
        .wait(libc::__WALL)
        .is_err_and(|e| e.kind() == io::ErrorKind::Interrupted)
    {}
    match task.returned {
        Some(true) => Ok(()),
        Some(false) => Err(io::Error::other("what was to be done apart has panicked")),
        None => std::process::abort(),
    }
}

/// Runs `work` in a copy of this process, and returns what it has to say.
pub fn fork(work: impl FnOnce() -> Vec<u8>) -> io::Result<Vec<u8>> {
    let said = File::from(rustix::fs::memfd_create(c"belay-apart", MemfdFlags::CLOEXEC)?);
    let blocked = Blocked::all()?;
    let child = child(|| i32::from(said.write_all_at(&work(), 0).is_err()))?;
    let status = loop {
        match child.wait(0) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            waited => break waited?,
        }
    };
    drop(blocked);
    if status != 0 {
        return Err(io::Error::other(format!(
            "the process that did it has ended with status {status:#x}"
        )));
    }
    let bytes = usize::try_from(rustix::fs::fstat(&said)?.st_size).map_err(io::Error::other)?;
    let mut all = vec![0; bytes];
    said.read_exact_at(&mut all, 0)?;
    Ok(all)
}

/// A process that [`child`] has made. The owner of the value waits for it.
#[derive(Debug)]
pub struct Child(i32);

/// A copy of this process that does `work` and ends with what that returns, or with 101 where it panics, without what the
/// original still has to do.
/// Where this process has other threads, `work` is system calls, or at most what the C library makes usable in a copy.
pub fn child(work: impl FnOnce() -> i32) -> io::Result<Child> {
    // SAFETY: the child does `work` and ends without returning; the C library makes its allocator usable there.
    match check(unsafe { libc::fork() }.into())? {
        0 => end(catch_unwind(AssertUnwindSafe(work)).unwrap_or(PANICKED)),
        pid => Ok(Child(pid as i32)),
    }
}

impl Child {
    /// Its number.
    pub fn pid(&self) -> i32 {
        self.0
    }

    /// Its status when it has ended, or done what `options` of `waitpid` say.
    pub fn wait(&self, options: i32) -> io::Result<i32> {
        wait(self.0, options)
    }
}

/// The status of child `pid`, when it has ended or done what `options` of `waitpid` say.
pub fn wait(pid: i32, options: i32) -> io::Result<i32> {
    let waited = waitpid(Pid::from_raw(pid), WaitOptions::from_bits_retain(options.cast_unsigned()))?;
    Ok(waited.map_or(0, |(_, status)| status.as_raw()))
}

/// Ends this process at once, without what it still has to do.
pub fn end(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Ends this process by `signal`, by SIGKILL where that one does not end it.
pub fn end_by(signal: i32) -> ! {
    // SAFETY: these calls take numbers and a set of this function's, which all-zero bytes are a valid value of.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::signal(signal, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::kill(libc::getpid(), signal);
    }
    let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
    end(1)
}

/// A child that has ended, and has not been waited for; it raised no signal, so only __WALL finds it.
pub fn ended() -> io::Result<i32> {
    extern "C" fn nothing(_: *mut libc::c_void) -> i32 {
        0
    }
    let stack = Stack::new()?;
    // SAFETY: the child only returns, on a stack of its own that lives until then: with CLONE_VFORK the caller waits for
    // it. It raises no signal when it ends.
    let pid = check(unsafe { libc::clone(nothing, stack.top(), libc::CLONE_VM | libc::CLONE_VFORK, std::ptr::null_mut()) }.into())?;
    Ok(pid as i32)
}

/// All signals of this thread, and of what it makes, are blocked while this lives.
pub struct Blocked(libc::sigset_t);

impl std::fmt::Debug for Blocked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Blocked")
    }
}

impl Blocked {
    /// Blocks them.
    pub fn all() -> io::Result<Self> {
        // SAFETY: all-zero bytes are a valid value of this plain C type.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        let mut all = before;
        // SAFETY: `all` is valid for writing.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: both sets are valid.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) } {
            0 => Ok(Self(before)),
            e => Err(io::Error::from_raw_os_error(e)),
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one of before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_apart_is_seen_here() {
        let (mut a, me) = (0, std::process::id());
        let mut other = me;
        run(&mut || (a, other) = (7, rustix::process::getpid().as_raw_pid().cast_unsigned())).unwrap();
        assert!(a == 7 && other != me);
        assert_eq!(fork(|| b"said".to_vec()).unwrap(), b"said");
    }

    #[test]
    fn what_panics_goes_on_nowhere() {
        assert!(run(&mut || panic!("apart")).is_err() && fork(|| panic!("apart")).is_err());
        let child = child(|| panic!("apart")).unwrap();
        assert_eq!(child.wait(0).unwrap(), 101 << 8);
    }

    #[test]
    fn who_ends_in_the_middle_takes_all_with_it() {
        let deep = |by: fn() -> ()| child(move || i32::from(run(&mut || by()).is_ok())).unwrap().wait(0).unwrap();
        assert_eq!(deep(|| end(0)) & 0x7f, libc::SIGABRT);
        assert_eq!(deep(|| end_by(libc::SIGKILL)) & 0x7f, libc::SIGABRT);
    }

    #[test]
    fn a_child_ends_as_it_says() {
        assert_eq!(child(|| 5).unwrap().wait(0).unwrap(), 5 << 8);
        let killed = child(|| end_by(libc::SIGTERM)).unwrap();
        assert_eq!(killed.wait(libc::__WALL).unwrap() & 0x7f, libc::SIGTERM);
        let pid = ended().unwrap();
        assert_eq!(wait(pid, libc::__WALL).unwrap(), 0);
        assert!(wait(pid, libc::__WALL).is_err());
    }
}
