//! `kcmp(2)`: whether two processes share a kernel object.

use std::cmp::Ordering;
use std::io;

/// Kinds of object that can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Object {
    /// Address space.
    Vm = 1,
    /// Descriptor table.
    Files = 2,
    /// Root, working directory and umask.
    Fs = 3,
    /// Signal handler table.
    Sighand = 4,
    /// What is noted down for System V semaphores (SEM_UNDO).
    SemUndo = 6,
}

fn raw(pid1: i32, pid2: i32, kind: i32, idx1: u64, idx2: u64) -> io::Result<Ordering> {
    // SAFETY: kcmp takes numbers only.
    let r = crate::check(unsafe { libc::syscall(libc::SYS_kcmp, pid1, pid2, kind, idx1, idx2) })?;
    match r {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(io::Error::other("kcmp: objects are not comparable")),
    }
}

/// Compares the `object` of two tasks; the order is arbitrary but total while both live.
pub fn compare(pid1: i32, pid2: i32, object: Object) -> io::Result<Ordering> {
    raw(pid1, pid2, object as i32, 0, 0)
}

/// Compares the open file descriptions behind `fd1` of `pid1` and `fd2` of `pid2`.
pub fn compare_files(pid1: i32, fd1: i32, pid2: i32, fd2: i32) -> io::Result<Ordering> {
    raw(pid1, pid2, 0, u64::from(fd1.unsigned_abs()), u64::from(fd2.unsigned_abs()))
}

/// Whether the description that number `candidate.1` of process `candidate.0` has is the one behind an entry of the epoll
/// instance that number `epoll.1` of process `epoll.0` has: the `offset`th of those that were added under `number`.
pub fn is_target(epoll: (i32, i32), number: i32, offset: u32, candidate: (i32, i32)) -> io::Result<bool> {
    const EPOLL_TFD: i32 = 7;
    let slot = [epoll.1.cast_unsigned(), number.cast_unsigned(), offset];
    let (pid, fd) = candidate;
    // SAFETY: `slot` is a `struct kcmp_epoll_slot`, valid for reading; the other arguments are numbers.
    let r = unsafe { libc::syscall(libc::SYS_kcmp, pid, epoll.0, EPOLL_TFD, fd, slot.as_ptr()) };
    crate::check(r).map(|r| r == 0)
}
