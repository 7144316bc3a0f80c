//! The job key: 256 random bits in a file that only the job's owner can read. Every connection of the tree proves that it knows it.

use crate::handle::TreeError;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Bytes of a key.
pub(crate) const KEY_BYTES: usize = 32;

/// The job key.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey(pub(crate) [u8; KEY_BYTES]);

impl std::fmt::Debug for JobKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobKey")
    }
}

impl JobKey {
    /// A new one.
    pub fn random() -> std::io::Result<Self> {
        let mut key = [0u8; KEY_BYTES];
        // SAFETY: the buffer is valid for writing its length. Requests of up to 256 bytes are never cut short.
        let n = unsafe { libc::getrandom(key.as_mut_ptr().cast(), key.len(), 0) };
        if usize::try_from(n) == Ok(key.len()) {
            Ok(Self(key))
        } else {
            Err(std::io::Error::last_os_error())
        }
    }

    /// Writes it to a new file with mode 0600.
    pub fn write(&self, path: &Path) -> Result<(), TreeError> {
        let fail = |source| TreeError::Key {
            path: path.to_owned(),
            source,
        };
        let text: String = self.0.iter().map(|b| format!("{b:02x}")).collect();
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(fail)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(fail)
    }

    /// Reads it; refuses a file that others can read.
    pub fn read(path: &Path) -> Result<Self, TreeError> {
        let fail = |source| TreeError::Key {
            path: path.to_owned(),
            source,
        };
        let wrong = |why: &str| fail(std::io::Error::other(why.to_owned()));
        let mode = std::fs::metadata(path).map_err(fail)?.mode();
        if mode & 0o077 != 0 {
            return Err(wrong("others may read it; make a new job directory"));
        }
        let text = std::fs::read_to_string(path).map_err(fail)?;
        let digits = text.trim().as_bytes();
        let mut key = [0u8; KEY_BYTES];
        if digits.len() != 2 * KEY_BYTES {
            return Err(wrong("not a job key"));
        }
        for (byte, pair) in key.iter_mut().zip(digits.chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong("not a job key"))?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong("not a job key"))?;
        }
        Ok(Self(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_private_and_comes_back() {
        let path = std::env::temp_dir().join(format!("belay-key-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let key = JobKey::random().unwrap();
        assert_ne!(key, JobKey::random().unwrap());
        key.write(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(JobKey::read(&path).unwrap(), key);
        assert!(key.write(&path).is_err(), "an existing key is not overwritten");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(JobKey::read(&path).is_err());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&path, "0123").unwrap();
        assert!(JobKey::read(&path).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
