//! TCP sockets: connections inside the job with data in flight both ways, listening sockets with connections that wait
//! to be accepted, connections to the outside (reset at restart), half-closed, connecting and unconnected sockets.

mod backlog;
mod capture;
mod connection;
mod drain;
mod info;
mod listening;
mod rebuild;
mod remote;
mod requeue;
mod said;
mod seen;
mod unread;

use super::names::{Book, Era, Names, Share, View};
use super::options::Options;
use crate::builder::Builder;
use crate::fault::{Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look};
use crate::model::{DescId, Descriptors};
use crate::session::Session;
use crate::state::Part;
use crate::sys::sock::{self, Addr};
use belay_image::blobs::BlobRef;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::RawFd;

pub(crate) use unread::token;
#[cfg(feature = "fuzzing")]
pub(crate) use {info::Counters, remote::Told, unread::Unread};

impl Part for Names {
    const KEY: &'static str = "names";
}

/// The kind. The addresses of the job belong to it as well: who connects later is led by them.
pub(crate) struct Tcp;

impl Kind for Tcp {
    const NAME: &'static str = "Tcp";
    const VERSION: u32 = 1;
    type State = TcpState;
    type Part = Names;

    fn recognise(look: &Look<'_>) -> bool {
        let of_internet = |family: &i32| [libc::AF_INET, libc::AF_INET6].contains(family);
        matches!(look, Look::Socket(family, libc::SOCK_STREAM, libc::IPPROTO_TCP) if of_internet(family))
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<TcpState, Fault> {
        capture::capture(s, seen.id, seen.raw())
    }

    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        let done = capture::finish(s, &mut out.descriptions);
        refusals.extend(done.err().map(|(holder, object, e)| e.of(holder.pid, object)));
    }

    /// Notes down for each socket when the program that holds it was started.
    fn contents(s: &mut Session<'_>, out: &mut Descriptors) -> Result<(), Refusal> {
        let stacks: HashMap<i32, u64> = s.processes.iter().map(|p| (p.pid, p.stack)).collect();
        let Some(names) = out.parts.get::<Names>() else {
            return Ok(());
        };
        for d in &mut out.descriptions {
            if let Some(t) = d.kind.get_mut::<TcpState>() {
                t.since = names.since(stacks.get(&d.holder.pid).copied().unwrap_or_default());
            }
        }
        Ok(())
    }

    fn check(t: &TcpState, d: &Descriptors) -> Result<(), String> {
        match t.role {
            Role::Pair(id) | Role::Waiting(id) => d.is_description(id),
            _ => Ok(()),
        }
    }

    fn join(b: &mut Builder<'_>) -> Result<(), Refusal> {
        rebuild::rebuild(b).map_err(|(id, e)| b.descriptors.refusal(id, &e))
    }

    nothing!(survey, check_part, numbers, ways, prepare, rebuild, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

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
    /// Ports from which that program connects, where they tell something.
    fn share(&self, book: Option<&Book>) -> Option<Share> {
        book?.share(View::Since(self.since))
    }
}

/// What a TCP socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Role {
    /// Not connected; bound where it has an address.
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
    /// An attempt to connect has been refused, which nobody has been told yet.
    Refused,
    /// An attempt to connect has failed, and somebody has asked about it.
    Failed,
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
            Role::Unconnected | Role::Listening(_) | Role::Refused | Role::Failed => false,
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
