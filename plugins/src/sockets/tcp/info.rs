//! The fields of `struct tcp_info` that matter here.

use crate::fault::{not_now, At, Fault};
use crate::sys::{fd, sock};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::RawFd;

/// What the kernel says about a TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Info {
    /// `TCP_*` state.
    pub(super) state: u8,
    /// Of a listening socket: connections that wait to be accepted.
    pub(super) waiting: u32,
    /// Of a listening socket: backlog limit.
    pub(super) backlog: u32,
    /// Segments with data sent.
    pub(super) data_segments_sent: u32,
    /// Bytes acknowledged by the peer; a FIN counts as one, and so does the SYN of the end that connected.
    bytes_acknowledged: u64,
    /// Bytes received in order; a FIN counts as one.
    bytes_received: u64,
    /// Bytes written and never sent; a FIN counts as one.
    not_sent: u32,
    /// Bytes of data sent, retransmissions included.
    bytes_sent: u64,
    /// Bytes of data retransmitted.
    bytes_retransmitted: u64,
    /// Segments sent and received.
    segments: (u32, u32),
    /// Room that the peer has announced; the first word is the smoothed round-trip time.
    window: (u32, u32),
}

/// Why a socket has no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// Nothing has been tried.
    Untried,
    /// It was refused by an answer.
    Refused,
    /// Without any answer: in time, or by what is on the way.
    Unanswered,
}

impl Info {
    /// Asks for it.
    pub(super) fn of(raw: RawFd) -> io::Result<Self> {
        let b = sock::get_bytes(raw, libc::IPPROTO_TCP, libc::TCP_INFO, 256)?;
        let word = |at: usize| b.get(at..at + 4).map_or(0, |w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Ok(Self {
            state: b.first().copied().unwrap_or(super::TCP_CLOSE),
            waiting: word(24),
            backlog: word(28),
            bytes_acknowledged: long(120),
            bytes_received: long(128),
            not_sent: word(144),
            data_segments_sent: word(156),
            bytes_sent: long(200),
            bytes_retransmitted: long(208),
            segments: (word(136), word(140)),
            window: (word(68), word(228)),
        })
    }

    /// Why a socket without connection never had one, if it did not. Who connects has
    /// its SYN acknowledged, who accepts has heard of a window.
    pub(super) fn failure(&self) -> Option<Failure> {
        let never = self.bytes_acknowledged == 0 && self.bytes_received == 0 && self.window == (0, 0);
        never.then_some(match self.segments {
            (0, _) => Failure::Untried,
            (_, 0) => Failure::Unanswered,
            _ => Failure::Refused,
        })
    }
}

/// One end of a connection, for [`undelivered`].
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// Its socket.
    pub(super) raw: RawFd,
    /// It has shut writing down.
    pub(super) closing: bool,
}

impl End {
    /// What the kernel counts, and the bytes in the send queue, all of one moment. The kernel is asked several times
    /// for that, between which segments may come; since the program is stopped, there is an end to them.
    fn settled(self) -> io::Result<(Info, i32)> {
        let mut before = Info::of(self.raw)?;
        loop {
            let queued = fd::unsent_bytes(self.raw)?;
            let info = Info::of(self.raw)?;
            if info == before {
                return Ok((info, queued));
            }
            before = info;
        }
    }

    /// Whether this end counts the SYN (the one that connected does) among the bytes that it has `counted`, if the
    /// counters tell: bytes sent do not contain it, but may contain attempts that failed.
    fn counts_syn(self, info: &Info, counted: i64) -> io::Result<Option<bool>> {
        let fin_held = i64::from(self.closing && info.not_sent > 0);
        let sent = i64::try_from(info.bytes_sent).map_err(io::Error::other)?;
        let again = i64::try_from(info.bytes_retransmitted).map_err(io::Error::other)?;
        let written = sent - again + i64::from(info.not_sent) - fin_held;
        Ok(match counted - written {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        })
    }
}

/// What one end says of its connection; both ends together tell what is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Bytes of data written, once with the connection's SYN where this end counts it.
    pub(super) counted: i64,
    /// Whether this end counts the SYN, if that is known.
    pub(super) syn: Option<bool>,
    /// Bytes of data received.
    pub(super) received: i64,
}

impl Counters {
    /// Reads them.
    pub(super) fn of(end: End) -> io::Result<Self> {
        let (info, queued) = end.settled()?;
        let count = |n: u64| i64::try_from(n).map_err(io::Error::other);
        let counted = count(info.bytes_acknowledged)? + i64::from(queued) - i64::from(end.closing);
        Ok(Self {
            counted,
            syn: end.counts_syn(&info, counted)?,
            received: count(info.bytes_received)? - i64::from(super::seen::closed_by_peer(info.state)),
        })
    }

    /// Bytes of data that this end still holds and `to` has not received. (What the sender has not had acknowledged is
    /// no measure: an acknowledgement may be delayed.)
    pub(crate) fn undelivered(&self, to: &Self) -> Result<usize, Fault> {
        let syn = match (self.syn, to.syn) {
            (Some(syn), _) => syn,
            (None, Some(other)) => !other,
            (None, None) => return not_now("its counters do not agree"),
        };
        // Another node's counters may say anything.
        let sent = self.counted.checked_sub(i64::from(syn));
        let left = sent.and_then(|sent| usize::try_from(sent.checked_sub(to.received)?).ok());
        left.map_or_else(|| not_now("more has been received than was sent, by its counters"), Ok)
    }
}

/// Bytes of data that `from` still holds and `to` has not received.
pub(super) fn undelivered(from: End, to: End) -> Result<usize, Fault> {
    let of = |end| Counters::of(end).at("count what is on its way");
    of(from)?.undelivered(&of(to)?)
}
