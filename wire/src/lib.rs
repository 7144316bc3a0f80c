//! Messages between the command line and the agent of a running job, and the names of the phases.
//!
//! The protocol: a client connects to `DIR/control.sock`, sends one [`Request`] as one line of JSON, and receives
//! [`Event`]s as lines of JSON; the last one holds the result ([`Event::is_last`]). Both sides treat what they receive
//! as untrusted: lines are bounded, and the peer is checked with `SO_PEERCRED`.

mod exit;
mod message;
mod phase;
pub mod socket;

pub use exit::{Exit, ExitRow};
pub use message::{
    AgentStatus, AutoInterval, AutoLevel, Checkpointed, ComparedStatus, ComparedTime, DeclaredSite, DeclaredStatus,
    DifferentialStatus, DirtyShare, Event, Factors, GenerationStatus, HostShare, JobState, LastError, Level, OnTier,
    PredictedStatus, ProcessStatus, Progress, Request, SnapshotStatus, Status,
};
pub use phase::Phase;
