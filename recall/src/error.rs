//! What can go wrong with a history, and which number C sees.

use std::io;

/// Why a call has failed.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// Nobody has put it.
    #[error("version {0} is unknown")]
    Unknown(u64),
    /// It was dropped, or read for the last time.
    #[error("version {0} has been dropped")]
    Dropped(u64),
    /// It has been put and not been dropped.
    #[error("version {0} is there already")]
    Exists(u64),
    /// Its bytes are not those that were written.
    #[error("version {0} is damaged")]
    Damaged(u64),
    /// The parts are not those that it was put with.
    #[error("version {0} was put with other parts")]
    Parts(u64),
    /// An option or an argument makes no sense.
    #[error("{0}")]
    Invalid(&'static str),
    /// A history of this name is open.
    #[error("history {0} is open already")]
    InUse(String),
    /// Others can reach the directory of the history.
    #[error("the directory of history {0} is not this user's alone")]
    NotPrivate(String),
    /// There are versions that live otherwise.
    #[error(
        "history {name} has versions that {}: open it so, or remove {dir}",
        match until_read { true => "live until they are read", false => "last" }
    )]
    OtherLife {
        /// Its name,
        name: String,
        /// the directory that has them,
        dir: String,
        /// and how they live.
        until_read: bool,
    },
    /// There is no memory for regions that have bytes in common.
    #[error("no {0} bytes of memory to read a region into that has bytes in common with another")]
    Memory(usize),
    /// The history was opened by the parent of this process.
    #[error("the history belongs to another process")]
    Forked,
    /// The system has refused something.
    #[error("{what}: {why}")]
    Io {
        /// What,
        what: String,
        /// and why.
        why: io::Error,
    },
    /// A fault of this library.
    #[error("the planner refuses its own order: {0}")]
    Planner(String),
}

impl HistoryError {
    /// With what was being done.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |why| HistoryError::Io { what, why }
    }

    /// The number for C: positive.
    pub fn errno(&self) -> i32 {
        match self {
            HistoryError::Unknown(_) => libc::ENODATA,
            HistoryError::Dropped(_) => libc::ESTALE,
            HistoryError::Exists(_) => libc::EEXIST,
            HistoryError::Damaged(_) => libc::EBADMSG,
            HistoryError::Parts(_) => libc::EMSGSIZE,
            HistoryError::Invalid(_) => libc::EINVAL,
            HistoryError::InUse(_) => libc::EBUSY,
            HistoryError::NotPrivate(_) => libc::EPERM,
            HistoryError::OtherLife { .. } => libc::ENOTEMPTY,
            HistoryError::Memory(_) => libc::ENOMEM,
            HistoryError::Forked => libc::ECHILD,
            HistoryError::Io { why, .. } => why.raw_os_error().unwrap_or(libc::EIO),
            HistoryError::Planner(_) => libc::EIO,
        }
    }
}
