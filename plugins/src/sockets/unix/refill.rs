//! Puts messages in flight back and brings the sockets to their final state.

use super::rebuild::{bind, connect, UnixBuild};
use super::{Message, Peer, UnixState};
use crate::fault::{refuse, At, Fault};
use crate::keep::Lent;
use crate::model::{DescId, Kind};
use crate::rebuild::Builder;
use crate::sockets::options::When;
use crate::sockets::send_buffer::Enlarged;
use crate::sys::sock::{self, Addr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const SHUT_READ: u8 = 1;
const SHUT_WRITE: u8 = 2;

/// Refills all queues, then connects datagram sockets, shuts down directions, closes peers outside the job and sets options.
pub(crate) fn refill(b: &Builder<'_>, build: UnixBuild) -> Result<(), (DescId, Fault)> {
    let sockets = |b: &Builder<'_>| -> Vec<(DescId, UnixState)> {
        let all = b.descriptors.descriptions.iter().enumerate();
        all.filter_map(|(id, d)| match &d.kind {
            Kind::Unix(u) => Some((id, u.clone())),
            _ => None,
        })
        .collect()
    };
    let all = sockets(b);
    for (id, u) in &all {
        for m in &u.queue {
            message(b, &build, &all, *id, u, m).map_err(|e| (*id, e))?;
        }
    }
    for (id, u) in &all {
        settle(b, &build, *id, u).map_err(|e| (*id, e))?;
    }
    drop(build.ends);
    Ok(())
}

/// Sends one message into the queue of `id`.
fn message(
    b: &Builder<'_>,
    build: &UnixBuild,
    all: &[(DescId, UnixState)],
    id: DescId,
    u: &UnixState,
    m: &Message,
) -> Result<(), Fault> {
    let data = b.blobs.get(&m.data)?;
    let carried: Vec<Lent> = m
        .fds
        .iter()
        .filter_map(|fd| b.lend(*fd).transpose())
        .collect::<Result<_, _>>()?;
    let fds: Vec<RawFd> = carried.iter().map(Lent::raw).collect();
    if fds.len() != m.fds.len() {
        return refuse("a descriptor in flight could not be rebuilt in time to be sent");
    }
    let other = match build.other_ends.get(&id) {
        Some(end) => build.ends.lend(*end)?,
        None => build.peers.get(&id).map_or(Ok(None), |p| b.lend(*p))?,
    };
    let other = other.as_ref().map(Lent::raw);
    if u.kind != libc::SOCK_DGRAM {
        return match other {
            Some(raw) => send_all(raw, &data, &fds, None, u.kind == libc::SOCK_STREAM),
            None => refuse("holds data, but has no peer to send it from"),
        };
    }
    let sender = sender(b, all, other, &m.from)?;
    let (raw, to) = match &sender {
        Sender::Peer(raw) => (*raw, None),
        Sender::Socket(own) => (own.raw(), Some(&u.name)),
        Sender::Temporary(fd) => (fd.as_raw_fd(), Some(&u.name)),
    };
    send_all(raw, &data, &fds, to, false)
}

enum Sender {
    Peer(RawFd),
    Socket(Lent),
    Temporary(OwnedFd),
}

/// The socket a datagram comes from: one of the job with that name, the peer, or one made for it.
fn sender(b: &Builder<'_>, all: &[(DescId, UnixState)], peer: Option<RawFd>, from: &Addr) -> Result<Sender, Fault> {
    if let Some(raw) = peer {
        if sock::local(raw).is_ok_and(|name| name.unix_name() == from.unix_name()) || from.is_unnamed() {
            return Ok(Sender::Peer(raw));
        }
    }
    let named = all
        .iter()
        .find(|(_, s)| !from.is_unnamed() && s.kind == libc::SOCK_DGRAM && s.name == *from);
    if let Some(own) = named.map_or(Ok(None), |(id, _)| b.lend(*id))? {
        return Ok(Sender::Socket(own));
    }
    let fd = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).at("socket")?;
    if from.unix_path().is_none() {
        // A sender that has gone is imitated; where its name is taken now, the datagram comes without one.
        let _ = bind(fd.as_raw_fd(), from, None);
    }
    Ok(Sender::Temporary(fd))
}

/// Sends a message whole, making the sender's buffer larger for the moment where needed.
fn send_all(raw: RawFd, data: &[u8], fds: &[RawFd], to: Option<&Addr>, stream: bool) -> Result<(), Fault> {
    let mut rest = data;
    let mut fds = fds;
    let mut grown = None;
    loop {
        match sock::send(raw, rest, fds, to) {
            Ok(n) if n == rest.len() => return Ok(()),
            Ok(n) if stream => {
                rest = &rest[n..];
                fds = &[];
            }
            Ok(n) => return refuse(format!("only {n} of {} bytes of a message could be put back", data.len())),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock) || e.raw_os_error() == Some(libc::EMSGSIZE) => {
                if grown.is_some() {
                    return Err(e).at("put a message in flight back");
                }
                grown = Some(Enlarged::new(raw));
            }
            Err(e) => return Err(e).at("put a message in flight back"),
        }
    }
}

/// Everything that must come after the data.
fn settle(b: &Builder<'_>, build: &UnixBuild, id: DescId, u: &UnixState) -> Result<(), Fault> {
    let Some(own) = b.lend(id)? else { return Ok(()) };
    let raw = own.raw();
    let by_name = u.kind == libc::SOCK_DGRAM && u.peer != Peer::None && !build.peers.contains_key(&id);
    if by_name && !build.other_ends.contains_key(&id) && !u.peer_name.is_unnamed() {
        // A peer outside the job (a log daemon, say) may be there again or not; without it sends fail as they do when it dies.
        let connected = connect(raw, &u.peer_name, u.file.as_ref());
        if let Err(error) = connected {
            tracing::warn!(%error, to = %u.peer_name, "could not connect a datagram socket again");
        }
    }
    for (bit, how) in [(SHUT_READ, libc::SHUT_RD), (SHUT_WRITE, libc::SHUT_WR)] {
        let with_peer = build.other_ends.contains_key(&id);
        if u.shutdown & bit != 0 && (!with_peer || u.kind == libc::SOCK_DGRAM || u.shutdown != SHUT_READ | SHUT_WRITE) {
            sock::shutdown(raw, how).at("shut a direction down")?;
        }
    }
    u.options.restore_buffers(raw);
    u.options.restore(raw, When::Late)
}
