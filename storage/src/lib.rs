//! Where the memory of checkpoints lies.
//!
//! ```text
//! belay-job/chunks/pages-0000001a.bpg   chunk 26: pages, then the table of their hashes (see `chunk`)
//! belay-job/gen/000007/pages-PID.bidx   extents of a process: address → chunk and page
//! ```
//! A chunk is written once, under a temporary name, and never changed. A generation lists extents in chunks old and
//! new, so it restarts without replaying others. A page is stored only where no chunk in use holds one with the same
//! XXH3-128 already (`index`): pages rewritten with the same contents, contents that moved, and contents that several
//! processes share cost nothing. Chunks that no generation refers to any more are removed (`store`); what is still
//! needed of chunks that are mostly dead moves to new chunks with the next generation (`compact`).
//!
//! A committed generation is copied to durable *tiers* (`tier`, `flush`), where chunks and files lie in large *packs*
//! (`pack`, `catalogue`), and comes back from there when it is missing or damaged here (`fetch`). What lies there may
//! be sealed (`seal`, `tier::sealed`).
//!
//! Where the job has local tiers, chunks are written there first and moved to the job directory beside the program (`place`).
//! How long a checkpoint will take is predicted from what is known of all these (`predict`).
//!
//! * [`engine::Engine`] lives as long as the agent, [`session::Session`] as long as one checkpoint; what a session has
//!   learned counts only when its generation is committed and the session is given back.

pub mod catalogue;
pub mod chunk;
pub mod compact;
mod control;
pub mod engine;
pub mod fetch;
pub mod flush;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod index;
pub mod needed;
pub mod numbers;
pub mod pack;
pub mod page_key;
pub mod payoff;
pub mod place;
pub mod predict;
pub mod seal;
pub mod session;
pub mod store;
#[cfg(test)]
mod testing;
pub mod tier;

use belay_abi::hash::PageHash;
pub use belay_image::extents::PAGE;
use belay_image::ImageError;
use std::sync::LazyLock;

static PAGES: LazyLock<PageHash> = LazyLock::new(PageHash::detect);

/// Whether pages are hashed with wide vectors on this machine.
pub fn hashes_wide() -> bool {
    PAGES.is_wide()
}

/// The checksum of a page: XXH3-64, the low half of its hash.
pub fn page_checksum(page: &[u8]) -> u64 {
    match page.try_into() {
        Ok(page) => PAGES.checksum(page),
        Err(_) => belay_image::checksum(page),
    }
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// A file could not be read or written, or is damaged.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The checkpoint would need more room than the job may use.
    #[error("the checkpoint does not fit: at most {limit} bytes may be stored (--max-bytes) and {used} are in use; raise the limit, or keep fewer checkpoints")]
    Quota {
        /// The limit.
        limit: u64,
        /// Bytes in use before this checkpoint.
        used: u64,
    },
    /// The store is in memory, of which too little is free.
    #[error("the checkpoint does not fit: the job directory lies in memory (tmpfs), of which {limit} bytes may be taken without harm to the program; put it on a disk with --ckpt-dir")]
    Memory {
        /// What may be taken.
        limit: u64,
    },
    /// A tier could not do what was asked of it.
    #[error("tier {tier}: {step} {key}: {source}")]
    Tier {
        /// Its name.
        tier: String,
        /// What was being done.
        step: &'static str,
        /// The object.
        key: String,
        /// The reason.
        source: std::io::Error,
    },
    /// What lies on a tier contradicts its checksums.
    #[error("tier {tier}: {key}: damaged: {reason}")]
    TierDamaged {
        /// Its name.
        tier: String,
        /// The object.
        key: String,
        /// What does not fit.
        reason: String,
    },
    /// What lies on a tier is sealed, and what opens it is not at hand. It may be as good as ever.
    #[error("tier {tier}: {key}: {reason}")]
    Locked {
        /// Its name.
        tier: String,
        /// The object.
        key: String,
        /// What is missing, and what to do.
        reason: String,
    },
    /// The tier may not hold as much.
    #[error("tier {tier}: {bytes} bytes do not fit: its capacity is {capacity} and {used} are in use; {advice}")]
    TierFull {
        /// Its name.
        tier: String,
        /// What the configuration allows.
        capacity: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes to be added.
        bytes: u64,
        /// What can be done.
        advice: String,
    },
    /// It would overwrite something else.
    #[error("generation {number} of the tier is not brought here: {reason}")]
    InUse {
        /// The generation that a tier has.
        number: u64,
        /// What is in its way.
        reason: String,
    },
    /// Nobody wants it any more.
    #[error("given up because the job ends")]
    Cancelled,
    /// Memory for the tables could not be had.
    #[error("{step}: {source}")]
    System {
        /// What was being done.
        step: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl StorageError {
    /// Whether what was to be read from a tier is lost there, as far as can be seen now, rather than out of reach.
    pub fn is_damage(&self) -> bool {
        match self {
            StorageError::Tier { source, .. } => belay_image::is_bad_sector(source),
            StorageError::InUse { .. } => true,
            _ => self.is_contradicted(),
        }
    }

    /// Whether the tier has no room for it, whoever else has taken that.
    pub fn is_for_want_of_room(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, StorageError::Tier { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded))
    }

    /// Whether what was read is not what was written, and no second attempt will change that.
    pub fn is_contradicted(&self) -> bool {
        matches!(
            self,
            StorageError::TierDamaged { .. } | StorageError::Image(ImageError::Damaged { .. })
        )
    }
}
