//! Puts messages in flight back and brings the sockets to their final state.

use super::places::in_directory;
use super::rebuild::UnixBuild;
use super::{Message, Peer, UnixState};
use crate::builder::Builder;
use crate::fault::{refuse, At, Fault};
use crate::keep::Lent;
use crate::model::DescId;
use crate::sockets::options::When;
use crate::sockets::send_buffer::Enlarged;
use crate::sys::sock::{self, Addr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const SHUT_READ: u8 = 1;
const SHUT_WRITE: u8 = 2;

/// Refills all queues, then connects datagram sockets, shuts down directions, closes peers outside the job and sets options.
pub(super) fn refill(b: &Builder<'_>, build: UnixBuild) -> Result<(), (DescId, Fault)> {
    let all: Vec<(DescId, UnixState)> = b.descriptors.each().map(|(id, u)| (id, UnixState::clone(u))).collect();
    for (id, u) in &all {
        for m in &u.queue {
            message(b, &build, &all, *id, u, m).map_err(|e| (*id, e))?;
        }
    }
    for (id, u) in &all {
        settle(b, &build, &all, *id, u).map_err(|e| (*id, e))?;
    }
    drop(build.ends);
    // Nobody needs to connect through them any more.
    build.places.settle().map_err(|e| (all.first().map_or(0, |(id, _)| *id), e))?;
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
    let raw = match &sender {
        Sender::Peer(raw) => return send_all(*raw, &data, &fds, None, false),
        Sender::Socket(own) => own.raw(),
        Sender::Temporary(fd) => fd.as_raw_fd(),
    };
    let Some(own) = b.lend(id)? else { return Ok(()) };
    let mut sent = Ok(());
    let reached = build.places.reach(own.raw(), &u.name, |to| {
        sent = send_all(raw, &data, &fds, Some(to), false);
        Ok(())
    });
    reached.and(sent)
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
        let _ = sock::bind(fd.as_raw_fd(), from);
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
fn settle(b: &Builder<'_>, build: &UnixBuild, all: &[(DescId, UnixState)], id: DescId, u: &UnixState) -> Result<(), Fault> {
    let Some(own) = b.lend(id)? else { return Ok(()) };
    let raw = own.raw();
    let by_name = u.kind == libc::SOCK_DGRAM && u.peer != Peer::None && !build.peers.contains_key(&id);
    if by_name && !build.other_ends.contains_key(&id) && !u.peer_name.is_unnamed() {
        let own = all.iter().find(|(_, p)| u.peer == Peer::Inode(p.ino));
        let own = own.map_or(Ok(None), |(id, _)| b.lend(*id))?;
        let connected = match own {
            Some(peer) => build.places.reach(peer.raw(), &u.peer_name, |to| sock::connect(raw, to)),
            // A peer outside the job (a log daemon, say) may be there again or not; without it sends fail as they do when it dies.
            None => in_directory(u.file.as_ref().and_then(|f| f.cwd.as_ref()).map(|d| d.as_path()), || {
                sock::connect(raw, &u.peer_name)
            })
            .at("connect"),
        };
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
