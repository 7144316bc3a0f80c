//! What the thread that attends to the connections tells the rest of the program, and the bell that calls for attention.

use crate::message::{Failed, NodeInfo, Values};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What happens in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// At the root: a node has joined.
    Joined(NodeInfo),
    /// At the root: a node has ended in good order, and has said with which status word.
    Left(u64, i32),
    /// At the root: a node is gone.
    Lost(u64, String),
    /// At the root: what a node has to say.
    Said(u64, String),
    /// Everywhere but at the root: an order.
    Order(String),
    /// The root is gone and did not come back.
    RootLost(String),
}

/// A collective step that failed, somewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken(pub Vec<Failed>);

/// The result of a step as the service reports it.
pub(crate) type Released = (u64, Vec<Failed>, Values);

/// A descriptor that one thread makes readable for another.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> std::io::Result<Self> {
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned it, and nobody else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn ring(&self) {
        let one = 1u64;
        // SAFETY: the value is valid for reading. A counter that is full is as readable as it can be.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    pub(crate) fn silence(&self) {
        let mut count = 0u64;
        // SAFETY: `count` is valid for writing. Nothing to read is no failure.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
