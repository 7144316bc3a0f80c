//! The agent's own part of a generation: `agent.json`, present only when the command had ended before the checkpoint.

use crate::{document, Failure};
use belay_image::manifest::FileEntry;
use serde::{Deserialize, Serialize};
use std::path::Path;

const FILE: &str = "agent.json";
/// Longest file that is read.
const MAX_BYTES: u64 = 4096;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct State {
    /// Status word of the command.
    wait_status: i32,
}

/// Writes the file into the generation in `dir` and makes it durable.
pub(crate) fn write(dir: &Path, wait_status: i32) -> Result<FileEntry, Failure> {
    document::write(dir, FILE, &State { wait_status })
}

/// How the command of the generation in `dir` had ended; `None` when it was running.
pub(crate) fn read(dir: &Path) -> Result<Option<i32>, Failure> {
    let state: Option<State> = document::read(dir, FILE, MAX_BYTES)?;
    Ok(state.map(|s| s.wait_status))
}

/// Whether the command of the generation in `dir` had failed before the checkpoint: that holds what it left behind, and
/// not what is to be done.
pub(crate) fn has_failed(dir: &Path) -> bool {
    read(dir).is_ok_and(|status| status.is_some_and(|s| s != 0))
}
