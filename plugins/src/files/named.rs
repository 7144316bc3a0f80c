//! What the name of a file, and when it was made, say of it.

use crate::sys::fd;
use belay_image::model::ObjectId;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Directories whose files do not outlive the program, a reboot or a cleaner.
const VOLATILE: [&str; 4] = ["/tmp", "/dev/shm", "/run", "/var/tmp"];

/// The path without the " (deleted)" that the kernel appends.
pub(crate) fn without_deleted(path: &Path) -> &Path {
    match path.as_os_str().as_bytes().strip_suffix(b" (deleted)") {
        Some(bare) => Path::new(OsStr::from_bytes(bare)),
        None => path,
    }
}

/// Whether the file `id` still has the name `path`.
pub(crate) fn is_named(path: &Path, id: ObjectId) -> bool {
    fd::stat(path, false).is_ok_and(|st| st.st_dev == id.dev && st.st_ino == id.ino)
}

/// Whether the file behind the descriptor was made at or after `start`; not where the file system does not say.
pub(super) fn made_since(raw: RawFd, start: SystemTime) -> bool {
    std::fs::metadata(fd::self_path(raw)).is_ok_and(|file| made_by(&file, start))
}

/// The same of a file that has been looked at.
pub(super) fn made_by(file: &Metadata, start: SystemTime) -> bool {
    file.created().is_ok_and(|t| t >= start)
}

/// Whether the file would be lost when the job ends, or the machine restarts.
pub(crate) fn is_volatile(path: &Path, file_system: Option<i64>) -> bool {
    VOLATILE.iter().any(|d| path.starts_with(d)) || file_system == Some(TMPFS_MAGIC)
}
