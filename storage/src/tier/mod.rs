//! A tier: a place that holds named objects. Objects are written once, appear whole or not at all, and are never changed.
//!
//! ```text
//! put ──write…──> finish (the object is there, whole) ──> sync (it and its name survive a power cut)
//!  └─ dropped: nothing is left
//! ```
//! Keys are relative paths such as `packs/000007-1f.bpk`. Every implementation passes the suite in [`conformance`].

pub mod conformance;
pub mod directory;
pub mod gather;
pub mod sealed;
mod seen;

pub use seen::ReadOnly;

use crate::{seal, StorageError};
use belay_kernel::direct::Buffer;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::ops::Range;

/// How addresses of object stores begin.
pub const OBJECT_SCHEMES: [&str; 5] = ["s3://", "gs://", "az://", "abfs://", "abfss://"];
/// The addresses of object stores, for messages.
pub const OBJECT_URLS: &str =
    "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX";

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Object {
    /// Its key.
    pub key: String,
    /// Its length.
    pub bytes: u64,
}

/// A place that holds objects.
pub trait Tier: Debug + Send + Sync {
    /// The name that the configuration gives it.
    fn name(&self) -> &str;

    /// Begins to write object `key`; one that is there already is replaced when this is finished.
    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError>;

    /// Reads `range` of object `key` into `buf`, which then holds exactly that. A range that leaves the object is an error.
    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError>;

    /// Length of object `key`, where it is there.
    fn length(&self, key: &str) -> Result<Option<u64>, StorageError>;

    /// The objects whose keys begin with the directory `prefix`, in order.
    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError>;

    /// The directories at the top of the tier, in order; some may be empty.
    fn folders(&self) -> Result<Vec<String>, StorageError> {
        let all = self.list("")?;
        let folders = all.iter().filter_map(|o| Some(o.key.split_once('/')?.0.to_owned()));
        Ok(folders.collect::<BTreeSet<_>>().into_iter().collect())
    }

    /// Removes object `key`; one that is not there is no error.
    fn delete(&self, key: &str) -> Result<(), StorageError>;

    /// Returns when all finished objects and removals survive a power cut.
    fn sync(&self) -> Result<(), StorageError>;

    /// Bytes free, where that is known.
    fn free(&self) -> Result<Option<u64>, StorageError>;

    /// Removes what puts that were interrupted have left. Call while nobody writes to the tier.
    fn clear(&self) -> Result<u64, StorageError>;

    /// The key with which what is written is sealed, if it is.
    fn seals_with(&self) -> Option<String> {
        None
    }

    /// The key with which object `key`, of which something has been read, is sealed, if it is.
    fn key_of(&self, _key: &str) -> Option<String> {
        None
    }
}

/// An object being written. Dropped, it leaves nothing behind.
pub trait Put: Send {
    /// Appends `data`.
    fn write(&mut self, data: &[u8]) -> Result<(), StorageError>;

    /// Makes the object visible under its key.
    fn finish(self: Box<Self>) -> Result<(), StorageError>;
}

/// An error of tier `tier` at `step` on object `key`.
pub fn failed(tier: &str, step: &'static str, key: &str, source: io::Error) -> StorageError {
    StorageError::Tier {
        tier: tier.to_owned(),
        step,
        key: key.to_owned(),
        source,
    }
}

/// Whether `key` is one that may be given to a tier: parts of letters, digits, `.`, `_` and `-`, none beginning with a dot.
pub fn is_key(key: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    key.split('/')
        .all(|part| !part.is_empty() && !part.starts_with('.') && part.chars().all(good))
}

/// Reads a whole object, of at most `most` bytes.
pub fn read_whole(tier: &dyn Tier, key: &str, most: u64) -> Result<Vec<u8>, StorageError> {
    let missing = || failed(tier.name(), "read", key, io::ErrorKind::NotFound.into());
    let bytes = tier.length(key)?.ok_or_else(missing)?;
    if bytes > most {
        return Err(StorageError::TierDamaged {
            tier: tier.name().to_owned(),
            key: key.to_owned(),
            reason: format!("{bytes} bytes, more than any object of this kind"),
        });
    }
    let mut out = Buffer::default();
    tier.get(key, 0..bytes, &mut out)?;
    locked(tier, key, &out, bytes)?;
    Ok(out.to_vec())
}

/// Refuses an object of `bytes` bytes that begins with `data` where that is sealed, and the tier was opened without a key.
pub(crate) fn locked(tier: &dyn Tier, key: &str, data: &[u8], bytes: u64) -> Result<(), StorageError> {
    let why = seal::locked(data, bytes);
    why.map_or(Ok(()), |why| {
        Err(StorageError::Locked {
            tier: tier.name().to_owned(),
            key: key.to_owned(),
            reason: why.to_string(),
        })
    })
}

/// Writes a whole object.
pub fn write_whole(tier: &dyn Tier, key: &str, data: &[u8]) -> Result<(), StorageError> {
    let mut put = tier.put(key)?;
    put.write(data)?;
    put.finish()
}
