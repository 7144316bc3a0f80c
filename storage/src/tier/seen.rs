//! A tier that is only looked at: nothing on it is written or removed, whatever is found there.

use super::{failed, Object, Put, Tier};
use crate::StorageError;
use belay_kernel::direct::Buffer;
use std::io::ErrorKind;
use std::ops::Range;

/// The tier in it, without any way to change it.
#[derive(Debug)]
pub struct ReadOnly(pub Box<dyn Tier>);

impl ReadOnly {
    fn refused<T>(&self, step: &'static str, key: &str) -> Result<T, StorageError> {
        Err(failed(self.name(), step, key, ErrorKind::ReadOnlyFilesystem.into()))
    }
}

impl Tier for ReadOnly {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        self.refused("write", key)
    }

    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        self.0.get(key, range, buf)
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        self.0.length(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        self.0.list(prefix)
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        self.0.folders()
    }

    fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.refused("remove", key)
    }

    fn sync(&self) -> Result<(), StorageError> {
        self.refused("sync", "")
    }

    fn free(&self) -> Result<Option<u64>, StorageError> {
        self.0.free()
    }

    fn clear(&self) -> Result<u64, StorageError> {
        self.refused("clear", "")
    }

    fn seals_with(&self) -> Option<String> {
        self.0.seals_with()
    }

    fn key_of(&self, key: &str) -> Option<String> {
        self.0.key_of(key)
    }
}
