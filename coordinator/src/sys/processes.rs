//! What the processes of belay are: their limits, rights, place in job control, and end.

use super::{Disposition, SignalSet};
use belay_kernel::{process, signals};
use rustix::process::{
    getppid, getrlimit, set_child_subreaper, set_dumpable_behavior, setrlimit, waitid, DumpableBehavior, Pid, Resource, Rlimit,
    WaitId, WaitIdOptions,
};
use rustix::thread::{set_capabilities, CapabilitySet, CapabilitySets};
use std::io;

/// Lets the caller write files as large as it is allowed to be let (RLIMIT_FSIZE): a program may have been given a
/// limit together with its agent (`ulimit -f`), whose files are larger than those of the program. What is too large for
/// the hard limit as well is an error (EFBIG) and not the end of the agent.
pub fn write_large_files() {
    Disposition::set_ignored(libc::SIGXFSZ);
    let none = Rlimit {
        current: None,
        maximum: None,
    };
    if setrlimit(Resource::Fsize, none).is_err() {
        let maximum = getrlimit(Resource::Fsize).maximum;
        let current = maximum;
        // Lower than it was it never is.
        let _ = setrlimit(Resource::Fsize, Rlimit { current, maximum });
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
    let child = WaitId::Pid(Pid::from_raw(pid)?);
    let what = WaitIdOptions::STOPPED | WaitIdOptions::CONTINUED | WaitIdOptions::NOHANG;
    let told = waitid(child, what).ok()??;
    if told.continued() {
        return Some(JobControl::Continued);
    }
    // Else it is a stop of the tracer's own.
    told.stopping_signal().filter(|_| told.stopped()).map(JobControl::Stopped)
}

/// The parent of this process; 0 where it is in no process namespace that this one sees.
pub fn parent() -> i32 {
    Pid::as_raw(getppid())
}

/// When this returns, every signal to a process group that another process in it has received already was also sent to
/// this process: the kernel sends to all members under the lock that `setpgid` takes, whether it succeeds or not.
pub fn group_barrier() {
    process::stay_in_group(process::group());
}

/// Gives up the capabilities that the program file has brought, and becomes a process again that its children may look
/// at. Does nothing where it brought none.
pub fn drop_file_capabilities() -> io::Result<()> {
    if !process::is_secure() {
        return Ok(());
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none)?;
    Ok(set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// Makes this process the one that orphaned descendants are given to.
pub fn become_subreaper() -> io::Result<()> {
    // Any number but 0 says so.
    Ok(set_child_subreaper(Some(rustix::process::getpid()))?)
}

/// Ends this process as the command ended: with the same status, or by the same signal (without a core file of its own).
pub fn exit_like(status: i32) -> ! {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        let none = Rlimit {
            current: Some(0),
            maximum: Some(0),
        };
        let _ = setrlimit(Resource::Core, none);
        Disposition::set_default(signal);
        // It is delivered when the mask is lifted.
        signals::raise(signal);
        SignalSet::of([]).set_mask();
        std::process::exit(128 + signal);
    }
    std::process::exit(libc::WEXITSTATUS(status))
}
