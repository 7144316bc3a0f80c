//! `sched_getattr`, `sched_setattr`, `ioprio_get` and `ioprio_set`, for which the C library has no functions, and masks of
//! processors of any length.

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

const WHO_PROCESS: i32 = 1;
/// Words of a mask of processors; no kernel has more.
const AFFINITY_WORDS: usize = 128;
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

/// Which of what disks do the thread `tid` gets, 0 for the calling one (`ioprio_get`).
pub fn io_priority(tid: i32) -> io::Result<i32> {
    // SAFETY: takes numbers only.
    crate::check(unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, tid) }).map(|priority| priority as i32)
}

/// Sets what [`io_priority`] reads.
pub fn set_io_priority(tid: i32, priority: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    crate::check(unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, tid, priority) }).map(drop)
}

/// The processors on which the calling thread may run, one bit each: as many words as the kernel has.
pub fn processors() -> io::Result<Vec<u64>> {
    let mut mask = vec![0u64; AFFINITY_WORDS];
    // SAFETY: the kernel writes at most the length given.
    let bytes = crate::check(unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, mask.len() * 8, mask.as_mut_ptr()) })?;
    mask.truncate(usize::try_from(bytes).unwrap_or(0) / 8);
    Ok(mask)
}

/// Sets those of thread `tid`, 0 for the calling one.
pub fn set_processors(tid: i32, mask: &[u64]) -> io::Result<()> {
    // SAFETY: a live array of that length.
    crate::check(unsafe { libc::syscall(libc::SYS_sched_setaffinity, tid, size_of_val(mask), mask.as_ptr()) }).map(drop)
}

/// Gives the calling thread what nobody else wants of disks (`ioprio_set`, the idle class).
pub fn leave_disks_to_others() -> io::Result<()> {
    const CLASS_IDLE: i32 = 3 << 13;
    set_io_priority(0, CLASS_IDLE)
}
