//! Opening and reading files that may be anything: whoever looks at a job directory that belongs to another user (root
//! may) must not be kept waiting by a FIFO or made to read a device without end. Only regular files are opened, and
//! nothing is read beyond a limit.

use crate::ImageError;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens the regular file at `path` for reading; the file and its length.
pub fn open(path: &Path) -> Result<(File, u64), ImageError> {
    let file = OpenOptions::new()
        .read(true)
        // Opening a FIFO would wait for a writer. Regular files do not know the flag.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| ImageError::io("open", path, e))?;
    let length = length(&file, path)?;
    Ok((file, length))
}

/// Length of `file`, a regular one.
fn length(file: &File, path: &Path) -> Result<u64, ImageError> {
    let meta = file.metadata().map_err(|e| ImageError::io("stat", path, e))?;
    if !meta.is_file() {
        return Err(ImageError::damaged(path, "not a regular file"));
    }
    Ok(meta.len())
}

/// Reads the regular file at `path`, which must not be longer than `limit`, also if it grows meanwhile.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, ImageError> {
    let (file, length) = open(path)?;
    read_to(file, (path, length), limit)
}

/// The same of a file that is open, and was opened without waiting; `path` is what errors call it.
pub fn read_open(file: File, path: &Path, limit: u64) -> Result<Vec<u8>, ImageError> {
    let length = length(&file, path)?;
    read_to(file, (path, length), limit)
}

fn read_to(file: File, (path, length): (&Path, u64), limit: u64) -> Result<Vec<u8>, ImageError> {
    let too_long = |n: u64| ImageError::damaged(path, format!("{n} bytes, more than any file of this kind"));
    if length > limit {
        return Err(too_long(length));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(length).map_err(|_| too_long(length))?;
    // A sparse file may claim a length for which there is no memory.
    bytes
        .try_reserve_exact(room)
        .map_err(|_| ImageError::io("read", path, ErrorKind::OutOfMemory.into()))?;
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| ImageError::io("read", path, e))?;
    if bytes.len() as u64 > limit {
        return Err(too_long(bytes.len() as u64));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read() {
        let dir = std::env::temp_dir().join(format!("belay-files-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let file = dir.join("file");
        std::fs::write(&file, b"hello").unwrap();
        assert_eq!(read(&file, 5).unwrap(), b"hello");
        assert!(read(&file, 4).unwrap_err().to_string().contains("5 bytes, more than"));
        assert!(read(&dir, 100).is_err());
        assert!(read(&dir.join("missing"), 100).unwrap_err().to_string().starts_with("open "));
        let fifo = dir.join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: the name is a live, terminated string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(read(&fifo, 100).unwrap_err().to_string().contains("not a regular file"));
        let endless = dir.join("endless");
        std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
        assert!(read(&endless, 100).unwrap_err().to_string().contains("not a regular file"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
