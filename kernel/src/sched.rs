//! `sched_getattr`, `sched_setattr` and `ioprio_set`, for which the C library has no functions.

pub use belay_abi::inject::SchedAttr as Attributes;
use std::io;

/// `SCHED_FLAG_RESET_ON_FORK`: what the thread starts is as if this had never been set.
pub const RESET_ON_FORK: u64 = 1;
/// `SCHED_FLAG_RECLAIM`
pub const RECLAIM: u64 = 2;
/// `SCHED_FLAG_DL_OVERRUN`
pub const DL_OVERRUN: u64 = 4;
/// `SCHED_FLAG_UTIL_CLAMP`: both bounds are given.
pub const UTIL_CLAMP: u64 = 0x60;

const SIZE: u32 = size_of::<Attributes>() as u32;

/// The attributes of thread `tid`, 0 for the calling one. What an earlier kernel does not know is 0.
pub fn get(tid: i32) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: `attributes` is live and of the size that is given.
    crate::check(unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut attributes, SIZE, 0) })?;
    Ok(attributes)
}

/// Gives them to thread `tid`, 0 for the calling one.
pub fn set(tid: i32, attributes: &Attributes) -> io::Result<()> {
    let attributes = Attributes {
        size: SIZE,
        ..*attributes
    };
    // SAFETY: `attributes` is live and says its size.
    crate::check(unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const attributes, 0) }).map(drop)
}

/// Gives the calling thread what nobody else wants of disks (`ioprio_set`, the idle class).
pub fn leave_disks_to_others() -> io::Result<()> {
    const WHO_PROCESS: i32 = 1;
    const CLASS_IDLE: i32 = 3 << 13;
    // SAFETY: takes numbers only; 0 is the calling thread.
    crate::check(unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE) }).map(drop)
}
