//! Errors of the restart flow.

use belay_image::ImageError;
use belay_plugins::{Group, Refusal};

/// Why a restart failed. Nothing of the job was started, and the checkpoint is untouched.
#[derive(Debug, thiserror::Error)]
pub enum RestartError {
    /// A step failed on an object.
    #[error("{step}: {reason}")]
    Failed {
        /// The step.
        step: String,
        /// The reason and what to do.
        reason: String,
    },
    /// The program that restores a process from inside has reported its failure by numbers; `explain` puts them into words.
    #[error("process {slot} of the restart could not be restored")]
    Reported {
        /// Where its report is.
        slot: usize,
    },
    /// A file that the job uses is missing or is not the one it used at the checkpoint.
    #[error("changed file: {path}: {reason}")]
    Changed {
        /// The file.
        path: String,
        /// What differs and what to do.
        reason: String,
    },
    /// Processes of the job are there.
    #[error("{reason}")]
    Lives {
        /// Which, and what to do.
        reason: String,
    },
    /// The kernel or the site's settings do not allow the namespaces that a restart needs.
    #[error("namespaces: {reason}")]
    Forbidden {
        /// What is not allowed and what to do.
        reason: String,
    },
    /// The image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The same of the image of another node.
    #[error("{reason}")]
    DamagedElsewhere {
        /// What that node says.
        reason: String,
    },
}

impl RestartError {
    /// A failed step.
    pub(crate) fn at(step: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        RestartError::Failed {
            step: step.into(),
            reason: reason.to_string(),
        }
    }

    /// Tells the other nodes of this error of the restart; theirs, where it comes from there.
    pub(crate) fn shared(self, group: Option<&dyn Group>) -> Self {
        let Some(group) = group else { return self };
        if let Some(reason) = group.damage_elsewhere() {
            return RestartError::DamagedElsewhere { reason };
        }
        let damaged = matches!(&self, RestartError::Image(e) if e.is_damage());
        group.fail(&self.to_string(), damaged);
        self
    }
}

/// How a process has ended, by its wait status.
pub(crate) fn ended(status: i32) -> String {
    if libc::WIFSIGNALED(status) {
        format!("was killed by signal {}", libc::WTERMSIG(status))
    } else {
        format!("ended with status {}", libc::WEXITSTATUS(status))
    }
}

/// Of the rebuild of descriptors and shared objects.
impl From<Refusal> for RestartError {
    fn from(refusal: Refusal) -> Self {
        if refusal.damage {
            return RestartError::Image(ImageError::Damaged {
                path: refusal.object,
                reason: refusal.reason,
            });
        }
        RestartError::at("rebuild", refusal)
    }
}

/// Result of a restart step.
pub(crate) type Outcome<T> = Result<T, RestartError>;
