//! Descriptors and shared objects: a folder for each kind, a table of them (`kinds`), and the flows that go through it.
//!
//! [`capture`] runs in the agent while every process of the job is stopped and leaves the kernel's state as it found
//! it. In the restarted job the agent calls [`Rebuilder::rebuild`], forks the processes, and each of them calls the
//! rest in this order:
//!
//! ```text
//! agent       rebuild                     every description, shared object and System V object exists, data in flight is back
//! leader      install_session(pid)        right after setsid(): controlling terminals inside the job
//! process     install(pid, keep)          descriptors at their numbers, everything else closed
//!                                         (fork children first: they do the same)
//! thread      install(tid), install_late  as for a process, where the thread has another table than its process,
//!                                         and before that has laid out its own
//! process     install_late(pid)           when all processes exist: pidfds, /proc files, signal owners, foreground groups
//! agent       finish, gates               when all memory is mapped: write seals, removal of System V segments;
//!                                         control pages; then drop the Rebuilder
//! ```

#![forbid(unsafe_code)]

mod builder;
mod capture;
mod content;
mod cuda;
mod doors;
mod env;
mod epoll;
mod eventfd;
mod fault;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod gate;
mod group;
pub mod infiniband;
mod inotify;
mod inside;
mod install;
mod keep;
mod kind;
mod kinds;
mod launcher;
mod limit;
mod locks;
mod look;
mod model;
pub mod mpi;
mod mqueue;
mod perf;
mod pidfd;
mod pipes;
mod plausible;
mod rebuild;
mod rebuilder;
mod renamed;
mod seek;
mod session;
mod sets;
mod shm;
mod signalfd;
mod sockets;
mod state;
mod sys;
mod tables;
mod terminals;
#[doc(hidden)]
pub mod testing;
mod timerfd;

pub use content::{PageSink, PageSource};
pub use env::{CaptureEnv, LeftGpus, ProcessView, SharedMapping};
pub use fault::Refusal;
pub use files::path::tasks_of;
pub use files::sight::{Copies, Key, Sights, Stored};
pub use files::way::check_path;
pub use group::{Brought, Facts, Group};
pub use inside::{Inside, Registration, Renewed, Unreadable};
pub use keep::Fork;
pub use model::Descriptors;
pub use rebuilder::Rebuilder;
pub use sockets::names::{lead, Book, Names};

/// Captures all descriptors and shared objects. On return, the kernel's state is what it was before: the processes may go on.
pub fn capture(env: CaptureEnv<'_>) -> Result<Descriptors, Vec<Refusal>> {
    capture::capture(env)
}

/// Looks, before a restart begins and before it enters any namespace, at the files that it is going to open, write or
/// make by their paths: what another user may have put there since is refused. A file that is only read need not be
/// there where it is `stored`.
pub fn look(descriptors: &Descriptors, stored: &Stored<'_>) -> Result<Sights, Refusal> {
    files::way::look(descriptors, kinds::ways(descriptors), stored)
}
