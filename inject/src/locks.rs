//! Which memory is locked.

use crate::libc_nr as nr;
use belay_abi::inject::{RangesTable, MAX_RANGES};
use belay_abi::syscall;
use core::ptr::addr_of_mut;

const MS_ASYNC: usize = 1;
const MS_INVALIDATE: usize = 2;
const EBUSY: isize = 16;

/// Replaces the length of each mapping by whether it is locked.
///
/// # Safety
/// `t` points to a table in the injected area.
pub(crate) unsafe fn run(t: *mut RangesTable) {
    unsafe {
        let ranges = addr_of_mut!((*t).ranges).cast::<[u64; 2]>();
        for i in 0..((*t).count as usize).min(MAX_RANGES) {
            let range = ranges.add(i);
            let [start, bytes] = *range;
            *range = [start, u64::from(is_locked(start, bytes))];
        }
    }
}

/// Whether memory is locked. To invalidate such is refused, and means nothing for any other.
pub(crate) fn is_locked(start: u64, bytes: u64) -> bool {
    unsafe { syscall!(nr::MSYNC, start, bytes, MS_ASYNC | MS_INVALIDATE) == -EBUSY }
}
