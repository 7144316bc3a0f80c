//! What a user of the command line can rely on, tested with real processes.

mod common;
mod errands;
mod jobs;
mod launch;
