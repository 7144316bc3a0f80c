//! The descriptor tables of the job: who has which, and what each number leads to.

use crate::doors::{Door, Pidfd};
use crate::env::ProcessView;
use crate::fault::{refuse, At, Fault, Refusal};
use crate::locks::{self, TableLocks};
use crate::look::look;
use crate::model::{Holder, Slot, Table};
use crate::session::Session;
use belay_kernel::kcmp;
use std::cmp::Ordering;
use std::os::fd::{AsFd, RawFd};

/// Reads the tables of all processes, and those of threads that have another one.
pub(crate) fn tables(s: &mut Session<'_>, refusals: &mut Vec<Refusal>) {
    for p in s.processes {
        if let Err(e) = process_table(s, p) {
            refusals.push(e.of(p.pid, "descriptor table"));
        }
    }
    for p in s.processes {
        let apart = p.apart.iter().try_for_each(|tid| thread_table(s, p, *tid));
        if let Err(e) = apart {
            refusals.push(e.of(p.pid, "descriptor table"));
        }
    }
    slots(s, refusals);
}

/// Looks at all numbers of all tables.
fn slots(s: &mut Session<'_>, refusals: &mut Vec<Refusal>) {
    let first = |t: &Table| t.pids[0];
    let numbers: Vec<Vec<RawFd>> = s
        .tables
        .iter()
        .map(
            |t| match belay_kernel::proc::fds(s.task_of(first(t))).at("list descriptors") {
                Ok(numbers) => numbers,
                Err(e) => {
                    refusals.push(e.of(first(t), "descriptor table"));
                    Vec::new()
                }
            },
        )
        .collect();
    let sights = s.tables.iter().zip(&numbers).filter_map(|(t, numbers)| {
        let door = s.doors.get(&first(t))?;
        Some((door.task, door.pidfd(), numbers.as_slice()))
    });
    let looks = look(&sights.collect::<Vec<_>>());
    for (at, (looks, numbers)) in looks.into_iter().zip(numbers).enumerate() {
        let pid = first(&s.tables[at]);
        let mut slots = Vec::with_capacity(numbers.len());
        for (look, fd) in looks.into_iter().zip(numbers) {
            let holder = Holder { pid, fd };
            let slot = look.and_then(|look| {
                let cloexec = look.cloexec;
                let locks = locks::of_table(&look.info)?;
                let desc = s.intern(look, None, holder)?;
                s.sets.of::<TableLocks>().note(holder, desc, locks);
                Ok(Slot { fd, desc, cloexec })
            });
            match slot {
                Ok(slot) => slots.push(slot),
                Err(e) => refusals.push(e.of(pid, format!("fd {fd}"))),
            }
        }
        s.tables[at].slots = slots;
    }
}

/// Whether a known table is what `task` uses too: its index, else its place in the order of `kcmp`.
fn known_table(s: &Session<'_>, task: i32) -> Result<Result<usize, usize>, Fault> {
    let mut failed = None;
    let place = s.ordered.binary_search_by(|known| {
        let first = s.task_of(s.tables[*known].pids[0]);
        kcmp::compare(first, task, kcmp::Object::Files).unwrap_or_else(|e| {
            failed = Some(e);
            Ordering::Less
        })
    });
    match failed {
        Some(e) => Err(e).at("compare descriptor tables"),
        None => Ok(place.map(|at| s.ordered[at])),
    }
}

/// Adds the table of process `p`, unless it is known.
fn process_table<'a>(s: &mut Session<'a>, p: &'a ProcessView) -> Result<(), Fault> {
    let door = Door {
        task: p.task,
        pidfd: Pidfd::Process(p.pidfd.as_fd()),
    };
    s.doors.insert(p.pid, door);
    match known_table(s, p.task)? {
        Ok(at) => s.tables[at].pids.push(p.pid),
        Err(place) => table(s, p.pid, place),
    }
    Ok(())
}

/// Adds the table of thread `tid`, which is not that of its process.
fn thread_table(s: &mut Session<'_>, p: &ProcessView, tid: i32) -> Result<(), Fault> {
    let at = match known_table(s, tid)? {
        Ok(at) => at,
        Err(place) => {
            let pidfd = belay_kernel::pidfd::open_thread(tid).at(format!("open thread {tid} (needs Linux 6.9)"))?;
            let door = Door {
                task: tid,
                pidfd: Pidfd::Thread(pidfd),
            };
            s.doors.insert(tid, door);
            table(s, tid, place);
            return Ok(());
        }
    };
    let first = s.tables[at].pids[0];
    let of_process = s.processes.iter().any(|p| p.pid == first);
    if of_process || !belay_kernel::proc::tasks(p.pid).at("list threads")?.contains(&first) {
        return refuse(format!(
            "thread {tid} shares the descriptor table of task {first} of another process, and not that of its own (CLONE_FILES), which cannot be restored"
        ));
    }
    s.tables[at].pids.push(tid);
    Ok(())
}

/// Adds the table whose first user is `user`; it comes at `place` in the order of tables.
fn table(s: &mut Session<'_>, user: i32, place: usize) {
    s.ordered.insert(place, s.tables.len());
    s.tables.push(Table {
        pids: vec![user],
        slots: Vec::new(),
    });
}
