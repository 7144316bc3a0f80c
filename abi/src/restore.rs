//! Tables the restart flow prepares for the restorer.
//!
//! The restorer lies, with its tables and stacks, in one *area*: an address range that neither the agent's nor the
//! restored process's mappings use. It is given a [`Plan`]. Nearly everything a process needs is a list of system calls
//! whose arguments are known before the restorer runs, so a plan is mostly [`Call`] lists, made and tested in ordinary
//! Rust; the restorer only adds what needs code: reading pages and checking them, and making threads.
//!
//! ```text
//! arrivals ─► before ─► fill (extents, several threads) ─► after ─► threads (each its own calls, then parks) ─► main's calls ─► last ─► park
//! ```
//! Every address in these tables points into the area, except where a system call's argument is an address of the restored process.

use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicU8};

/// First word of a plan; guards against a restorer of another build.
pub const PLAN_MAGIC: u64 = 0x4245_4c41_5952_0005;

/// An array in the area.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Table {
    /// Address of the first entry.
    pub addr: u64,
    /// Number of entries.
    pub len: u64,
}

/// The result must equal the first argument (`mmap` with MAP_FIXED).
pub const CALL_EXPECT_ARG0: u32 = 1;
/// An error is not a failure.
pub const CALL_MAY_FAIL: u32 = 2;
/// Keep the result (a descriptor) for calls with [`CALL_USE_KEPT_ARG0`] or [`CALL_USE_KEPT_ARG4`].
pub const CALL_KEEP: u32 = 4;
/// The first argument is the kept result.
pub const CALL_USE_KEPT_ARG0: u32 = 8;
/// The fifth argument is the kept result.
pub const CALL_USE_KEPT_ARG4: u32 = 16;
/// Not a call: the 32-bit word at the first argument must equal the second.
pub const CALL_COMPARE: u32 = 32;
/// The result must equal the sixth argument, which the call does not look at.
pub const CALL_EXPECT_ARG5: u32 = 64;

/// One system call of a list.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Call {
    /// Number.
    pub nr: u32,
    /// `CALL_*` bits.
    pub flags: u32,
    /// What the call is for, see [`Step`]; reported with an error.
    pub step: u32,
    /// Which object of that step; reported with an error.
    pub index: u32,
    /// Arguments.
    pub args: [u64; 6],
}

/// What the restorer was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Step {
    /// Nothing has failed.
    None = 0,
    /// Making room: unmapping the agent's memory.
    Clear,
    /// Moving `[vdso]` and its data pages; index: which.
    Vdso,
    /// Mapping; index: the mapping.
    Map,
    /// Attaching a System V segment; index: which.
    Attach,
    /// Reading pages; index: the extent.
    Fill,
    /// Pages read differ from what was written; index: the extent.
    Checksum,
    /// A chunk ends before an extent; index: the extent.
    Short,
    /// Protection, advice, lock or name of a mapping; index: the mapping.
    Advise,
    /// `PR_SET_MM_MAP`.
    Layout,
    /// `membarrier` registration.
    Membarrier,
    /// Signal disposition; index: the signal.
    Sigaction,
    /// Creating a thread; index: which.
    Thread,
    /// A thread's own setting; index: which thread.
    ThreadState,
    /// Credentials.
    Credentials,
    /// Queueing a pending signal; index: the signal.
    Pending,
    /// Interval timer; index: which.
    Itimer,
    /// POSIX timer; index: which.
    Timer,
    /// Other process-wide settings.
    Process,
    /// Closing a descriptor the restart used.
    Close,
    /// A POSIX file lock; index: which.
    Lock,
    /// A ring of native asynchronous I/O; index: which.
    Ring,
    /// A memory protection key; index: which.
    Key,
    /// The plan is not one of this build.
    Magic,
}

impl Step {
    /// The step with number `v`.
    pub fn from_u32(v: u32) -> Self {
        const ALL: [Step; 24] = [
            Step::None,
            Step::Clear,
            Step::Vdso,
            Step::Map,
            Step::Attach,
            Step::Fill,
            Step::Checksum,
            Step::Short,
            Step::Advise,
            Step::Layout,
            Step::Membarrier,
            Step::Sigaction,
            Step::Thread,
            Step::ThreadState,
            Step::Credentials,
            Step::Pending,
            Step::Itimer,
            Step::Timer,
            Step::Process,
            Step::Close,
            Step::Lock,
            Step::Ring,
            Step::Key,
            Step::Magic,
        ];
        ALL.get(v as usize).copied().unwrap_or(Step::Magic)
    }
}

/// A stored range of pages.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Fill {
    pub vaddr: u64,
    pub bytes: u64,
    pub offset: u64,
    pub fd: u32,
    /// 1 where the kernel may drop the pages at any time: what is zero is not damaged.
    pub droppable: u32,
    /// Address of the XXH3-64 of each page.
    pub sums: u64,
}

/// Kernel's `struct clone_args` (version 2, 88 bytes).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct CloneArgs {
    pub flags: u64,
    pub pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    pub set_tid: u64,
    pub set_tid_size: u64,
    pub cgroup: u64,
}

/// One thread to be made; the first entry of the table is the main thread, which exists.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ThreadPlan {
    /// Thread identifier.
    pub tid: i32,
    /// Index in the table.
    pub index: u32,
    /// Lowest address of its stack.
    pub stack: u64,
    /// Size of its stack.
    pub stack_bytes: u64,
    /// What it does before it parks.
    pub calls: Table,
    /// Address of the plan.
    pub plan: u64,
    /// Places in the table, as 64-bit words, of the threads that it makes: those that have its descriptor table.
    pub makes: Table,
}

/// A thread that helps to read pages and is gone before the restored threads are made.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Helper {
    /// Thread identifier that no task of the job has.
    pub tid: i32,
    /// Padding.
    pub pad: u32,
    /// Lowest address of its stack.
    pub stack: u64,
}

/// Largest number of helpers.
pub const MAX_HELPERS: usize = 7;
/// Stack of a restorer thread, bytes.
pub const STACK_BYTES: u64 = 8192;
/// Stack of a thread that reads pages, bytes (the checksum state is large).
pub const FILL_STACK_BYTES: u64 = 32 * 1024;
/// Pages are read and checked in pieces of this size, so that the check finds them in the cache.
pub const PIECE_BYTES: u64 = 256 * 1024;

/// What the restorer does in one process.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Plan {
    /// [`PLAN_MAGIC`].
    pub magic: u64,
    /// Address of this process's [`Slot`].
    pub slot: u64,
    /// Address of the [`Control`].
    pub control: u64,
    /// Process identifier.
    pub pid: i32,
    /// Number of entries of `helpers` in use.
    pub helper_count: u32,
    /// Threads that help to read pages.
    pub helpers: [Helper; MAX_HELPERS],
    /// [`Call`]s that make room and map.
    pub before: Table,
    /// [`Fill`]s.
    pub fills: Table,
    /// [`crate::aio::RingPlan`]s.
    pub rings: Table,
    /// [`Call`]s after the pages are there.
    pub after: Table,
    /// [`ThreadPlan`]s.
    pub threads: Table,
    /// [`Call`]s of the main thread when all threads have parked.
    pub last: Table,
    /// The stage that the process must wait for before `last`: 0, [`STAGE_STOP`] or [`STAGE_FINISH`].
    pub hold: u32,
    /// Signal by which the process stops itself at the end (it was stopped by job control), 0 for none.
    pub stop_signal: i32,
    /// Tasks that exist already, share the memory, and come into the restorer by themselves; nothing is unmapped before all have.
    pub arrivals: u32,
    /// 1 when the memory is that of another process, which makes it.
    pub guest: u32,
    /// Address of the [`Slot`] of the process that makes the memory: there the tasks that share it arrive, and learn
    /// that it is there.
    pub first: u64,
}

/// `Slot::state`: the process has failed; `Slot::step` and so on say how.
pub const STATE_FAILED: u32 = u32::MAX;
/// `Slot::state`: the restorer has taken over.
pub const STATE_RESTORER: u32 = 100;
/// `Slot::state`: memory and threads are there; the process waits for the stage `Plan::hold`.
pub const STATE_READY: u32 = 101;
/// `Slot::state`: all threads are parked; only registers are missing.
pub const STATE_PARKED: u32 = 102;

/// `Control::stage` when those that stop, and whoever uses the same descriptor table, have memory and threads: they stop.
pub const STAGE_STOP: u32 = 5;
/// `Control::stage` when every process has memory and threads: timers start, descriptors of the restart are closed.
pub const STAGE_FINISH: u32 = 6;

/// Longest text a process can report.
pub const TEXT_BYTES: usize = 384;

/// What one process reports.
#[repr(C)]
#[derive(Debug)]
pub struct Slot {
    /// Stage reached.
    pub state: AtomicU32,
    /// [`Step`] that failed.
    pub step: AtomicU32,
    /// Object of that step.
    pub index: AtomicU32,
    /// Error number.
    pub errno: AtomicI32,
    /// Threads that have parked.
    pub parked: AtomicU32,
    /// Tasks that existed already and have come into the restorer.
    pub arrived: AtomicU32,
    /// 1 when the memory is there: those tasks go on.
    pub filled: AtomicU32,
    /// Next entry of `Plan::fills` to be read.
    pub next_fill: AtomicU32,
    /// 1 when the process has been made, whether or not it has reported anything.
    pub made: AtomicU32,
    /// Helpers still running: their thread identifiers, cleared by the kernel at their end.
    pub helper_tid: [AtomicU32; MAX_HELPERS],
    /// Descriptor by which the process waits for pages that are missing, where some are filled later.
    pub uffd: AtomicI32,
    /// Length of `text`.
    pub text_bytes: AtomicU32,
    /// First address of the area and first behind it.
    pub area: [AtomicU64; 2],
    /// Monotonic times in nanoseconds: restorer entered, mapped, filled, parked.
    pub times: [AtomicU64; 4],
    /// An error found outside the restorer, as text.
    pub text: [AtomicU8; TEXT_BYTES],
}

/// Head of the memory shared by the agent and all processes that are being restored; the slots follow.
#[repr(C)]
#[derive(Debug)]
pub struct Control {
    /// Stage the processes may enter; a futex.
    pub stage: AtomicU32,
    /// Incremented at every report; a futex.
    pub reports: AtomicU32,
}

/// `Control::stage` when the restart has failed: every process ends.
pub const STAGE_ABORT: u32 = u32::MAX;
