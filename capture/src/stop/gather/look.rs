//! Looks at tasks that were asked to stop, each on the thread that traces it: what a stop is, and what state the task has there.

use super::Of;
use crate::state::waits::Sleepers;
use crate::stop::stopped::Task;
use crate::stop::tracers::Traced;
use crate::CaptureError;
use belay_kernel::cut;
use belay_kernel::masks;
use belay_kernel::proc;
use belay_kernel::ptrace::{self, Event};

/// A task that stood in a stop, with these registers.
#[derive(Debug)]
pub(super) struct Standing {
    pub(super) of: Of,
    pub(super) regs: Vec<u64>,
}

impl Traced for Standing {
    fn tracer(&self) -> usize {
        self.of.tracer
    }
}

impl Standing {
    /// Whether it is not in that stop any more, or another thread has its number.
    pub(super) fn has_gone_on(&self) -> bool {
        let regs = ptrace::get_regs(self.of.tid).map(|regs| ptrace::regs_to_words(&regs));
        ptrace::has_changed(self.of.tid) || regs.ok().as_ref() != Some(&self.regs)
    }
}

/// What a look at a task that was asked to stop has shown.
#[derive(Debug)]
pub(super) enum Look {
    /// It has not stopped yet, or has been sent on.
    Nothing,
    Stopped(Box<Task>),
    Ended(i32),
    /// It is not ours any more.
    Lost,
    Refused(CaptureError),
}

/// As [`look`]; what is refused has stopped, and goes on.
pub(super) fn look_or_let_go(of: &Of, sleepers: &Sleepers) -> Look {
    let look = look(of, sleepers);
    if matches!(look, Look::Refused(_)) {
        drop(ptrace::detach(of.tid, 0));
    }
    look
}

/// Looks, on the thread that traces it, whether a task has stopped.
fn look(of: &Of, sleepers: &Sleepers) -> Look {
    let event = match ptrace::peek(of.tid) {
        Ok(None) => return Look::Nothing,
        // A signal was on its way before our stop: let it be delivered; the stop follows before the handler's first
        // instruction. `wait` would take the signal out of the task's hands, and should the agent die then it would be
        // lost.
        Ok(Some(Event::Signal(sig))) => {
            // It has interrupted a call, which stands under another number when our stop comes.
            if let Ok(regs) = ptrace::get_regs(of.tid) {
                crate::state::calls::note(of.tid, &regs, None);
            }
            drop(ptrace::cont(of.tid, sig));
            return Look::Nothing;
        }
        Ok(Some(_)) => ptrace::wait(of.tid, false),
        Err(e) => Err(e),
    };
    match event {
        Ok(None) => Look::Nothing,
        Err(_) => Look::Lost,
        Ok(Some(event)) => seen(of, event, sleepers),
    }
}

/// What it means that `wait` has reported `event`.
fn seen(of: &Of, event: Event, sleepers: &Sleepers) -> Look {
    match event {
        Event::Interrupted => stopped(*of, None, sleepers),
        Event::GroupStop(sig) => stopped(*of, Some(sig), sleepers),
        // Not a signal: that is not waited for.
        Event::Signal(_) | Event::Syscall | Event::Other(_) => {
            drop(ptrace::cont(of.tid, 0));
            Look::Nothing
        }
        Event::Ended(status) => Look::Ended(status),
    }
}

/// The task's state at its stop; gone when it died at that moment.
fn stopped(of: Of, group_stop: Option<i32>, sleepers: &Sleepers) -> Look {
    let Of { tid, tracer, .. } = of;
    let read = || Ok((ptrace::get_regs(tid)?, ptrace::get_xstate(tid)?, ptrace::get_sigmask(tid)?));
    let (mut regs, xstate, sigmask) = match read() {
        Ok(state) => state,
        Err(e) => return unreadable(of, &e),
    };
    if let Err(e) = cut::take_back(tid, &mut regs) {
        return unreadable(of, &e);
    }
    let mut task = Box::new(Task {
        rseq: ptrace::rseq(tid).unwrap_or((0, 0, 0)),
        wait: sleepers.wait(tid, &regs),
        group_stop,
        ..Task::new(tid, tracer, (regs, xstate, sigmask))
    });
    crate::state::calls::note(tid, &task.regs, task.wait.as_ref());
    task.waits = crate::state::calls::waits_for_futex(tid, &task.regs);
    if masks::hide_interruption(&mut task.regs) {
        if let Some(wait) = task.wait {
            wait.shorten(&mut task.regs);
        }
        if ptrace::has_changed(tid) {
            // Another thread, which has called exec, has got its number since.
            return Look::Nothing;
        }
        // At once, so that the call is restarted even if the agent dies.
        let _ = ptrace::set_regs(tid, &task.regs);
    }
    task.call_mask = masks::of_call(tid, &task.regs, sigmask);
    Look::Stopped(task)
}

/// Reads the state of a task anew that has run on and stands again. Of one that has been killed it stays as it was.
pub(super) fn renew(task: &mut Task) {
    let of = Of {
        tid: task.tid,
        pid: task.tid,
        tracer: task.tracer,
    };
    if let Look::Stopped(now) = stopped(of, task.group_stop, &Sleepers::default()) {
        *task = *now;
    }
}

/// What it means that the state of a task that has just stopped cannot be read.
fn unreadable(Of { tid, pid, .. }: Of, e: &std::io::Error) -> Look {
    let stopped = proc::stat(tid).is_ok_and(|s| s.state == 't');
    match (e.raw_os_error(), stopped) {
        // Killed at that moment; its end is seen by the next look.
        (Some(libc::ESRCH), false) => Look::Nothing,
        // Another thread of the process, with another tracer, has called exec and has got its number.
        (Some(libc::ESRCH), true) => Look::Refused(CaptureError::refuse_for_now(
            pid,
            format!("thread {tid}"),
            "calls exec at this moment",
        )),
        _ => Look::Refused(CaptureError::refuse(
            pid,
            format!("thread {tid}"),
            format!("its registers cannot be read: {e}"),
        )),
    }
}
