//! A TCP socket as the kernel lists it, and the states of TCP.

use super::{TcpState, TCP_CLOSE, TCP_LISTEN};
use crate::model::{DescId, Description};
use crate::sys::sock::Addr;

pub(super) const ESTABLISHED: u8 = 1;
pub(super) const SYN_SENT: u8 = 2;
pub(super) const FIN_WAIT1: u8 = 4;
pub(super) const FIN_WAIT2: u8 = 5;
pub(super) const CLOSE_WAIT: u8 = 8;
pub(super) const LAST_ACK: u8 = 9;
pub(super) const CLOSING: u8 = 11;

/// A socket whose connection has not been looked at yet.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) id: DescId,
    pub(super) state: u8,
    pub(super) local: Addr,
    pub(super) peer: Option<Addr>,
    pub(super) data_segments_sent: u32,
    /// Of a listening socket: connections that wait to be accepted.
    pub(super) waiting: u32,
}

impl Seen {
    /// Whether there is no connection.
    pub(super) fn is_unconnected(&self) -> bool {
        matches!(self.state, SYN_SENT | TCP_CLOSE | TCP_LISTEN)
    }

    /// Whether the peer has said that it will send no more.
    pub(super) fn is_closed_by_peer(&self) -> bool {
        closed_by_peer(self.state)
    }
}

/// Whether the peer of a connection in this state has said that it will send no more.
pub(super) fn closed_by_peer(state: u8) -> bool {
    matches!(state, CLOSE_WAIT | LAST_ACK | CLOSING)
}

/// Whether it is a TCP socket that sends no more.
pub(super) fn has_sent_fin(d: &Description) -> bool {
    d.kind.get::<TcpState>().is_some_and(|t| t.sent_fin)
}
