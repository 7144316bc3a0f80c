//! The mark of a generation in which damage has been found.
//!
//! Most damage shows only when every byte is read, which is too much for a list or for retention. Who has read it and
//! found damage, a restart, a flush or `belay verify`, leaves a file in the generation's directory; who makes the
//! generation whole again, or reads all of it and finds nothing, removes that. A marked one is not counted as whole, and
//! stays as any other that is not, until enough whole ones are newer: it may be made whole from elsewhere.

use belay_image::files;
use belay_image::sections::create_private;
use std::io::{self, Write};
use std::path::Path;

const MARK: &str = "damaged";
/// Longest reason.
const MAX: usize = 1000;

/// Marks the generation in directory `generation`. Where that cannot be written (the disk is full), the damage will be
/// found once more.
pub fn mark(generation: &Path, why: &str) {
    let why: String = why.chars().take(MAX).collect();
    let path = generation.join(MARK);
    let write = || {
        let mut file = create_private(&path)?;
        let written = file.write_all(why.as_bytes()).and_then(|()| file.sync_all());
        written.map_err(|e| belay_image::ImageError::io("write", &path, e))
    };
    // One that is there says when it began.
    if is_marked(generation) {
        return;
    }
    match write() {
        Ok(()) => {
            tracing::warn!(generation = %generation.display(), why, "damaged: not counted as whole from now on");
            drop(super::sync_dir(generation).inspect_err(|e| tracing::warn!(error = %e, "the mark may be lost")));
        }
        Err(e) => tracing::warn!(error = %e, "damage is not marked"),
    }
}

/// All of the generation in directory `generation` has been read, and is as it was written.
pub fn unmark(generation: &Path) {
    match std::fs::remove_file(generation.join(MARK)) {
        Ok(()) => tracing::info!(generation = %generation.display(), "whole again"),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => tracing::warn!(error = %e, "a mark of damage stays"),
    }
}

/// Whether the generation in directory `generation` is marked.
pub fn is_marked(generation: &Path) -> bool {
    generation.join(MARK).exists()
}

/// Why the generation in directory `generation` is marked, where it is.
pub(super) fn of(generation: &Path) -> Option<String> {
    if !is_marked(generation) {
        return None;
    }
    let why = files::read(&generation.join(MARK), 4 * MAX as u64).unwrap_or_default();
    let why = crate::failure::plain(&String::from_utf8_lossy(&why));
    Some(if why.is_empty() { "it was found to be".into() } else { why })
}
