//! What the thread that attends to the connections tells the rest of the program, and the bell that calls for attention.

use crate::message::{Failed, NodeInfo, Values};
use rustix::event::{eventfd, EventfdFlags};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

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
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn ring(&self) {
        // A counter that is full is as readable as it can be.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        // Nothing to read is no failure.
        let _ = rustix::io::read(&self.0, &mut [0u8; 8][..]);
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
