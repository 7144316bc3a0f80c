//! Running code inside a stopped process: single system calls, and the operations of `belay-inject`.

use crate::mlock;
use crate::rescue::Gate;
use crate::suspend::{Process, Suspended, Task};
use crate::CaptureError;
use belay_abi::inject::{
    Mark, NotificationTable, ProcessTable, RingsTable, SnapshotTable, ThreadTable, Turn, WaitTable, MAX_LEFT_OUT, MAX_WRITERS,
    OP_NOTIFICATION, OP_PROCESS, OP_RINGS, OP_SNAPSHOT, OP_THREAD, OP_WAIT, RING_LOST, WRITER_STACK,
};
use belay_kernel::blob::Blob;
use belay_kernel::proc::{Map, Status};
use belay_kernel::ptrace::{self, Event, Regs};
use belay_kernel::vm::Memory;
use belay_plugins::Group;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// Stack of a thread that fills in a table: also of a handler of the program, should a signal come in the moment between the agent's death and the
/// thread's way back. Only the top of it is touched otherwise.
const SMALL_STACK: u64 = 16 * 1024;
/// Stack of the operations on a process.
const LARGE_STACK: u64 = 16 * 1024;
/// How long the job stands still for an operation that waits for requests of the program.
const LONGEST_TURN: Duration = Duration::from_secs(5);
/// What it waits for: no other operation waits.
const WAITED_FOR: &str = "a request of asynchronous I/O (io_setup)";

/// The injected area of one process.
#[derive(Debug)]
pub(crate) struct Area {
    base: u64,
    entry: u64,
    /// Signal that announces the end of an operation.
    signo: i32,
    memory: Memory,
    process_table: u64,
    snapshot_table: u64,
    notification_table: u64,
    rings_table: u64,
    thread_tables: u64,
    frames: u64,
    frame_bytes: u64,
    small_stacks: u64,
    large_stack_top: u64,
    intermediary_stack_top: u64,
    writer_stack_top: u64,
    bytes: u64,
}

/// Lets `task` issue one system call.
pub(crate) fn remote_syscall(gate: &Gate, task: &mut Task, nr: i64, args: [u64; 6]) -> Result<u64, CaptureError> {
    let fail = |step: &str, e: std::io::Error| CaptureError::failed(format!("{step} of thread {}", task.tid), e);
    let mut regs = task.regs;
    regs.rip = gate.syscall_at;
    regs.rsp = gate.stack.unwrap_or(regs.rsp);
    regs.rax = nr.cast_unsigned();
    regs.orig_rax = u64::MAX;
    [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = args;
    ptrace::set_regs(task.tid, &regs).map_err(|e| fail("set registers", e))?;
    ptrace::set_sigmask(task.tid, u64::MAX).map_err(|e| fail("set signal mask", e))?;
    task.borrowed = true;
    for _ in 0..2 {
        ptrace::cont_to_syscall(task.tid).map_err(|e| CaptureError::failed(format!("continue thread {}", task.tid), e))?;
        task.wait_for(Event::Syscall)?;
    }
    let ret = ptrace::get_regs(task.tid)
        .map_err(|e| CaptureError::failed(format!("read registers of thread {}", task.tid), e))?
        .rax;
    match ret.cast_signed() {
        e @ -4095..=-1 => Err(CaptureError::Call {
            tid: task.tid,
            nr,
            errno: i32::try_from(-e).unwrap_or(libc::EIO),
        }),
        _ => Ok(ret),
    }
}

/// Lets the main thread of `process` issue one system call.
pub(crate) fn on_main(process: &mut Process, nr: i64, args: [u64; 6]) -> Result<u64, CaptureError> {
    match (process.gate.as_ref(), process.tasks.first_mut()) {
        (Some(gate), Some(task)) => remote_syscall(gate, task, nr, args),
        _ => Err(CaptureError::refuse(
            process.pid,
            "process",
            "it cannot issue system calls for the agent",
        )),
    }
}

/// The signal that marks the end of an operation: one that is not pending and that the process does not catch, so that its delivery means nothing when nobody traces
/// the process. Where all are caught (Go, some runtimes) SIGURG: were the agent to die in that moment, its handler would run once without reason.
fn mark_signal(status: &Status, of_threads: u64) -> Option<i32> {
    let mask = |key: &str| status.hex(key).unwrap_or(u64::MAX);
    let free = |busy: u64| {
        [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD]
            .into_iter()
            .find(|s| busy & (1 << (s - 1)) == 0)
    };
    let pending = mask("SigPnd") | mask("ShdPnd") | of_threads;
    free(pending | mask("SigCgt")).or_else(|| free(pending))
}

impl Area {
    /// Maps the area into `process` and writes the program, the tables and the frames into it. `pending` are the signals that are pending for single threads.
    pub(crate) fn map(
        process: &mut Process,
        maps: &[Map],
        status: &Status,
        pending: u64,
        blob: &Blob,
    ) -> Result<Self, CaptureError> {
        let pid = process.pid;
        let refuse = |reason: &str| CaptureError::refuse(pid, "process", reason);
        let signo =
            mark_signal(status, pending).ok_or_else(|| refuse("SIGURG, SIGWINCH and SIGCHLD are all pending; try again"))?;
        let memory =
            Memory::open(process.task()).map_err(|e| CaptureError::failed(format!("open the memory of process {pid}"), e))?;
        let gate = Gate::prepare(process, maps, &memory);
        process.gate = Some(gate.ok_or_else(|| refuse("no system call instruction in its memory"))?);
        let threads = process.tasks.len() as u64;
        let frame_bytes = crate::frame::bytes(process.tasks.iter().map(|t| t.xstate.len()).max().unwrap_or(0)) as u64;
        let mut at = blob.bytes();
        let mut take = |bytes: u64, align: u64| {
            let start = at.next_multiple_of(align);
            at = start + bytes;
            start
        };
        let process_table = take(size_of::<ProcessTable>() as u64, 64);
        let snapshot_table = take(size_of::<SnapshotTable>() as u64, 64);
        let notification_table = take(size_of::<NotificationTable>() as u64, 64);
        let rings_table = take(size_of::<RingsTable>() as u64, 64);
        let thread_tables = take(size_of::<ThreadTable>() as u64 * threads, 64);
        let frames = take(frame_bytes * threads, 64);
        let small_stacks = take(SMALL_STACK * threads, 64);
        let large_stack_top = take(LARGE_STACK, 64) + LARGE_STACK;
        let intermediary_stack_top = take(LARGE_STACK, 64) + LARGE_STACK;
        let writers = WRITER_STACK * MAX_WRITERS as u64;
        let writer_stack_top = take(writers, 64) + writers;
        let bytes = at.next_multiple_of(PAGE);
        let base = mlock::map(process, bytes, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC, 0)?;
        process.area = Some((base, bytes));
        let mut image = blob.placed_at(base);
        image.resize(small_stacks as usize, 0);
        for (i, task) in process.tasks.iter().enumerate() {
            let offset = frames + frame_bytes * i as u64;
            crate::frame::write(
                &mut image[offset as usize..(offset + frame_bytes) as usize],
                base + offset,
                &crate::calls::without_restart_block(task.tid, &task.regs),
                task.sigmask,
                &task.xstate,
            );
        }
        memory
            .write(base, &image)
            .map_err(|e| CaptureError::failed(format!("write the injected program into process {pid}"), e))?;
        Ok(Self {
            base,
            entry: base + blob.entry(),
            signo,
            memory,
            process_table,
            snapshot_table,
            notification_table,
            rings_table,
            thread_tables,
            frames,
            frame_bytes,
            small_stacks,
            large_stack_top,
            intermediary_stack_top,
            writer_stack_top,
            bytes,
        })
    }

    /// First address and length.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.base, self.base + self.bytes)
    }

    /// A mark to be filled in by the operation's caller.
    pub(crate) fn no_mark(&self) -> Mark {
        self.mark(0, 0, 0)
    }

    fn mark(&self, pid: i32, tid: i32, index: usize) -> Mark {
        Mark {
            pid,
            tid,
            signo: self.signo,
            done: 0,
            frame: self.base + self.frames + self.frame_bytes * index as u64 + crate::frame::RSP_OFFSET,
            subreaper: 0,
            pad: 0,
        }
    }

    /// The mark of an operation of the main thread of `process` after OP_PROCESS.
    fn main_mark(&self, process: &Process) -> Mark {
        Mark {
            subreaper: process.subreaper.into(),
            ..self.mark(process.pid, process.tasks[0].tid, 0)
        }
    }

    fn put<T: Copy>(&self, offset: u64, tables: &[T]) -> Result<(), CaptureError> {
        // SAFETY: `T` is one of the plain C structs of `belay_abi::inject`, which have no implicit padding; its bytes are only read.
        let bytes = unsafe { std::slice::from_raw_parts(tables.as_ptr().cast::<u8>(), size_of_val(tables)) };
        self.memory
            .write(self.base + offset, bytes)
            .map_err(|e| CaptureError::failed("write a table into the application", e))
    }

    fn get_all<T: Copy>(&self, offset: u64, count: usize) -> Result<Vec<T>, CaptureError> {
        let mut out = Vec::<T>::with_capacity(count);
        // SAFETY: the slice covers the vector's spare capacity, which is made initialised first; every bit pattern is a value of the plain C structs
        // used here, so `count` elements are initialised afterwards.
        unsafe {
            std::ptr::write_bytes(out.as_mut_ptr(), 0, count);
            let bytes = std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), count * size_of::<T>());
            self.memory
                .read(self.base + offset, bytes)
                .map_err(|e| CaptureError::failed("read a table from the application", e))?;
            out.set_len(count);
        }
        Ok(out)
    }

    fn get<T: Copy>(&self, offset: u64) -> Result<T, CaptureError> {
        Ok(self.get_all(offset, 1)?[0])
    }

    /// How `task` is to begin operation `op` on `table`.
    fn entry(&self, task: &Task, op: u64, table: u64, stack_top: u64) -> Entry {
        let mut regs = task.regs;
        regs.rip = self.entry;
        regs.rdi = op;
        regs.rsi = self.base + table;
        regs.rsp = (self.base + stack_top) & !15;
        regs.orig_rax = u64::MAX;
        Entry {
            regs,
            mask: !(1 << (self.signo - 1)),
            signo: self.signo,
            uses_vectors: !matches!(op, OP_THREAD | OP_WAIT),
        }
    }
}

/// The state in which a task begins an operation, and the signal with which it ends it.
#[derive(Debug)]
struct Entry {
    regs: Regs,
    mask: u64,
    signo: i32,
    /// What every thread runs is built without: to put them back would cost 2 µs for each (`compute_regs threads` sees it).
    uses_vectors: bool,
}

impl Entry {
    fn begin(&self, task: &mut Task) -> Result<(), CaptureError> {
        self.prepare(task)?;
        Self::let_run(task)
    }

    /// Leads the task to the operation: it is the next that it does, even without the agent.
    fn prepare(&self, task: &mut Task) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::failed(format!("prepare thread {}", task.tid), e);
        task.borrowed = true;
        task.vectors_used |= self.uses_vectors;
        ptrace::set_regs(task.tid, &self.regs).map_err(fail)?;
        ptrace::set_sigmask(task.tid, self.mask).map_err(fail)
    }

    fn let_run(task: &mut Task) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::failed(format!("run thread {}", task.tid), e);
        ptrace::cont(task.tid, 0).map_err(fail)?;
        task.running = true;
        Ok(())
    }

    fn end(&self, task: &mut Task) -> Result<(), CaptureError> {
        if task.running {
            task.wait_for(Event::Signal(self.signo))?;
            task.put_vectors_back();
        }
        Ok(())
    }
}

/// Lets the main thread of every process that `who` names begin an operation as `prepare` says (areas are those of the named ones), waits for the end of all that began, and lets `collect` read each one's result. An
/// operation that began is always waited for, whatever has failed meanwhile: a thread taken out of the middle of one would leave its process with a
/// stray child or without an attribute. Returns the first failure.
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

/// Runs OP_THREAD on every task; returns the results by process and task. As with the other operations, what began is waited for. All but the first of each process, which are
/// needed for nothing more, get their registers back at once. While the others are busy, `meanwhile` is done with the first ones.
pub(crate) fn collect_threads<M>(
    job: &mut Suspended,
    areas: &[Area],
    meanwhile: impl FnOnce(&mut Suspended) -> Result<M, CaptureError>,
) -> Result<(Vec<Vec<ThreadTable>>, M), CaptureError> {
    let size = size_of::<ThreadTable>() as u64;
    for (process, area) in job.processes.iter().zip(areas) {
        let blank: ThreadTable = area.get(area.thread_tables)?;
        let mut tables = vec![blank; process.tasks.len()];
        for (i, (table, task)) in tables.iter_mut().zip(&process.tasks).enumerate() {
            table.mark = area.mark(process.pid, task.tid, i);
        }
        area.put(area.thread_tables, &tables)?;
    }
    let entry = |process: usize, number: usize, task: &Task| {
        let (area, i) = (&areas[process], number as u64);
        let entry = area.entry(
            task,
            OP_THREAD,
            area.thread_tables + size * i,
            area.small_stacks + SMALL_STACK * (i + 1),
        );
        (number == 0, entry)
    };
    let began: Result<Vec<()>, _> = job
        .each_task(entry, |task, (_, entry)| entry.begin(task))
        .into_iter()
        .flatten()
        .collect();
    let end = |task: &mut Task, (first, entry): &(bool, Entry)| {
        entry.end(task)?;
        if !first {
            task.put_back();
        }
        Ok(())
    };
    let (ended, done) = job.each_task_while(entry, end, |job| began.and_then(|_| meanwhile(job)));
    ended.into_iter().flatten().collect::<Result<(), CaptureError>>()?;
    let done = done?;
    let mut out = Vec::new();
    for (process, area) in job.processes.iter().zip(areas) {
        let tables = area.get_all::<ThreadTable>(area.thread_tables, process.tasks.len())?;
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
            let mut table = area.get::<ProcessTable>(area.process_table)?;
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
            table.mark = area.mark(process.pid, process.tasks[0].tid, 0);
            area.put(area.process_table, &[table])?;
            Ok(area.entry(&process.tasks[0], OP_PROCESS, area.process_table, area.large_stack_top))
        },
        |process, area| {
            let table = area.get::<ProcessTable>(area.process_table)?;
            process.subreaper = table.child_subreaper > 0;
            out.push(table);
            Ok(())
        },
    )?;
    Ok(out)
}

/// A snapshot child.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made {
    pub(crate) pid: i32,
    /// The userfaultfd that it was to bring: its descriptor in the child, or a negative error number.
    pub(crate) uffd: Option<i32>,
}

/// Makes a snapshot child of every process with memory of its own, whose `areas` and so on these are; `controls` are the agent's descriptors of their control memories and the inode numbers of these. `want_uffd` says whose child shall bring a userfaultfd. Returns for each process its child or
/// the error number that prevented it.
pub(crate) fn snapshot(
    job: &mut Suspended,
    areas: &[Area],
    left_out: &[Vec<[u64; 2]>],
    controls: &[(i32, u64)],
    want_uffd: &[bool],
) -> Result<Vec<Result<Made, i32>>, CaptureError> {
    let agent_pid = std::process::id().cast_signed();
    let mut out = Vec::new();
    in_all(
        job,
        areas,
        |process| process.guest.is_none(),
        |i, process, area| {
            let mut ranges = [[0; 2]; MAX_LEFT_OUT];
            for (slot, range) in ranges.iter_mut().zip(&left_out[i]) {
                *slot = *range;
            }
            let (fd, ino) = controls[i];
            let table = SnapshotTable {
                mark: area.main_mark(process),
                stack_intermediary: area.base + area.intermediary_stack_top,
                stack_writers: area.base + area.writer_stack_top,
                agent_pid,
                control_fd: fd,
                control_ino: ino,
                child: 0,
                error: 0,
                want_uffd: i32::from(want_uffd[i]),
                uffd: 0,
                left_out: ranges,
            };
            area.put(area.snapshot_table, &[table])?;
            Ok(area.entry(&process.tasks[0], OP_SNAPSHOT, area.snapshot_table, area.large_stack_top))
        },
        |_, area| {
            let table = area.get::<SnapshotTable>(area.snapshot_table)?;
            out.push(match (table.error, table.child) {
                (0, pid) if pid > 0 => Ok(Made {
                    pid,
                    uffd: (table.want_uffd != 0).then_some(table.uffd),
                }),
                (0, child) => Err(-child),
                (error, _) => Err(-error),
            });
            Ok(())
        },
    )?;
    Ok(out)
}

/// Lets the main thread of process number `at` do operation `op` on the table at `table`, whose turn is at `turn`, while its other threads wait: should the agent die, they go on only when
/// it is over. Where that takes longer than [`LONGEST_TURN`], all other processes are let go, since one of them may be what it waits for, and the end of the operation is a failure.
fn take_turn(
    job: &mut Suspended,
    (at, area): (usize, &Area),
    (op, table, turn): (u64, u64, u64),
    group: Option<&dyn Group>,
) -> Result<(), CaptureError> {
    let pid = job.processes[at].pid;
    let size = size_of::<WaitTable>() as u64;
    let over = area.base + turn + std::mem::offset_of!(Turn, over) as u64;
    // The tables of OP_THREAD have been read.
    let tasks = job.processes[at].tasks.iter().enumerate();
    let waits: Vec<WaitTable> = tasks
        .map(|(i, task)| WaitTable {
            mark: area.mark(pid, task.tid, i),
            over,
        })
        .collect();
    area.put(area.thread_tables, &waits)?;
    let entry = |process: usize, number: usize, task: &Task| {
        let i = number as u64;
        let (wait, stack) = (area.thread_tables + size * i, area.small_stacks + SMALL_STACK * (i + 1));
        (process == at).then(|| match number {
            0 => area.entry(task, op, table, area.large_stack_top),
            // Whatever signal the operation brings, it is not for those who wait.
            _ => Entry {
                mask: u64::MAX,
                ..area.entry(task, OP_WAIT, wait, stack)
            },
        })
    };
    let each = |job: &mut Suspended, f: fn(&mut Task, &Entry) -> Result<(), CaptureError>| {
        let done = job.each_task(entry, move |task, entry| {
            entry.as_ref().map_or(Ok(()), |entry| f(task, entry))
        });
        done.into_iter().flatten().collect::<Result<(), _>>()
    };
    // Nobody runs before all are prepared: an agent that dies in between leaves a turn that does nothing. The main thread is the first, or the others would wait for ever.
    let first = area.entry(&job.processes[at].tasks[0], op, table, area.large_stack_top);
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

/// Runs OP_NOTIFICATION on the main thread of process number `at`, with `table` completed; `bytes` is the size of the room for messages, which `read` can read in the end.
pub(crate) fn notification<R>(
    job: &mut Suspended,
    at: usize,
    area: &Area,
    mut table: NotificationTable,
    bytes: u64,
    read: impl FnOnce(&NotificationTable, &Memory) -> Result<R, CaptureError>,
) -> Result<R, CaptureError> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    table.room = mlock::map(&mut job.processes[at], bytes, protection, libc::MAP_NORESERVE)?;
    table.mark = area.main_mark(&job.processes[at]);
    let turn = area.notification_table + std::mem::offset_of!(NotificationTable, turn) as u64;
    let done = area
        .put(area.notification_table, &[table])
        .and_then(|()| take_turn(job, (at, area), (OP_NOTIFICATION, area.notification_table, turn), None))
        .and_then(|()| area.get::<NotificationTable>(area.notification_table))
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
    area.put(area.rings_table, &[table])?;
    let turn = area.rings_table + std::mem::offset_of!(RingsTable, turn) as u64;
    let took = take_turn(job, (at, area), (OP_RINGS, area.rings_table, turn), group);
    let done = match area.get::<RingsTable>(area.rings_table) {
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
