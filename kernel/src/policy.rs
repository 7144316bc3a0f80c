//! Memory policies: on which nodes memory shall lie. Nothing else changes by them.

use crate::check;
use std::io;

/// Words of a mask of nodes that kernels take.
pub const NODE_WORDS: usize = 16;

/// Bits of `nodes`; none where there are none. (The kernel takes one bit less than it is told.)
fn bits(nodes: Option<&[u64; NODE_WORDS]>) -> (*const u64, usize) {
    nodes.map_or((std::ptr::null(), 0), |nodes| (nodes.as_ptr(), 64 * NODE_WORDS))
}

/// That of the calling thread, and of those that it makes.
pub fn set(mode: u32, nodes: Option<&[u64; NODE_WORDS]>) -> io::Result<()> {
    let (nodes, bits) = bits(nodes);
    // SAFETY: the mask is live and as long as it says.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode as usize, nodes, bits) }).map(drop)
}

/// That of the memory from page boundary `start` on, so many bytes.
pub fn bind(start: u64, bytes: u64, mode: u32, nodes: Option<&[u64; NODE_WORDS]>) -> io::Result<()> {
    let (nodes, bits) = bits(nodes);
    // SAFETY: as above; without flags nothing is moved.
    check(unsafe { libc::syscall(libc::SYS_mbind, start, bytes, mode as usize, nodes, bits, 0) }).map(drop)
}

/// Mode and nodes of that at an address of this process.
pub fn at(address: u64) -> io::Result<(i32, [u64; NODE_WORDS])> {
    const BY_ADDRESS: usize = 2;
    let (mut mode, mut nodes) = (-1, [0u64; NODE_WORDS]);
    let (kind, mask, bits) = (&raw mut mode, nodes.as_mut_ptr(), 64 * NODE_WORDS);
    // SAFETY: both are valid for writing, and the mask is as long as it says.
    check(unsafe { libc::syscall(libc::SYS_get_mempolicy, kind, mask, bits, address, BY_ADDRESS) })?;
    Ok((mode, nodes))
}
