//! The ways to the descriptor tables of stopped processes.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The way to a descriptor table.
#[derive(Debug)]
pub(crate) struct Door<'a> {
    /// A task that has it.
    pub(crate) task: i32,
    pub(crate) pidfd: Pidfd<'a>,
}

/// The pidfd of a task.
#[derive(Debug)]
pub(crate) enum Pidfd<'a> {
    Process(BorrowedFd<'a>),
    Thread(OwnedFd),
}

impl Door<'_> {
    /// A pidfd of the task.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        match &self.pidfd {
            Pidfd::Process(fd) => *fd,
            Pidfd::Thread(fd) => fd.as_fd(),
        }
    }
}

/// The ways to all tables, by process and, where a thread is its first user, by that.
pub(crate) type Doors<'a> = HashMap<i32, Door<'a>>;
