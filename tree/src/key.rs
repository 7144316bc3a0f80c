//! The job key: 256 random bits in a file that only the job's owner can read. Every connection of the tree proves that it knows it.

use crate::error::TreeError;
use rustix::process::geteuid;
use rustix::rand::{getrandom, GetRandomFlags};
use std::hash::Hasher;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use zeroize::{Zeroize, Zeroizing};

/// Bytes of a key.
pub(crate) const KEY_BYTES: usize = 32;
/// A key file is shorter than this.
const MAX_FILE: usize = 128;

/// The job key. Its bytes are cleared when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey(pub(crate) [u8; KEY_BYTES]);

impl Drop for JobKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl std::fmt::Debug for JobKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobKey")
    }
}

impl JobKey {
    /// A new one.
    pub fn random() -> std::io::Result<Self> {
        let mut key = [0u8; KEY_BYTES];
        // Requests of up to 256 bytes are never cut short.
        match getrandom(&mut key[..], GetRandomFlags::empty())? {
            KEY_BYTES => Ok(Self(key)),
            _ => Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// A number that tells the job from others, of which the key cannot be told.
    pub fn mark(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write(&self.0);
        hasher.finish()
    }

    /// Writes it to a new file with mode 0600.
    pub fn write(&self, path: &Path) -> Result<(), TreeError> {
        let fail = |source| TreeError::Key {
            path: path.to_owned(),
            source,
        };
        let digit = |d: u8| char::from(if d < 10 { b'0' + d } else { b'a' + d - 10 });
        let mut text = Zeroizing::new(String::with_capacity(2 * KEY_BYTES));
        for b in self.0 {
            text.extend([digit(b >> 4), digit(b & 15)]);
        }
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(fail)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(fail)
    }

    /// Reads it; refuses a file that is not the caller's own or that others can read.
    pub fn read(path: &Path) -> Result<Self, TreeError> {
        let fail = |source| TreeError::Key {
            path: path.to_owned(),
            source,
        };
        let wrong = |why: &str| fail(std::io::Error::other(why.to_owned()));
        // One look at the file that is then read: what the name leads to may change between two.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(path)
            .map_err(fail)?;
        let meta = file.metadata().map_err(fail)?;
        if !meta.is_file() || meta.uid() != geteuid().as_raw() {
            return Err(wrong("not a file of the caller's own"));
        }
        if meta.mode() & 0o077 != 0 {
            return Err(wrong("others may read it; make a new job directory"));
        }
        let mut text = Zeroizing::new(Vec::with_capacity(MAX_FILE));
        file.take(MAX_FILE as u64).read_to_end(&mut text).map_err(fail)?;
        let digits = text.trim_ascii();
        let mut key = Self([0; KEY_BYTES]);
        if digits.len() != 2 * KEY_BYTES || text.len() >= MAX_FILE {
            return Err(wrong("not a job key"));
        }
        let value = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
        for (byte, pair) in key.0.iter_mut().zip(digits.as_chunks::<2>().0) {
            let (Some(high), Some(low)) = (value(pair[0]), value(pair[1])) else {
                return Err(wrong("not a job key"));
            };
            *byte = high << 4 | low;
        }
        Ok(key)
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
        let good = std::fs::read_to_string(&path).unwrap();
        for bad in [
            "0123",
            &good[1..],
            &good.replace(|c: char| c.is_ascii_digit(), "+"),
            &"0".repeat(1000),
        ] {
            std::fs::write(&path, bad).unwrap();
            assert!(JobKey::read(&path).is_err(), "{bad}");
        }
        std::fs::write(&path, good + "\n").unwrap();
        assert_eq!(JobKey::read(&path).unwrap(), key);
        let link = path.with_extension("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(JobKey::read(&link).is_err(), "a link is not followed");
        std::fs::remove_file(link).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
