//! Why one object could not be captured or rebuilt. The flows add which process and descriptor it was.

use belay_image::ImageError;
use serde::{Deserialize, Serialize};
use std::io;

/// A failed step or an unsupported state of one object.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// A system call failed.
    #[error("{step}: {source}")]
    Call {
        /// What was being done.
        step: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The object is in a state that cannot be saved or brought back; the text says why and what to do.
    #[error("{0}")]
    Refused(String),
    /// As `Refused`, but the state passes by itself when the program runs on.
    #[error("{0}")]
    Passing(String),
    /// The image could not be read or written.
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl Fault {
    /// Whether a call has failed because this process may not have more descriptors.
    pub(crate) fn is_for_want_of_descriptors(&self) -> bool {
        matches!(self, Fault::Call { source, .. } if source.raw_os_error() == Some(libc::EMFILE))
    }

    /// The fault as the flows report it: with the object, and the process that holds it (0 where it belongs to none in particular).
    pub(crate) fn of(&self, pid: i32, object: impl Into<String>) -> Refusal {
        Refusal {
            pid,
            object: object.into(),
            reason: self.to_string(),
            passing: matches!(self, Fault::Passing(_)),
            damage: matches!(self, Fault::Image(e) if e.is_damage()),
        }
    }
}

/// Adds the step to the error of a system call.
pub(crate) trait At<T> {
    /// Names the step.
    fn at(self, step: impl Into<String>) -> Result<T, Fault>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, step: impl Into<String>) -> Result<T, Fault> {
        self.map_err(|source| Fault::Call {
            step: step.into(),
            source,
        })
    }
}

/// A refusal for the moment, with this text.
pub(crate) fn not_now<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Passing(reason.into()))
}

/// A refusal with this text.
pub(crate) fn refuse<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Refused(reason.into()))
}

/// Something that cannot be checkpointed or restarted, with the reason.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[error("process {pid}: {object}: {reason}")]
pub struct Refusal {
    /// Process, 0 where the object belongs to no particular one.
    pub pid: i32,
    /// The object, for example `fd 7 (anon_inode:[io_uring])`.
    pub object: String,
    /// Why not, and what to do.
    pub reason: String,
    /// Whether the reason passes by itself when the program runs on for a moment.
    #[serde(default)]
    pub passing: bool,
    /// Whether the reason is damage of the image.
    #[serde(default)]
    pub damage: bool,
}
