//! The restart flow: namespace, process tree, descriptors, memory, threads, resume.

use std::path::{Path, PathBuf};

/// Choices for a restart.
#[derive(Debug, Clone)]
pub struct Options {
    /// Map page files and read pages on demand instead of reading them before the first instruction.
    pub lazy: bool,
    /// The restorer program's file.
    pub restorer: PathBuf,
}

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
    /// The image cannot be used.
    #[error(transparent)]
    Image(#[from] belay_image::ImageError),
}

/// What the agent of the restarted job learns.
#[derive(Debug, Clone, Copy)]
pub struct Restored {
    /// PID of the launched command.
    pub root_pid: i32,
}

/// Restarts the generation in `dir`. Call from the single-threaded front process. Makes the namespaces, their PID 1 and, inside, the agent, which
/// rebuilds the job, lets it go on, and then runs `agent_main`, whose result (a wait status word) becomes the result of this call in the front process.
/// The front process forwards terminal job control and termination signals meanwhile.
pub fn restart(_dir: &Path, _options: &Options, _agent_main: &mut dyn FnMut(Restored) -> i32) -> Result<i32, RestartError> {
    Err(RestartError::Failed {
        step: "restart".into(),
        reason: "not built".into(),
    })
}
