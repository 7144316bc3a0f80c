//! The agent's event loop and the job: job directory, generations, control socket, interval, signals, status.
//!
//! ```text
//! belay launch ── front ── agent ── command ─ …
//!                  │         └─ (orphans of the job, snapshot children while a checkpoint is written)
//!                  └ waits in the caller's shell, mirrors the command's exit status
//! ```
//! The *front* is the process the shell waits for. The *agent* is its child, the parent of the command and the
//! subreaper of everything the command starts; so it may trace all of it, and it can stay when the command has ended
//! but processes that it left behind run on.

pub mod agent;
mod checkpoint;
mod clients;
pub mod config;
mod description;
mod document;
pub mod exporter;
mod failure;
pub mod forecast;
pub mod front;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod generations;
pub mod history;
pub mod interval;
pub mod jobdir;
pub mod keys;
pub mod launch;
mod levels;
mod lock;
mod metrics;
pub mod nodes;
mod processes;
pub mod redundancy;
mod relay;
pub mod removal;
pub mod restart;
mod shell;
mod state;
pub mod sys;
pub mod tiers;
pub mod verbs;
pub mod verify;

pub use belay_restart::End;
pub use failure::{counted, plain, Failure};
pub use processes::host_pids;
