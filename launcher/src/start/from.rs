//! Arrays that a job starts from.

use belay_access::index::{Portable, INDEX};
use belay_coordinator::Failure;
use belay_image::files;
use belay_image::name::Name;
use belay_wire::Exit;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest index that is read, bytes: as long as what programs read.
const MOST_INDEX: u64 = 64 << 20;

/// Looks whether programs can start from directory `from`, before anything is made for them; that all of it is as it
/// should be, they see.
pub(super) fn check(from: Option<&Path>) -> Result<(), Failure> {
    let Some(from) = from else { return Ok(()) };
    let path = from.join(INDEX);
    let fail = |e: std::io::Error| Failure::io(format!("read {}", path.display()), &e);
    let mut text = Vec::new();
    let (file, _) = files::open(&path)?;
    file.take(MOST_INDEX).read_to_end(&mut text).map_err(fail)?;
    let usage = |why: String| Failure::new(Exit::Usage, why);
    let index: Portable = serde_json::from_slice(&text)
        .map_err(|e| usage(format!("--from: {} is not the index of an export: {e}", path.display())))?;
    match index.point {
        Some(_) => Ok(()),
        None => Err(usage(format!(
            "--from: {} was exported without global arrays (belay_dataset_part), so no program can start from it",
            from.display()
        ))),
    }
}

/// The directory, from wherever it is looked at.
pub(super) fn absolute(from: Option<&PathBuf>) -> Result<Option<Name>, Failure> {
    let absolute = from.map(std::path::absolute).transpose();
    let absolute = absolute.map_err(|e| Failure::new(Exit::Usage, format!("--from: {e}")))?;
    Ok(absolute.map(Name::from))
}
