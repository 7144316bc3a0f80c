//! Operations that one process does while the others stand still, and that may have to wait.

use super::area::{Area, Entry};
use super::memory;
use super::on_main;
use crate::stop::stopped::{Suspended, Task};
use crate::CaptureError;
use belay_abi::inject::{NotificationTable, RingsTable, Turn, WaitTable, OP_NOTIFICATION, OP_RINGS, OP_WAIT, RING_LOST};
use belay_kernel::vm::Memory;
use belay_plugins::Group;
use std::time::{Duration, Instant};

/// How long the job stands still for an operation that waits for requests of the program.
const LONGEST_TURN: Duration = Duration::from_secs(5);
/// What it waits for: no other operation waits.
const WAITED_FOR: &str = "a request of asynchronous I/O (io_setup)";

/// Lets the main thread of process number `at` do operation `op` on the table at `table`, whose turn is at `turn`,
/// while its other threads wait: should the agent die, they go on only when it is over. Where that takes longer than
/// [`LONGEST_TURN`], all other processes are let go, since one of them may be what it waits for, and the end of the
/// operation is a failure.
fn take_turn(
    job: &mut Suspended,
    (at, area): (usize, &Area),
    (op, table, turn): (u64, u64, u64),
    group: Option<&dyn Group>,
) -> Result<(), CaptureError> {
    let pid = job.processes[at].pid;
    let over = area.base + turn + std::mem::offset_of!(Turn, over) as u64;
    // The tables of OP_THREAD have been read.
    let tasks = job.processes[at].tasks.iter().enumerate();
    let waits: Vec<WaitTable> = tasks
        .map(|(i, task)| WaitTable {
            mark: area.mark(pid, task.tid, i),
            over,
        })
        .collect();
    area.put_thread_tables(&waits)?;
    let entry = |process: usize, number: usize, task: &Task| {
        let wait = area.thread_table(number);
        (process == at).then(|| match number {
            0 => area.entry(task, op, table, area.at.large_stack_top),
            // Whatever signal the operation brings, it is not for those who wait.
            _ => Entry {
                mask: u64::MAX,
                ..area.entry(task, OP_WAIT, wait, wait)
            },
        })
    };
    let each = |job: &mut Suspended, f: fn(&mut Task, &Entry) -> Result<(), CaptureError>| {
        let done = job.each_task(entry, move |task, entry| {
            entry.as_ref().map_or(Ok(()), |entry| f(task, entry))
        });
        done.into_iter().flatten().collect::<Result<(), _>>()
    };
    // Nobody runs before all are prepared: an agent that dies in between leaves a turn that does nothing. The main
    // thread is the first, or the others would wait for ever.
    let first = area.entry(&job.processes[at].tasks[0], op, table, area.at.large_stack_top);
    first.prepare(&mut job.processes[at].tasks[0])?;
    each(job, |task, entry| entry.prepare(task))?;
    area.put(turn, &[1u32])?;
    let began = each(job, |task, _| Entry::let_run(task));
    let reason = format!(
        "has not ended within {} s; it waits for a slow device, or for a process of the job, which goes on now",
        LONGEST_TURN.as_secs()
    );
    let in_time = op != OP_RINGS || job.processes[at].tasks[0].reports_until(Instant::now() + LONGEST_TURN);
    if !in_time {
        job.resume_others(at);
        if let Some(group) = group {
            group.give_up(&format!("process {pid}: {WAITED_FOR} {reason}"));
        }
    }
    let done = first.end(&mut job.processes[at].tasks[0]);
    // After a failure the others may wait for ever: whoever puts the process back stops them.
    began.and(done)?;
    each(job, |task, entry| entry.end(task))?;
    if in_time {
        return Ok(());
    }
    Err(CaptureError::refuse(pid, WAITED_FOR, reason))
}

/// Runs OP_NOTIFICATION on the main thread of process number `at`, with `table` completed; `bytes` is the size of the
/// room for messages, which `read` can read in the end.
pub(crate) fn notification<R>(
    job: &mut Suspended,
    at: usize,
    area: &Area,
    mut table: NotificationTable,
    bytes: u64,
    read: impl FnOnce(&NotificationTable, &Memory) -> Result<R, CaptureError>,
) -> Result<R, CaptureError> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    table.room = memory::map(&mut job.processes[at], bytes, protection, libc::MAP_NORESERVE)?;
    table.mark = area.main_mark(&job.processes[at]);
    let turn = area.at.notification_table + std::mem::offset_of!(NotificationTable, turn) as u64;
    let done = area
        .put(area.at.notification_table, &[table])
        .and_then(|()| take_turn(job, (at, area), (OP_NOTIFICATION, area.at.notification_table, turn), None))
        .and_then(|()| area.get::<NotificationTable>(area.at.notification_table))
        .and_then(|done| read(&table.answered(&done), &area.memory));
    on_main(&mut job.processes[at], libc::SYS_munmap, [table.room, bytes, 0, 0, 0, 0])?;
    done
}

/// Runs OP_RINGS on the main thread of process number `at`; `read` can read what it has found, before that is unmapped.
pub(crate) fn rings<R>(
    job: &mut Suspended,
    (at, area): (usize, &Area),
    mut table: RingsTable,
    group: Option<&dyn Group>,
    read: impl FnOnce(&RingsTable, &Memory) -> Result<R, CaptureError>,
) -> Result<R, CaptureError> {
    table.mark = area.main_mark(&job.processes[at]);
    area.put(area.at.rings_table, &[table])?;
    let turn = area.at.rings_table + std::mem::offset_of!(RingsTable, turn) as u64;
    let took = take_turn(job, (at, area), (OP_RINGS, area.at.rings_table, turn), group);
    let done = match area.get::<RingsTable>(area.at.rings_table) {
        Ok(done) => table.answered(&done),
        Err(e) => return Err(took.err().unwrap_or(e)),
    };
    let told = if done.mark.done == 0 {
        let reason = "got a signal from outside the job at this moment";
        Err(CaptureError::refuse_for_now(job.processes[at].pid, "process", reason))
    } else {
        read(&done, &area.memory)
    };
    // Worse than to have waited too long is to have lost something.
    let result = if done.rings.iter().any(|r| r.outcome == RING_LOST) {
        told
    } else {
        took.and(told)
    };
    for ring in done.rings.iter().filter(|r| r.scratch != 0) {
        on_main(
            &mut job.processes[at],
            libc::SYS_munmap,
            [ring.scratch, 2 * ring.bytes, 0, 0, 0, 0],
        )?;
    }
    result
}
