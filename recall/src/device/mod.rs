//! Memory that versions lie in.

mod host;
mod slow;

pub use host::Host;
pub use slow::Slow;

use std::io;
use std::ops::Range;

/// What a copy is for. A device may give each a stream of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The program waits for it.
    Call,
    /// From a tier to the one below,
    Down,
    /// and back.
    Up,
}

/// Memory of a fixed size, addressed from 0.
pub trait Device: Send + Sync {
    /// How large it is.
    fn bytes(&self) -> u64;

    /// Copies into the device. Returns when the bytes are there. `to` are ranges of the device that no other copy uses
    /// meanwhile; both have the same length together.
    fn store(&self, lane: Lane, from: &[&[u8]], to: &[Range<u64>]) -> io::Result<()>;

    /// Copies out of the device. Returns when the bytes are there. `from` are ranges of the device that nobody writes to
    /// meanwhile; both have the same length together.
    fn load(&self, lane: Lane, from: &[Range<u64>], to: &mut [&mut [u8]]) -> io::Result<()>;
}
