//! Suspend: every task of the job is seized and stopped, without a signal that the program could notice.
//!
//! ```text
//! descendants of the agent ──► seize + interrupt every task ──► all stopped? ──► list again ──► nothing new: suspended
//!                                        ▲                          │ no             │ new task
//!                                        └──────────────────────────┴────────────────┘
//! ```
//! Only a running task makes a new one, so a listing taken while all known tasks are stopped and that shows nothing new is complete.
//!
//! A parent inside `vfork` cannot be stopped until its child has called exec or exited: such children are let go until the parent has
//! stopped. Dropping a [`Suspended`] puts everything back and lets the tasks go on.

use crate::rescue::Gate;
use crate::CaptureError;
use belay_kernel::kcmp;
use belay_kernel::proc;
use belay_kernel::ptrace::{self, Event, Regs};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long a task may take to reach its stop before the checkpoint is given up.
const LIMIT: Duration = Duration::from_secs(10);
/// A task that has not stopped after this time is looked at for `vfork`.
const PATIENCE: Duration = Duration::from_millis(2);

/// How long a failed suspend waits for tasks that it has already asked to stop. Any that take longer are let go by [`release`].
const SETTLE_LIMIT: Duration = Duration::from_secs(1);

/// How long the processes wait for one that was stopped by job control to stand still again.
const STOP_LIMIT: Duration = Duration::from_millis(100);

/// A stopped task.
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub(crate) tid: i32,
    /// Registers as the task must find them when it goes on.
    pub(crate) regs: Regs,
    /// Blocked signals as the task must find them.
    pub(crate) sigmask: u64,
    /// Signal that stopped the process by job control.
    pub(crate) group_stop: Option<i32>,
    /// Signal to be delivered when the task goes on.
    deferred: i32,
    /// Whether registers or mask have been changed since the stop.
    pub(crate) borrowed: bool,
    /// Whether the task runs code of ours at this moment.
    pub(crate) running: bool,
}

/// A process all of whose tasks are stopped.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) ppid: i32,
    /// The main thread first, unless it has exited.
    pub(crate) tasks: Vec<Task>,
    /// Injected area, to be unmapped before the process goes on: (address, bytes).
    pub(crate) area: Option<(u64, u64)>,
    /// Whether its attribute PR_SET_CHILD_SUBREAPER must be switched on again.
    pub(crate) subreaper: bool,
    /// How its main thread issues system calls for the agent.
    pub(crate) gate: Option<Gate>,
}

/// A process that has ended and was not waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zombie {
    pub(crate) pid: i32,
}

/// The whole job, stopped.
#[derive(Debug, Default)]
pub(crate) struct Suspended {
    pub(crate) processes: Vec<Process>,
    pub(crate) zombies: Vec<Zombie>,
}

/// Where a task is on its way to the stop.
#[derive(Debug)]
enum State {
    Pending(Instant),
    Stopped(Box<Task>),
    Gone,
}

/// Stops all descendants of `agent` but its children `outside` and what they have started.
pub(crate) fn suspend(agent: i32, outside: &[i32]) -> Result<Suspended, CaptureError> {
    let mut gathering = Gathering {
        outside: outside.to_vec(),
        ..Gathering::default()
    };
    match gathering.run(agent) {
        Ok(()) => Ok(gathering.finish()),
        Err(e) => {
            gathering.settle();
            drop(gathering.finish());
            Err(e)
        }
    }
}

/// Processes that ended while they were traced, with their wait status: for the tracer's own children the trace's wait was the only one.
static ENDED: Mutex<Vec<(i32, i32)>> = Mutex::new(Vec::new());

fn ended(tid: i32, status: i32) {
    if let Ok(mut list) = ENDED.lock() {
        list.push((tid, status));
    }
}

/// Tasks that ended during the checkpoints since the last call, and were collected there: (identifier, wait status). A caller that waits for a child of its own finds it
/// here when it was killed in mid-checkpoint.
pub fn take_ended() -> Vec<(i32, i32)> {
    ENDED.lock().map(|mut list| std::mem::take(&mut *list)).unwrap_or_default()
}

/// Lets task `tid` go, whose stop the caller's `waitpid` has reported outside a checkpoint: it was asked to stop by one that failed.
pub fn release(tid: i32) {
    drop(ptrace::detach(tid, 0));
}

#[derive(Debug, Default)]
struct Gathering {
    /// Children of the agent that are no part of the job.
    outside: Vec<i32>,
    /// By task: its process and state.
    tasks: BTreeMap<i32, (i32, State)>,
    parents: BTreeMap<i32, i32>,
    zombies: BTreeSet<i32>,
    /// Children let go because their parent waits for them in `vfork`: child and that parent.
    released: BTreeMap<i32, i32>,
}

impl Gathering {
    fn run(&mut self, agent: i32) -> Result<(), CaptureError> {
        let begin = Instant::now();
        loop {
            let news = self.seize_new(agent)?;
            if !news && self.pending() == 0 {
                return Ok(());
            }
            self.wait_for_stops(begin)?;
        }
    }

    fn pending(&self) -> usize {
        self.tasks.values().filter(|(_, s)| matches!(s, State::Pending(_))).count()
    }

    /// Seizes every task not yet known; says whether there was one.
    fn seize_new(&mut self, agent: i32) -> Result<bool, CaptureError> {
        let mut news = false;
        let list =
            proc::descendants_but(agent, &self.outside).map_err(|e| CaptureError::failed("list the processes of the job", e))?;
        for (pid, ppid) in list {
            if self.zombies.contains(&pid) || self.released.contains_key(&pid) {
                continue;
            }
            self.parents.insert(pid, ppid);
            let tids = proc::tasks(pid).unwrap_or_default();
            for tid in tids {
                if !self.tasks.contains_key(&tid) {
                    news |= self.seize(pid, ppid, tid, agent)?;
                }
            }
        }
        Ok(news)
    }

    fn seize(&mut self, pid: i32, ppid: i32, tid: i32, agent: i32) -> Result<bool, CaptureError> {
        let refused = match ptrace::seize(tid, libc::PTRACE_O_TRACESYSGOOD) {
            Ok(()) => {
                // A task that has died since gives ESRCH here; its end is seen by the wait.
                let _ = ptrace::interrupt(tid);
                self.tasks.insert(tid, (pid, State::Pending(Instant::now())));
                return Ok(true);
            }
            Err(e) => e,
        };
        let state = proc::stat(tid).map(|s| s.state);
        match (refused.raw_os_error(), state) {
            (Some(libc::ESRCH), _) | (_, Err(_)) => Ok(false),
            // The main thread has exited while others run: they are the process.
            (_, Ok('Z' | 'X')) if tid == pid && proc::tasks(pid).is_ok_and(|t| t.len() > 1) => Ok(false),
            (_, Ok('Z' | 'X')) => {
                // The agent collects its own children; others are waited for by their parents, perhaps after the restart.
                if tid == pid && ppid != agent {
                    self.zombies.insert(pid);
                }
                Ok(false)
            }
            _ => {
                let tracer = proc::Status::read(tid)
                    .ok()
                    .and_then(|s| s.text("TracerPid").map(str::to_owned))
                    .unwrap_or_default();
                let reason = if tracer != "0" && !tracer.is_empty() {
                    format!("is traced by process {tracer} (ptrace); end the debugger and try again")
                } else {
                    format!(
                        "cannot be traced ({refused}): a setuid or undumpable program; keep it out of the job or run belay as root"
                    )
                };
                let comm = proc::stat(pid).map(|s| s.comm).unwrap_or_default();
                Err(CaptureError::refuse(pid, comm, reason))
            }
        }
    }

    /// Collects the stops of pending tasks until none is pending, or until something must be looked at again.
    fn wait_for_stops(&mut self, begin: Instant) -> Result<(), CaptureError> {
        loop {
            let pending: Vec<i32> = self
                .tasks
                .iter()
                .filter(|(_, (_, s))| matches!(s, State::Pending(_)))
                .map(|(t, _)| *t)
                .collect();
            if pending.is_empty() {
                return Ok(());
            }
            for tid in pending {
                self.poll(tid)?;
            }
            if self.pending() == 0 {
                self.released.clear();
                return Ok(());
            }
            if begin.elapsed() > LIMIT {
                return Err(self.stuck());
            }
            self.release_vfork_children()?;
            crate::signals::wait_for_child(Duration::from_millis(1));
        }
    }

    fn poll(&mut self, tid: i32) -> Result<(), CaptureError> {
        let event = match ptrace::wait(tid, false) {
            Ok(None) => return Ok(()),
            Ok(Some(event)) => {
                if let Event::Ended(status) = event {
                    ended(tid, status);
                }
                event
            }
            Err(_) => Event::Ended(0),
        };
        let Some((pid, state)) = self.tasks.get_mut(&tid) else {
            return Ok(());
        };
        match event {
            Event::Interrupted => *state = stopped(*pid, tid, None)?,
            Event::GroupStop(sig) => *state = stopped(*pid, tid, Some(sig))?,
            // A signal was on its way before our stop: let it be delivered; the stop follows before the handler's first instruction.
            Event::Signal(sig) => drop(ptrace::cont(tid, sig)),
            Event::Syscall | Event::Other(_) => drop(ptrace::cont(tid, 0)),
            // Forgotten, so that the next look at the job finds what it has become: a zombie that its parent has yet to wait for.
            Event::Ended(_) => drop(self.tasks.remove(&tid)),
        }
        Ok(())
    }

    /// Lets stopped children go on whose parent cannot stop because it waits for them in `vfork`.
    fn release_vfork_children(&mut self) -> Result<(), CaptureError> {
        let waiting: Vec<(i32, i32)> = self
            .tasks
            .iter()
            .filter(|(_, (_, s))| matches!(s, State::Pending(since) if since.elapsed() > PATIENCE))
            .filter(|(tid, _)| proc::stat(**tid).is_ok_and(|s| s.state == 'D'))
            .map(|(tid, (pid, _))| (*tid, *pid))
            .collect();
        for (waiter, parent) in waiting {
            for child in proc::children(parent).unwrap_or_default() {
                if !kcmp::compare(waiter, child, kcmp::Object::Vm).is_ok_and(|o| o.is_eq()) {
                    continue;
                }
                let tids: Vec<i32> = self
                    .tasks
                    .iter()
                    .filter(|(_, (p, s))| *p == child && matches!(s, State::Stopped(_)))
                    .map(|(t, _)| *t)
                    .collect();
                if tids.is_empty() {
                    continue;
                }
                for tid in tids {
                    drop(ptrace::detach(tid, 0));
                    self.tasks.remove(&tid);
                }
                self.released.insert(child, parent);
            }
        }
        Ok(())
    }

    fn stuck(&self) -> CaptureError {
        let (tid, pid) = self
            .tasks
            .iter()
            .find(|(_, (_, s))| matches!(s, State::Pending(_)))
            .map_or((0, 0), |(t, (p, _))| (*t, *p));
        let place = std::fs::read_to_string(format!("/proc/{tid}/wchan")).unwrap_or_default();
        CaptureError::refuse(
            pid,
            format!("thread {tid}"),
            format!("did not stop within {} s (kernel: {place}); try again", LIMIT.as_secs()),
        )
    }

    /// After a failure: tasks already asked to stop do so shortly, and only a stopped task can be let go.
    fn settle(&mut self) {
        let begin = Instant::now();
        while self.pending() > 0 && begin.elapsed() < SETTLE_LIMIT {
            let pending: Vec<i32> = self
                .tasks
                .iter()
                .filter(|(_, (_, s))| matches!(s, State::Pending(_)))
                .map(|(t, _)| *t)
                .collect();
            for tid in pending {
                if self.poll(tid).is_err() {
                    drop(ptrace::detach(tid, 0));
                    self.tasks.remove(&tid);
                }
            }
            crate::signals::wait_for_child(Duration::from_millis(1));
        }
    }

    fn finish(self) -> Suspended {
        let mut by_pid: BTreeMap<i32, Vec<Task>> = BTreeMap::new();
        for (_, (pid, state)) in self.tasks {
            if let State::Stopped(task) = state {
                by_pid.entry(pid).or_default().push(*task);
            }
        }
        let mut out = Suspended::default();
        for (pid, mut tasks) in by_pid {
            tasks.sort_by_key(|t| (t.tid != pid, t.tid));
            let ppid = self.parents.get(&pid).copied().unwrap_or(0);
            out.processes.push(Process {
                pid,
                ppid,
                tasks,
                area: None,
                subreaper: false,
                gate: None,
            });
        }
        out.zombies = self.zombies.into_iter().map(|pid| Zombie { pid }).collect();
        out
    }
}

/// The task's state at its stop; gone when it died at that moment.
fn stopped(pid: i32, tid: i32, group_stop: Option<i32>) -> Result<State, CaptureError> {
    let regs = match ptrace::get_regs(tid) {
        Ok(regs) => regs,
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(State::Gone),
        Err(e) => {
            return Err(CaptureError::refuse(
                pid,
                format!("thread {tid}"),
                format!("its registers cannot be read: {e}"),
            ))
        }
    };
    let Ok(sigmask) = ptrace::get_sigmask(tid) else {
        return Ok(State::Gone);
    };
    let mut task = Box::new(Task {
        tid,
        regs,
        sigmask,
        group_stop,
        deferred: 0,
        borrowed: false,
        running: false,
    });
    if crate::calls::hide_interruption(&mut task.regs) {
        // At once, so that the call is restarted even if the agent dies.
        let _ = ptrace::set_regs(tid, &task.regs);
    }
    Ok(State::Stopped(task))
}

impl Suspended {
    /// Number of tasks.
    pub(crate) fn tasks(&self) -> usize {
        self.processes.iter().map(|p| p.tasks.len()).sum()
    }

    /// Whether nothing of the job is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.zombies.is_empty()
    }

    /// Takes the injected areas away, puts registers and masks back, and lets every task go on.
    pub(crate) fn resume(mut self) {
        self.put_back();
    }

    fn put_back(&mut self) {
        // After a failure in the middle of a step some tasks may still run code of ours: only a stopped task takes requests.
        for task in self
            .processes
            .iter_mut()
            .flat_map(|p| p.tasks.iter_mut())
            .filter(|t| t.running)
        {
            let _ = ptrace::interrupt(task.tid);
            if let Ok(Some(Event::Ended(status))) = ptrace::wait(task.tid, true) {
                ended(task.tid, status);
            }
            task.running = false;
        }
        for process in &mut self.processes {
            process.put_back();
        }
        // Those stopped by job control first, until they stand still again: nobody may see them run.
        let (stopped, others): (Vec<&Process>, Vec<&Process>) = self
            .processes
            .iter()
            .partition(|p| p.tasks.iter().any(|t| t.group_stop.is_some()));
        for process in stopped {
            process.detach();
            process.wait_until_stopped();
        }
        for process in others {
            process.detach();
        }
        self.processes.clear();
    }
}

impl Process {
    /// A thread that lives: under its identifier the kernel shows what belongs to the whole process, also when the main thread has exited.
    pub(crate) fn task(&self) -> i32 {
        self.tasks.first().map_or(self.pid, |t| t.tid)
    }

    /// Takes the injected area away and puts registers, masks and attributes back. After each single step the process would find its way back by
    /// itself, should the agent die there: nobody stands in the area any more when it goes, and the main thread, which takes it away, is
    /// led back by its gate.
    fn put_back(&mut self) {
        let reader = self.task();
        let Some((main, others)) = self.tasks.split_first_mut() else {
            return;
        };
        others.iter().for_each(Task::put_back);
        if let Some(gate) = &self.gate {
            // When one of these fails the process has died, and what it would have changed with it.
            if self.subreaper {
                let on = [libc::PR_SET_CHILD_SUBREAPER as u64, 1, 0, 0, 0, 0];
                let _ = crate::inject::remote_syscall(gate, main, libc::SYS_prctl, on);
            }
            if let Some((address, bytes)) = self.area.take() {
                let _ = crate::inject::remote_syscall(gate, main, libc::SYS_munmap, [address, bytes, 0, 0, 0, 0]);
            }
        }
        main.put_back();
        if let Some(gate) = &mut self.gate {
            gate.remove(reader);
        }
    }

    fn detach(&self) {
        for task in &self.tasks {
            let _ = ptrace::detach(task.tid, task.deferred);
        }
    }

    fn wait_until_stopped(&self) {
        let begin = Instant::now();
        let moving = |tid: i32| proc::stat(tid).is_ok_and(|s| matches!(s.state, 'R' | 'S' | 'D' | 't'));
        while begin.elapsed() < STOP_LIMIT && self.tasks.iter().any(|t| moving(t.tid)) {
            std::thread::yield_now();
        }
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        self.put_back();
    }
}

impl Task {
    /// Gives the stopped task its mask and registers back. The mask first: should the agent die between the two, the task goes its way back,
    /// which ends with the same mask.
    fn put_back(&self) {
        if self.borrowed {
            let _ = ptrace::set_sigmask(self.tid, self.sigmask);
            let _ = ptrace::set_regs(self.tid, &self.regs);
        }
    }

    /// Waits until the task stops with `expected` while it runs code of ours. Signals that cannot be blocked are kept for later.
    pub(crate) fn wait_for(&mut self, expected: Event) -> Result<(), CaptureError> {
        loop {
            let event =
                ptrace::wait(self.tid, true).map_err(|e| CaptureError::failed(format!("wait for thread {}", self.tid), e))?;
            let Some(event) = event else { continue };
            if let Event::Ended(status) = event {
                ended(self.tid, status);
            }
            if event == expected {
                self.running = false;
                return Ok(());
            }
            match event {
                Event::Signal(libc::SIGSTOP) => {
                    self.deferred = libc::SIGSTOP;
                    let again = if expected == Event::Syscall {
                        ptrace::cont_to_syscall(self.tid)
                    } else {
                        ptrace::cont(self.tid, 0)
                    };
                    again.map_err(|e| CaptureError::failed(format!("continue thread {}", self.tid), e))?;
                }
                Event::Interrupted | Event::GroupStop(_) | Event::Other(_) => {
                    let again = if expected == Event::Syscall {
                        ptrace::cont_to_syscall(self.tid)
                    } else {
                        ptrace::cont(self.tid, 0)
                    };
                    again.map_err(|e| CaptureError::failed(format!("continue thread {}", self.tid), e))?;
                }
                other => {
                    self.running = false;
                    return Err(CaptureError::Failed {
                        step: format!("thread {} of the application", self.tid),
                        reason: format!("{other:?} while suspended"),
                    });
                }
            }
        }
    }
}
