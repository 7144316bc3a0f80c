//! Small JSON files that an agent adds to a generation (`agent.json`, `nodes.json`): written durably, read with a limit.

use crate::Failure;
use belay_image::manifest::FileEntry;
use belay_image::{checksum, files, sections, ImageError};
use serde::{de::DeserializeOwned, Serialize};
use std::io::Write;
use std::path::Path;

/// Writes `value` to file `name` of the generation in `dir` and makes it durable; what the manifest says of it.
pub(crate) fn write<T: Serialize + ?Sized>(dir: &Path, name: &str, value: &T) -> Result<FileEntry, Failure> {
    let path = dir.join(name);
    let fail = |e: std::io::Error| Failure::io(format!("write {}", path.display()), &e);
    let bytes = serde_json::to_vec(value).map_err(|e| fail(e.into()))?;
    let mut f = sections::create_private(&path)?;
    f.write_all(&bytes).and_then(|()| f.sync_all()).map_err(fail)?;
    Ok(FileEntry {
        name: name.into(),
        bytes: bytes.len() as u64,
        xxh3: Some(checksum(&bytes)),
    })
}

/// Reads it back, at most `limit` bytes; `None` where the generation has no such file.
pub(crate) fn read<T: DeserializeOwned>(dir: &Path, name: &str, limit: u64) -> Result<Option<T>, Failure> {
    let path = dir.join(name);
    let bytes = match files::read(&path, limit) {
        Ok(bytes) => bytes,
        Err(ImageError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let value = serde_json::from_slice(&bytes).map_err(|e| ImageError::damaged(&path, e.to_string()))?;
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_comes_back_and_neither_damage_nor_length_passes() {
        let dir = std::env::temp_dir().join(format!("belay-document-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        assert_eq!(read::<u32>(&dir, "x.json", 100).unwrap(), None);
        let entry = write(&dir, "x.json", &12345u32).unwrap();
        assert_eq!((entry.bytes, entry.name.as_str()), (5, "x.json"));
        assert_eq!(read(&dir, "x.json", 5).unwrap(), Some(12345u32));
        assert!(read::<u32>(&dir, "x.json", 4).is_err());
        std::fs::write(dir.join("x.json"), "{").unwrap();
        assert!(read::<u32>(&dir, "x.json", 100).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
