//! On which memory nodes memory shall lie.

use crate::libc_nr as nr;
use belay_abi::inject::{RangesTable, MAX_RANGES, NODE_WORDS};
use belay_abi::syscall;
use core::ptr::{addr_of_mut, null};

const MPOL_F_ADDR: usize = 2;
/// Bits of a mask of nodes.
pub(crate) const NODES: usize = 64 * NODE_WORDS;

/// Replaces the length of each mapping by the mode of its policy; 0 where it has none, or is gone.
///
/// # Safety
/// `t` points to a table in the injected area.
pub(crate) unsafe fn run(t: *mut RangesTable) {
    unsafe {
        let ranges = addr_of_mut!((*t).ranges).cast::<[u64; 2]>();
        for i in 0..((*t).count as usize).min(MAX_RANGES) {
            let range = ranges.add(i);
            let [start, _] = *range;
            let mut mode = 0i32;
            syscall!(
                nr::GET_MEMPOLICY,
                addr_of_mut!(mode),
                null::<u8>(),
                0usize,
                start,
                MPOL_F_ADDR
            );
            *range = [start, u64::from(mode.unsigned_abs())];
        }
    }
}
