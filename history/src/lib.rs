//! Histories of checkpoints: many versions that a program writes quickly and reads back in an order it knows, kept in
//! tiers (device memory, host memory, local disk). Pure: no I/O, no clock; time is an argument.
//!
//! | module | contents |
//! |---|---|
//! | `life` | what a tier has of a version: a state machine |
//! | `extents` | room in a tier, paged or contiguous |
//! | `table` | all versions, what each tier has of them, and who goes first |
//! | `order` | the order of reads that the program has told |
//! | `choose` | which versions make room for another |
//! | `plan` | which copy begins next, and what the program waits for |
//! | `limits` | what no policy can be better than |

pub mod choose;
pub mod extents;
pub mod life;
pub mod limits;
pub mod order;
pub mod plan;
pub mod table;

/// The number that the program has given to a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);
