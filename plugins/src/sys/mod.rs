//! The system calls this crate makes, with Rust types. Decisions are made by the callers.

pub(crate) mod diag;
pub(crate) mod fd;
pub(crate) mod fdinfo;
pub(crate) mod sock;
pub(crate) mod view;
