//! What is mapped into a process for the operations: the program, their tables, a frame and a stack for each thread;
//! and how a thread enters one.

use super::memory;
use super::{on_main, on_mains};
use crate::state::limits;
use crate::stop::stopped::Gate;
use crate::stop::stopped::{Process, Task};
use crate::CaptureError;
use belay_abi::inject::{
    Mark, NotificationTable, ProcessTable, RangesTable, RingsTable, SnapshotTable, ThreadTable, WaitTable, MAX_WRITERS, OP_THREAD,
    OP_WAIT, WRITER_STACK,
};
use belay_kernel::blob::Blob;
use belay_kernel::plain::{bytes_of, bytes_of_mut, Plain};
use belay_kernel::proc::{Map, Status};
use belay_kernel::ptrace::{self, Event, Regs};
use belay_kernel::vm::{self, Memory};

const PAGE: u64 = 4096;
/// Stack of a thread that fills in a table: also of a handler of the program, should a signal come in the moment
/// between the agent's death and the thread's way back. Only the top of it is touched otherwise.
const SMALL_STACK: u64 = 16 * 1024;
/// Table of a thread: any of those that every thread has.
const TABLE_BYTES: u64 = {
    let (tell, wait) = (size_of::<ThreadTable>(), size_of::<WaitTable>());
    (if tell > wait { tell } else { wait }).next_multiple_of(64) as u64
};
/// Stack of the operations on a process.
const LARGE_STACK: u64 = 16 * 1024;

/// What each thread has in the area: a stack, which grows down from its table, and its frame behind that. Stack, table
/// and frame of a thread that tells of itself share a page.
///
/// ```text
/// ...stack │ table │ frame ║ ...stack │ table │ frame ║
///                          └─ page boundary           └─
/// ```
#[derive(Debug, Clone, Copy)]
struct Slots {
    /// Where the first one begins, from the start of the area.
    start: u64,
    bytes: u64,
    frame_bytes: u64,
    /// How many there are.
    threads: u64,
}

impl Slots {
    /// For `threads` threads whose extended state has at most `xstate` bytes.
    fn new(start: u64, threads: u64, xstate: usize) -> Self {
        let frame_bytes = crate::inject::frame::bytes(xstate) as u64;
        Self {
            start,
            bytes: (SMALL_STACK + TABLE_BYTES + frame_bytes).next_multiple_of(PAGE),
            frame_bytes,
            threads,
        }
    }

    fn end(self) -> u64 {
        self.start + self.bytes * self.threads
    }

    fn frame(self, index: u64) -> u64 {
        self.start + self.bytes * (index + 1) - self.frame_bytes
    }

    fn table(self, index: u64) -> u64 {
        self.frame(index) - TABLE_BYTES
    }
}

/// The injected area of one process.
#[derive(Debug)]
pub(crate) struct Area {
    /// A thread of the process.
    task: i32,
    pub(super) base: u64,
    entry: u64,
    /// Signal that announces the end of an operation.
    signo: i32,
    pub(super) memory: Memory,
    pub(super) at: Places,
}

/// Where the parts of an area lie, bytes from its start.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) process_table: u64,
    pub(super) snapshot_table: u64,
    pub(super) notification_table: u64,
    pub(super) rings_table: u64,
    pub(super) ranges_table: u64,
    program_end: u64,
    pub(super) large_stack_top: u64,
    pub(super) intermediary_stack_top: u64,
    pub(super) writer_stack_top: u64,
    /// What each thread has, at the end.
    slots: Slots,
}

/// The signal that marks the end of an operation: one that is not pending and that the process does not catch, so that
/// its delivery means nothing when nobody traces the process. Where all are caught (Go, some runtimes) SIGURG: were the
/// agent to die in that moment, its handler would run once without reason.
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

/// An area that is about to be mapped.
struct Prepared {
    signo: i32,
    memory: Memory,
    at: Places,
}

/// What has to be known of a process to map its area.
pub(crate) struct Facts<'a> {
    pub(crate) maps: &'a [Map],
    pub(crate) status: &'a Status,
    /// The signals that are pending for single threads.
    pub(crate) pending: u64,
}

impl Places {
    /// Behind a program of so many bytes, for `threads` threads whose extended state has at most `xstate` bytes.
    fn new(program: u64, threads: u64, xstate: usize) -> Self {
        let mut at = program;
        let mut take = |bytes: u64, align: u64| {
            let start = at.next_multiple_of(align);
            at = start + bytes;
            start
        };
        let writers = WRITER_STACK * MAX_WRITERS as u64;
        Self {
            process_table: take(size_of::<ProcessTable>() as u64, PAGE),
            snapshot_table: take(size_of::<SnapshotTable>() as u64, 64),
            notification_table: take(size_of::<NotificationTable>() as u64, 64),
            rings_table: take(size_of::<RingsTable>() as u64, 64),
            ranges_table: take(size_of::<RangesTable>() as u64, 64),
            program_end: take(0, PAGE),
            large_stack_top: take(LARGE_STACK, 64) + LARGE_STACK,
            intermediary_stack_top: take(LARGE_STACK, 64) + LARGE_STACK,
            writer_stack_top: take(writers, 64) + writers,
            slots: Slots::new(take(0, PAGE), threads, xstate),
        }
    }

    /// The length of the area, bytes.
    fn bytes(&self) -> u64 {
        self.slots.end()
    }
}

impl Prepared {
    /// Decides where everything is to lie, and prepares the gate of `process`.
    fn of(process: &mut Process, facts: &Facts<'_>, blob: &Blob) -> Result<Self, CaptureError> {
        let pid = process.pid;
        let refuse = |reason: &str| CaptureError::refuse(pid, "process", reason);
        let signo = mark_signal(facts.status, facts.pending)
            .ok_or_else(|| refuse("SIGURG, SIGWINCH and SIGCHLD are all pending; try again"))?;
        let memory =
            Memory::open(process.task()).map_err(|e| CaptureError::system(format!("open the memory of process {pid}"), e))?;
        let gate = Gate::prepare(process, facts.maps, &memory);
        process.gate = Some(gate.ok_or_else(|| refuse("no system call instruction in its memory"))?);
        let threads = process.tasks.len() as u64;
        let xstate = process.tasks.iter().map(|t| t.xstate.len()).max().unwrap_or(0);
        Ok(Self {
            signo,
            memory,
            at: Places::new(blob.bytes(), threads, xstate),
        })
    }

    /// Writes the program, the tables and the frames into the area of `process`, which is mapped at `base`.
    fn fill(self, process: &Process, base: u64, blob: &Blob) -> Result<Area, CaptureError> {
        let (slots, threads) = (self.at.slots, process.tasks.len() as u64);
        let mut image = blob.placed_at(base);
        image.resize(self.at.program_end as usize, 0);
        let mut frames = vec![0; (slots.frame_bytes * threads) as usize];
        let all = frames.chunks_exact_mut(slots.frame_bytes as usize).zip(&process.tasks);
        for (i, (frame, task)) in (0..).zip(all) {
            let regs = crate::state::calls::without_restart_block(task.tid, &task.regs, task.wait.as_ref());
            crate::inject::frame::write(frame, base + slots.frame(i), &regs, task.sigmask, &task.xstate);
        }
        let places: Vec<u64> = (0..threads).map(|i| base + slots.frame(i)).collect();
        self.memory
            .write(base, &image)
            .and_then(|()| write_each(process.task(), &self.memory, &places, &frames))
            .map_err(|e| CaptureError::system(format!("write the injected program into process {}", process.pid), e))?;
        Ok(Area {
            task: process.task(),
            base,
            entry: base + blob.entry(),
            signo: self.signo,
            memory: self.memory,
            at: self.at,
        })
    }
}

impl Area {
    /// Maps an area into each of `processes`, and writes the program, the tables and the frames into it.
    pub(crate) fn map_all<'a>(
        processes: &mut [Process],
        facts: impl Iterator<Item = Facts<'a>>,
        blob: &Blob,
    ) -> Result<Vec<Self>, CaptureError> {
        processes.iter_mut().for_each(limits::raise);
        let prepared = processes.iter_mut().zip(facts);
        let prepared = prepared.map(|(process, facts)| Prepared::of(process, &facts, blob));
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        let mut lengths = prepared.iter().map(|one| one.at.bytes());
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let args = |_: &mut Process| lengths.next().map(|bytes| memory::mapping(bytes, all, 0));
        let mapped = on_mains(processes.iter_mut(), libc::SYS_mmap, args);
        for ((process, mapped), one) in processes.iter_mut().zip(&mapped).zip(&prepared) {
            if let Some(Ok(base)) = mapped {
                process.area = Some((*base, one.at.bytes()));
            }
        }
        let each = processes.iter_mut().zip(prepared);
        let each = each.map(|(process, one)| match process.area {
            Some((base, _)) => one.fill(process, base, blob),
            // What is in the way is told, or gone round.
            None => {
                let base = map_code(process, one.at.bytes(), one.at.process_table)?;
                one.fill(process, base, blob)
            }
        });
        each.collect()
    }

    /// First address and length.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.base, self.base + self.at.bytes())
    }

    /// Address of a page that nobody has touched in the process: the writers whose stacks end there run in its copy.
    pub(super) fn untouched_page(&self) -> u64 {
        self.base + self.at.slots.start - PAGE
    }

    /// A mark to be filled in by the operation's caller.
    pub(crate) fn no_mark(&self) -> Mark {
        self.mark(0, 0, 0)
    }

    pub(super) fn mark(&self, pid: i32, tid: i32, index: usize) -> Mark {
        Mark {
            pid,
            tid,
            signo: self.signo,
            done: 0,
            frame: self.base + self.at.slots.frame(index as u64) + crate::inject::frame::RSP_OFFSET,
            subreaper: 0,
            witness: 0,
        }
    }

    /// The mark of an operation of the main thread of `process` after OP_PROCESS.
    pub(super) fn main_mark(&self, process: &Process) -> Mark {
        Mark {
            subreaper: process.subreaper.into(),
            ..self.mark(process.pid, process.tasks[0].tid, 0)
        }
    }

    /// Where the table of thread number `index` lies, from the start of the area. Its stack ends there.
    pub(super) fn thread_table(&self, index: usize) -> u64 {
        self.at.slots.table(index as u64)
    }

    /// Writes the tables of all threads.
    pub(super) fn put_thread_tables<T: Plain>(&self, tables: &[T]) -> Result<(), CaptureError> {
        write_each(self.task, &self.memory, &self.places(tables.len()), bytes_of(tables))
            .map_err(|e| CaptureError::system("write tables into the application", e))
    }

    /// Reads the tables of all threads.
    pub(super) fn thread_tables<T: Plain>(&self, count: usize) -> Result<Vec<T>, CaptureError> {
        let places = self.places(count);
        let one_by_one = |bytes: &mut [u8]| {
            let pieces = bytes.chunks_exact_mut(size_of::<T>());
            places
                .iter()
                .zip(pieces)
                .try_for_each(|(at, piece)| self.memory.read(*at, piece))
        };
        read_all(count, |bytes| {
            vm::read_each(self.task, &places, bytes).or_else(|_| one_by_one(bytes))
        })
    }

    fn places(&self, count: usize) -> Vec<u64> {
        (0..count).map(|i| self.base + self.thread_table(i)).collect()
    }

    pub(super) fn put<T: Plain>(&self, offset: u64, tables: &[T]) -> Result<(), CaptureError> {
        self.memory
            .write(self.base + offset, bytes_of(tables))
            .map_err(|e| CaptureError::system("write a table into the application", e))
    }

    /// Address of room for arguments and results of single system calls: the table of OP_PROCESS, which has been read.
    pub(crate) fn scratch(&self) -> u64 {
        self.base + self.at.process_table
    }

    /// Bytes of that room.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        size_of::<ProcessTable>() as u64
    }

    /// The first `count` bytes of it.
    pub(crate) fn get_scratch(&self, count: u64) -> Result<Vec<u8>, CaptureError> {
        self.get_all(
            self.at.process_table,
            usize::try_from(count.min(self.scratch_bytes())).unwrap_or(0),
        )
    }

    /// How many operations on semaphores [`Area::put_operations`] has room for.
    pub(crate) fn room_of_operations(&self) -> usize {
        size_of::<ProcessTable>() / size_of::<libc::sembuf>()
    }

    /// Writes them there; their address.
    pub(crate) fn put_operations(&self, ops: &[libc::sembuf]) -> Result<u64, CaptureError> {
        self.put(self.at.process_table, ops)?;
        Ok(self.scratch())
    }

    pub(super) fn get_all<T: Plain>(&self, offset: u64, count: usize) -> Result<Vec<T>, CaptureError> {
        read_all(count, |bytes| self.memory.read(self.base + offset, bytes))
    }

    pub(super) fn get<T: Plain>(&self, offset: u64) -> Result<T, CaptureError> {
        Ok(self.get_all(offset, 1)?[0])
    }

    /// How `task` is to begin operation `op` on `table`.
    pub(super) fn entry(&self, task: &Task, op: u64, table: u64, stack_top: u64) -> Entry {
        let mut regs = super::borrowed(task);
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

/// Maps `bytes` into `process`, of which the first `code` are executable and the rest is writable: all of it both, or,
/// where that is forbidden (PR_SET_MDWE), each part the one.
fn map_code(process: &mut Process, bytes: u64, code: u64) -> Result<u64, CaptureError> {
    let (read_write, execute) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_EXEC);
    let whole = memory::map(process, bytes, read_write | execute, 0);
    let (base, is_whole) = match whole {
        Err(CaptureError::Call { errno: libc::EACCES, .. }) => (memory::map(process, bytes, libc::PROT_READ | execute, 0)?, false),
        done => (done?, true),
    };
    process.area = Some((base, bytes));
    if is_whole {
        return Ok(base);
    }
    let data = [base + code, bytes - code, read_write as u64, 0, 0, 0];
    on_main(process, libc::SYS_mprotect, data)?;
    Ok(base)
}

/// Writes equal pieces of `data` to `places` in the memory of thread `task`: with one call, or, where a filter for
/// system calls refuses that, one by one.
fn write_each(task: i32, memory: &Memory, places: &[u64], data: &[u8]) -> std::io::Result<()> {
    vm::write_each(task, places, data).or_else(|_| {
        let pieces = data.chunks_exact((data.len() / places.len().max(1)).max(1));
        places.iter().zip(pieces).try_for_each(|(at, piece)| memory.write(*at, piece))
    })
}

/// Plain C structs whose bytes `read` fills in.
fn read_all<T: Plain>(count: usize, read: impl FnOnce(&mut [u8]) -> std::io::Result<()>) -> Result<Vec<T>, CaptureError> {
    let mut out = vec![T::zero(); count];
    read(bytes_of_mut(&mut out)).map_err(|e| CaptureError::system("read a table from the application", e))?;
    Ok(out)
}

/// The state in which a task begins an operation, and the signal with which it ends it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) regs: Regs,
    pub(super) mask: u64,
    pub(super) signo: i32,
    /// What every thread runs is built without: to put them back would cost 2 µs for each (`compute_regs threads` sees it).
    pub(super) uses_vectors: bool,
}

impl Entry {
    pub(super) fn begin(&self, task: &mut Task) -> Result<(), CaptureError> {
        self.prepare(task)?;
        Self::let_run(task)
    }

    /// Leads the task to the operation: it is the next that it does, even without the agent.
    pub(super) fn prepare(&self, task: &mut Task) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::system(format!("prepare thread {}", task.tid), e);
        task.borrowed = true;
        task.vectors_used |= self.uses_vectors;
        ptrace::set_regs(task.tid, &self.regs).map_err(fail)?;
        ptrace::set_sigmask(task.tid, self.mask).map_err(fail)
    }

    pub(super) fn let_run(task: &mut Task) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::system(format!("run thread {}", task.tid), e);
        ptrace::cont(task.tid, 0).map_err(fail)?;
        task.running = true;
        Ok(())
    }

    pub(super) fn end(&self, task: &mut Task) -> Result<(), CaptureError> {
        if task.running {
            task.wait_for(Event::Signal(self.signo))?;
            task.put_vectors_back();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_table_and_frame_of_each_thread_lie_apart() {
        // SSE, AVX-512 and AMX.
        for xstate in [576, 2696, 11_008] {
            let slots = Slots::new(7 * PAGE, 3, xstate);
            let mut free = slots.start;
            for i in 0..3 {
                let (table, frame) = (slots.table(i), slots.frame(i));
                assert!(table - free >= SMALL_STACK, "{xstate}: stack {i}");
                assert!(frame - table >= TABLE_BYTES, "{xstate}: table {i}");
                assert_eq!((table % 64, frame % 64), (0, 0));
                free = frame + slots.frame_bytes;
                assert!(slots.frame_bytes >= crate::inject::frame::bytes(xstate) as u64 && free.is_multiple_of(PAGE));
            }
            assert_eq!(free, slots.end());
        }
    }
}
