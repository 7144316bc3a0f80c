//! TCP sockets: connections inside the job with data in flight both ways, listening sockets with connections that wait to be accepted,
//! connections to the outside (reset at restart), half-closed, connecting and unconnected sockets.

mod capture;
mod connection;
mod drain;
mod info;
mod listening;
mod rebuild;
mod remote;
mod requeue;
mod unread;

use super::names::{Book, Era, Share, View};
use super::options::Options;
use crate::model::DescId;
use crate::sys::sock::{self, Addr};
use belay_image::blobs::BlobRef;
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;

pub(crate) use capture::{capture, finish, TcpSet};
pub(crate) use rebuild::rebuild;
pub(crate) use remote::token;
#[cfg(feature = "fuzzing")]
pub(crate) use {info::Counters, remote::Told, unread::Unread};

/// A TCP socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TcpState {
    /// AF_INET or AF_INET6.
    family: i32,
    /// Its address.
    local: Addr,
    /// Its peer's.
    peer: Option<Addr>,
    /// What it is.
    role: Role,
    /// No more will be sent from here.
    sent_fin: bool,
    /// No more will be received here: the peer has said so, or this side has shut reading down.
    received_fin: bool,
    /// Received and not read, or sent by the other end and not yet received.
    received: Option<BlobRef>,
    /// For a connection that waits to be accepted: what it has sent already.
    early: Option<BlobRef>,
    /// Of a connection to another node: sent and not received there.
    #[serde(default)]
    unsent: Option<BlobRef>,
    /// When the program was started that holds it.
    #[serde(default)]
    since: Era,
    /// Options.
    options: Options,
}

impl TcpState {
    /// The description of the other end, or of the listening socket.
    pub(crate) fn refers_to(&self) -> Option<DescId> {
        match self.role {
            Role::Pair(id) | Role::Waiting(id) => Some(id),
            _ => None,
        }
    }

    /// It is held by a program that was started then.
    pub(crate) fn held_since(&mut self, era: Era) {
        self.since = era;
    }

    /// Ports from which that program connects, where they tell something.
    fn share(&self, book: Option<&Book>) -> Option<Share> {
        book?.share(View::Since(self.since))
    }
}

/// What a TCP socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Role {
    /// Not connected; bound where its address has a port.
    Unconnected,
    /// Listening, with this backlog limit.
    Listening(i32),
    /// Connected to another socket of the job.
    Pair(DescId),
    /// Connected to a socket of the job on another node.
    Remote,
    /// Connected, and waits to be accepted by the listening socket of the job.
    Waiting(DescId),
    /// A connection attempt is under way.
    Connecting,
    /// Connected; the other end has closed in good order.
    PeerClosed,
    /// Connected to a program outside the job, or already reset: reports ECONNRESET.
    Reset,
}

impl TcpState {
    /// Whether the rebuilt socket `made` is connected. An attempt that was under way may have succeeded at once.
    pub(crate) fn is_connected(&self, made: RawFd) -> bool {
        match self.role {
            Role::Pair(_) | Role::Waiting(_) | Role::PeerClosed | Role::Reset | Role::Remote => true,
            Role::Connecting => sock::peer(made).is_ok_and(|peer| peer.is_some()),
            Role::Unconnected | Role::Listening(_) => false,
        }
    }
}

/// Whether a socket has no connection, and none under way.
pub(crate) fn is_unconnected(raw: RawFd) -> std::io::Result<bool> {
    Ok(info::Info::of(raw)?.state == TCP_CLOSE)
}

/// State of a socket without connection.
const TCP_CLOSE: u8 = 7;
/// State of a listening socket in `struct tcp_info` and in socket diagnosis.
const TCP_LISTEN: u8 = 10;
