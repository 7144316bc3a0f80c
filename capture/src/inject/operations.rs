//! Operations that every process does at the same time: telling about threads and processes, and copying itself.

use super::area::{Area, Entry};
use crate::stop::stopped::{Process, Suspended, Task};
use crate::CaptureError;
use belay_abi::inject::{
    Mark, ProcessTable, RangesTable, SnapshotTable, ThreadTable, MAX_RANGES, OP_LOCKS, OP_POLICIES, OP_PROCESS, OP_SNAPSHOT,
    OP_THREAD,
};

/// Lets the main thread of every process that `who` names begin an operation as `prepare` says (areas are those of the
/// named ones), waits for the end of all that began, and lets `collect` read each one's result. An operation that began
/// is always waited for, whatever has failed meanwhile: a thread taken out of the middle of one would leave its process
/// with a stray child or without an attribute. Returns the first failure.
fn in_all(
    job: &mut Suspended,
    areas: &[Area],
    who: impl Fn(&Process) -> bool,
    mut prepare: impl FnMut(usize, &Process, &Area) -> Result<Entry, CaptureError>,
    mut collect: impl FnMut(&mut Process, &Area) -> Result<(), CaptureError>,
) -> Result<(), CaptureError> {
    let mut began = Vec::new();
    let mut failed = None;
    let named = |process: &&mut Process| who(process);
    for (i, (process, area)) in job.processes.iter_mut().filter(named).zip(areas).enumerate() {
        let entry = prepare(i, process, area);
        match entry.and_then(|entry| entry.begin(&mut process.tasks[0]).map(|()| entry)) {
            Ok(entry) => began.push(entry),
            Err(e) => {
                failed = Some(e);
                break;
            }
        }
    }
    for ((process, area), entry) in job.processes.iter_mut().filter(named).zip(areas).zip(began) {
        if let Err(e) = entry.end(&mut process.tasks[0]).and_then(|()| collect(process, area)) {
            failed.get_or_insert(e);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Runs OP_THREAD on every task, each of which tries to look into its one of `witnesses`, by process and task; returns
/// the results by process and task. As with the other operations, what began is waited for. All but the first of each
/// process, which are needed for nothing more, get their registers back at once. While the others are busy, `meanwhile`
/// is done with the first ones.
pub(crate) fn collect_threads<M>(
    job: &mut Suspended,
    areas: &[Area],
    witnesses: &[Vec<i32>],
    meanwhile: impl FnOnce(&mut Suspended) -> Result<M, CaptureError>,
) -> Result<(Vec<Vec<ThreadTable>>, M), CaptureError> {
    for ((process, area), witnesses) in job.processes.iter().zip(areas).zip(witnesses) {
        let tasks = process.tasks.iter().zip(witnesses).enumerate();
        // The rest of each table is as the kernel has given the memory.
        let mark = |(i, (task, witness)): (usize, (&Task, &i32))| Mark {
            witness: *witness,
            ..area.mark(process.pid, task.tid, i)
        };
        let marks: Vec<Mark> = tasks.map(mark).collect();
        area.put_thread_tables(&marks)?;
    }
    let entry = |process: usize, number: usize, task: &Task| {
        let (area, table) = (&areas[process], areas[process].thread_table(number));
        (number == 0, area.entry(task, OP_THREAD, table, table))
    };
    let begin = |task: &mut Task, (_, entry): &(bool, Entry)| entry.begin(task);
    // The first ones must have told by the time the caller needs them.
    let first_then_meanwhile = |job: &mut Suspended| {
        let firsts = job.processes.iter_mut().enumerate();
        let firsts = firsts.filter_map(|(i, process)| Some((i, process.tasks.first_mut()?)));
        // All are waited for, whatever has failed.
        let ended = firsts.map(|(i, task)| entry(i, 0, task).1.end(task));
        ended.fold(Ok(()), Result::and)?;
        meanwhile(job)
    };
    let end = |task: &mut Task, (first, entry): &(bool, Entry)| {
        entry.end(task)?;
        if !first {
            task.put_back();
        }
        Ok(())
    };
    let (began, done) = job.each_task_while(entry, begin, first_then_meanwhile);
    let ended = job.each_task(entry, end);
    let all = began.into_iter().chain(ended).flatten();
    all.collect::<Result<(), CaptureError>>()?;
    let done = done?;
    let mut out = Vec::new();
    for (process, area) in job.processes.iter().zip(areas) {
        let tables = area.thread_tables::<ThreadTable>(process.tasks.len())?;
        if tables.iter().any(|t| t.mark.done == 0) {
            let reason = "got a signal from outside the job at this moment";
            return Err(CaptureError::refuse_for_now(process.pid, "process", reason));
        }
        out.push(tables);
    }
    Ok((out, done))
}

/// Runs OP_PROCESS on the main thread of every process; `timers` are the identifiers of each one's POSIX timers.
pub(crate) fn collect_processes(
    job: &mut Suspended,
    areas: &[Area],
    timers: &[Vec<i32>],
) -> Result<Vec<ProcessTable>, CaptureError> {
    let mut out = Vec::new();
    in_all(
        job,
        areas,
        |_| true,
        |i, process, area| {
            let ids = &timers[i];
            let mut table = area.get::<ProcessTable>(area.at.process_table)?;
            if ids.len() > table.timers.len() {
                return Err(CaptureError::refuse(
                    process.pid,
                    format!("{} POSIX timers", ids.len()),
                    format!("more than {}", table.timers.len()),
                ));
            }
            for (slot, id) in table.timers.iter_mut().zip(ids) {
                slot.id = *id;
            }
            table.timer_count = u32::try_from(ids.len()).unwrap_or(0);
            table.untouched_page = area.untouched_page();
            table.mark = area.mark(process.pid, process.tasks[0].tid, 0);
            area.put(area.at.process_table, &[table])?;
            Ok(area.entry(&process.tasks[0], OP_PROCESS, area.at.process_table, area.at.large_stack_top))
        },
        |process, area| {
            let table = area.get::<ProcessTable>(area.at.process_table)?;
            process.subreaper = table.child_subreaper > 0;
            out.push(table);
            Ok(())
        },
    )?;
    Ok(out)
}

/// Which of the mappings at `ranges` of `process` are locked.
pub(crate) fn locked(process: &mut Process, area: &Area, ranges: &[(u64, u64)]) -> Result<Vec<bool>, CaptureError> {
    let told = of_each(process, area, OP_LOCKS, ranges)?;
    Ok(told.into_iter().map(|locked| locked != 0).collect())
}

/// The mode of the policy of each of the mappings at `ranges` of `process`.
pub(crate) fn policies(process: &mut Process, area: &Area, ranges: &[(u64, u64)]) -> Result<Vec<u64>, CaptureError> {
    of_each(process, area, OP_POLICIES, ranges)
}

/// What operation `op` says of each of the mappings at `ranges` of `process`.
fn of_each(process: &mut Process, area: &Area, op: u64, ranges: &[(u64, u64)]) -> Result<Vec<u64>, CaptureError> {
    let mut out = Vec::with_capacity(ranges.len());
    for some in ranges.chunks(MAX_RANGES) {
        let mut table = RangesTable {
            mark: area.main_mark(process),
            count: some.len() as u64,
            ranges: [[0; 2]; MAX_RANGES],
        };
        for (slot, (start, end)) in table.ranges.iter_mut().zip(some) {
            *slot = [*start, end - start];
        }
        area.put(area.at.ranges_table, &[table])?;
        let entry = area.entry(&process.tasks[0], op, area.at.ranges_table, area.at.large_stack_top);
        entry.begin(&mut process.tasks[0])?;
        entry.end(&mut process.tasks[0])?;
        let told: RangesTable = area.get(area.at.ranges_table)?;
        if told.mark.done == 0 {
            let reason = "got a signal from outside the job at this moment";
            return Err(CaptureError::refuse_for_now(process.pid, "process", reason));
        }
        out.extend(told.ranges[..some.len()].iter().map(|range| range[1]));
    }
    Ok(out)
}

/// A snapshot child.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made {
    pub(crate) pid: i32,
    /// The userfaultfd that it was to bring: its descriptor in the child, or a negative error number.
    pub(crate) uffd: Option<i32>,
    /// Bytes that it lacks because they have not changed.
    pub(crate) unchanged: u64,
}

/// What is kept from a snapshot child.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// As [`SnapshotTable::left_out`].
    pub(crate) left_out: Vec<[u64; 2]>,
    /// As [`SnapshotTable::unchanged`].
    pub(crate) unchanged: Vec<[u64; 2]>,
}

/// Makes a snapshot child of every process with memory of its own, whose `areas` and so on these are; `controls` are
/// the agent's descriptors of their control memories and the inode numbers of these. `want_uffd` says whose child shall
/// bring a userfaultfd, and which ([`SnapshotTable::want_uffd`]). Returns for each process its child or the error
/// number that prevented it.
pub(crate) fn snapshot(
    job: &mut Suspended,
    areas: &[Area],
    kept: &[Kept],
    controls: &[(i32, u64)],
    want_uffd: &[i32],
) -> Result<Vec<Result<Made, i32>>, CaptureError> {
    let agent_pid = std::process::id().cast_signed();
    let mut out = Vec::new();
    in_all(
        job,
        areas,
        |process| process.guest.is_none(),
        |i, process, area| {
            let (fd, ino) = controls[i];
            let table = SnapshotTable {
                mark: area.main_mark(process),
                stack_intermediary: area.base + area.at.intermediary_stack_top,
                stack_writers: area.base + area.at.writer_stack_top,
                agent_pid,
                control_fd: fd,
                control_ino: ino,
                child: 0,
                error: 0,
                want_uffd: want_uffd[i],
                uffd: 0,
                has_keys: belay_kernel::cpu::has_protection_keys().into(),
                reserved: 0,
                left_out: table_of(&kept[i].left_out),
                unchanged: table_of(&kept[i].unchanged),
            };
            area.put(area.at.snapshot_table, &[table])?;
            Ok(area.entry(
                &process.tasks[0],
                OP_SNAPSHOT,
                area.at.snapshot_table,
                area.at.large_stack_top,
            ))
        },
        |_, area| {
            let table = area.get::<SnapshotTable>(area.at.snapshot_table)?;
            out.push(match (table.error, table.child) {
                (0, pid) if pid > 0 => Ok(Made {
                    pid,
                    uffd: (table.want_uffd != 0).then_some(table.uffd),
                    unchanged: table.unchanged.iter().map(|[start, end]| end.saturating_sub(*start)).sum(),
                }),
                (0, child) => Err(-child),
                (error, _) => Err(-error),
            });
            Ok(())
        },
    )?;
    Ok(out)
}

/// The first `N` of these ranges, with empty ones behind them.
fn table_of<const N: usize>(ranges: &[[u64; 2]]) -> [[u64; 2]; N] {
    let mut table = [[0; 2]; N];
    table.iter_mut().zip(ranges).for_each(|(slot, range)| *slot = *range);
    table
}
