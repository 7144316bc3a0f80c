//! The checkpoint flow: suspend, capture, snapshot, resume, write.

use belay_image::manifest::FileEntry;
use belay_wire::Phase;
use std::path::Path;
use std::time::Duration;

/// Choices for one checkpoint.
#[derive(Debug, Clone)]
pub struct Options {
    /// Save the contents of every open regular file.
    pub save_open_files: bool,
    /// Number of writer threads per process snapshot.
    pub writers: u32,
}

/// Why a checkpoint failed. The application goes on undisturbed.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// Something cannot be checkpointed.
    #[error("cannot checkpoint: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused(Vec<belay_plugins::Refusal>),
    /// A step failed.
    #[error("{step}: {reason}")]
    Failed {
        /// The step.
        step: String,
        /// The reason.
        reason: String,
    },
    /// The image could not be written.
    #[error(transparent)]
    Image(#[from] belay_image::ImageError),
}

/// What has been captured while the application was stopped, and the snapshot processes still to be written.
#[derive(Debug)]
pub struct Snapshot {
    /// Time from the first stop to the last resume.
    pub blocked: Duration,
    /// Duration of each phase so far.
    pub phases: Vec<(Phase, Duration)>,
    /// Number of live processes.
    pub processes: u32,
    /// Number of threads.
    pub threads: u32,
}

/// Stops every descendant of the calling process, captures its state into `dir` (which exists and is empty), takes snapshots and lets the
/// processes go on. Call from the agent's main thread. `on_phase` is called at the start of each phase.
pub fn capture(
    _root_pid: i32,
    _dir: &Path,
    _options: &Options,
    _on_phase: &mut dyn FnMut(Phase),
) -> Result<Snapshot, CaptureError> {
    Err(CaptureError::Failed {
        step: "capture".into(),
        reason: "not built".into(),
    })
}

impl Snapshot {
    /// Writes the snapshots; may run on any thread. `progress` receives (bytes written, bytes expected). Returns the files of the generation,
    /// all of them synced to the device.
    pub fn write(self, _progress: &dyn Fn(u64, u64)) -> Result<Vec<FileEntry>, CaptureError> {
        Ok(Vec::new())
    }
}
