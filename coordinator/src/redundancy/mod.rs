//! Level `redundant`: what each host has of a generation is encoded across groups of hosts, so that it can be made
//! again when a host is lost.
//!
//! ```text
//! root:    commit ── order ── groups, plan ─────────────────── all done? ── record ──> the generation is redundant
//! member:             hello ┘      └ read blocks of the others ─ encode ─ write parity ─ done ┘
//! restart: record ── servers on the hosts that are left ── each part's store healed on its host ── restart as always
//! ```
//! Members only read from each other; each writes only its own files, under temporary names until they are complete.
//! Checkpoint data lies on the hosts' own disks (`local`), the record in the job directory. The code itself is crate
//! `belay-redundancy`.

pub(crate) mod again;
pub(crate) mod content;
pub(crate) mod encode;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod heal;
pub mod local;
mod parity;
pub mod record;
pub(crate) mod round;
pub mod serve;
pub(crate) mod settings;
pub mod verify;

pub use settings::{Redundancy, Settings};

use crate::Failure;
use belay_redundancy::RedundancyError;
use belay_wire::Exit;
use std::path::Path;

/// The index in the file `path`, which a host keeps of its group.
pub fn index_of(path: &Path) -> Result<belay_redundancy::Index, Failure> {
    content::index_in(path)
}

impl From<RedundancyError> for Failure {
    fn from(e: RedundancyError) -> Self {
        let exit = match &e {
            RedundancyError::Layout(_) | RedundancyError::Groups(_) | RedundancyError::Code(_) => Exit::NotDurable,
            RedundancyError::Lost { .. } | RedundancyError::Damaged(_) => Exit::Damaged,
        };
        Failure::new(exit, e.to_string())
    }
}
