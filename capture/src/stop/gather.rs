//! Gathering: every task of the job is found, seized and stopped, without a signal that the program could notice.
//!
//! ```text
//! descendants of the agent ──► seize + interrupt every task ──► all stopped? ──► list again ──► nothing new: suspended
//!            ▲                                                   │ no                  │ yes
//!            └───────────────────────────────────────────────────┴─────────────────────┘
//! ```
//! Only a running task makes a new one, and what a task is about to make is there when it has stopped. So a listing
//! that shows nothing new, and nothing ended, while all known tasks are stopped is complete. The first listing is made
//! before anything is stopped, and the threads of processes that have several are seized then: they run on, but for one
//! that a signal is sent to. A process with one thread may be about to call exec, and a traced one that calls a setuid
//! program does not get its privileges: such a process is interrupted right after it was seized.
//!
//! A parent inside `vfork` cannot be stopped until its child has called exec or exited. Those that wait at first are
//! outlasted before anything is stopped (see `vfork`); children made since are let go until the parent has stopped.

mod look;
mod seize;

use crate::state::waits::Sleepers;
use crate::stop::listing::Listing;
use crate::stop::reaper::{Reaper, Seized};
use crate::stop::stopped::{collect, ended, Process, Suspended, Task, Zombie};
use crate::stop::tracers::{Traced, Tracers};
use crate::stop::vfork;
use crate::stop::vfork::LIMIT;
use crate::CaptureError;
use belay_kernel::futex;
use belay_kernel::proc;
use belay_kernel::ptrace::{self, Event};
use look::{look_or_let_go, Look, Standing};
use seize::{interrupt, not_traceable, seize, seize_running, seize_unless_waiting, Unseized};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A task that has not stopped after this time is looked at for `vfork`.
const PATIENCE: Duration = Duration::from_millis(2);
/// How long a failed suspend waits for tasks that it has already asked to stop. Any that take longer are let go by
/// [`crate::release`].
const SETTLE_LIMIT: Duration = Duration::from_secs(1);

/// What can be done before anything is stopped: the job is listed, and processes with several threads are seized.
#[derive(Debug)]
pub(crate) struct Prepared {
    listing: Listing,
    gathering: Gathering,
    reaper: Reaper,
    /// What was refused. Seized tasks must be asked to stop all the same, since only then can they be let go.
    seized: Result<(), CaptureError>,
}

/// Prepares the suspension of the processes in the list.
pub(crate) fn prepare(listing: Listing, agent: i32) -> Result<Prepared, CaptureError> {
    let reaper = Reaper::start().map_err(|e| CaptureError::system("start a thread of the agent", e))?;
    let tracers = Tracers::for_job(listing.tasks());
    let sleepers = Sleepers::among(listing.processes.iter().map(|(pid, _, tids)| (*pid, tids.as_slice())));
    let mut gathering = Gathering {
        tracers,
        seized: reaper.seized.clone(),
        sleepers: Arc::new(sleepers),
        tasks: BTreeMap::new(),
        parents: BTreeMap::new(),
        zombies: BTreeSet::new(),
        released: BTreeMap::new(),
        dead: BTreeSet::new(),
        changed: false,
    };
    let several = listing.processes.iter().filter(|(.., tids)| tids.len() > 1);
    let seized = gathering.seize_new(several, agent, seize_running).map(drop);
    Ok(Prepared {
        listing,
        gathering,
        reaper,
        seized,
    })
}

/// Stops all tasks of the list, and all that they have made since; also tells when the first was asked to.
pub(crate) fn suspend(prepared: Prepared, agent: i32, outside: &[i32]) -> Result<(Suspended, Instant), CaptureError> {
    let Prepared {
        listing,
        mut gathering,
        reaper,
        seized,
    } = prepared;
    let first = if gathering.sleepers.take_turns() {
        gathering.interrupt(|of| !futex::sleeps_in_wait(of.tid))
    } else {
        gathering.interrupt(|_| true)
    };
    let result = seized
        .and_then(|()| gathering.run(listing, agent, outside))
        .and_then(|()| gathering.check_leaders());
    if result.is_err() {
        gathering.interrupt(|_| true);
        gathering.settle();
    }
    let suspended = gathering.finish(reaper);
    result.map(|()| (suspended, first))
}

/// Stops a task that has run on by itself, with its signals blocked, wherever it is now. One that does not come to a stop (a
/// driver that hangs) is left alone: it is let go when it does, by [`crate::release`].
pub(crate) fn stand_again(task: &mut Task) {
    if !std::mem::take(&mut task.running) {
        return;
    }
    drop(ptrace::interrupt(task.tid));
    let end = Instant::now() + SETTLE_LIMIT;
    loop {
        match ptrace::wait(task.tid, false) {
            Ok(Some(Event::Interrupted | Event::GroupStop(_))) => break,
            Ok(Some(Event::Ended(status))) => return ended(task.tid, status),
            Ok(Some(event)) => task.pass(event),
            Ok(None) if Instant::now() > end => {
                tracing::warn!(tid = task.tid, "a thread of a driver does not stop");
                task.gone = true;
                return;
            }
            Ok(None) => crate::stop::signals::wait_for_child(Duration::from_millis(1)),
            // The reaper has waited for it.
            Err(_) => return,
        }
    }
    drop(ptrace::set_sigmask(task.tid, task.sigmask));
    let kept = std::mem::take(&mut task.deferred);
    look::renew(task);
    // From this kind of stop the kernel delivers none when the task is let go: it waits like any other.
    if kept != 0 {
        drop(ptrace::send(task.tid, kept));
    }
}

/// Where a task is on its way to the stop.
#[derive(Debug)]
enum State {
    /// Runs.
    Seized,
    /// Asked to stop at this moment.
    Pending(Instant),
    Stopped(Box<Task>),
}

/// A task known to the gathering.
#[derive(Debug)]
struct Known {
    pid: i32,
    tracer: usize,
    state: State,
}

/// A task to be dealt with by its tracer.
#[derive(Debug, Clone, Copy)]
struct Of {
    tid: i32,
    pid: i32,
    tracer: usize,
}

impl Traced for Of {
    fn tracer(&self) -> usize {
        self.tracer
    }
}

#[derive(Debug)]
struct Gathering {
    tracers: Tracers,
    seized: Seized,
    sleepers: Arc<Sleepers>,
    /// By task.
    tasks: BTreeMap<i32, Known>,
    parents: BTreeMap<i32, i32>,
    zombies: BTreeSet<i32>,
    /// Children let go because their parent waits for them in `vfork`: child and that parent.
    released: BTreeMap<i32, i32>,
    /// Tasks that were found ended; they tell nothing new the next time.
    dead: BTreeSet<i32>,
    /// Whether a task has ended or has been let go since the last listing.
    changed: bool,
}

impl Gathering {
    fn run(&mut self, mut listing: Listing, agent: i32, outside: &[i32]) -> Result<(), CaptureError> {
        let begin = Instant::now();
        if self.sleepers.take_turns() {
            self.seize_new(listing.processes.iter(), agent, seize_unless_waiting)?;
            // Whoever wakes those that wait for a futex stands still before they do: once they are stopped, nobody is found there.
            self.wait_for_stops(begin)?;
            self.interrupt(|_| true);
        } else {
            self.seize_new(listing.processes.iter(), agent, seize)?;
        }
        loop {
            self.wait_for_stops(begin)?;
            self.catch_orphans(agent, outside, begin)?;
            self.changed = false;
            listing = listing.again(agent, outside, |pid, tids| self.are_all(pid, tids))?;
            let news = self.seize_new(listing.processes.iter(), agent, seize)?;
            if !news && !self.changed {
                return Ok(());
            }
            if begin.elapsed() > LIMIT {
                return Err(self.stuck());
            }
        }
    }

    /// Takes hold of processes that have been left to the agent, the newest first, and collects those that have ended,
    /// until there is no other. A look at the whole job takes longer than one process of a chain lives in which each
    /// makes the next and ends; here one is asked to stop before it has made its own.
    fn catch_orphans(&mut self, agent: i32, outside: &[i32], begin: Instant) -> Result<(), CaptureError> {
        loop {
            let known = |pid: &i32| {
                outside.contains(pid)
                    || self.tasks.contains_key(pid)
                    || self.zombies.contains(pid)
                    || self.released.contains_key(pid)
            };
            let mut orphans = proc::children_of_thread(agent, agent).unwrap_or_default();
            orphans.retain(|pid| !known(pid));
            let mut some = false;
            for pid in orphans.into_iter().rev() {
                if collect(pid) {
                    some = true;
                    continue;
                }
                let of = Of {
                    tid: pid,
                    pid,
                    tracer: 0,
                };
                self.parents.insert(pid, agent);
                some |= self.note_seized(of, agent, agent, seize(of, &self.seized))?;
            }
            if !some {
                return Ok(());
            }
            self.wait_for_stops(begin)?;
            if begin.elapsed() > LIMIT {
                return Err(self.stuck());
            }
        }
    }

    /// Whether process `pid` has no other threads than `tids`, all of them stopped: then none of them makes another,
    /// and their number tells. One that has been killed since is missed when each of them is looked at
    /// (`threads::look`).
    fn are_all(&self, pid: i32, tids: &[i32]) -> bool {
        let stopped = |tid: &i32| {
            let known = self.tasks.get(tid);
            known.is_some_and(|k| k.pid == pid && matches!(k.state, State::Stopped(_)))
        };
        tids.iter().all(stopped) && proc::stat(pid).is_ok_and(|s| s.num_threads as usize == tids.len())
    }

    fn pending(&self) -> impl Iterator<Item = (Of, Instant)> + '_ {
        self.tasks.iter().filter_map(|(tid, known)| match known.state {
            State::Pending(since) => Some((known.of(*tid), since)),
            _ => None,
        })
    }

    /// Does `seize` to every task not yet known of these processes (process, parent, threads); says whether there was one.
    fn seize_new<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a (i32, i32, Vec<i32>)>,
        agent: i32,
        seize: fn(Of, &Seized) -> Result<State, Unseized>,
    ) -> Result<bool, CaptureError> {
        let mut news = false;
        let mut shared = Vec::new();
        for (pid, ppid, tids) in processes {
            if self.zombies.contains(pid) || self.released.contains_key(pid) {
                continue;
            }
            self.parents.insert(*pid, *ppid);
            // A process that has ended while the list was made has left its children to another.
            self.changed |= tids.is_empty();
            let mut unknown: Vec<i32> = tids.iter().filter(|tid| !self.tasks.contains_key(tid)).copied().collect();
            unknown.reverse();
            // The caller traces the first one that lives: with it, system calls are issued for the process.
            while let Some(tid) = unknown.pop() {
                let of = Of {
                    tid,
                    pid: *pid,
                    tracer: 0,
                };
                if self.note_seized(of, *ppid, agent, seize(of, &self.seized))? {
                    news = true;
                    break;
                }
            }
            let others = unknown.into_iter().enumerate().map(|(i, tid)| Of {
                tid,
                pid: *pid,
                tracer: self.tracers.share(i),
            });
            shared.extend(others.map(|of| (of, *ppid)));
        }
        let (tasks, parents): (Vec<Of>, Vec<i32>) = shared.into_iter().unzip();
        let list = self.seized.clone();
        let results = self.tracers.each(tasks, move |of| seize(*of, &list));
        // All of them, whatever is refused: what is seized must be let go.
        let noted = results.into_iter().zip(parents);
        let noted: Vec<_> = noted
            .map(|((of, result), ppid)| self.note_seized(of, ppid, agent, result))
            .collect();
        for seized in noted {
            news |= seized?;
        }
        Ok(news)
    }

    /// Asks those to stop that have been seized and of which `who` is true by then; returns when the first one was. A
    /// helper may have to wait for a processor until others of the program have had theirs: the caller's own do not
    /// stand still so long, but are asked when the helpers have been heard.
    fn interrupt(&mut self, who: fn(&Of) -> bool) -> Instant {
        let seized = self.tasks.iter().filter(|(_, known)| matches!(known.state, State::Seized));
        let seized = seized.map(|(tid, known)| known.of(*tid));
        let (own, others): (Vec<Of>, Vec<Of>) = seized.partition(|of| of.tracer == 0);
        let mut first = None;
        for part in [others, own] {
            let asked = self.tracers.each(part, move |of| {
                who(of).then(|| {
                    let now = Instant::now();
                    interrupt(*of);
                    now
                })
            });
            for (of, at) in asked.into_iter().filter_map(|(of, at)| Some((of, at?))) {
                first = Some(first.map_or(at, |f: Instant| f.min(at)));
                if let Some(known) = self.tasks.get_mut(&of.tid) {
                    known.state = State::Pending(at);
                }
            }
        }
        first.unwrap_or_else(Instant::now)
    }

    /// Notes the outcome of [`seize`]; says whether the task is ours now.
    fn note_seized(&mut self, of: Of, ppid: i32, agent: i32, result: Result<State, Unseized>) -> Result<bool, CaptureError> {
        let Of { tid, pid, tracer } = of;
        let refused = match result {
            Ok(state) => {
                self.tasks.insert(tid, Known { pid, tracer, state });
                return Ok(true);
            }
            Err(e) => e,
        };
        let state = proc::stat(tid).map(|s| s.state);
        self.changed |= !matches!(state, Ok('Z' | 'X')) || self.dead.insert(tid);
        match (refused.error.raw_os_error(), state) {
            (Some(libc::ESRCH), _) | (_, Err(_)) => Ok(false),
            // Another thread has got its number since: that is another task.
            (_, Ok(state)) if refused.dead && !matches!(state, 'Z' | 'X') => Ok(false),
            // The main thread has exited while others run: they are the process.
            (_, Ok('Z' | 'X')) if tid == pid && proc::tasks(pid).is_ok_and(|t| t.len() > 1) => Ok(false),
            (_, Ok('Z' | 'X')) => {
                // The agent collects its own children. Others are waited for by their parents, perhaps after the restart.
                if tid == pid && ppid == agent {
                    collect(pid);
                } else if tid == pid {
                    self.zombies.insert(pid);
                }
                Ok(false)
            }
            // One of its threads that is ours already has called exec, and has got this number: of the main thread,
            // which had exited.
            _ if tid == pid && tracer == 0 && ptrace::interrupt(tid).is_ok() => {
                let state = State::Pending(Instant::now());
                self.tasks.insert(tid, Known { pid, tracer, state });
                Ok(true)
            }
            _ => Err(not_traceable(pid, tid, &refused.error)),
        }
    }

    /// Collects the stops of pending tasks until none is pending.
    fn wait_for_stops(&mut self, begin: Instant) -> Result<(), CaptureError> {
        loop {
            let pending: Vec<Of> = self.pending().map(|(of, _)| of).collect();
            if pending.is_empty() {
                return Ok(());
            }
            self.look_at(pending)?;
            if self.pending().next().is_none() {
                self.released.clear();
                return Ok(());
            }
            if begin.elapsed() > LIMIT {
                return Err(self.stuck());
            }
            self.forget_replaced();
            self.release_vfork_children()?;
            crate::stop::signals::wait_for_child(Duration::from_millis(1));
        }
    }

    /// Takes note of those that have stopped or ended. Returns the first refusal, after all have been looked at.
    fn look_at(&mut self, pending: Vec<Of>) -> Result<(), CaptureError> {
        let sleepers = self.sleepers.clone();
        let looks = self.tracers.each(pending, move |of| look_or_let_go(of, &sleepers));
        let lost = looks
            .iter()
            .filter(|(of, look)| matches!(look, Look::Lost) && of.tid != of.pid);
        let left: BTreeSet<i32> = lost.map(|(of, _)| of.pid).collect();
        let noted = looks
            .into_iter()
            .map(|(of, look)| self.note(of, look))
            .fold(Ok(()), Result::and);
        if !left.is_empty() {
            self.look_again(&left);
        }
        noted
    }

    /// A thread of each of these processes is not there any more. If it has called exec it has the number of the main
    /// thread now, and all others have ended, also those that had stopped before: what has left its stop is waited for
    /// once more.
    fn look_again(&mut self, pids: &BTreeSet<i32>) {
        let stopped = self.tasks.iter().filter_map(|(tid, known)| match &known.state {
            State::Stopped(task) if pids.contains(&known.pid) => Some(Standing {
                of: known.of(*tid),
                regs: ptrace::regs_to_words(&task.regs),
            }),
            _ => None,
        });
        for (standing, gone_on) in self.tracers.each(stopped.collect(), |s| s.has_gone_on()) {
            if let (true, Some(known)) = (gone_on, self.tasks.get_mut(&standing.of.tid)) {
                known.state = State::Pending(Instant::now());
            }
        }
    }

    fn note(&mut self, of: Of, look: Look) -> Result<(), CaptureError> {
        match look {
            Look::Nothing => {}
            Look::Stopped(task) => {
                let Of { tid, pid, tracer } = of;
                let state = State::Stopped(task);
                self.tasks.insert(tid, Known { pid, tracer, state });
            }
            Look::Ended(_) | Look::Lost => {
                if let Look::Ended(status) = look {
                    ended(of.tid, status);
                }
                // Forgotten, so that the next look at the job finds what it has become: a zombie that its parent has
                // yet to wait for.
                self.tasks.remove(&of.tid);
                self.changed = true;
            }
            Look::Refused(e) => {
                self.tasks.remove(&of.tid);
                return Err(e);
            }
        }
        Ok(())
    }

    /// Forgets main threads whose end the kernel does not tell of: in their place is another thread of the process,
    /// which has called exec before it was seized, and nobody traces it; or they have exited while others run, and
    /// their end counts only when these have ended.
    fn forget_replaced(&mut self) {
        let long = self
            .pending()
            .filter(|(_, since)| since.elapsed() > PATIENCE)
            .map(|(of, _)| of.tid);
        for tid in long.collect::<Vec<_>>() {
            let untraced = proc::Status::read(tid).is_ok_and(|s| s.text("TracerPid") == Some("0"));
            let exited = proc::stat(tid).is_ok_and(|s| s.state == 'Z' && s.num_threads > 1);
            if untraced || exited {
                self.tasks.remove(&tid);
                self.changed = true;
            }
        }
    }

    /// Lets stopped children go on whose parent cannot stop because it waits for them in `vfork`.
    fn release_vfork_children(&mut self) -> Result<(), CaptureError> {
        let waiting = self.pending().filter(|(_, since)| since.elapsed() > PATIENCE);
        let waiting: Vec<Of> = waiting.map(|(of, _)| of).collect();
        for waiter in waiting {
            for child in vfork::children(waiter.pid, waiter.tid) {
                let stopped = self
                    .tasks
                    .iter()
                    .filter(|(_, k)| k.pid == child && matches!(k.state, State::Stopped(_)));
                let tasks: Vec<Of> = stopped.map(|(tid, known)| known.of(*tid)).collect();
                if tasks.is_empty() {
                    continue;
                }
                for (of, ()) in self.tracers.each(tasks, |of| drop(ptrace::detach(of.tid, 0))) {
                    self.tasks.remove(&of.tid);
                }
                self.released.insert(child, waiter.pid);
                self.changed = true;
            }
        }
        Ok(())
    }

    /// The caller must trace the first task of every process. It does, unless those that it seized first have ended since.
    fn check_leaders(&self) -> Result<(), CaptureError> {
        let all: BTreeSet<i32> = self.tasks.values().map(|k| k.pid).collect();
        let led: BTreeSet<i32> = self.tasks.values().filter(|k| k.tracer == 0).map(|k| k.pid).collect();
        let main = |pid: &i32| self.tasks.get(pid).is_some_and(|k| k.tracer != 0);
        match all.iter().find(|pid| !led.contains(pid) || main(pid)) {
            Some(pid) => Err(CaptureError::refuse_for_now(
                *pid,
                "process",
                "its threads end at this moment",
            )),
            None => Ok(()),
        }
    }

    fn stuck(&self) -> CaptureError {
        let Some((Of { tid, pid, .. }, _)) = self.pending().next() else {
            return CaptureError::refuse(
                0,
                "the job",
                "its processes come and go faster than they can be stopped; try again",
            );
        };
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
        while begin.elapsed() < SETTLE_LIMIT {
            let pending: Vec<Of> = self.pending().map(|(of, _)| of).collect();
            if pending.is_empty() {
                return;
            }
            let looks = self.tracers.each(pending, |of| look_or_let_go(of, &Sleepers::default()));
            for (of, look) in looks {
                self.note(of, look).ok();
            }
            crate::stop::signals::wait_for_child(Duration::from_millis(1));
        }
        // Of what stands in a stop that has been seen already nobody would hear any more.
        let pending: Vec<Of> = self.pending().map(|(of, _)| of).collect();
        self.tracers.each(pending, |of| {
            let signal = match ptrace::peek(of.tid) {
                Ok(Some(Event::Signal(signal))) => signal,
                _ => 0,
            };
            drop(ptrace::detach(of.tid, signal));
        });
    }

    fn finish(self, reaper: Reaper) -> Suspended {
        let mut by_pid: BTreeMap<i32, Vec<Task>> = BTreeMap::new();
        for known in self.tasks.into_values() {
            if let State::Stopped(task) = known.state {
                by_pid.entry(known.pid).or_default().push(*task);
            }
        }
        let mut processes = Vec::new();
        for (pid, mut tasks) in by_pid {
            tasks.sort_by_key(|t| (t.tid != pid, t.tracer != 0, t.tid));
            let ppid = self.parents.get(&pid).copied().unwrap_or(0);
            processes.push(Process::stopped(pid, ppid, tasks));
        }
        let zombies = self.zombies.into_iter().map(|pid| Zombie { pid }).collect();
        Suspended::new(processes, zombies, self.tracers, Some(reaper))
    }
}

impl Known {
    fn of(&self, tid: i32) -> Of {
        Of {
            tid,
            pid: self.pid,
            tracer: self.tracer,
        }
    }
}
