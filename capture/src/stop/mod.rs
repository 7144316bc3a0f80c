//! Stopping a job and letting it go on: every task is found, seized and stopped, and led back.

pub(crate) mod gather;
pub(crate) mod listing;
pub(crate) mod reaper;
pub(crate) mod resume;
pub(crate) mod signals;
pub(crate) mod stopped;
pub(crate) mod tracers;
pub(crate) mod vfork;
