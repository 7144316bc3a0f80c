//! Seizes tasks, and asks them to stop.

use super::{Of, State};
use crate::stop::reaper::Seized;
use crate::CaptureError;
use belay_kernel::futex;
use belay_kernel::proc;
use belay_kernel::ptrace;
use std::time::Instant;

/// Why a task was not seized.
#[derive(Debug)]
pub(super) struct Unseized {
    pub(super) error: std::io::Error,
    /// It had ended, or was not there.
    pub(super) dead: bool,
}

/// Seizes a task, adds it to the list, and asks it to stop.
pub(super) fn seize(of: Of, list: &Seized) -> Result<State, Unseized> {
    seize_running(of, list)?;
    interrupt(of);
    Ok(State::Pending(Instant::now()))
}

/// As [`seize`], but one that waits for a futex is not asked to stop yet.
pub(super) fn seize_unless_waiting(of: Of, list: &Seized) -> Result<State, Unseized> {
    let seized = seize_running(of, list)?;
    if futex::sleeps_in_wait(of.tid) {
        return Ok(seized);
    }
    interrupt(of);
    Ok(State::Pending(Instant::now()))
}

/// Seizes a task and adds it to the list.
pub(super) fn seize_running(Of { tid, pid, .. }: Of, list: &Seized) -> Result<State, Unseized> {
    let options = libc::PTRACE_O_TRACESYSGOOD;
    let program = || {
        proc::stat(tid)
            .ok()
            .filter(|s| !matches!(s.state, 'Z' | 'X'))
            .map(|s| s.start_stack)
    };
    let mut before = None;
    loop {
        match ptrace::seize(tid, options) {
            // Said of what has ended, too: of a main thread in whose place another thread of the process is about to
            // be, because that has called exec. So may the next one.
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
                let now = program();
                if now.is_none() || now == before {
                    let dead = now.is_none();
                    return Err(Unseized { error: e, dead });
                }
                before = now;
            }
            Err(error) => return Err(Unseized { error, dead: false }),
            Ok(()) => break,
        }
    }
    list.add(pid, tid);
    Ok(State::Seized)
}

/// Asks a task that was seized to stop.
pub(super) fn interrupt(Of { tid, pid, .. }: Of) {
    // A task that has died since gives ESRCH here; its end is seen by the wait.
    if ptrace::interrupt(tid).is_err() && tid != pid {
        // Or it has called exec, for which the request to seize it may have waited: it is ours under the number of its
        // main thread now.
        drop(ptrace::interrupt(pid));
    }
}

pub(super) fn not_traceable(pid: i32, tid: i32, refused: &std::io::Error) -> CaptureError {
    let tracer = proc::Status::read(tid)
        .ok()
        .and_then(|s| s.text("TracerPid").map(str::to_owned))
        .unwrap_or_default();
    if std::path::Path::new(&format!("/proc/self/task/{tracer}")).exists() {
        return CaptureError::refuse_for_now(pid, format!("thread {tid}"), "is still being let go by the attempt before");
    }
    let reason = if tracer != "0" && !tracer.is_empty() {
        format!("is traced by process {tracer} (ptrace); end the debugger and try again")
    } else {
        format!("cannot be traced ({refused}): a setuid or undumpable program; keep it out of the job or run belay as root")
    };
    let comm = proc::stat(pid).map(|s| s.comm).unwrap_or_default();
    CaptureError::refuse(pid, comm.to_string_lossy(), reason)
}
