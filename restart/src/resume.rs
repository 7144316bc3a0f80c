//! The end of a restart: every thread is parked in the restorer; its registers are set from outside, the restorer is
//! unmapped, everything goes on.

use crate::control::Shared;
use crate::fail::{Outcome, RestartError};
use crate::processor;
use crate::sched;
use crate::state;
use crate::sys;
use crate::tree::{Role, Tree};
use belay_image::model::{Job, Process, ProcessState, Processor, Thread};
use belay_kernel::blob::Blob;
use belay_kernel::cut;
use belay_kernel::futex::{self, Returning};
use belay_kernel::masks;
use belay_kernel::patience;
use belay_kernel::proc;
use belay_kernel::ptrace::{self, Event, Regs};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MUNMAP: u64 = 11;
const PRCTL: u64 = 157;
const EXIT: u64 = 60;

/// How long a thread of a driver may take to come to a stop.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const OPTIONS: i32 = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;

/// Every thread of the job, in ptrace stop with its final state.
pub(crate) struct Stopped<'a> {
    live: Vec<&'a Process>,
    /// Threads that have run since: their state is not that of the image any more.
    have_run: Vec<i32>,
}

/// Takes every thread from its park and gives it its state. If the agent dies, the kernel kills them all.
pub(crate) fn seize<'a>(job: &'a Job, shared: &Shared, tree: &Tree, live: &[usize], blob: &Blob) -> Outcome<Stopped<'a>> {
    let syscall = find_syscall(blob).ok_or_else(|| RestartError::at("resume", "the restorer holds no system call instruction"))?;
    let mut out = Vec::new();
    for slot in live {
        let Role::Process(i) = tree.nodes[*slot].role else { continue };
        let p = &job.processes[i];
        if !stopped(p) {
            for t in &p.threads {
                ptrace::seize(t.tid, options(t))
                    .and_then(|()| ptrace::interrupt(t.tid))
                    .map_err(|e| failed(p, t, "stop", &e))?;
            }
        }
        out.push((*slot, p));
    }
    let area = |slot: usize| shared.slot(slot).area.each_ref().map(|a| a.load(Ordering::Relaxed));
    let defaults = sched::Defaults::own(&job.processors);
    let nodes = sched::memory_nodes();
    let now = Processor::own();
    let then = job.processor.as_ref().unwrap_or(&now);
    for (slot, p) in &out {
        for t in p.threads.iter().filter(|_| !stopped(p)) {
            expect(t.tid, Event::Interrupted).map_err(|e| failed(p, t, "stop", &e))?;
        }
        let [base, _] = area(*slot);
        for t in p.threads.iter() {
            if let Some(code) = t.exited {
                exit(t.tid, base + syscall, code).map_err(|e| failed(p, t, "exit", &e))?;
            }
        }
    }
    for (slot, p) in &out {
        let [base, end] = area(*slot);
        for t in alive(p).filter(|t| t.pdeathsig != 0 && state::loses_maker(p, &job.processes)) {
            let signal = [libc::PR_SET_PDEATHSIG as u64, t.pdeathsig.unsigned_abs().into()];
            inject(t.tid, base + syscall, (PRCTL, signal)).map_err(|e| failed(p, t, "tell it of its parent's end", &e))?;
        }
        unmap(runner(p), base + syscall, base, end - base)
            .map_err(|e| RestartError::at("resume", format!("process {} ({}): unmap the restorer: {e}", p.pid, p.comm)))?;
        for t in alive(p) {
            set_state(t, then, &now).map_err(|e| failed(p, t, "set registers", &e))?;
            sched::thread(t, &defaults);
        }
        sched::process(p);
        sched::nodes(p, &nodes);
    }
    Ok(Stopped {
        live: out.into_iter().map(|(_, p)| p).collect(),
        have_run: Vec::new(),
    })
}

impl Stopped<'_> {
    /// Does `ask` while these threads (process, thread) run, their signals blocked, and nothing else of the job: they do the
    /// work of the GPUs' driver. If the agent dies, the kernel kills them all.
    pub(crate) fn with_driver<R>(&mut self, threads: &[(i32, i32)], ask: impl FnOnce(&dyn Fn()) -> R) -> io::Result<R> {
        let all = self.live.iter().flat_map(|p| alive(p).map(|t| (p.pid, t.tid)));
        let those: Vec<i32> = all.filter(|t| threads.contains(t)).map(|(_, tid)| tid).collect();
        if those.len() != threads.len() {
            return Err(io::Error::other(format!(
                "damaged image: not all of {threads:?} (process, thread) are threads of the job"
            )));
        }
        let masks: Vec<u64> = those.iter().map(|tid| ptrace::get_sigmask(*tid)).collect::<io::Result<_>>()?;
        // What cannot be blocked is kept for later, unless an instruction would only bring it again.
        let kept: RefCell<Vec<(i32, i32)>> = RefCell::default();
        let pass = |tid: i32, event: Event| {
            let signal = match event {
                Event::Signal(signal) if ptrace::is_for_instruction(signal) => signal,
                Event::Signal(signal) => {
                    kept.borrow_mut().push((tid, signal));
                    0
                }
                _ => 0,
            };
            ptrace::cont(tid, signal)
        };
        for tid in &those {
            ptrace::set_sigmask(*tid, u64::MAX)?;
            // It may have issued a call for us.
            pass(*tid, ptrace::leave_call(*tid)?)?;
        }
        let done = ask(&|| {
            for tid in &those {
                if let Ok(Some(event)) = ptrace::wait(*tid, false) {
                    let _ = pass(*tid, event);
                }
            }
        });
        let end = Instant::now() + STOP_LIMIT;
        for (tid, mask) in those.iter().zip(masks) {
            ptrace::interrupt(*tid)?;
            loop {
                match ptrace::wait(*tid, false)? {
                    Some(Event::Interrupted | Event::GroupStop(_)) => break,
                    Some(Event::Ended(_)) => return Err(io::ErrorKind::NotFound.into()),
                    Some(event) => pass(*tid, event)?,
                    None if Instant::now() > end => return Err(io::ErrorKind::TimedOut.into()),
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            let mut regs = ptrace::get_regs(*tid)?;
            if masks::hide_interruption(&mut regs) {
                ptrace::set_regs(*tid, &regs)?;
            }
            ptrace::set_sigmask(*tid, mask)?;
        }
        for (tid, signal) in kept.into_inner() {
            ptrace::send(tid, signal)?;
        }
        self.have_run = those;
        Ok(done)
    }

    /// Lets everything go on. Processes stopped by job control stay stopped; they are let go first, so that nobody sees
    /// them traced.
    pub(crate) fn resume(self) {
        let (stopped, running): (Vec<&Process>, Vec<&Process>) = self.live.iter().partition(|p| stopped(p));
        stopped.iter().flat_map(|p| alive(p)).for_each(|t| detach(t, 0));
        patience::until_stopped(stopped.into_iter().map(runner));
        let all = running.iter().flat_map(|p| alive(p)).map(|t| (t, self.regs(t)));
        let all: Vec<(&Thread, Option<Regs>)> = all.collect();
        let signals: HashMap<i32, i32> = all.iter().filter_map(|(t, regs)| enter_call(t, regs.as_ref()?)).collect();
        let cut = all.iter().filter(|(t, _)| !signals.contains_key(&t.tid));
        cut.for_each(|(t, regs)| carry_call_on(t, regs.as_ref()));
        let (waiters, others): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|(t, regs)| waits_for_futex(regs.as_ref()) && !signals.contains_key(&t.tid));
        let mut returning = Returning::default();
        for (t, _) in waiters {
            returning.add(t.tid);
            detach(t, 0);
        }
        // Whoever wakes them must find them.
        returning.wait(patience::LIMIT);
        others
            .iter()
            .for_each(|(t, _)| detach(t, signals.get(&t.tid).copied().unwrap_or(0)));
    }

    /// The registers with which a thread goes on.
    fn regs(&self, t: &Thread) -> Option<Regs> {
        if self.have_run.contains(&t.tid) {
            ptrace::get_regs(t.tid).ok()
        } else {
            ptrace::words_to_regs(&t.regs)
        }
    }
}

/// Whether a thread goes back into a wait for a futex.
fn waits_for_futex(regs: Option<&Regs>) -> bool {
    regs.is_some_and(|regs| futex::goes_back(regs.orig_rax, regs))
}

/// The threads of `p` that live.
fn alive(p: &Process) -> impl Iterator<Item = &Thread> {
    p.threads.iter().filter(|t| t.exited.is_none())
}

/// Leads a thread into the call that it begins anew, where other signals are blocked there. Returns its number with the
/// signal that it is to receive instead.
fn enter_call(t: &Thread, regs: &Regs) -> Option<(i32, i32)> {
    let mask = masks::of_call(t.tid, regs, t.sigmask)?;
    match masks::enter(t.tid, regs, mask, t.sigmask) {
        Ok(Event::Signal(signal)) => Some((t.tid, signal)),
        // An end is seen by who waits for it.
        _ => None,
    }
}

/// Has a thread issue the rest of a call that the checkpoint has cut short.
fn carry_call_on(t: &Thread, regs: Option<&Regs>) {
    let regs = regs.filter(|regs| cut::may_be(regs));
    if let Some(Err(e)) = regs.map(|regs| cut::carry_on(t.tid, regs)) {
        tracing::warn!(tid = t.tid, error = %e, "a call that was cut short returns what it has done");
    }
}

/// A thread of `p` that lives.
fn runner(p: &Process) -> i32 {
    alive(p).next().map_or(p.pid, |t| t.tid)
}

/// A main thread that had exited does so again, and is seen on its way.
fn options(t: &Thread) -> i32 {
    OPTIONS | if t.exited.is_some() { libc::PTRACE_O_TRACEEXIT } else { 0 }
}

fn stopped(p: &Process) -> bool {
    matches!(p.state, ProcessState::Stopped(_))
}

/// Lets a thread go, which receives `signal` unless that is 0.
fn detach(t: &Thread, signal: i32) {
    match ptrace::detach(t.tid, signal) {
        // The job runs already: another of its tasks has ended this one.
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
        Err(e) => tracing::error!(tid = t.tid, error = %e, "cannot let a thread go on"),
        Ok(()) => {}
    }
}

/// Waits until the processes that stop themselves (they were stopped by job control) have stopped, and traces them from then on.
pub(crate) fn await_stops(job: &Job, tree: &Tree, slots: &[usize]) -> Outcome<()> {
    for slot in slots {
        let Role::Process(i) = tree.nodes[*slot].role else { continue };
        let p = &job.processes[i];
        for t in &p.threads {
            ptrace::seize(t.tid, options(t)).map_err(|e| failed(p, t, "stop", &e))?;
        }
        for t in &p.threads {
            group_stop(t.tid).map_err(|e| failed(p, t, "stop", &e))?;
        }
    }
    Ok(())
}

/// Waits until a traced task is stopped by job control.
pub(crate) fn group_stop(tid: i32) -> io::Result<()> {
    loop {
        match ptrace::next(tid)? {
            Event::GroupStop(_) => return Ok(()),
            // Traced before the signal was delivered: now it is.
            Event::Signal(signal) => ptrace::cont(tid, signal)?,
            other => return Err(io::Error::other(format!("unexpected event {other:?}"))),
        }
    }
}

fn failed(p: &Process, t: &Thread, what: &str, e: &io::Error) -> RestartError {
    RestartError::at(
        "resume",
        format!("process {} ({}) thread {}: {what}: {e}", p.pid, p.comm, t.tid),
    )
}

fn expect(tid: i32, wanted: Event) -> io::Result<()> {
    match ptrace::next(tid)? {
        e if e == wanted => Ok(()),
        other => Err(io::Error::other(format!("unexpected event {other:?}"))),
    }
}

/// Offset of a `syscall` instruction in the restorer.
fn find_syscall(blob: &Blob) -> Option<u64> {
    let image = blob.placed_at(0);
    image.windows(2).position(|w| w == [0x0f, 0x05]).map(|at| at as u64)
}

/// Makes a stopped thread exit. It is seen once more inside the kernel, and never runs in the restorer's area any more;
/// then it is a zombie, before any other thread of the job can look at it.
fn exit(tid: i32, syscall: u64, code: i32) -> io::Result<()> {
    let mut regs = ptrace::get_regs(tid)?;
    regs.rip = syscall;
    regs.rax = EXIT;
    regs.orig_rax = u64::MAX;
    regs.rdi = u64::from(libc::WEXITSTATUS(code).unsigned_abs());
    ptrace::set_regs(tid, &regs)?;
    ptrace::cont(tid, 0)?;
    expect(tid, Event::Other(libc::PTRACE_EVENT_EXIT))?;
    ptrace::detach(tid, 0)?;
    // Nobody can wait for a main thread while others live.
    patience::within(patience::LIMIT, || proc::stat(tid).map_or(true, |s| s.is_dead()));
    Ok(())
}

/// Makes a stopped thread unmap the restorer's area.
fn unmap(pid: i32, syscall: u64, base: u64, bytes: u64) -> io::Result<()> {
    inject(pid, syscall, (MUNMAP, [base, bytes]))
}

/// Makes a stopped thread issue a call. It is stopped again before it returns from that, so it never runs in the
/// restorer's area.
fn inject(tid: i32, syscall: u64, (number, arguments): (u64, [u64; 2])) -> io::Result<()> {
    let mut regs = ptrace::get_regs(tid)?;
    regs.rip = syscall;
    regs.rax = number;
    regs.orig_rax = u64::MAX;
    [regs.rdi, regs.rsi] = arguments;
    ptrace::set_regs(tid, &regs)?;
    for _ in 0..2 {
        ptrace::cont_to_syscall(tid)?;
        loop {
            match ptrace::next(tid)? {
                Event::Syscall => break,
                // Somebody continues the process (SIGCONT), which is told to who traces it.
                Event::Interrupted => ptrace::cont_to_syscall(tid)?,
                other => return Err(io::Error::other(format!("unexpected event {other:?}"))),
            }
        }
    }
    sys::raw(ptrace::get_regs(tid)?.rax.cast_signed() as isize).map(drop)
}

fn set_state(t: &Thread, then: &Processor, now: &Processor) -> io::Result<()> {
    if !t.xstate.is_empty() {
        let bytes = ptrace::get_xstate(t.tid)?.len();
        let xstate = processor::convert(&t.xstate, &then.components, &now.components, bytes);
        let xstate = xstate.map_err(|missing| io::Error::other(format!("this processor lacks {missing}")))?;
        ptrace::set_xstate(t.tid, &xstate)?;
    }
    let regs = ptrace::words_to_regs(&t.regs).ok_or_else(|| io::Error::other("damaged image: not 27 registers"))?;
    // A thread that was in a system call has `orig_rax` and an ERESTART code: the kernel issues the call anew, or runs
    // a pending handler first.
    ptrace::set_regs(t.tid, &regs)?;
    ptrace::set_sigmask(t.tid, t.sigmask)
}

/// Gives the terminal to the process group that had it, or to the agent's.
pub(crate) fn hand_over_terminal(job: &Job) {
    let Some(tty) = sys::terminal() else { return };
    let own = |g: i32| job.processes.iter().any(|p| p.pgid == g);
    // A terminal of the job's own can have the same number, in a devpts of the job's own.
    let of_terminal = |p: &&Process| p.tty != 0 && (p.tty, p.sid) == (job.agent.tty, job.agent.sid) && p.tty_pgrp > 0;
    let group = job.processes.iter().find(of_terminal).map(|p| p.tty_pgrp).filter(|g| own(*g));
    let mine = belay_kernel::process::group();
    if let Err(e) = sys::tcsetpgrp(tty.as_fd(), group.unwrap_or(mine)) {
        tracing::warn!(error = %e, "the terminal was not handed over");
    }
}
