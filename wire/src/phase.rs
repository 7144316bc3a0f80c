//! Names of the phases of a checkpoint and of a restart.

/// Phases of a checkpoint and of a restart. The same words appear in code, log, status and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Every task is stopped.
    Suspend,
    /// Data in flight is captured.
    Drain,
    /// Descriptors and kernel state are captured.
    Capture,
    /// Copy-on-write snapshots are taken.
    Snapshot,
    /// The tasks go on.
    Resume,
    /// Snapshots are written.
    Write,
    /// Copies to slower tiers.
    Flush,
    /// The generation becomes visible.
    Commit,
    /// Restart: what is not local is fetched.
    Fetch,
    /// Restart: process tree.
    Spawn,
    /// Restart: descriptors, sockets, shared memory.
    Rebuild,
    /// Restart: memory.
    Map,
    /// Restart: threads.
    Threads,
    /// Restart: data in flight.
    Refill,
}

impl Phase {
    /// The phase's name.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Suspend => "suspend",
            Phase::Drain => "drain",
            Phase::Capture => "capture",
            Phase::Snapshot => "snapshot",
            Phase::Resume => "resume",
            Phase::Write => "write",
            Phase::Flush => "flush",
            Phase::Commit => "commit",
            Phase::Fetch => "fetch",
            Phase::Spawn => "spawn",
            Phase::Rebuild => "rebuild",
            Phase::Map => "map",
            Phase::Threads => "threads",
            Phase::Refill => "refill",
        }
    }
}
