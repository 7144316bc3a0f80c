//! The queue, whose log is another here.

#[path = "../../src/shadow/queue.rs"]
mod queue;

pub(crate) use queue::Queue;

/// The library's own, of which there is none here.
pub(crate) struct Log;
