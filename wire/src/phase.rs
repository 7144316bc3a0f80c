//! Names of the phases of a checkpoint and of a restart.

/// Phases of a checkpoint and of a restart. The same words appear in code, log, status and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Libraries that take part come to rest.
    Gate,
    /// Every task is stopped.
    Suspend,
    /// Kernel state is captured.
    Capture,
    /// Descriptors and data in flight are captured.
    Drain,
    /// Copy-on-write snapshots are taken.
    Snapshot,
    /// The tasks go on.
    Resume,
    /// Libraries that were at rest go on.
    Reopen,
    /// Snapshots are written.
    Write,
    /// Copies to slower tiers.
    Flush,
    /// The generation becomes visible.
    Commit,
    /// Restart: what is not local is fetched.
    Fetch,
    /// Restart: descriptors, sockets, shared memory, data in flight.
    Rebuild,
    /// Restart: process tree.
    Spawn,
    /// Restart: memory.
    Map,
    /// Restart: pages are read.
    Refill,
    /// Restart: threads.
    Threads,
}

impl Phase {
    /// The phase's name.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Gate => "gate",
            Phase::Suspend => "suspend",
            Phase::Capture => "capture",
            Phase::Drain => "drain",
            Phase::Snapshot => "snapshot",
            Phase::Resume => "resume",
            Phase::Reopen => "reopen",
            Phase::Write => "write",
            Phase::Flush => "flush",
            Phase::Commit => "commit",
            Phase::Fetch => "fetch",
            Phase::Rebuild => "rebuild",
            Phase::Spawn => "spawn",
            Phase::Map => "map",
            Phase::Refill => "refill",
            Phase::Threads => "threads",
        }
    }
}
