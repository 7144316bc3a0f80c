//! Local tiers: fast places that hold chunks until they have been moved home, to the job directory.
//!
//! ```text
//! snapshot ──chunk──> memory (tmpfs), local disks ──mover──> belay-job/chunks/
//!              └─────────── where there is no room ───────────────┘
//! ```
//! A chunk lies in one place or another, with the same name; whoever reads looks at home first (`store`). What is
//! committed is never removed before it is whole and durable at home. Which place the next chunk gets is decided by
//! [`desk`] after the [`rule`], with a [`model`] of each tier's throughput.

pub mod calibrate;
pub mod claims;
pub mod desk;
pub mod marker;
pub mod model;
pub mod mover;
pub mod rule;
