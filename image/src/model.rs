//! What a checkpointed job consists of: processes, threads, mappings and kernel state, as plain data.
//!
//! Descriptors, their descriptions and shared memory objects are not here: the `plugins` crate owns their types and stores them
//! in a section of their own. A [`Vma`] refers to a shared object by [`ObjectId`], as the descriptors do.

use crate::attributes::{Own, Placement, Policy, Sched, ThreadPrctl};
use crate::blobs::BlobRef;
use crate::extents::PAGE;
use crate::name::Name;
use serde::{Deserialize, Serialize};

mod declared;

pub use declared::{Dataset, LeftOut, Point, Share};

/// Contents of section JOB.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// Processor architecture, as in `std::env::consts::ARCH`.
    pub arch: String,
    /// Kernel release at capture (`uname -r`).
    pub kernel: String,
    /// Host name at capture.
    pub host: String,
    /// Number of its boot, as processes saw it; empty in images of before.
    #[serde(default)]
    pub boot_id: String,
    /// Time of capture, seconds since the epoch.
    pub time_unix_s: u64,
    /// Bytes of the vDSO at capture: the same bytes at restart mean that the restorer's own vDSO can be moved into place.
    pub vdso_xxh3: u64,
    /// These bytes and what they work on, for a restart where they are others; `None` where they could not be read, and
    /// in images of before.
    #[serde(default)]
    pub kernel_pages: Option<KernelPages>,
    /// The processor; `None` in images of before.
    #[serde(default)]
    pub processor: Option<Processor>,
    /// In which security domain (AppArmor, SELinux) all of it ran; `None` where there are none, and in images of before.
    #[serde(default)]
    pub domain: Option<Name>,
    /// The agent as the processes saw it (parent of the first process, subreaper of orphans).
    pub agent: AgentIdentity,
    /// Processors that the job was given, one bit each, little endian words; empty in images of before.
    #[serde(default)]
    pub processors: Vec<u64>,
    /// PID of the launched command.
    pub root_pid: i32,
    /// The number that a process or thread was given last; `None` where it is not known, and in images of before.
    #[serde(default)]
    pub last_pid: Option<i32>,
    /// Every process, zombies included; order is parents before children where possible.
    pub processes: Vec<Process>,
    /// `clock_gettime(CLOCK_MONOTONIC)` at capture, nanoseconds.
    pub monotonic_ns: u64,
    /// The same of `CLOCK_BOOTTIME`; `None` in images of before.
    #[serde(default)]
    pub boottime_ns: Option<u64>,
    /// Files that processes map, stored for a restart that finds others in their places. Without `--no-save-code`, most
    /// of those with an identity.
    #[serde(default)]
    pub code: Vec<MappedFile>,
}

/// A program, a library or another file that processes map, with its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedFile {
    /// Its path, as in [`VmaKind::FilePrivate`] and [`Process::exe`].
    pub path: Name,
    /// What it was.
    pub identity: FileIdentity,
    /// Its permission bits.
    pub mode: u32,
    /// To whom it belonged, where that is known.
    #[serde(default)]
    pub owner: Option<u32>,
    /// Where its first byte lies among all of them, in the table of [`crate::CODE`]; a multiple of the page.
    pub at: u64,
    /// What is stored: ranges of whole pages, in ascending order. The last page of a file is filled up with zeros.
    pub parts: Vec<(u64, u64)>,
}

impl MappedFile {
    /// Bytes that are stored.
    pub fn stored(&self) -> u64 {
        let lengths = self.parts.iter().map(|(from, to)| to.saturating_sub(*from));
        lengths.fold(0, u64::saturating_add)
    }

    /// Whether all of it is stored.
    pub fn is_whole(&self) -> bool {
        self.identity.bytes.checked_next_multiple_of(PAGE) == Some(self.stored())
    }

    /// Whether it is this one.
    pub fn is(&self, path: &Name, identity: &FileIdentity) -> bool {
        self.path == *path && self.identity == *identity
    }
}

/// The pages that the kernel gives to every process, the same in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelPages {
    /// `[vdso]`.
    pub code: BlobRef,
    /// `[vvar]`, between two changes.
    pub data: BlobRef,
}

/// A processor, as programs see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processor {
    /// Instructions that programs may choose by asking for them, with Linux's names.
    pub features: Vec<String>,
    /// The layout of [`Thread::xstate`] from component 2 on.
    pub components: Vec<StateComponent>,
}

/// A component of the extended state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateComponent {
    /// Its number.
    pub number: u32,
    /// Where it lies, bytes.
    pub offset: u32,
    /// Its length, bytes.
    pub bytes: u32,
}

/// Identity of the agent at capture; the agent of the restarted job takes the same one.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct AgentIdentity {
    /// Its process identifier.
    pub pid: i32,
    /// Its process group.
    pub pgid: i32,
    /// Its session.
    pub sid: i32,
    /// Device number (as in field 7 of `/proc/PID/stat`) of the controlling terminal it shares with the command, 0 if none.
    pub tty: u64,
    /// When it was started (field 22); 0 where nobody has looked.
    #[serde(default)]
    pub started: u64,
    /// Its parent, which waits for it.
    #[serde(default)]
    pub front: i32,
    /// When that was started.
    #[serde(default)]
    pub front_started: u64,
}

/// Whether a process runs, is stopped by job control, or has ended without being waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessState {
    /// Runs.
    Running,
    /// Stopped by this signal (SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU).
    Stopped(i32),
    /// Ended; holds the status word as `wait` reports it.
    Zombie(i32),
}

/// One process. For a zombie only the identity fields, `comm` and `state` are meaningful; the rest is empty.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    /// Process identifier.
    pub pid: i32,
    /// Parent process identifier.
    pub ppid: i32,
    /// Process group.
    pub pgid: i32,
    /// Session.
    pub sid: i32,
    /// Controlling terminal device number (field 7 of `/proc/PID/stat`), 0 if none.
    pub tty: u64,
    /// When it was started (field 22); 0 where nobody has looked.
    #[serde(default)]
    pub started: u64,
    /// Foreground process group of that terminal (field 8), -1 if none.
    pub tty_pgrp: i32,
    /// State.
    pub state: ProcessState,
    /// It is stopped, and its parent has not been told so yet.
    #[serde(default)]
    pub stop_untold: bool,
    /// It has been continued after a stop, and its parent has not been told so yet.
    #[serde(default)]
    pub continue_untold: bool,
    /// Signal sent to the parent when this process ends (usually SIGCHLD).
    pub exit_signal: i32,
    /// Name of the main thread.
    pub comm: Name,
    /// Target of `/proc/PID/exe`.
    pub exe: Name,
    /// Identity of the executable file.
    pub exe_identity: Option<FileIdentity>,
    /// Working directory.
    pub cwd: Name,
    /// Root directory.
    pub root: Name,
    /// File mode creation mask.
    pub umask: u32,
    /// Execution domain (`/proc/PID/personality`).
    pub personality: u64,
    /// Number of the user namespace that it sees as its own (`stat` of `/proc/self/ns/user`); 0 where nobody has looked.
    #[serde(default)]
    pub user_namespace: u64,
    /// The same of the PID namespace.
    #[serde(default)]
    pub pid_namespace: u64,
    /// The same of the IPC namespace.
    #[serde(default)]
    pub ipc_namespace: u64,
    /// User and group identity and capability sets.
    pub creds: Credentials,
    /// Resource limits in order of `RLIMIT_*` number: (soft, hard).
    pub rlimits: Vec<(u64, u64)>,
    /// `/proc/PID/oom_score_adj`.
    pub oom_score_adj: i32,
    /// `/proc/PID/coredump_filter`; `None` where nobody has looked.
    #[serde(default)]
    pub coredump_filter: Option<u32>,
    /// The nice value of its session (`/proc/PID/autogroup`), with the first process of each session that is not the agent's.
    #[serde(default)]
    pub session_nice: Option<i32>,
    /// Process-wide `prctl` settings.
    pub prctl: ProcessPrctl,
    /// Signal dispositions, for signals 1 to 64.
    pub sigactions: Vec<SigAction>,
    /// Signals pending for the whole process: raw `siginfo_t`, 128 bytes each.
    pub pending: Vec<Vec<u8>>,
    /// ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF.
    pub itimers: [ItimerValue; 3],
    /// POSIX timers.
    pub posix_timers: Vec<PosixTimer>,
    /// `membarrier` registrations (bit mask of commands, as returned by MEMBARRIER_CMD_GET_REGISTRATIONS).
    pub membarrier: u32,
    /// Process whose address space this process shares (CLONE_VM without CLONE_THREAD); 0 for its own. That one is the
    /// first of the group: its parent is none of those who share. Mappings, rings and pages are in its description
    /// alone.
    pub shares_mm_with: i32,
    /// The process shares its signal dispositions too (CLONE_SIGHAND): with its parent, or where that does not share
    /// the memory, with the first of the group.
    #[serde(default)]
    pub shares_handlers: bool,
    /// The parent, where this process shares its working directory, root and file mode creation mask (CLONE_FS); 0 for its own.
    #[serde(default)]
    pub shares_fs_with: i32,
    /// Its time namespace is not the agent's: the pages in [`Job::kernel_pages`] are not its own.
    #[serde(default)]
    pub own_clocks: bool,
    /// Where its time namespace is not the machine's, or a thread stood in the vDSO, frames of signal handlers that
    /// will return into the vDSO: (address of the return address, return address).
    #[serde(default)]
    pub vdso_frames: Vec<(u64, u64)>,
    /// Layout values of the address space.
    pub mm: Mm,
    /// Segment descriptors of its own (`modify_ldt`), as the kernel has them.
    #[serde(default)]
    pub segments: Vec<u64>,
    /// Memory protection keys that it has allocated (`pkey_alloc`), a bit each; 0 where the processor has none.
    #[serde(default)]
    pub keys: u16,
    /// Private memory that has a policy of its own.
    #[serde(default)]
    pub placements: Vec<Placement>,
    /// Mappings in ascending order.
    pub vmas: Vec<Vma>,
    /// What was not stored, because the program has declared that it overwrites it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<LeftOut>,
    /// The arrays that the program has declared (`belay_access.h`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub datasets: Vec<Dataset>,
    /// The point of its own at which it waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<Point>,
    /// Rings of native asynchronous I/O; the other mappings of kind [`VmaKind::Ring`] belong to no context.
    #[serde(default)]
    pub rings: Vec<Ring>,
    /// Threads, the main thread first.
    pub threads: Vec<Thread>,
}

/// A ring of native asynchronous I/O (`io_setup`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Address of its mapping, which is the name of the context.
    pub start: u64,
    /// Length of the mapping.
    pub bytes: u64,
    /// Place of the first event that has not been reaped.
    pub head: u32,
    /// Place behind the last one.
    pub tail: u32,
    /// The events between them, 32 bytes each.
    pub events: Vec<u8>,
    /// Addresses of polls (`struct iocb`) that nothing has happened for yet: submitted again.
    #[serde(default)]
    pub polls: Vec<u64>,
}

/// Identity of a file, to notice at restart that it has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Length in bytes.
    pub bytes: u64,
    /// Modification time, nanoseconds since the epoch.
    pub mtime_ns: i64,
    /// GNU build id in hexadecimal, where the file is an ELF object that has one.
    pub build_id: Option<String>,
    /// XXH3-64 of the whole file when there is no build id.
    pub xxh3: Option<u64>,
}

/// User and group identity and capability sets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Real, effective, saved and file system user identifiers.
    pub uids: [u32; 4],
    /// Real, effective, saved and file system group identifiers.
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Inheritable capability set.
    pub cap_inheritable: u64,
    /// Permitted capability set.
    pub cap_permitted: u64,
    /// Effective capability set.
    pub cap_effective: u64,
    /// Capability bounding set.
    pub cap_bounding: u64,
    /// Ambient capability set.
    pub cap_ambient: u64,
    /// `PR_SET_NO_NEW_PRIVS`.
    pub no_new_privs: bool,
}

/// Process-wide `prctl` settings.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ProcessPrctl {
    /// `PR_GET_DUMPABLE`.
    pub dumpable: i32,
    /// `PR_GET_CHILD_SUBREAPER`.
    pub child_subreaper: bool,
    /// `PR_GET_KEEPCAPS`.
    pub keepcaps: bool,
    /// `PR_GET_THP_DISABLE`.
    pub thp_disable: bool,
    /// Not where huge pages are asked for (`PR_THP_DISABLE_EXCEPT_ADVISED`).
    #[serde(default)]
    pub thp_advised: bool,
    /// `PR_GET_MEMORY_MERGE`.
    #[serde(default)]
    pub merge: bool,
    /// The process chooses the numbers of its POSIX timers (`PR_TIMER_CREATE_RESTORE_IDS`).
    #[serde(default)]
    pub timer_ids: bool,
    /// `PR_GET_SECUREBITS`.
    pub securebits: u32,
    /// `PR_GET_MDWE`.
    #[serde(default)]
    pub mdwe: u32,
}

/// Kernel's `struct sigaction`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SigAction {
    /// Handler address, or 0 (default), or 1 (ignore).
    pub handler: u64,
    /// `SA_*` flags.
    pub flags: u64,
    /// Address of the restorer trampoline.
    pub restorer: u64,
    /// Signals blocked while the handler runs.
    pub mask: u64,
}

/// `struct itimerval` in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct ItimerValue {
    /// Period, 0 for one-shot.
    pub interval_us: u64,
    /// Time to the next expiry, 0 when disarmed.
    pub value_us: u64,
}

/// One POSIX timer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PosixTimer {
    /// Kernel's timer identifier.
    pub id: i32,
    /// Clock.
    pub clock: i32,
    /// `sigev_notify`.
    pub notify: i32,
    /// `sigev_signo`.
    pub signo: i32,
    /// `sigev_value`.
    pub value: u64,
    /// Target thread for SIGEV_THREAD_ID.
    pub tid: i32,
    /// Period in nanoseconds.
    pub interval_ns: u64,
    /// Time to the next expiry in nanoseconds, 0 when disarmed.
    pub value_ns: u64,
    /// Overrun count.
    pub overrun: i32,
}

/// Layout values of an address space (`struct prctl_mm_map`).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[allow(missing_docs)] // the kernel's names
pub struct Mm {
    pub start_code: u64,
    pub end_code: u64,
    pub start_data: u64,
    pub end_data: u64,
    pub start_brk: u64,
    pub brk: u64,
    pub start_stack: u64,
    pub arg_start: u64,
    pub arg_end: u64,
    pub env_start: u64,
    pub env_end: u64,
    /// Flags for `mlockall` that lock what is mapped from now on (MCL_FUTURE, MCL_ONFAULT), 0 for none.
    #[serde(default)]
    pub mlockall: u32,
    /// Raw auxiliary vector.
    pub auxv: Vec<u64>,
}

/// Identity of a shared memory object or file: (device, inode) as in `/proc/PID/maps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectId {
    /// Device number, `makedev(major, minor)`.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
}

/// One mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vma {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// `PROT_*` bits.
    pub prot: u32,
    /// What is mapped.
    pub kind: VmaKind,
    /// `madvise` and `mlock` state worth restoring, as the two-letter codes of `VmFlags` in `/proc/PID/smaps` (for example
    /// `hg`, `nh`, `dc`, `wf`, `dd`, `lo`, `gd`, `nr`, `dp`, `sl`).
    pub flags: Vec<String>,
    /// Its memory protection key; 0: none of its own.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub key: u8,
    /// Guard regions in it (MADV_GUARD_INSTALL), in ascending order: first address and first behind it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guards: Vec<(u64, u64)>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn is_zero(key: &u8) -> bool {
    *key == 0
}

/// What a mapping maps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmaKind {
    /// Private anonymous memory; contents in the page files.
    Anonymous {
        /// Name set with PR_SET_VMA_ANON_NAME, if any.
        name: Option<String>,
    },
    /// Private memory in explicit huge pages (MAP_HUGETLB); contents in the page files.
    HugeTlb {
        /// Size of a page.
        page_bytes: u64,
    },
    /// The main thread's stack (`[stack]`): private anonymous, grows down.
    Stack,
    /// The heap (`[heap]`).
    Heap,
    /// Private mapping of a file; pages that differ from the file are in the page files.
    FilePrivate {
        /// Path of the file.
        path: Name,
        /// Offset in the file, bytes.
        offset: u64,
        /// Identity of the file, checked at restart. `None`: the file was deleted, and all pages are in the page files.
        identity: Option<FileIdentity>,
    },
    /// Private mapping of a file without a name that the plugins capture and rebuild (memfd, deleted file); pages that
    /// differ from it are in the page files.
    PrivateObject {
        /// The object.
        object: ObjectId,
        /// Offset in it, bytes.
        offset: u64,
    },
    /// Shared mapping of an object that the plugins capture and rebuild (shared anonymous, memfd, POSIX shm, file).
    Shared {
        /// The object.
        object: ObjectId,
        /// Offset in it, bytes.
        offset: u64,
        /// Whether it was mapped through a description open for writing (`VmFlags` has `mw`).
        may_write: bool,
    },
    /// Attached System V segment (rebuilt with shmat).
    SysvShm {
        /// Segment identifier.
        shmid: i32,
        /// The object, to find its contents.
        object: ObjectId,
        /// Offset in it, bytes (not 0 when part of the attachment was unmapped).
        offset: u64,
    },
    /// `[vdso]`, `[vvar]`, `[vvar_vclock]`; the name without brackets.
    Vdso(String),
    /// Ring of native asynchronous I/O, see [`Process::rings`].
    Ring,
    /// `[vsyscall]`; nothing to do.
    Vsyscall,
    /// Memory of a device, by its file, that a library in the process maps again elsewhere. Its place is kept, without access.
    Device(Name),
}

/// One thread.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Thread {
    /// Thread identifier.
    pub tid: i32,
    /// Name.
    pub comm: Name,
    /// `struct user_regs_struct`, 27 words, already adjusted so that an interrupted system call is issued anew.
    pub regs: Vec<u64>,
    /// The XSAVE area as PTRACE_GETREGSET(NT_X86_XSTATE) returns it.
    pub xstate: Vec<u8>,
    /// Blocked signals.
    pub sigmask: u64,
    /// Signals pending for this thread: raw `siginfo_t`, 128 bytes each.
    pub pending: Vec<Vec<u8>>,
    /// Alternate signal stack: (address, flags, size).
    pub altstack: (u64, i32, u64),
    /// `set_tid_address` pointer.
    pub tid_address: u64,
    /// Robust futex list: (head, length).
    pub robust_list: (u64, u64),
    /// Restartable sequences: (address, length, signature), address 0 when not registered.
    pub rseq: (u64, u32, u32),
    /// `PR_GET_PDEATHSIG`.
    pub pdeathsig: i32,
    /// `PR_GET_TIMERSLACK`, nanoseconds.
    pub timer_slack_ns: u64,
    /// Scheduling policy, nice value, real-time priority.
    pub sched: Sched,
    /// Processors the thread may run on, one bit each, little endian words. Empty: all that the job is given.
    pub affinity: Vec<u64>,
    /// `ioprio_get` value.
    pub ioprio: i32,
    /// For a main thread that has exited while others run: its exit code as `wait` reports it. Of the rest only name
    /// and identifier mean anything.
    #[serde(default)]
    pub exited: Option<i32>,
    /// Working directory and file mode creation mask of its own (`unshare(CLONE_FS)`), else those of the process.
    #[serde(default)]
    pub directories: Option<(Name, u32)>,
    /// Whose it is, where that is not what is said of the process.
    #[serde(default)]
    pub own: Option<Own<Credentials>>,
    /// What it has set for itself.
    #[serde(default)]
    pub prctl: ThreadPrctl,
    /// Where its memory shall lie, unless it is left to the kernel.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// Its execution domain, where that is not what is said of the process.
    #[serde(default)]
    pub personality: Option<u64>,
}
