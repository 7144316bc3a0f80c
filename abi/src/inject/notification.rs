//! What the process is asked about its registration for notification.

use super::{Mark, Turn};

/// A registration for notification about a POSIX message queue (`mq_notify`). The kernel tells only by notifying what a
/// process will be told: so it is notified, and registers again. The queue is emptied and filled meanwhile, because a
/// message that returns to an empty queue would notify too.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NotificationTable {
    /// End of operation.
    pub mark: Mark,
    /// Its beginning and end for the other threads.
    pub turn: Turn,
    /// Address of the room for messages: `capacity` times a [`MessageHead`] with `stride - 16` bytes of text behind it.
    pub room: u64,
    /// See `room`.
    pub stride: u64,
    /// See `room`.
    pub capacity: u32,
    /// Largest message, bytes.
    pub message_bytes: u32,
    /// A descriptor of the queue in this process.
    pub queue: i32,
    /// `sigev_notify`; SIGEV_NONE in the end where the kernel has sent no signal (the registration is older than an exec).
    pub how: i32,
    /// `sigev_signo`.
    pub signo: i32,
    /// Number of entries of `sockets` in use.
    pub socket_count: u32,
    /// Netlink sockets of this process: one of them is told where `how` is SIGEV_THREAD.
    pub sockets: [i32; MAX_NOTIFIED],
    /// Which of them it is.
    pub socket: i32,
    /// One of `RENEW_*`.
    pub outcome: i32,
    /// Error number of the step that `outcome` names.
    pub error: i32,
    /// Messages received into the room.
    pub received: u32,
    /// Messages sent again.
    pub sent: u32,
    /// Padding.
    pub pad: u32,
    /// What the signal carries.
    pub value: u64,
    /// What the socket is sent.
    pub cookie: [u8; 32],
}

impl NotificationTable {
    /// This table with what `done`, read back from the process, answers: any process of the same user can have written
    /// there, so sizes and addresses stay those that were sent.
    #[must_use]
    pub fn answered(&self, done: &Self) -> Self {
        Self {
            mark: self.mark,
            room: self.room,
            stride: self.stride,
            capacity: self.capacity,
            message_bytes: self.message_bytes,
            queue: self.queue,
            received: done.received.min(self.capacity),
            sent: done.sent.min(self.capacity),
            ..*done
        }
    }
}

/// Most sockets in a [`NotificationTable`].
pub const MAX_NOTIFIED: usize = 16;
/// [`NotificationTable::outcome`]: done.
pub const RENEW_DONE: i32 = 0;
/// [`NotificationTable::outcome`]: nothing was touched, because the same signal is pending, or a socket holds something already.
pub const RENEW_NOT_NOW: i32 = 1;
/// [`NotificationTable::outcome`]: nothing was touched, because the queue cannot be read and written.
pub const RENEW_NO_ACCESS: i32 = 2;
/// [`NotificationTable::outcome`]: the process could not register again.
pub const RENEW_LOST: i32 = 3;
/// [`NotificationTable::outcome`]: nothing was touched, because a signal with a value cannot be queued.
pub const RENEW_NO_ROOM: i32 = 4;
/// [`NotificationTable::outcome`]: the message that was to tell went to a receiver. The process is registered as
/// before, as long as `error` is 0; with the value 0 where it is not.
pub const RENEW_TAKEN: i32 = 5;

/// A message in the room of a [`NotificationTable`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MessageHead {
    pub bytes: u64,
    pub priority: u32,
    pub pad: u32,
}
