//! What is mapped into a process for the operations: the program, their tables, a frame and a stack for each thread; and how a thread enters one.

use crate::mlock;
use crate::rescue::Gate;
use crate::suspend::{Process, Task};
use crate::CaptureError;
use belay_abi::inject::{
    LocksTable, Mark, NotificationTable, ProcessTable, RingsTable, SnapshotTable, ThreadTable, MAX_WRITERS, OP_THREAD, OP_WAIT,
    WRITER_STACK,
};
use belay_kernel::blob::Blob;
use belay_kernel::proc::{Map, Status};
use belay_kernel::ptrace::{self, Event, Regs};
use belay_kernel::vm::Memory;

const PAGE: u64 = 4096;
/// Stack of a thread that fills in a table: also of a handler of the program, should a signal come in the moment between the agent's death and the
/// thread's way back. Only the top of it is touched otherwise.
pub(super) const SMALL_STACK: u64 = 16 * 1024;
/// Stack of the operations on a process.
const LARGE_STACK: u64 = 16 * 1024;

/// The injected area of one process.
#[derive(Debug)]
pub(crate) struct Area {
    pub(super) base: u64,
    entry: u64,
    /// Signal that announces the end of an operation.
    signo: i32,
    pub(super) memory: Memory,
    pub(super) process_table: u64,
    pub(super) snapshot_table: u64,
    pub(super) notification_table: u64,
    pub(super) rings_table: u64,
    pub(super) locks_table: u64,
    pub(super) thread_tables: u64,
    frames: u64,
    frame_bytes: u64,
    pub(super) small_stacks: u64,
    pub(super) large_stack_top: u64,
    pub(super) intermediary_stack_top: u64,
    pub(super) writer_stack_top: u64,
    bytes: u64,
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
        let locks_table = take(size_of::<LocksTable>() as u64, 64);
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
                &crate::calls::without_restart_block(task.tid, &task.regs, task.wait.as_ref()),
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
            locks_table,
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

    pub(super) fn mark(&self, pid: i32, tid: i32, index: usize) -> Mark {
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
    pub(super) fn main_mark(&self, process: &Process) -> Mark {
        Mark {
            subreaper: process.subreaper.into(),
            ..self.mark(process.pid, process.tasks[0].tid, 0)
        }
    }

    pub(super) fn put<T: Copy>(&self, offset: u64, tables: &[T]) -> Result<(), CaptureError> {
        // SAFETY: `T` is one of the plain C structs of `belay_abi::inject`, or an operation on a semaphore, which have no implicit padding; its bytes are only read.
        let bytes = unsafe { std::slice::from_raw_parts(tables.as_ptr().cast::<u8>(), size_of_val(tables)) };
        self.memory
            .write(self.base + offset, bytes)
            .map_err(|e| CaptureError::failed("write a table into the application", e))
    }

    /// Address of room for arguments and results of single system calls: the table of OP_PROCESS, which has been read.
    pub(crate) fn scratch(&self) -> u64 {
        self.base + self.process_table
    }

    /// Bytes of that room.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        size_of::<ProcessTable>() as u64
    }

    /// The first `count` bytes of it.
    pub(crate) fn get_scratch(&self, count: u64) -> Result<Vec<u8>, CaptureError> {
        self.get_all(
            self.process_table,
            usize::try_from(count.min(self.scratch_bytes())).unwrap_or(0),
        )
    }

    /// How many operations on semaphores [`Area::put_operations`] has room for.
    pub(crate) fn room_of_operations(&self) -> usize {
        size_of::<ProcessTable>() / size_of::<libc::sembuf>()
    }

    /// Writes them there; their address.
    pub(crate) fn put_operations(&self, ops: &[libc::sembuf]) -> Result<u64, CaptureError> {
        self.put(self.process_table, ops)?;
        Ok(self.scratch())
    }

    pub(super) fn get_all<T: Copy>(&self, offset: u64, count: usize) -> Result<Vec<T>, CaptureError> {
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

    pub(super) fn get<T: Copy>(&self, offset: u64) -> Result<T, CaptureError> {
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
        let fail = |e| CaptureError::failed(format!("prepare thread {}", task.tid), e);
        task.borrowed = true;
        task.vectors_used |= self.uses_vectors;
        ptrace::set_regs(task.tid, &self.regs).map_err(fail)?;
        ptrace::set_sigmask(task.tid, self.mask).map_err(fail)
    }

    pub(super) fn let_run(task: &mut Task) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::failed(format!("run thread {}", task.tid), e);
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
