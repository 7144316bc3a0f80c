//! How far something has come that runs beside the program, and how it is given up.

use crate::StorageError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How far a flush has come, and whether it is still wanted.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    /// Bytes read so far.
    pub bytes: AtomicU64,
    /// Bytes to read in all.
    pub expected: AtomicU64,
}

impl Control {
    /// Gives the flush up.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Fails once the flush has been given up.
    pub fn check(&self) -> Result<(), StorageError> {
        if self.cancelled.load(Ordering::Relaxed) {
            Err(StorageError::Cancelled)
        } else {
            Ok(())
        }
    }
}
