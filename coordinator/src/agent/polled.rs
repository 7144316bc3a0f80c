//! What the agent's loop waits for, beside clients, readers of metrics and hosts that part.

use super::filling::Filled;
use super::Agent;
use std::os::fd::{AsRawFd, RawFd};

/// One of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Own {
    /// A signal.
    Signals,
    /// A client that connects.
    Listener,
    /// The next checkpoint is due.
    Interval,
    /// Clients hear of the progress.
    Tick,
    /// The time is over that a job has to end.
    Grace,
    /// The writer of a checkpoint has ended.
    Written,
    /// The front.
    Front,
    /// The other nodes.
    Nodes,
    /// It is time to look at the memory that is free.
    Watch,
    /// A flush has ended.
    Flushed,
    /// A flush is tried again.
    FlushAgain,
    /// A round of encoding has ended.
    Encoded,
    /// The process that fills memory later.
    Filler,
    /// What stands in for it.
    StandIn,
}

impl Agent {
    /// Their descriptors; -1 where there is none.
    pub(super) fn descriptors(&self) -> [(Own, RawFd); 14] {
        let [filler, stand_in] = self.filled.as_ref().map_or([-1; 2], Filled::descriptors);
        [
            (Own::Signals, self.signals.as_raw_fd()),
            (Own::Listener, self.listener.as_ref().map_or(-1, AsRawFd::as_raw_fd)),
            (Own::Interval, self.interval.as_raw_fd()),
            (Own::Tick, self.tick.as_raw_fd()),
            (Own::Grace, self.grace.as_raw_fd()),
            (Own::Written, self.done.as_raw_fd()),
            (Own::Front, self.channel.as_ref().map_or(-1, AsRawFd::as_raw_fd)),
            (Own::Nodes, self.nodes.as_ref().map_or(-1, AsRawFd::as_raw_fd)),
            (Own::Watch, self.watch.as_raw_fd()),
            (Own::Flushed, self.flush.done.as_raw_fd()),
            (Own::FlushAgain, self.flush.again.as_raw_fd()),
            (Own::Encoded, self.encoding.done.as_raw_fd()),
            (Own::Filler, filler),
            (Own::StandIn, stand_in),
        ]
    }
}
