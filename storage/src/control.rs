//! How far something has come that runs beside the program, and how it is given up.

use crate::StorageError;
use belay_image::{is_bad_sector, ImageError};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How far a flush has come, and whether it is still wanted.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    /// What was read of the generation itself is not what was written.
    rotten: AtomicBool,
    /// A tier had no room for it.
    full: AtomicBool,
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

    /// Why the generation itself could not be read. Whoever has written it is not to build upon what has rotted.
    pub fn note(&self, own: &StorageError) {
        if let StorageError::Image(e) = own {
            if is_rotten(e) {
                self.rotten.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether something of the generation has been found damaged.
    pub fn is_rotten(&self) -> bool {
        self.rotten.load(Ordering::Relaxed)
    }

    /// Notes where a tier has failed for want of room.
    pub fn note_room(&self, of_tier: &StorageError) {
        if of_tier.is_for_want_of_room() {
            self.found_no_room();
        }
    }

    /// Notes that a tier had no room for what was copied to it.
    pub fn found_no_room(&self) {
        self.full.store(true, Ordering::Relaxed);
    }

    /// Whether a tier had no room.
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
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

/// Whether a file is not what was written, or its device cannot read it.
pub(crate) fn is_rotten(e: &ImageError) -> bool {
    match e {
        ImageError::Io { source, .. } => is_bad_sector(source),
        ImageError::Damaged { .. } => true,
        ImageError::Elsewhere { .. } | ImageError::Version { .. } | ImageError::Architecture { .. } => false,
    }
}
