//! The filling of a job's memory while it runs, as its agent sees it: see `pager`.

use crate::channel::{Channel, Message};
use crate::fail::{Outcome, RestartError};
use belay_kernel::{numbers, pidfd};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// How long the two processes may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The two processes that fill memory.
#[derive(Debug)]
pub struct Filling {
    channel: Channel,
    /// The one that stands by, and the one that fills.
    processes: [OwnedFd; 2],
    identifiers: [i32; 2],
    since: Instant,
}

impl Filling {
    /// Those with these identifiers, which are at the other end of `channel`, once they do their work.
    pub(crate) fn of(channel: Channel, identifiers: [i32; 2]) -> Outcome<Self> {
        let failed = |e| RestartError::at("fill memory", e);
        match channel.receive().map_err(failed)? {
            Some((Message::Hello, _)) => {}
            other => return Err(what_else(other.map(|(message, _)| message))),
        }
        let [guard, pager] = identifiers.map(pidfd::open);
        Ok(Self {
            channel,
            processes: [guard.map_err(failed)?, pager.map_err(failed)?],
            identifiers,
            since: Instant::now(),
        })
    }

    /// The process that stands by.
    pub(crate) fn stands_by(&self) -> i32 {
        self.identifiers[0]
    }

    /// All mappings are there: pages are put there for which nobody waits.
    pub(crate) fn goes_on(&self) {
        self.channel.send(&Message::Resumed);
    }

    /// Readable when there is something to see by [`Filling::end`].
    pub fn descriptors(&self) -> [RawFd; 2] {
        [self.channel.fd(), self.processes[0].as_raw_fd()]
    }

    /// Whether it is over: all is there and was whole, or why not. It has then stopped, and the job must end.
    pub fn end(&self) -> Option<Result<Duration, RestartError>> {
        let [channel, guard] = self.descriptors();
        let is_readable = |fd| numbers::poll(fd, libc::POLLIN, 0).is_ok_and(|events| events != 0);
        // Looked at first: what it has said comes before its end.
        let gone = is_readable(guard);
        if is_readable(channel) {
            return Some(match self.channel.receive() {
                Ok(Some((Message::Filled, _))) => Ok(self.since.elapsed()),
                other => Err(what_else(other.ok().flatten().map(|(message, _)| message))),
            });
        }
        gone.then(|| Err(what_else(None)))
    }

    /// Ends the two processes. What is missing then reads as zeros: nothing of the job may go on. So that does not come
    /// by itself when this is dropped: an agent that fails leaves them, and the job.
    pub fn give_up(self) {
        for process in &self.processes {
            // It may have ended by itself.
            let _ = pidfd::send_signal(process.as_fd(), libc::SIGKILL);
        }
        for process in &self.processes {
            pidfd::gone_within(process.as_fd(), END_LIMIT);
        }
    }
}

/// The failure of which a message tells that was not expected.
fn what_else(message: Option<Message>) -> RestartError {
    match message {
        Some(Message::Failed { kind, step, reason }) => Message::error(kind, step, reason),
        _ => RestartError::at("fill memory", "the process that stands by ended unexpectedly"),
    }
}
