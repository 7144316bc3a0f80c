//! Redundancy across hosts, without I/O: which host holds what of whom (`layout`), groups of hosts in distinct failure
//! domains (`groups`), where its files lie (`stream`), the code itself (`code`), and the format of what is stored
//! (`index`).
//!
//! What one host has of a generation is a *stream*: its files, each at a place of its own. Streams of a group have
//! different lengths; each is thought to be followed by zeros up to `data` segments of one length.
//!
//! ```text
//! three hosts, XOR (data = 2, parity = 1)
//!            host 0      host 1      host 2
//! stripe 0   parity      segment 0   segment 1
//! stripe 1   segment 1   parity      segment 0
//! stripe 2   segment 0   segment 1   parity
//! ```
//! Segments and parity are cut into blocks of [`BLOCK`] bytes. Each block has a checksum, so a block that is damaged is
//! treated like one that is lost.

pub mod code;
pub mod groups;
pub mod index;
pub mod layout;
pub mod part;
pub mod stream;

pub use index::{Index, Member};
pub use layout::{Layout, Scheme};
pub use part::{Part, Place};
pub use stream::{Geometry, Order, Piece};

/// Bytes of a block; the last one of a segment may be shorter.
pub const BLOCK: u64 = 1 << 20;
/// Lengths of segments are multiples of this.
pub const ALIGN: u64 = 64;

/// Why something cannot be encoded, decoded or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RedundancyError {
    /// The scheme does not fit the group.
    #[error("{0}")]
    Layout(String),
    /// No groups can be formed.
    #[error("{0}")]
    Groups(String),
    /// Too little is left.
    #[error("{left} of {needed} blocks are left")]
    Lost {
        /// Blocks that are there.
        left: usize,
        /// Blocks that are needed.
        needed: usize,
    },
    /// The code refused.
    #[error("code: {0}")]
    Code(String),
    /// Not what was written.
    #[error("damaged: {0}")]
    Damaged(String),
}

/// Checksum of a block or an index.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
