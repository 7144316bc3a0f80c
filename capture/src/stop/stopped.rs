//! Stopped processes: what is known of them, and of their tasks. [`crate::stop::resume`] lets them go on.

use crate::state::wait::{Call, Wait};
use crate::stop::reaper::{self, Reaper};
use crate::stop::tracers::{Traced, Tracers};
use crate::CaptureError;
use belay_kernel::masks;
use belay_kernel::proc::{Map, Status};
use belay_kernel::ptrace::{self, Event, Regs};
use belay_kernel::vm::Memory;
use rustix::process::{waitpid, Pid, WaitOptions};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Most that is waited for one announcement of a stop: two may become one.
const PATIENCE: Duration = Duration::from_millis(100);

/// A stopped task.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) tid: i32,
    /// The tracer that seized it.
    pub(crate) tracer: usize,
    /// Registers as the task must find them when it goes on.
    pub(crate) regs: Regs,
    /// Its extended state (XSAVE area).
    pub(crate) xstate: Vec<u8>,
    /// Blocked signals as the task must find them.
    pub(crate) sigmask: u64,
    /// Registration of restartable sequences: (address, length, signature).
    pub(crate) rseq: (u64, u32, u32),
    /// How long it still had to wait, where that is known.
    pub(crate) wait: Option<Wait>,
    /// Whether it has been let go already.
    pub(crate) gone: bool,
    /// Whether it was stopped in a wait for a futex, into which it goes back.
    pub(crate) waits: bool,
    /// Mask that is in force in the call that it begins anew, where that blocks more.
    pub(crate) call_mask: Option<u64>,
    /// Signal that stopped the process by job control.
    pub(crate) group_stop: Option<i32>,
    /// Signal to be delivered when the task goes on.
    pub(crate) deferred: i32,
    /// Whether registers or mask have been changed since the stop.
    pub(crate) borrowed: bool,
    /// Whether code of ours may have used its vector registers since.
    pub(crate) vectors_used: bool,
    /// Whether the task runs code of ours at this moment.
    pub(crate) running: bool,
}

impl Task {
    /// Task `tid`, which `tracer` has seized and found with these registers, extended state and mask. The rest is that of a
    /// task of which nothing else is known and that has not been touched.
    pub(crate) fn new(tid: i32, tracer: usize, (regs, xstate, sigmask): (Regs, Vec<u8>, u64)) -> Self {
        Self {
            tid,
            tracer,
            regs,
            xstate,
            sigmask,
            rseq: (0, 0, 0),
            wait: None,
            gone: false,
            waits: false,
            call_mask: None,
            group_stop: None,
            deferred: 0,
            borrowed: false,
            vectors_used: false,
            running: false,
        }
    }
}

impl<T: Send + 'static> Traced for (Task, T) {
    fn tracer(&self) -> usize {
        self.0.tracer
    }
}

/// A locked piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Locked {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Its pages are locked when they are touched.
    pub(crate) on_fault: bool,
}

impl Locked {
    pub(crate) fn of(map: &Map) -> Option<Self> {
        let has = |flag: &str| map.flags.iter().any(|f| f == flag);
        has("lo").then(|| Self {
            start: map.start,
            end: map.end,
            // Earlier kernels have no name for it.
            on_fault: has("lf") || has("??"),
        })
    }

    /// How much a process with this status has locked, KiB.
    pub(crate) fn kib(status: &Status) -> i64 {
        status.list("VmLck").first().copied().unwrap_or(0)
    }

    /// Mappings for tests: two locked at once (the second cannot be read), one page by page, one not at all.
    #[cfg(test)]
    pub(crate) fn examples() -> Vec<Map> {
        let line = |range: &str, prot: &str, flags: &str| format!("{range} {prot} 00000000 00:00 0 \nVmFlags: {flags}\n");
        let text = [
            line("1000-3000", "rw-p", "rd wr mr lo"),
            line("5000-6000", "---p", "mr lo"),
            line("7000-9000", "rw-p", "rd wr lo lf"),
            line("a000-c000", "rw-p", "rd wr"),
        ];
        Map::parse(text.concat().as_bytes()).unwrap()
    }
}

/// Where system calls are issued, and the frame behind them.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Address of the instruction.
    pub(crate) syscall_at: u64,
    /// Stack pointer for the call, where there is a way back.
    pub(crate) stack: Option<u64>,
    /// What lay where the frame is.
    pub(crate) covered: Option<(u64, Vec<u8>)>,
}

impl Gate {
    /// Puts back what lay where the frame is; `pid` is a thread of the process.
    pub(crate) fn remove(&mut self, pid: i32) {
        if let Some((place, covered)) = self.covered.take() {
            if let Ok(memory) = Memory::open(pid) {
                let _ = memory.write(place, &covered);
            }
        }
    }
}

/// What a process has in common with the first of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Guest {
    /// The first.
    pub(crate) first: i32,
    /// Its number in the group; that of the first is 0.
    pub(crate) place: u64,
    /// Whether it shares the signal dispositions of its maker.
    pub(crate) handlers: bool,
}

/// A process all of whose tasks are stopped.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) ppid: i32,
    /// The main thread first, unless it has exited. The first one is traced by the calling thread.
    pub(crate) tasks: Vec<Task>,
    /// Signal that has stopped it by job control: any of its tasks may have been the one that told of it.
    pub(crate) group_stop: Option<i32>,
    /// Injected area, to be unmapped before the process goes on: (address, bytes).
    pub(crate) area: Option<(u64, u64)>,
    /// What was unlocked to make room for it, to be locked again.
    pub(crate) unlocked: Vec<Locked>,
    /// Limits that were raised, as they were: resource, soft and hard limit.
    pub(crate) raised: Vec<(u32, (u64, u64))>,
    /// Whether its attribute PR_SET_CHILD_SUBREAPER must be switched on again.
    pub(crate) subreaper: bool,
    /// How its main thread issues system calls for the agent.
    pub(crate) gate: Option<Gate>,
    /// Its memory is another's.
    pub(crate) guest: Option<Guest>,
    /// Where frames for those that share its memory would lie is the stack of one of them.
    pub(crate) crowded: bool,
}

/// A process that has ended and was not waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zombie {
    pub(crate) pid: i32,
}

/// The whole job, stopped.
#[derive(Debug)]
pub(crate) struct Suspended {
    pub(crate) processes: Vec<Process>,
    pub(crate) zombies: Vec<Zombie>,
    pub(crate) tracers: Tracers,
    /// While they are stopped: nobody is told that a main thread has been killed before the other threads of its
    /// process have been waited for.
    pub(crate) reaper: Option<Reaper>,
}

/// Processes that ended while they were traced, with their wait status: for the tracer's own children the trace's wait
/// was the only one.
static ENDED: Mutex<Vec<(i32, i32)>> = Mutex::new(Vec::new());

/// Notes that a traced task has ended.
pub(crate) fn ended(tid: i32, status: i32) {
    if let Ok(mut list) = ENDED.lock() {
        list.push((tid, status));
    }
}

/// Collects the caller's child `pid` if it has ended; says whether it had.
pub(crate) fn collect(pid: i32) -> bool {
    // It may be traced by another thread of the caller: what it stopped for stays where it is.
    if !reaper::has_ended(pid) {
        return false;
    }
    let options = WaitOptions::NOHANG | WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned());
    let collected = waitpid(Pid::from_raw(pid), options).ok().flatten();
    if let Some((_, status)) = collected {
        ended(pid, status.as_raw());
    }
    collected.is_some()
}

/// Tasks that ended during the checkpoints since the last call, and were collected there: (identifier, wait status). A
/// caller that waits for a child of its own finds it here when it was killed in mid-checkpoint.
pub fn take_ended() -> Vec<(i32, i32)> {
    ENDED.lock().map(|mut list| std::mem::take(&mut *list)).unwrap_or_default()
}

/// Lets task `tid` go, whose stop the caller's `waitpid` has reported outside a checkpoint: it was asked to stop by one
/// that failed.
pub fn release(tid: i32) {
    drop(ptrace::detach(tid, 0));
}

impl Suspended {
    /// A job whose tasks have been stopped by `tracers`; `reaper` knows them.
    pub(crate) fn new(processes: Vec<Process>, zombies: Vec<Zombie>, tracers: Tracers, reaper: Option<Reaper>) -> Self {
        Self {
            processes,
            zombies,
            tracers,
            reaper,
        }
    }

    /// Number of tasks.
    pub(crate) fn tasks(&self) -> usize {
        self.processes.iter().map(|p| p.tasks.len()).sum()
    }

    /// Does `f` to every task on the thread that traces it, with what `prepare` says of it; `prepare` is told the
    /// numbers of the process and, within that, of the task. Returns what `f` said, by process and task.
    pub(crate) fn each_task<A: Send + 'static, R: Send + 'static>(
        &mut self,
        prepare: impl FnMut(usize, usize, &Task) -> A,
        f: impl Fn(&mut Task, &A) -> R + Send + Sync + 'static,
    ) -> Vec<Vec<R>> {
        self.each_task_while(prepare, f, |_| ()).0
    }

    /// As [`Self::each_task`]; while the helpers are busy the caller, once it has done its own part, does `meanwhile`,
    /// which finds of every process the first task only.
    pub(crate) fn each_task_while<A: Send + 'static, R: Send + 'static, M>(
        &mut self,
        mut prepare: impl FnMut(usize, usize, &Task) -> A,
        f: impl Fn(&mut Task, &A) -> R + Send + Sync + 'static,
        meanwhile: impl FnOnce(&mut Self) -> M,
    ) -> (Vec<Vec<R>>, M) {
        let f = Arc::new(f);
        let mut items = Vec::with_capacity(self.tasks());
        let mut counts = Vec::with_capacity(self.processes.len());
        let mut first = Vec::with_capacity(self.processes.len());
        for (p, process) in self.processes.iter_mut().enumerate() {
            // Unless those seized first have ended since, the first one is the caller's.
            let own = usize::from(process.tasks.first().is_some_and(|t| t.tracer == 0));
            first.extend(process.tasks.first().filter(|_| own == 1).map(|task| prepare(p, 0, task)));
            let others = process.tasks.split_off(own);
            counts.push((own, others.len()));
            items.extend(others.into_iter().enumerate().map(|(t, task)| {
                let given = prepare(p, own + t, &task);
                (task, given)
            }));
        }
        let of_others = f.clone();
        let round = self.tracers.begin(items, move |(task, given)| of_others(task, given));
        let firsts = self.processes.iter_mut().filter_map(|p| p.tasks.first_mut());
        let mut firsts = firsts
            .zip(&first)
            .map(|(task, given)| f(task, given))
            .collect::<Vec<R>>()
            .into_iter();
        let done_meanwhile = meanwhile(self);
        let mut done = round.finish().into_iter();
        let mut out = Vec::with_capacity(counts.len());
        for (process, (own, others)) in self.processes.iter_mut().zip(counts) {
            let mut said: Vec<R> = firsts.by_ref().take(own).collect();
            for ((task, _), r) in done.by_ref().take(others) {
                process.tasks.push(task);
                said.push(r);
            }
            out.push(said);
        }
        (out, done_meanwhile)
    }
}

impl Process {
    /// Whether one of its tasks waits for the futex at `word`.
    pub(crate) fn waits_for(&self, word: u64) -> bool {
        self.tasks.iter().any(|t| t.waits && Call::of(&t.regs).args[0] == word)
    }

    /// A process whose `tasks` are stopped.
    pub(crate) fn stopped(pid: i32, ppid: i32, tasks: Vec<Task>) -> Self {
        Self {
            pid,
            ppid,
            group_stop: tasks.iter().find_map(|t| t.group_stop),
            tasks,
            area: None,
            unlocked: Vec::new(),
            raised: Vec::new(),
            subreaper: false,
            gate: None,
            guest: None,
            crowded: false,
        }
    }

    /// A thread that lives: under its identifier the kernel shows what belongs to the whole process, also when the main
    /// thread has exited.
    pub(crate) fn task(&self) -> i32 {
        self.tasks.first().map_or(self.pid, |t| t.tid)
    }
}

impl Task {
    /// Stops a task that still runs code of ours.
    pub(crate) fn halt(&mut self) {
        if self.running {
            let _ = ptrace::interrupt(self.tid);
            if let Ok(Some(Event::Ended(status))) = ptrace::wait(self.tid, true) {
                ended(self.tid, status);
            }
            self.running = false;
        }
    }

    /// Lets the stopped task run on by itself, its signals blocked, until [`crate::stop::gather::stand_again`]. Of one that
    /// cannot be asked there is nothing left. Should the agent die meanwhile, signals stay blocked: in a thread of a driver,
    /// while the process has others.
    pub(crate) fn run_by_itself(&mut self) {
        // It has not come to its last stop yet: then `attend` lets it run past that.
        if std::mem::take(&mut self.gone) {
            self.running = true;
            return;
        }
        match ptrace::set_sigmask(self.tid, u64::MAX).and_then(|()| ptrace::leave_call(self.tid)) {
            Ok(Event::Ended(status)) => ended(self.tid, status),
            Ok(event) => {
                self.running = true;
                self.pass(event);
            }
            Err(_) => {}
        }
    }

    /// Whatever stops it meanwhile does so for a moment only.
    pub(crate) fn attend(&mut self) {
        match ptrace::wait(self.tid, false) {
            Ok(Some(Event::Ended(status))) => {
                ended(self.tid, status);
                self.running = false;
            }
            Ok(Some(event)) => self.pass(event),
            _ => {}
        }
    }

    /// Lets it run on past a stop. A signal that cannot be blocked is kept for later, unless it is for an instruction, which
    /// would only bring it again.
    pub(crate) fn pass(&mut self, event: Event) {
        let signal = match event {
            Event::Signal(signal) if ptrace::is_for_instruction(signal) => signal,
            Event::Signal(signal) => {
                self.deferred = signal;
                0
            }
            _ => 0,
        };
        drop(ptrace::cont(self.tid, signal));
    }

    /// Gives the stopped task its mask and registers back. The mask first: should the agent die between the two, the
    /// task goes its way back, which ends with the same mask.
    pub(crate) fn put_back(&mut self) {
        self.put_vectors_back();
        if std::mem::take(&mut self.borrowed) {
            let _ = ptrace::set_sigmask(self.tid, self.sigmask);
            let _ = ptrace::set_regs(self.tid, &self.regs);
        }
    }

    /// Whether others wait until it is back in its wait for a futex.
    pub(crate) fn goes_first(&self) -> bool {
        self.waits && self.deferred == 0
    }

    /// Leads the task, which has its own registers and mask, into the call that it begins anew, where other signals are
    /// blocked there. Should the agent die before it is inside, it keeps the call's mask.
    pub(crate) fn enter_call(&mut self) {
        let Some(mask) = self.call_mask.take().filter(|_| self.deferred == 0) else {
            return;
        };
        match masks::enter(self.tid, &self.regs, mask, self.sigmask) {
            Ok(Event::Signal(signal)) => self.deferred = signal,
            Ok(Event::Ended(status)) => ended(self.tid, status),
            // Inside; of a task that cannot be asked there is nothing left.
            Ok(_) | Err(_) => {}
        }
    }

    /// Gives the stopped task its extended state back, if code of ours may have used it.
    pub(crate) fn put_vectors_back(&mut self) {
        if std::mem::take(&mut self.vectors_used) {
            let _ = ptrace::set_xstate(self.tid, &self.xstate);
        }
    }

    /// Whether the task, which runs code of ours, has something to be waited for, or gets it before `end`.
    pub(crate) fn reports_until(&self, end: Instant) -> bool {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if !self.running || ptrace::has_changed(self.tid) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
            crate::stop::signals::wait_for_child(left.min(PATIENCE));
        }
    }

    /// Waits until the task stops with `expected` while it runs code of ours. Signals that cannot be blocked are kept for later.
    pub(crate) fn wait_for(&mut self, expected: Event) -> Result<(), CaptureError> {
        loop {
            let event = match ptrace::wait(self.tid, true) {
                Ok(None) => continue,
                Ok(Some(event)) => event,
                // The reaper has waited for it: it was killed.
                Err(e) if e.raw_os_error() == Some(libc::ECHILD) => Event::Ended(libc::SIGKILL),
                Err(e) => return Err(CaptureError::system(format!("wait for thread {}", self.tid), e)),
            };
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
                    again.map_err(|e| CaptureError::system(format!("continue thread {}", self.tid), e))?;
                }
                Event::Interrupted | Event::GroupStop(_) | Event::Other(_) => {
                    let again = if expected == Event::Syscall {
                        ptrace::cont_to_syscall(self.tid)
                    } else {
                        ptrace::cont(self.tid, 0)
                    };
                    again.map_err(|e| CaptureError::system(format!("continue thread {}", self.tid), e))?;
                }
                other => {
                    self.running = false;
                    return Err(CaptureError::Failed {
                        step: format!("thread {} of the application", self.tid),
                        reason: match other {
                            Event::Ended(status) if libc::WIFSIGNALED(status) => {
                                format!("it was killed by signal {} during the checkpoint", libc::WTERMSIG(status))
                            }
                            Event::Ended(_) => "it ended during the checkpoint".to_owned(),
                            Event::Signal(signal) => format!(
                                "it got signal {signal} in the middle of the checkpoint, as from an instruction of its own; take it again"
                            ),
                            other => format!("it did something unexpected in the middle of the checkpoint ({other:?})"),
                        },
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(tid: i32, group_stop: Option<i32>) -> Task {
        let regs = belay_kernel::ptrace::no_regs();
        Task {
            group_stop,
            ..Task::new(tid, 0, (regs, Vec::new(), 0))
        }
    }

    #[test]
    fn a_stop_that_another_than_the_first_task_tells_of_is_known_while_the_others_are_away() {
        let tasks = vec![task(i32::MAX - 1, None), task(i32::MAX, Some(libc::SIGTSTP))];
        let process = Process::stopped(i32::MAX - 1, 1, tasks);
        let mut job = Suspended::new(vec![process], Vec::new(), Tracers::default(), None);
        let seen = |job: &mut Suspended| (job.processes[0].tasks.len(), job.processes[0].group_stop);
        let (tids, meanwhile) = job.each_task_while(|_, number, _| number, |task, number| (task.tid, *number), seen);
        assert_eq!(meanwhile, (1, Some(libc::SIGTSTP)));
        assert_eq!(tids, [[(i32::MAX - 1, 0), (i32::MAX, 1)]]);
        assert_eq!(job.processes[0].tasks.len(), 2);
        // None of these tasks exists.
        job.processes.clear();
    }
}
