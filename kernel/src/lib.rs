//! Typed access to the kernel interfaces that capture and restart need.
//!
//! Each module wraps one interface and nothing more; decisions are made by the callers.

pub mod apart;
pub mod blob;
pub mod cpu;
pub mod cut;
pub mod dir;
pub mod direct;
pub mod domain;
pub mod fcntl;
pub mod futex;
pub mod guards;
pub mod held;
pub mod hugepages;
pub mod identity;
pub mod ioctl;
pub mod kcmp;
pub mod limits;
pub mod masks;
pub mod missing;
pub mod mounts;
pub mod mq;
pub mod namespaces;
pub mod net;
pub mod numbers;
pub mod pagemap;
pub mod pages;
pub mod patience;
pub mod pidfd;
pub mod place;
pub mod plain;
pub mod policy;
pub mod prctl;
pub mod proc;
pub mod process;
pub mod prompt;
pub mod ptrace;
pub mod room;
pub mod rseq;
pub mod sched;
pub mod seccomp;
pub mod shared;
pub mod signals;
pub mod sockets;
pub mod softdirty;
pub mod spread;
pub mod sysv;
pub mod task;
pub mod trust;
pub mod uffd;
pub mod vdso;
pub mod vm;
pub mod waking;

use std::io;

/// Turns the result of a libc call into a `Result`, reading `errno` on -1.
pub fn check(ret: libc::c_long) -> io::Result<libc::c_long> {
    if ret == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret)
    }
}

/// Turns the result of a libc call that returns `ssize_t` into a length.
pub(crate) fn length(ret: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::last_os_error())
}
