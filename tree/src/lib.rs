//! The tree of agents of a job on many nodes.
//!
//! ```text
//! node 0 (root: coordinator of the job) ─┬─ node 1 ─┬─ node 1 + k ...
//!                                        ├─ node 2  └─ ...            every agent may be a relay: it has up to `fan-out` children
//!                                        └─ node k
//! ```
//! Two things travel. An *order* goes from the root to everybody. A *collective step* goes up and comes back: every
//! node contributes an outcome, facts that it publishes, and names of facts that it wants; inner nodes merge what their
//! children contribute into one message, the root decides, and the answer carries to each node just the facts that it
//! asked for. So barrier and name service are one mechanism, and the root handles one message per child and step,
//! whatever the number of nodes and processes.
//!
//! `shape`, `merge` and `crowd` are pure; `noise` turns bytes into messages and back without I/O; `link` is a
//! connection, `listening` where they come in, `strangers` those that have not proved yet that they know the key,
//! `service` the thread that attends to a node's connections, `direct` a connection of two nodes beside the tree,
//! `event` what that thread tells the rest of the program, and `handle` what the rest of the program sees.

mod crowd;
mod direct;
mod error;
mod event;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handle;
mod key;
mod link;
mod listening;
mod merge;
mod message;
mod noise;
mod service;
pub mod shape;
mod strangers;

pub use direct::{beating, Direct, Door};
pub use error::TreeError;
pub use event::{Broken, Event};
pub use handle::{Joining, Tree};
pub use key::JobKey;
pub use message::{Contribution, Failed, FailureKind, NodeInfo, Values};
pub use service::Traffic;
