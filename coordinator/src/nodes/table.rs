//! `nodes.json` in a generation of the root: the parts of the job at that checkpoint. Each has a generation with the same number in `DIR/nodes/TAG`.

use super::remote::RemoteShell;
use super::Nodes;
use crate::{document, Failure};
use belay_image::manifest::{FileEntry, Manifest};
use belay_image::ImageError;
use serde::{Deserialize, Serialize};
use std::path::Path;

const FILE: &str = "nodes.json";
/// Longest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// The number of no process.
const NOBODY: i32 = 0;

/// One part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Its directory's name.
    pub(crate) tag: u64,
    /// How it was started.
    pub(crate) words: RemoteShell,
    /// The process that stands in for the remote shell.
    pub(crate) standin: i32,
    /// The first part that the same remote shell has started; 0 for this one itself.
    #[serde(default)]
    pub(crate) first: u64,
    /// What the host is called on which it ran ([`super::name_here`]); empty in tables of before.
    #[serde(default)]
    pub(crate) on: String,
}

impl Row {
    /// Tag of the first part of its remote shell.
    pub(crate) fn first(&self) -> u64 {
        if self.first == 0 {
            self.tag
        } else {
            self.first
        }
    }

    /// The host on which it ran, by a name under which its remote shell reaches it.
    pub(crate) fn host(&self) -> &str {
        if self.words.tasks > 0 && !self.on.is_empty() {
            &self.on
        } else {
            &self.words.host
        }
    }
}

/// The parts of the job now.
pub(crate) fn of(nodes: &Nodes) -> Vec<Row> {
    let rows = nodes.remotes.iter().filter(|(_, r)| !r.is_over());
    rows.map(|(tag, r)| Row {
        tag: *tag,
        words: r.words.clone(),
        // A part may go on when its remote shell has ended, and the number be another process's by then.
        standin: if r.has_standin() { r.standin } else { NOBODY },
        first: r.first,
        on: r.node().and_then(|n| nodes.there.get(&n)).cloned().unwrap_or_default(),
    })
    .collect()
}

/// Writes the file into the generation in `dir` and makes it durable.
pub(crate) fn write(dir: &Path, rows: &[Row]) -> Result<FileEntry, Failure> {
    document::write(dir, FILE, rows)
}

/// The parts of the generation in `dir`; none for a job on one host.
pub(crate) fn read(dir: &Path) -> Result<Vec<Row>, Failure> {
    Ok(document::read(dir, FILE, MAX_BYTES)?.unwrap_or_default())
}

/// The same; refused where the generation had parts, and the file is missing.
pub(crate) fn read_listed(dir: &Path) -> Result<Vec<Row>, Failure> {
    let rows = read(dir)?;
    if rows.is_empty() && Manifest::read(dir)?.files.iter().any(|f| f.name == FILE) {
        return Err(ImageError::damaged(&dir.join(FILE), "missing").into());
    }
    Ok(rows)
}
