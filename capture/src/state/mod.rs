//! What a stopped process is, besides its memory: what `/proc` and the process itself tell, and what is made right
//! before it is told.

pub(crate) mod calls;
pub(crate) mod draft;
pub(crate) mod frames;
pub(crate) mod histories;
pub(crate) mod landlock;
pub(crate) mod limits;
pub(crate) mod namespaces;
pub(crate) mod placements;
pub(crate) mod process;
pub(crate) mod remote;
pub(crate) mod rights;
pub(crate) mod rings;
pub(crate) mod sequences;
pub(crate) mod sharing;
pub(crate) mod threads;
pub(crate) mod undo;
pub(crate) mod wait;
pub(crate) mod waits;
pub(crate) mod witness;
