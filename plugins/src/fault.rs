//! Why one object could not be captured or rebuilt. The flows add which process and descriptor it was.

use belay_image::ImageError;
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
    /// The image could not be read or written.
    #[error(transparent)]
    Image(#[from] ImageError),
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

/// A refusal with this text.
pub(crate) fn refuse<T>(reason: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Refused(reason.into()))
}
