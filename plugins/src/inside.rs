//! What only the stopped processes themselves can do, with code that is put into them.

use crate::fault::Refusal;
use std::os::fd::RawFd;

/// What a stopped process can be made to do, without a trace in it afterwards.
pub trait Inside: std::fmt::Debug {
    /// Finds out what a process has registered for with `mq_notify`, and reads the queue. The registration is there
    /// afterwards, as the messages are.
    fn renew(&mut self, registration: &Registration) -> Result<Renewed, Refusal>;

    /// What process `pid` has noted down, to be carried out when it ends (SEM_UNDO), for semaphores of `set`, whose
    /// values these are.
    fn undo(&mut self, pid: i32, set: i32, values: &[u16]) -> Result<Vec<(u16, i16)>, Unreadable>;

    /// For each page of the `bytes` bytes at `address` in the memory of `task`'s process, bit 0: whether the mapped
    /// object has that page (`mincore`), in memory.
    fn resident(&mut self, task: i32, address: u64, bytes: u64) -> std::io::Result<Vec<u8>>;
}

/// Why [`Inside::undo`] has found out nothing.
#[derive(Debug, Clone)]
pub enum Unreadable {
    /// The process may not do what tells it.
    Forbidden(String),
    /// A step failed.
    Failed(String),
}

/// A registration for notification about a POSIX message queue, as the kernel shows it.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The process to be notified.
    pub pid: i32,
    /// A descriptor of the queue in that process.
    pub queue: RawFd,
    /// `sigev_notify`.
    pub how: i32,
    /// `sigev_signo`.
    pub signal: i32,
    /// Most messages in the queue.
    pub capacity: u32,
    /// Largest message, bytes.
    pub message_bytes: u32,
    /// Netlink sockets of the process.
    pub sockets: Vec<RawFd>,
}

/// What [`Inside::renew`] has found out.
#[derive(Debug, Clone)]
pub struct Renewed {
    /// `sigev_notify` as it takes effect.
    pub how: i32,
    /// What the signal carries.
    pub value: u64,
    /// The socket that is told, and what it is sent.
    pub socket: RawFd,
    /// See `socket`.
    pub cookie: Vec<u8>,
    /// (priority, text), in the order in which they will be received.
    pub messages: Vec<(u32, Vec<u8>)>,
    /// How many of them, the last ones, are not in the queue again, because a program outside the job has filled it.
    pub unsent: usize,
}
