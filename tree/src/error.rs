//! Why a tree cannot be had.

use std::path::PathBuf;

/// Why a tree cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The key file.
    #[error("job key {}: {source}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A system call.
    #[error("{0}: {1}")]
    System(&'static str, std::io::Error),
    /// The root did not take us.
    #[error("join the job at {0}: {1}")]
    Join(String, String),
    /// Others have not joined.
    #[error("wait until all other nodes have joined: {0}")]
    Absent(String),
}
