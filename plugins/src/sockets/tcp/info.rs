//! The fields of `struct tcp_info` that matter here.

use crate::sys::sock;
use std::io;
use std::os::fd::RawFd;

/// What the kernel says about a TCP socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Info {
    /// `TCP_*` state.
    pub(super) state: u8,
    /// Of a listening socket: connections that wait to be accepted.
    pub(super) waiting: u32,
    /// Of a listening socket: backlog limit.
    pub(super) backlog: u32,
    /// Segments with data sent.
    pub(super) data_segments_sent: u32,
    /// Bytes received in order; a FIN counts as one.
    bytes_received: u64,
    /// Bytes written and never sent; a FIN counts as one.
    not_sent: u32,
    /// Bytes of data sent, retransmissions included.
    bytes_sent: u64,
    /// Bytes of data retransmitted.
    bytes_retransmitted: u64,
}

impl Info {
    /// Asks for it.
    pub(super) fn of(raw: RawFd) -> io::Result<Self> {
        const CLOSE: u8 = 7;
        let b = sock::get_bytes(raw, libc::IPPROTO_TCP, libc::TCP_INFO, 256)?;
        let word = |at: usize| b.get(at..at + 4).map_or(0, |w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Ok(Self {
            state: b.first().copied().unwrap_or(CLOSE),
            waiting: word(24),
            backlog: word(28),
            bytes_received: long(128),
            not_sent: word(144),
            data_segments_sent: word(156),
            bytes_sent: long(200),
            bytes_retransmitted: long(208),
        })
    }
}

/// Bytes of data that `sender` still holds and `receiver` has not received. (What the sender has not had acknowledged is no measure: an
/// acknowledgement may be delayed.) `fin_written` and `fin_received` say whether a FIN has been written and has arrived.
pub(super) fn undelivered(sender: RawFd, receiver: RawFd, fin_written: bool, fin_received: bool) -> io::Result<usize> {
    let (s, r) = (Info::of(sender)?, Info::of(receiver)?);
    let not_sent = u64::from(s.not_sent);
    let fin_held = u64::from(fin_written && not_sent > 0);
    let written = (s.bytes_sent - s.bytes_retransmitted) + not_sent - fin_held;
    let received = r.bytes_received - u64::from(fin_received);
    let left = written.checked_sub(received).ok_or_else(|| {
        io::Error::other(format!(
            "the counters do not agree: {written} bytes written, {received} received"
        ))
    })?;
    usize::try_from(left).map_err(io::Error::other)
}
