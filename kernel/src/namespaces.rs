//! New namespaces for the calling process.

use rustix::thread::{unshare_unsafe, LinkNameSpaceType, UnshareFlags};
use std::io;

/// Puts the calling thread into a new namespace of this kind (`unshare`); of kinds that are about children (processes,
/// time) it is those that are put there.
pub fn enter_new(kind: LinkNameSpaceType) -> io::Result<()> {
    // SAFETY: of what `unshare` parts, only the descriptor table can be something that code relies on, and it is no namespace.
    Ok(unsafe { unshare_unsafe(UnshareFlags::from_bits_retain(kind as u32)) }?)
}
