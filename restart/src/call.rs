//! System calls as data: what the restorer carries out.

use belay_abi::restore::{Call, Step};

/// System call numbers of x86-64 used in plans.
pub(crate) mod nr {
    pub(crate) const OPEN: u32 = 2;
    pub(crate) const CLOSE: u32 = 3;
    pub(crate) const MMAP: u32 = 9;
    pub(crate) const MPROTECT: u32 = 10;
    pub(crate) const MUNMAP: u32 = 11;
    pub(crate) const RT_SIGACTION: u32 = 13;
    pub(crate) const IOCTL: u32 = 16;
    pub(crate) const MREMAP: u32 = 25;
    pub(crate) const MADVISE: u32 = 28;
    pub(crate) const SHMAT: u32 = 30;
    pub(crate) const SETITIMER: u32 = 38;
    pub(crate) const WAIT4: u32 = 61;
    pub(crate) const FCNTL: u32 = 72;
    pub(crate) const CHDIR: u32 = 80;
    pub(crate) const UMASK: u32 = 95;
    pub(crate) const SETGROUPS: u32 = 116;
    pub(crate) const SETRESUID: u32 = 117;
    pub(crate) const SETRESGID: u32 = 119;
    pub(crate) const SETFSUID: u32 = 122;
    pub(crate) const SETFSGID: u32 = 123;
    pub(crate) const CAPSET: u32 = 126;
    pub(crate) const RT_SIGQUEUEINFO: u32 = 129;
    pub(crate) const SIGALTSTACK: u32 = 131;
    pub(crate) const PERSONALITY: u32 = 135;
    pub(crate) const MLOCKALL: u32 = 151;
    pub(crate) const MODIFY_LDT: u32 = 154;
    pub(crate) const PRCTL: u32 = 157;
    pub(crate) const ARCH_PRCTL: u32 = 158;
    pub(crate) const CHROOT: u32 = 161;
    pub(crate) const SET_TID_ADDRESS: u32 = 218;
    pub(crate) const TIMER_CREATE: u32 = 222;
    pub(crate) const TIMER_SETTIME: u32 = 223;
    pub(crate) const TIMER_DELETE: u32 = 226;
    pub(crate) const MBIND: u32 = 237;
    pub(crate) const SET_MEMPOLICY: u32 = 238;
    pub(crate) const UNSHARE: u32 = 272;
    pub(crate) const SET_ROBUST_LIST: u32 = 273;
    pub(crate) const RT_TGSIGQUEUEINFO: u32 = 297;
    pub(crate) const PROCESS_VM_READV: u32 = 310;
    pub(crate) const MEMBARRIER: u32 = 324;
    pub(crate) const MLOCK2: u32 = 325;
    pub(crate) const PKEY_MPROTECT: u32 = 329;
    pub(crate) const PKEY_ALLOC: u32 = 330;
    pub(crate) const PKEY_FREE: u32 = 331;
    pub(crate) const RSEQ: u32 = 334;
    pub(crate) const CLOSE_RANGE: u32 = 436;
    pub(crate) const MSEAL: u32 = 462;
}

/// A call that must succeed.
pub(crate) fn call(step: Step, index: usize, nr: u32, args: &[u64]) -> Call {
    let mut a = [0; 6];
    a[..args.len()].copy_from_slice(args);
    Call {
        nr,
        flags: 0,
        step: step as u32,
        index: u32::try_from(index).unwrap_or(u32::MAX),
        args: a,
    }
}

/// Sign-extends a number for an argument register.
pub(crate) fn signed(v: i32) -> u64 {
    i64::from(v) as u64
}

/// Adds flags to a call.
pub(crate) trait With {
    /// The call with `flags` added.
    fn with(self, flags: u32) -> Self;
}

impl With for Call {
    fn with(mut self, flags: u32) -> Self {
        self.flags |= flags;
        self
    }
}
