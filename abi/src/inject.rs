//! Tables the capture flow shares with the injected program.
//!
//! The agent maps one anonymous area into the stopped process, writes the program, the tables and stacks into it,
//! points a thread's registers at the program's entry with `rdi` = operation and `rsi` = address of that operation's
//! table, and lets the thread run. When the operation is done the program sends `Mark::signo` to its own thread. The
//! agent has chosen a signal that the process neither catches nor waits for: a traced thread stops before such a signal
//! is delivered, and if the agent has died meanwhile, the signal is discarded and the program goes on to `rt_sigreturn`
//! from `Mark::frame`, which holds the thread's original state.

mod notification;
mod rings;

pub use notification::*;
pub use rings::*;

/// Operation: fill a [`ThreadTable`].
pub const OP_THREAD: u64 = 1;
/// Operation: fill a [`ProcessTable`].
pub const OP_PROCESS: u64 = 2;
/// Operation: make the snapshot child described by a [`SnapshotTable`].
pub const OP_SNAPSHOT: u64 = 3;
/// Operation: replace rings of native asynchronous I/O, see [`RingsTable`].
pub const OP_RINGS: u64 = 5;
/// Operation: wait until another thread's operation is over, see [`WaitTable`].
pub const OP_WAIT: u64 = 6;
/// Operation: look into a registration for notification and renew it, see [`NotificationTable`].
pub const OP_NOTIFICATION: u64 = 4;

/// Operation: find out which mappings are locked, see [`RangesTable`].
pub const OP_LOCKS: u64 = 7;
/// Operation: find out which policy each mapping has, see [`RangesTable`].
pub const OP_POLICIES: u64 = 8;

/// Tells agents and injected programs of different versions apart: the version, and the sizes of what both lay out (FNV-1a).
pub const FINGERPRINT: u64 = {
    let sizes = [
        size_of::<Mark>(),
        size_of::<WaitTable>(),
        size_of::<ThreadTable>(),
        size_of::<ProcessTable>(),
        size_of::<RangesTable>(),
        size_of::<SnapshotTable>(),
        size_of::<NotificationTable>(),
        size_of::<RingsTable>(),
        size_of::<Range>(),
        size_of::<StoredExtent>(),
        size_of::<Loan>(),
        size_of::<Writer>(),
        size_of::<Control>(),
    ];
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut i = 0;
    while i < sizes.len() + version.len() {
        let next = if i < sizes.len() {
            sizes[i] as u64
        } else {
            version[i - sizes.len()] as u64
        };
        hash = (hash ^ next).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    hash
};

/// How the end of an operation is announced; first member of every table.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    /// Process.
    pub pid: i32,
    /// Thread that runs the operation.
    pub tid: i32,
    /// Signal sent at the end.
    pub signo: i32,
    /// 1 when the operation is complete.
    pub done: u32,
    /// Address of the signal frame that leads back to where the thread was.
    pub frame: u64,
    /// 1 when PR_SET_CHILD_SUBREAPER has been switched off and the thread, should the agent have died, must switch it on again.
    pub subreaper: u32,
    /// [`OP_THREAD`]: a process that the thread is to look into, 0 for none.
    pub witness: i32,
}

/// `stack_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AltStack {
    pub sp: u64,
    pub flags: i32,
    pub pad: u32,
    pub size: u64,
}

/// Whether an operation may begin, and whether it is over. While the agent lives no other thread of the process runs;
/// should it die, all do, so those others wait here ([`OP_WAIT`]).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Turn {
    /// 1 when all other threads have been led to their wait; the operation does nothing otherwise.
    pub go: u32,
    /// 1 when the operation is over; a futex.
    pub over: u32,
}

/// How a thread waits for another one's operation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WaitTable {
    /// End of operation.
    pub mark: Mark,
    /// Address of [`Turn::over`].
    pub over: u64,
}

/// What only a thread can tell about itself.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ThreadTable {
    /// End of operation.
    pub mark: Mark,
    /// Alternate signal stack.
    pub altstack: AltStack,
    /// `PR_GET_TID_ADDRESS`.
    pub tid_address: u64,
    /// `PR_GET_PDEATHSIG`.
    pub pdeathsig: i32,
    /// `PR_GET_SECUREBITS`.
    pub securebits: u32,
    /// `PR_GET_TIMERSLACK`.
    pub timer_slack: u64,
    /// `PR_GET_NAME`.
    pub comm: [u8; 16],
    /// `sched_getattr`.
    pub sched: SchedAttr,
    /// `get_robust_list`: head and length.
    pub robust_list: [u64; 2],
    /// `ioprio_get`.
    pub ioprio: i64,
    /// `sched_getaffinity`, and its result: the number of bytes filled in.
    pub affinity: [u64; AFFINITY_WORDS],
    /// See `affinity`.
    pub affinity_bytes: i64,
    /// `PR_MCE_KILL_GET`.
    pub machine_checks: i32,
    /// `PR_GET_TSC`.
    pub tsc: i32,
    /// `ARCH_GET_CPUID`, or a negative error number.
    pub cpuid: i32,
    /// `PR_GET_IO_FLUSHER`, or a negative error number.
    pub io_flusher: i32,
    /// `PR_GET_SPECULATION_CTRL` of each kind, or a negative error number.
    pub speculation: [i32; SPECULATIONS],
    /// The error number with which looking into [`Mark::witness`] was refused, 0 where it was not.
    pub blind: i32,
    /// Cookie of core scheduling (`PR_SCHED_CORE_GET`), 0 for none.
    pub core: u64,
    /// `get_mempolicy`: the mode, and the nodes.
    pub policy: i32,
    /// Execution domain (`personality`).
    pub personality: u32,
    /// See `policy`.
    pub nodes: [u64; NODE_WORDS],
}

/// Kinds of speculation that a thread can have a say in.
pub const SPECULATIONS: usize = 3;
/// Words of a mask of memory nodes: 1024, the most that kernels are built for.
pub const NODE_WORDS: usize = 16;

/// Words of a processor mask: 1024 processors.
pub const AFFINITY_WORDS: usize = 16;

/// `struct sched_attr`, the second version.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct SchedAttr {
    pub size: u32,
    pub policy: u32,
    pub flags: u64,
    pub nice: i32,
    pub priority: u32,
    pub runtime: u64,
    pub deadline: u64,
    pub period: u64,
    pub util_min: u32,
    pub util_max: u32,
}

/// Largest number of POSIX timers of one process that can be captured.
pub const MAX_TIMERS: usize = 256;

/// Kernel's `struct sigaction`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct KernelSigaction {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

/// One POSIX timer: `id` is given, the rest is filled in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct TimerSlot {
    pub id: i32,
    pub overrun: i32,
    pub interval: [i64; 2],
    pub value: [i64; 2],
}

/// What only a process can tell about itself.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ProcessTable {
    /// End of operation.
    pub mark: Mark,
    /// Dispositions of signals 1 to 64.
    pub sigactions: [KernelSigaction; 64],
    /// ITIMER_REAL, VIRTUAL, PROF as (interval s, µs, value s, µs).
    pub itimers: [[i64; 4]; 3],
    /// `brk(0)`.
    pub brk: u64,
    /// Registered membarrier commands.
    pub membarrier: i32,
    /// `PR_GET_DUMPABLE`.
    pub dumpable: i32,
    /// `PR_GET_CHILD_SUBREAPER`. The attribute is switched off until the process goes on, or snapshot children would
    /// become children of the program instead of the agent's.
    pub child_subreaper: i32,
    /// `PR_GET_KEEPCAPS`.
    pub keepcaps: i32,
    /// `PR_GET_THP_DISABLE`.
    pub thp_disable: i32,
    /// `PR_GET_MEMORY_MERGE`, or a negative error number.
    pub merge: i32,
    /// `PR_TIMER_CREATE_RESTORE_IDS_GET`, or a negative error number.
    pub timer_ids: i32,
    /// Bytes of the first segment descriptor of its own (`modify_ldt`): 0 where it has none.
    pub segment_bytes: i32,
    /// `PR_GET_MDWE`, or an error on kernels that do not have it.
    pub mdwe: i32,
    /// Memory protection keys that it has allocated, a bit each.
    pub keys: u32,
    /// That descriptor.
    pub segment: u64,
    /// Number of timers in `timers`.
    pub timer_count: u32,
    /// Of `untouched_page`: 1 where it is locked, and 2 more where it is there.
    pub future_locks: u32,
    /// A page of the area that nobody has touched.
    pub untouched_page: u64,
    /// POSIX timers.
    pub timers: [TimerSlot; MAX_TIMERS],
}

/// Most mappings in a [`RangesTable`].
pub const MAX_RANGES: usize = 256;

/// What is so with each of some mappings.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RangesTable {
    /// End of operation.
    pub mark: Mark,
    /// Number of `ranges`.
    pub count: u64,
    /// First address and length of each; instead of the length afterwards 1 where it is locked, else 0, or the mode of
    /// its policy (`MPOL_*`, with flags).
    pub ranges: [[u64; 2]; MAX_RANGES],
}

/// A userfaultfd with asynchronous write protection.
pub const UFFD_ASYNC: i32 = 1;
/// A userfaultfd without any features.
pub const UFFD_PLAIN: i32 = 2;

/// How the snapshot child is made.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SnapshotTable {
    /// End of operation.
    pub mark: Mark,
    /// Stack of the intermediary (its top).
    pub stack_intermediary: u64,
    /// Stack of the second writer thread (its top); more follow every [`WRITER_STACK`] bytes below.
    pub stack_writers: u64,
    /// PID of the agent.
    pub agent_pid: i32,
    /// Descriptor of the control memory in the agent.
    pub control_fd: i32,
    /// Inode number of the control memory: the descriptor may have been closed, and its number used again, when the
    /// child comes to open it.
    pub control_ino: u64,
    /// PID of the snapshot child, or a negative error number.
    pub child: i32,
    /// Error of the intermediary's creation, 0 when it ran.
    pub error: i32,
    /// Whether the child shall have a userfaultfd of the process: 0, [`UFFD_ASYNC`] or [`UFFD_PLAIN`].
    pub want_uffd: i32,
    /// Its descriptor in the child, or a negative error number.
    pub uffd: i32,
    /// Whether the processor has protection keys: the child reads also what the program has denied itself.
    pub has_keys: i32,
    /// 0.
    pub reserved: i32,
    /// Ranges that the child must not inherit, unused ones empty: attachments of System V segments, whose number a
    /// program can ask for.
    pub left_out: [[u64; 2]; MAX_LEFT_OUT],
    /// Ranges that it need not inherit, behind the first page of a mapping and before its last one; 0 ends them. Where one
    /// could not be kept from it the end is set to the start.
    pub unchanged: [[u64; 2]; MAX_UNCHANGED],
}

/// Largest number of ranges left out of a snapshot child.
pub const MAX_LEFT_OUT: usize = 64;
/// Largest number of ranges left out because they have not changed.
pub const MAX_UNCHANGED: usize = 256;

/// Stack of a writer thread, bytes.
pub const WRITER_STACK: u64 = 16 * 1024;
/// Largest number of writer threads.
pub const MAX_WRITERS: usize = 8;
/// Longest run of memory that is hashed before it is written, bytes: small enough to stay in the second-level cache
/// from the hash to the copy.
pub const BATCH_BYTES: u64 = 256 * 1024;
/// The same in pages.
pub const BATCH_PAGES: usize = (BATCH_BYTES / crate::PAGE) as usize;

/// `Control::state`: the child has opened the control memory and waits.
pub const STATE_READY: u32 = 1;
/// `Control::state`: the agent has filled in ranges and files.
pub const STATE_GO: u32 = 2;
/// `Control::state`: the checkpoint has been given up; the child ends.
pub const STATE_ABANDONED: u32 = 3;

/// [`Range::flags`]: the range must be made readable first.
pub const RANGE_UNREADABLE: u64 = 1;
/// [`Range::flags`], set by a writer: the range could not be made readable, and has not been stored.
pub const RANGE_REFUSED: u64 = 4;
/// [`Range::flags`]: pages that hold only zeros are stored too, because without them the file behind the mapping would show.
pub const RANGE_KEEP_ZEROS: u64 = 2;

/// Writers give back memory that they have stored in pieces that end at multiples of this: a huge page is given back whole.
pub const GIVE_BACK_BYTES: u64 = 2 << 20;
/// A frugal writer waits for the disk each time it has written so much more.
pub const ON_THE_WAY_BYTES: u64 = 1 << 20;

/// A range to be written.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// `RANGE_*` bits.
    pub flags: u64,
}

/// A stored extent: `bytes` at `vaddr` lie in chunk `chunk` from page `page` on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredExtent {
    pub vaddr: u64,
    pub bytes: u64,
    pub chunk: u32,
    pub page: u32,
}

/// Room in a chunk, to be filled by one writer.
#[repr(C)]
#[derive(Debug)]
pub struct Loan {
    /// Number of the chunk.
    pub chunk: u32,
    /// Descriptor of its file in the agent, once it has been lent.
    pub fd: i32,
    /// First page free.
    pub first: u32,
    /// Pages that may be written.
    pub pages: u32,
    /// 1 where the file can be written past the page cache.
    pub direct: u32,
    /// Padding.
    pub pad: u32,
    /// Pages written.
    pub used: core::sync::atomic::AtomicU32,
    /// 1 when the writer has done with it, and all its pages are in the file.
    pub done: core::sync::atomic::AtomicU32,
    /// Offset in the control memory of the hashes (16 bytes each) of the pages written.
    pub hashes: u64,
}

/// Progress of one writer thread.
#[repr(C)]
#[derive(Debug)]
pub struct Writer {
    /// 1 when it has finished.
    pub done: core::sync::atomic::AtomicU32,
    /// Error number, 0 when well.
    pub error: core::sync::atomic::AtomicI32,
    /// Number of extents in its table.
    pub extents: core::sync::atomic::AtomicU32,
    /// Padding.
    pub pad: u32,
    /// Offset of its extent table in the control memory.
    pub table: u64,
    /// Capacity of that table.
    pub capacity: u64,
    /// Bytes dealt with.
    pub bytes: core::sync::atomic::AtomicU64,
    /// Pages that were looked for by their hash.
    pub looked: core::sync::atomic::AtomicU64,
    /// Pages that were found by it.
    pub found: core::sync::atomic::AtomicU64,
    /// Pages whose time was taken: those of some large batches.
    pub timed: core::sync::atomic::AtomicU64,
    /// Nanoseconds of the processor that hashing them took, the first touch of the memory included.
    pub hash_ns: core::sync::atomic::AtomicU64,
    /// Nanoseconds that looking for them took, and noting those that are new.
    pub look_ns: core::sync::atomic::AtomicU64,
    /// Nanoseconds spent in system calls that write.
    pub write_ns: core::sync::atomic::AtomicU64,
    /// Nanoseconds in all.
    pub total_ns: core::sync::atomic::AtomicU64,
}

/// Head of the memory shared by agent and snapshot child.
#[repr(C)]
#[derive(Debug)]
pub struct Control {
    /// One of `STATE_*`; a futex.
    pub state: core::sync::atomic::AtomicU32,
    /// Set by the child when it cannot start.
    pub error: core::sync::atomic::AtomicI32,
    /// Length of the control memory once filled in.
    pub bytes: u64,
    /// Number of ranges.
    pub ranges: u32,
    /// Next range to be taken.
    pub next: core::sync::atomic::AtomicU32,
    /// Offset of the ranges.
    pub range_table: u64,
    /// Number of writers.
    pub writers: u32,
    /// Number of loans.
    pub loans: u32,
    /// Next loan to be taken.
    pub next_loan: core::sync::atomic::AtomicU32,
    /// Descriptor in the agent of the table of page hashes, -1 for none.
    pub index_fd: i32,
    /// Offset of the loans.
    pub loan_table: u64,
    /// Length of the table of page hashes, bytes.
    pub index_bytes: u64,
    /// Which pages it is of: see [`crate::index::Table::new`].
    pub index_sample: u64,
    /// 1 where little memory is free: the writers keep what they have written out of the page cache.
    pub frugal: u32,
    /// 1 where pages are hashed with wide vectors ([`crate::hash::PageHash::is_wide`]).
    pub wide_hash: u32,
    /// The secret of the job's hashes ([`crate::hash::Secret`]), eight bytes a word.
    pub secret: [u64; crate::hash::SECRET_BYTES / 8],
    /// Bytes that each writer gathers before it writes them past the page cache; 0 where it shall not.
    pub stage_bytes: u64,
    /// Number of loans that have their files; a futex. Writers wait for theirs.
    pub lent: core::sync::atomic::AtomicU32,
    /// 1 as soon as all writers are done; a futex.
    pub written: core::sync::atomic::AtomicU32,
    /// 1 as soon as the child may end; a futex.
    pub released: core::sync::atomic::AtomicU32,
    /// 1 as soon as the child has seen that it may end: until then it had its memory.
    pub left: core::sync::atomic::AtomicU32,
    /// The writers.
    pub writer: [Writer; MAX_WRITERS],
}
