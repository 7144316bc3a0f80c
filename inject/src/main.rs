//! The program that runs inside a stopped process for a moment.
//!
//! It runs on a thread whose registers the agent has saved, on a stack of its own, in an area that is unmapped
//! afterwards. It may use nothing of the application: no libc, no thread-local storage, no allocator, no descriptor.
//! Signals are blocked while it runs.
//!
//! * `thread`, `process`: ask the kernel what only the task itself may ask.
//! * `locks`, `policies`: which memory is locked, and where it shall lie.
//! * `turn`: threads wait until another one's operation is over.
//! * `notification`: what a process will be told about a message queue.
//! * `rings`: requests of native asynchronous I/O are waited for.
//! * `snapshot`: make the copy-on-write child; `writer`: what that child does, with which pages (`output`), and how
//!   they reach the files (`sink`).
#![no_std]
#![no_main]
// Everything here is raw system calls on tables that the agent has laid out; one comment per function states the contract.
#![allow(clippy::undocumented_unsafe_blocks)]

mod collect;
mod locks;
mod notification;
mod output;
mod policies;
mod rings;
mod shared;
mod sink;
mod snapshot;
mod stack;
mod turn;
mod writer;

use crate::collect::PR_SET_CHILD_SUBREAPER;
use belay_abi::inject::{
    Mark, FINGERPRINT, OP_LOCKS, OP_NOTIFICATION, OP_POLICIES, OP_PROCESS, OP_RINGS, OP_SNAPSHOT, OP_THREAD, OP_WAIT,
};
use belay_abi::syscall;

belay_abi::freestanding!();

core::arch::global_asm!(
    ".balign 8",
    ".quad {fingerprint}",
    ".globl _start",
    "_start:",
    "  cld",
    "  call {main}",
    "  ud2",
    // sigreturn(frame): the thread's original state from the frame the agent prepared.
    ".globl belay_sigreturn",
    "belay_sigreturn:",
    "  mov rsp, rdi",
    "  mov eax, 15",
    "  syscall",
    "  ud2",
    main = sym inject_main,
    fingerprint = const FINGERPRINT,
);

extern "C" {
    fn belay_sigreturn(frame: u64) -> !;
}

/// Runs operation `op` on `table` and announces its end.
///
/// # Safety
/// Called by `_start` only; `table` is the table of `op` in the injected area.
unsafe extern "C" fn inject_main(op: u64, table: *mut Mark) -> ! {
    unsafe {
        match op {
            OP_THREAD => collect::thread(table.cast()),
            OP_PROCESS => collect::process(table.cast()),
            OP_LOCKS => locks::run(table.cast()),
            OP_POLICIES => policies::run(table.cast()),
            OP_SNAPSHOT => snapshot::run(table.cast()),
            OP_RINGS => rings::run(table.cast()),
            OP_WAIT => turn::wait(table.cast()),
            OP_NOTIFICATION => notification::run(table.cast()),
            _ => {}
        }
        (*table).done = 1;
        let mark = *table;
        // With the agent alive the thread stops here and never comes back.
        syscall!(libc_nr::TGKILL, mark.pid, mark.tid, mark.signo);
        if mark.subreaper != 0 {
            syscall!(libc_nr::PRCTL, PR_SET_CHILD_SUBREAPER, 1usize);
        }
        belay_sigreturn(mark.frame)
    }
}

/// System call numbers of x86-64.
mod libc_nr {
    pub(crate) const READ: usize = 0;
    pub(crate) const OPEN: usize = 2;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const FSTAT: usize = 5;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const MPROTECT: usize = 10;
    pub(crate) const MUNMAP: usize = 11;
    pub(crate) const BRK: usize = 12;
    pub(crate) const RT_SIGACTION: usize = 13;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const IOCTL: usize = 16;
    pub(crate) const PREAD64: usize = 17;
    pub(crate) const PWRITE64: usize = 18;
    pub(crate) const MSYNC: usize = 26;
    pub(crate) const MINCORE: usize = 27;
    pub(crate) const MREMAP: usize = 25;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const GETITIMER: usize = 36;
    pub(crate) const RECVFROM: usize = 45;
    pub(crate) const CLONE: usize = 56;
    pub(crate) const EXIT: usize = 60;
    pub(crate) const WAIT4: usize = 61;
    pub(crate) const KILL: usize = 62;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const GETPPID: usize = 110;
    pub(crate) const SETSID: usize = 112;
    pub(crate) const RT_SIGPENDING: usize = 127;
    pub(crate) const RT_SIGTIMEDWAIT: usize = 128;
    pub(crate) const RT_SIGQUEUEINFO: usize = 129;
    pub(crate) const SIGALTSTACK: usize = 131;
    pub(crate) const MODIFY_LDT: usize = 154;
    pub(crate) const PKEY_MPROTECT: usize = 329;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const ARCH_PRCTL: usize = 158;
    pub(crate) const PERSONALITY: usize = 135;
    pub(crate) const FUTEX: usize = 202;
    pub(crate) const SCHED_GETAFFINITY: usize = 204;
    pub(crate) const IO_DESTROY: usize = 207;
    pub(crate) const IO_GETEVENTS: usize = 208;
    pub(crate) const FADVISE64: usize = 221;
    pub(crate) const TIMER_GETTIME: usize = 224;
    pub(crate) const TIMER_GETOVERRUN: usize = 225;
    pub(crate) const CLOCK_GETTIME: usize = 228;
    pub(crate) const EXIT_GROUP: usize = 231;
    pub(crate) const TGKILL: usize = 234;
    pub(crate) const GET_MEMPOLICY: usize = 239;
    pub(crate) const MQ_TIMEDSEND: usize = 242;
    pub(crate) const MQ_TIMEDRECEIVE: usize = 243;
    pub(crate) const MQ_NOTIFY: usize = 244;
    pub(crate) const IOPRIO_GET: usize = 252;
    pub(crate) const GET_ROBUST_LIST: usize = 274;
    pub(crate) const SYNC_FILE_RANGE: usize = 277;
    pub(crate) const VMSPLICE: usize = 278;
    pub(crate) const PROCESS_VM_READV: usize = 310;
    pub(crate) const KCMP: usize = 312;
    pub(crate) const SCHED_GETATTR: usize = 315;
    pub(crate) const USERFAULTFD: usize = 323;
    pub(crate) const PIPE2: usize = 293;
    pub(crate) const PWRITEV: usize = 296;
    pub(crate) const MEMBARRIER: usize = 324;
    pub(crate) const CLOSE_RANGE: usize = 436;
}
