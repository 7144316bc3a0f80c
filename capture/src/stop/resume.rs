//! The way for stopped processes to go on as if they had never been stopped.
//!
//! Dropping a [`Suspended`] puts everything back and lets the tasks go on.

use crate::inject::{memory, on_main, on_mains};
use crate::state::limits;
use crate::state::wait::MOST_WAITERS;
use crate::stop::stopped::{Process, Suspended};
use belay_kernel::cut;
use belay_kernel::futex::Returning;
use belay_kernel::{patience, ptrace};
use std::time::Instant;

impl Suspended {
    /// Takes the injected areas away, puts registers and masks back, and lets every task go on. Returns the moment at
    /// which the last one was let go: this thread may get its processor back only after many of them have had theirs.
    pub(crate) fn resume(&mut self) -> Instant {
        self.put_back(None)
    }

    /// Takes the injected areas away, and puts registers and masks back; nobody goes on yet.
    pub(crate) fn clear_all(&mut self) {
        self.clear(None);
    }

    /// Lets all processes but number `at` go on as if they had never been stopped; they have no tasks then.
    pub(crate) fn resume_others(&mut self, at: usize) {
        self.put_back(Some(at));
    }

    /// Takes the injected areas of all processes but number `stays` away, puts registers, masks and attributes back, and lets
    /// them go. After each single step a process would find its way back by itself, should the agent die there: nobody stands in
    /// an area any more when it goes, and the main thread, which takes it away, is led back by its gate.
    fn put_back(&mut self, stays: Option<usize>) -> Instant {
        self.clear(stays);
        self.enter_calls(stays);
        self.carry_calls_on(stays);
        self.let_waiters_go(stays);
        // Those stopped by job control first, until they stand still again: nobody may see them run.
        let stopped = |p: &Process| p.group_stop.is_some();
        let still: Vec<bool> = self.processes.iter().map(stopped).collect();
        let mut last = Instant::now();
        for first in [true, false] {
            if first && !still.contains(&true) {
                continue;
            }
            // The helpers let go what is theirs as they end.
            let end = !first && stays.is_none() && self.tracers.can_end();
            let let_go = self.each_task(
                |number, _, _| still[number] == first && Some(number) != stays,
                move |task, now| {
                    let still_ours = !task.gone;
                    if *now && still_ours && (!end || task.tracer == 0 || task.deferred != 0) {
                        drop(ptrace::detach(task.tid, task.deferred));
                    }
                    Instant::now()
                },
            );
            last = let_go.into_iter().flatten().fold(last, Instant::max);
            if end {
                last = last.max(self.tracers.end());
            }
            let all = self.processes.iter().enumerate();
            all.filter(|(i, p)| first && stopped(p) && Some(*i) != stays)
                .for_each(|(_, p)| patience::until_stopped(p.tasks.iter().map(|t| t.tid)));
        }
        let all = self.processes.iter_mut().enumerate();
        all.filter(|(i, _)| Some(*i) != stays).for_each(|(_, p)| p.tasks.clear());
        if stays.is_none() && !self.processes.is_empty() {
            self.processes.clear();
            // Their numbers may be those of others now.
            self.reaper = None;
            crate::state::calls::resumed();
        }
        last
    }

    /// The first half of it: nobody goes on yet.
    fn clear(&mut self, stays: Option<usize>) {
        // After a failure in the middle of a step some tasks may still run code of ours: only a stopped task takes requests.
        self.each_task(
            |process, number, _| (Some(process) != stays, number == 0),
            |task, (goes, first)| {
                if *goes {
                    task.halt();
                    if !first {
                        task.put_back();
                    }
                }
            },
        );
        let all = self.processes.iter_mut().enumerate();
        let going = all.filter(|(i, p)| Some(*i) != stays && !p.tasks.is_empty());
        put_back(going.map(|(_, p)| p).collect());
    }
}

impl Suspended {
    /// Which processes run on when all but number `stays` are let go: those that job control has stopped do not.
    fn run_on(&self, stays: Option<usize>) -> Vec<bool> {
        let all = self.processes.iter().enumerate();
        all.map(|(i, p)| Some(i) != stays && p.group_stop.is_none()).collect()
    }

    /// Lets those go first that wait for a futex, and waits until they are back in their waits: a wake-up that found
    /// nobody there would be lost. Where they are too many to be waited for, all go together.
    fn let_waiters_go(&mut self, stays: Option<usize>) {
        let goes = self.run_on(stays);
        let tasks = self.processes.iter().zip(&goes).filter(|(_, goes)| **goes);
        let tasks = tasks.flat_map(|(p, _)| &p.tasks);
        let waiters: Vec<i32> = tasks.clone().filter(|t| t.goes_first()).map(|t| t.tid).collect();
        if !(1..=MOST_WAITERS).contains(&waiters.len()) || waiters.len() == tasks.count() {
            return;
        }
        let mut returning = Returning::default();
        waiters.into_iter().for_each(|tid| returning.add(tid));
        self.each_task(
            |process, _, task| goes[process] && task.goes_first(),
            |task, now| {
                if *now {
                    drop(ptrace::detach(task.tid, 0));
                    task.gone = true;
                }
            },
        );
        returning.wait(patience::LIMIT);
    }

    /// Leads the threads of all processes but number `stays` into the calls in which other signals are blocked.
    fn enter_calls(&mut self, stays: Option<usize>) {
        let goes = self.run_on(stays);
        let masked = |(p, goes): (&Process, &bool)| *goes && p.tasks.iter().any(|t| t.call_mask.is_some());
        if self.processes.iter().zip(&goes).any(masked) {
            self.each_task(
                |process, _, _| goes[process],
                |task, goes| {
                    if *goes {
                        task.enter_call()
                    }
                },
            );
        }
    }
}

impl Suspended {
    /// Has the threads of all processes but number `stays` issue the rest of the calls that the stop has cut short.
    fn carry_calls_on(&mut self, stays: Option<usize>) {
        let goes = self.run_on(stays);
        let cut = |(p, goes): (&Process, &bool)| *goes && p.tasks.iter().any(|t| cut::may_be(&t.regs));
        if self.processes.iter().zip(&goes).any(cut) {
            self.each_task(
                |process, _, task| goes[process] && task.deferred == 0 && cut::may_be(&task.regs),
                |task, now| {
                    // Of a task that has ended there is nothing left; where anything else fails, the call has done a part.
                    if *now {
                        drop(cut::carry_on(task.tid, &task.regs));
                    }
                },
            );
        }
    }
}

/// Takes the injected areas of `processes` away, and puts their main threads and attributes back.
fn put_back(mut processes: Vec<&mut Process>) {
    // When a call fails here the process has died, and what it would have changed with it.
    for process in &mut processes {
        if std::mem::take(&mut process.subreaper) {
            let on = [libc::PR_SET_CHILD_SUBREAPER as u64, 1, 0, 0, 0, 0];
            let _ = on_main(process, libc::SYS_prctl, on);
        }
    }
    let area = |p: &mut Process| p.area.take().map(|(address, bytes)| [address, bytes, 0, 0, 0, 0]);
    on_mains(processes.iter_mut().map(|p| &mut **p), libc::SYS_munmap, area);
    for process in processes {
        memory::lock_again(process);
        limits::lower(process);
        let reader = process.task();
        process.tasks[0].put_back();
        if let Some(gate) = &mut process.gate {
            gate.remove(reader);
        }
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        self.put_back(None);
    }
}
