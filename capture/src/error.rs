//! Why a checkpoint fails.

use belay_plugins::Refusal;

/// Why a checkpoint failed. The application goes on undisturbed.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Something cannot be checkpointed.
    #[error("cannot checkpoint: {}", named(.0))]
    Refused(Vec<Refusal>),
    /// A process has a library that must be asked to come to rest first.
    #[error("cannot checkpoint: {0}")]
    NotAsked(Refusal),
    /// Nothing of the job is left.
    #[error("the program ended before the checkpoint was taken")]
    Ended,
    /// A system call of the agent failed.
    #[error("{step}: {source}")]
    System {
        /// What was being done.
        step: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A step failed.
    #[error("{step}: {reason}")]
    Failed {
        /// The step.
        step: String,
        /// The reason.
        reason: String,
    },
    /// A system call failed that a process of the program was to issue.
    #[error("system call {nr} in thread {tid}: {}", std::io::Error::from_raw_os_error(*errno))]
    Call {
        /// The thread.
        tid: i32,
        /// Number of the system call.
        nr: i64,
        /// Error number.
        errno: i32,
    },
    /// Too little memory is free.
    #[error("too little memory for a checkpoint: {0}")]
    NoMemory(String),
    /// The image could not be written.
    #[error(transparent)]
    Image(#[from] belay_image::ImageError),
    /// The memory could not be stored.
    #[error(transparent)]
    Storage(#[from] belay_storage::StorageError),
}

/// Most refusals that a message names.
const NAMED: usize = 8;

fn named(refusals: &[Refusal]) -> String {
    let mut out: Vec<String> = refusals.iter().take(NAMED).map(ToString::to_string).collect();
    if refusals.len() > NAMED {
        out.push(format!("and {} more", refusals.len() - NAMED));
    }
    out.join("; ")
}

impl CaptureError {
    pub(crate) fn system(step: impl Into<String>, source: std::io::Error) -> Self {
        CaptureError::System {
            step: step.into(),
            source,
        }
    }

    pub(crate) fn failed(step: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        CaptureError::Failed {
            step: step.into(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn refuse(pid: i32, object: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::refusal(pid, object.into(), reason.into(), false)
    }

    /// A refusal for a reason that passes by itself.
    pub(crate) fn refuse_for_now(pid: i32, object: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::refusal(pid, object.into(), reason.into(), true)
    }

    fn refusal(pid: i32, object: String, reason: String, passing: bool) -> Self {
        CaptureError::Refused(vec![Refusal {
            pid,
            object,
            reason,
            passing,
            damage: false,
        }])
    }
}
