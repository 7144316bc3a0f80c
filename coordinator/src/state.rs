//! The agent's own part of a generation: `agent.json`, present only when the command had ended before the checkpoint.

use crate::Failure;
use belay_image::manifest::FileEntry;
use belay_image::{checksum, sections, ImageError};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::Path;

const FILE: &str = "agent.json";
/// Longest file that is read.
const MAX_BYTES: u64 = 4096;

#[derive(Debug, Serialize, Deserialize)]
struct State {
    /// Status word of the command.
    wait_status: i32,
}

/// Writes the file into the generation in `dir` and makes it durable.
pub(crate) fn write(dir: &Path, wait_status: i32) -> Result<FileEntry, Failure> {
    let path = dir.join(FILE);
    let fail = |e: std::io::Error| Failure::io(format!("write {}", path.display()), &e);
    let bytes = serde_json::to_vec(&State { wait_status }).map_err(|e| fail(e.into()))?;
    let mut f = sections::create_private(&path)?;
    f.write_all(&bytes).and_then(|()| f.sync_all()).map_err(fail)?;
    Ok(FileEntry {
        name: FILE.into(),
        bytes: bytes.len() as u64,
        xxh3: Some(checksum(&bytes)),
    })
}

/// How the command of the generation in `dir` had ended; `None` when it was running.
pub(crate) fn read(dir: &Path) -> Result<Option<i32>, Failure> {
    let path = dir.join(FILE);
    let file = match std::fs::File::open(&path) {
        Ok(f) => f,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ImageError::io("open", &path, e).into()),
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES)
        .read_to_end(&mut bytes)
        .map_err(|e| ImageError::io("read", &path, e))?;
    let state: State = serde_json::from_slice(&bytes).map_err(|e| ImageError::damaged(&path, e.to_string()))?;
    Ok(Some(state.wait_status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_comes_back() {
        let dir = std::env::temp_dir().join(format!("belay-state-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        assert_eq!(read(&dir).unwrap(), None);
        let entry = write(&dir, 0x300).unwrap();
        assert_eq!(read(&dir).unwrap(), Some(0x300));
        assert_eq!(entry.bytes, std::fs::metadata(dir.join(FILE)).unwrap().len());
        std::fs::write(dir.join(FILE), "{").unwrap();
        assert!(read(&dir).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
