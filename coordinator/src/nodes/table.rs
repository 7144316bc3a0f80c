//! `nodes.json` in a generation of the root: the parts of the job at that checkpoint. Each has a generation with the
//! same number in `DIR/nodes/TAG`.

use super::remote::RemoteShell;
use crate::{document, Failure};
use belay_image::manifest::{FileEntry, Manifest};
use belay_image::ImageError;
use belay_tree::{Contribution, Values};
use belay_wire::{DirtyShare, GenerationStatus};
use serde::{Deserialize, Serialize};
use std::path::Path;

const FILE: &str = "nodes.json";
/// Longest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// One part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// What the host is called on which it ran ([`super::seat::name_here`]); empty in tables of before.
    #[serde(default)]
    pub(crate) on: String,
    /// What it has of the generation; absent in tables of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) share: Option<Share>,
}

/// What a part has of a generation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Share {
    pub(crate) processes: u32,
    pub(crate) threads: u32,
    pub(crate) bytes: u64,
    pub(crate) new_bytes: u64,
    /// Absent in tables of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dirty: Option<DirtyShare>,
}

/// Under what the parts tell their shares.
const SHARE: &str = "share/";

impl Share {
    fn of(g: &GenerationStatus) -> Self {
        Self {
            processes: g.ranks,
            threads: g.threads,
            bytes: g.bytes,
            new_bytes: g.new_bytes,
            dirty: g.dirty.as_deref().copied(),
        }
    }

    /// Adds to what part `tag` brings to a step that it has `g`.
    pub(crate) fn add_to(own: &mut Contribution, tag: u64, g: &GenerationStatus) {
        if let Ok(text) = serde_json::to_string(&Self::of(g)) {
            own.publish.insert(format!("{SHARE}{tag}"), text);
        }
    }

    /// The wish for those of all parts.
    pub(crate) fn wish() -> String {
        format!("{SHARE}*")
    }
}

/// Takes from `said` what each part has.
pub(crate) fn hear_shares(rows: &mut [Row], said: &Values) {
    for row in rows {
        let text = said.get(&format!("{SHARE}{}", row.tag));
        row.share = text.and_then(|text| serde_json::from_str(text).ok());
    }
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

    /// What the host on which it ran is called.
    pub(crate) fn place(&self) -> &str {
        if self.on.is_empty() {
            self.host()
        } else {
            &self.on
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

/// The parts that generation `dir` of the root has, each with the host on which it ran.
pub fn parts_of(dir: &Path) -> Result<Vec<(u64, String)>, Failure> {
    Ok(read_listed(dir)?.into_iter().map(|row| (row.tag, row.on)).collect())
}
