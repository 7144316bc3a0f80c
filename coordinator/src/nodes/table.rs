//! `nodes.json` in a generation of the root: the parts of the job at that checkpoint. Each has a generation with the same number in `DIR/nodes/TAG`.

use super::remote::RemoteShell;
use super::Nodes;
use crate::Failure;
use belay_image::manifest::FileEntry;
use belay_image::{checksum, sections, ImageError};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::Path;

const FILE: &str = "nodes.json";
/// Longest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// One part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Its directory's name.
    pub(crate) tag: u64,
    /// How it was started.
    pub(crate) words: RemoteShell,
    /// The process that stands in for the remote shell.
    pub(crate) standin: i32,
}

/// The parts of the job now.
pub(crate) fn of(nodes: &Nodes) -> Vec<Row> {
    let rows = nodes.remotes.iter().filter(|(_, r)| !r.is_over());
    rows.map(|(tag, r)| Row {
        tag: *tag,
        words: r.words.clone(),
        standin: r.standin,
    })
    .collect()
}

/// Writes the file into the generation in `dir` and makes it durable.
pub(crate) fn write(dir: &Path, rows: &[Row]) -> Result<FileEntry, Failure> {
    let path = dir.join(FILE);
    let fail = |e: std::io::Error| Failure::io(format!("write {}", path.display()), &e);
    let bytes = serde_json::to_vec(rows).map_err(|e| fail(e.into()))?;
    let mut f = sections::create_private(&path)?;
    f.write_all(&bytes).and_then(|()| f.sync_all()).map_err(fail)?;
    Ok(FileEntry {
        name: FILE.into(),
        bytes: bytes.len() as u64,
        xxh3: Some(checksum(&bytes)),
    })
}

/// The parts of the generation in `dir`; none for a job on one host.
pub(crate) fn read(dir: &Path) -> Result<Vec<Row>, Failure> {
    let path = dir.join(FILE);
    let file = match std::fs::File::open(&path) {
        Ok(f) => f,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(ImageError::io("open", &path, e).into()),
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES)
        .read_to_end(&mut bytes)
        .map_err(|e| ImageError::io("read", &path, e))?;
    Ok(serde_json::from_slice(&bytes).map_err(|e| ImageError::damaged(&path, e.to_string()))?)
}
