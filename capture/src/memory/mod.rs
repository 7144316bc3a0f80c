//! Memory of a job: what each mapping is, and how its pages come into the store.

pub(crate) mod code;
pub(crate) mod contents;
pub(crate) mod control;
pub(crate) mod copy;
pub(crate) mod family;
pub(crate) mod flags;
pub(crate) mod guards;
pub mod headroom;
pub(crate) mod held;
pub(crate) mod kin;
pub(crate) mod later;
pub(crate) mod looks;
pub(crate) mod mappings;
pub(crate) mod mlock;
pub(crate) mod reader;
pub(crate) mod snapshot;
pub(crate) mod tracking;
pub(crate) mod unchanged;
pub(crate) mod writing;
