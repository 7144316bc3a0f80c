//! Puts messages in flight back and brings the sockets to their final state.

use super::caller::call_as;
use super::gate::Gate;
use super::places::address;
use super::rebuild::{Socket, UnixBuild};
use super::{BoundFile, Message, Peer, UnixState};
use crate::builder::Builder;
use crate::fault::{refuse, At, Fault};
use crate::files::Seen;
use crate::keep::Lent;
use crate::model::DescId;
use crate::sockets::options::When;
use crate::sockets::send_buffer::Enlarged;
use crate::sys::sock::{self, Addr};
use rustix::net::Shutdown;
use rustix::process::{getegid, geteuid};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const SHUT_READ: u8 = 1;
const SHUT_WRITE: u8 = 2;

/// Refills all queues, then shuts down directions, closes peers outside the job and sets options. A datagram socket is
/// connected when what it had received from others is back: from then on they may not send to it, while its peer may
/// send as much as it likes. Returns the files of bound sockets.
pub(super) fn refill(b: &Builder<'_>, build: UnixBuild) -> Result<Vec<Seen>, (DescId, Fault)> {
    let all: Vec<(DescId, UnixState)> = b.descriptors.each().map(|(id, u)| (id, UnixState::clone(u))).collect();
    let job = Job { b, build, all: &all };
    let strangers = |at: usize| job.strangers(at).map_err(|e| (all[at].0, e));
    let strangers = (0..all.len()).map(strangers).collect::<Result<Vec<_>, _>>()?;
    for ((id, u), strangers) in all.iter().zip(&strangers) {
        let mut from_others = u.queue[..*strangers].iter();
        from_others
            .try_for_each(|m| job.message(*id, u, m, false))
            .map_err(|e| (*id, e))?;
    }
    for (id, u) in in_order(&all) {
        job.connect(*id, u).map_err(|e| (*id, e))?;
    }
    for ((id, u), strangers) in all.iter().zip(&strangers) {
        let mut from_peer = u.queue[*strangers..].iter();
        from_peer
            .try_for_each(|m| job.message(*id, u, m, true))
            .map_err(|e| (*id, e))?;
    }
    for (id, u) in &all {
        job.settle(*id, u).map_err(|e| (*id, e))?;
    }
    let build = job.build;
    drop(build.ends);
    // Nobody needs to connect through them any more.
    build.places.settle().map_err(|e| (all.first().map_or(0, |(id, _)| *id), e))?;
    Ok(build.places.files())
}

/// Those that are connected to a socket before it: it can have a peer by now that lets nobody else send to it.
fn in_order(all: &[Socket]) -> Vec<&Socket> {
    let mut to: HashMap<u32, Vec<usize>> = HashMap::new();
    for (at, (_, u)) in all.iter().enumerate() {
        if let Peer::Inode(ino) = u.peer {
            to.entry(ino).or_default().push(at);
        }
    }
    let (mut out, mut seen) = (Vec::new(), vec![false; all.len()]);
    let mut next: Vec<(usize, bool)> = (0..all.len()).map(|at| (at, false)).collect();
    while let Some((at, is_last)) = next.pop() {
        if is_last {
            out.push(&all[at]);
        } else if !std::mem::replace(&mut seen[at], true) {
            next.push((at, true));
            next.extend(to.get(&all[at].1.ino).into_iter().flatten().map(|at| (*at, false)));
        }
    }
    out
}

/// What the refill works on.
struct Job<'a, 'b> {
    b: &'a Builder<'b>,
    build: UnixBuild,
    all: &'a [Socket],
}

impl Job<'_, '_> {
    /// How many of the messages at the beginning of the queue of socket `at` of all have to be there before it has its peer.
    fn strangers(&self, at: usize) -> Result<usize, Fault> {
        let (id, u) = &self.all[at];
        // What it had before, it has lost when it was connected.
        if self.build.feeders.values().any(|feeder| feeder == id) {
            return Ok(0);
        }
        if !self.is_connected_by_name(*id, u) {
            return Ok(0);
        }
        let imitated = match self.build.other_ends.get(id) {
            Some(end) => self.build.ends.lend(*end)?,
            None => None,
        };
        let peer = match imitated {
            Some(end) => Some(sock::local(end.raw()).at("read a name")?),
            None => self.peer(u).map(|(_, p)| p.name.clone()),
        };
        let from_peer = |m: &Message| !m.from.is_unnamed() && m.from == u.peer_name && peer.as_ref() == Some(&m.from);
        Ok(u.queue.iter().rposition(|m| !from_peer(m)).map_or(0, |last| last + 1))
    }

    /// Whether it is a datagram socket that is not one of a pair.
    fn is_connected_by_name(&self, id: DescId, u: &UnixState) -> bool {
        let paired = u.name.is_unnamed() || u.peer_name.is_unnamed();
        u.kind == libc::SOCK_DGRAM && !self.build.peers.contains_key(&id) && !(paired && self.build.other_ends.contains_key(&id))
    }

    /// Its peer in the job.
    fn peer(&self, u: &UnixState) -> Option<&Socket> {
        self.all.iter().find(|(_, p)| u.peer == Peer::Inode(p.ino))
    }

    /// Sends one message into the queue of `id`, which has its peer if it is `connected`.
    fn message(&self, id: DescId, u: &UnixState, m: &Message, connected: bool) -> Result<(), Fault> {
        let (b, build) = (self.b, &self.build);
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
        let other = match build.other_ends.get(&id).filter(|_| connected) {
            Some(end) => build.ends.lend(*end)?,
            None => {
                let peer = build.peers.get(&id).or_else(|| build.feeders.get(&id));
                peer.map_or(Ok(None), |p| b.lend(*p))?
            }
        };
        let other = other.as_ref().map(Lent::raw);
        if u.kind != libc::SOCK_DGRAM {
            return match other {
                Some(raw) => send_all(raw, &data, (&fds, m.whose), None, u.kind == libc::SOCK_STREAM),
                None => refuse("holds data, but has no peer to send it from"),
            };
        }
        let sender = self.sender(u, other, &m.from)?;
        let Some(own) = b.lend(id)? else { return Ok(()) };
        if u.can_be_sent_to() {
            Gate::open_for(own.raw(), &data)?;
        }
        let send = |raw, to: Option<&Addr>| send_all(raw, &data, (&fds, m.whose), to, false);
        let to_own = |raw| {
            let mut sent = Ok(());
            let reached = build.places.reach(own.raw(), &u.name, |to| {
                sent = send(raw, Some(to));
                Ok(())
            });
            reached.and(sent)
        };
        let sent = match &sender {
            Sender::Peer(raw) => send(*raw, None),
            Sender::Socket(own) => to_own(own.raw()),
            Sender::Temporary(fd) => to_own(fd.as_raw_fd()),
        };
        if u.can_be_sent_to() {
            Gate::close(own.raw())?;
        }
        sent
    }

    /// The socket a datagram for `u` comes from: its peer, one of the job with that name, or one made for it.
    fn sender(&self, u: &UnixState, peer: Option<RawFd>, from: &Addr) -> Result<Sender, Fault> {
        if let Some(raw) = peer {
            if sock::local(raw).is_ok_and(|name| name.unix_name() == from.unix_name()) || from.is_unnamed() {
                return Ok(Sender::Peer(raw));
            }
        }
        let is_it = |s: &&Socket| !from.is_unnamed() && s.1.kind == libc::SOCK_DGRAM && s.1.name == *from;
        // Several can have been bound to one name.
        let named = self.peer(u).filter(is_it).or_else(|| self.all.iter().find(is_it));
        if let Some(own) = named.map_or(Ok(None), |(id, _)| self.b.lend(*id))? {
            return Ok(Sender::Socket(own));
        }
        let fd = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).at("socket")?;
        // A sender that has gone is imitated; where its name cannot be had, the datagram comes without one.
        let named = match from.unix_path() {
            Some(path) => self
                .build
                .places
                .bind_apart(fd.as_raw_fd(), from, &path, &BoundFile::default()),
            None => sock::bind(fd.as_raw_fd(), from).at("bind"),
        };
        if let Err(error) = named {
            tracing::debug!(%error, %from, "the name of a sender that is gone cannot be had");
        }
        Ok(Sender::Temporary(fd))
    }

    /// Connects a datagram socket, where that has not been done when it was made.
    fn connect(&self, id: DescId, u: &UnixState) -> Result<(), Fault> {
        let Some(own) = self.b.lend(id)? else { return Ok(()) };
        if u.peer == Peer::None || u.peer_name.is_unnamed() || !self.is_connected_by_name(id, u) {
            return Ok(());
        }
        let (raw, places) = (own.raw(), &self.build.places);
        let end = match self.build.other_ends.get(&id) {
            Some(end) => self.build.ends.lend(*end)?,
            None => None,
        };
        if let Some(end) = end {
            let name = sock::local(end.raw()).at("read a name")?;
            places.reach(end.raw(), &name, |to| sock::connect(raw, to))?;
            return places.reach(raw, &u.name, |to| sock::connect(end.raw(), to));
        }
        let peer = self.peer(u).map_or(Ok(None), |(id, _)| self.b.lend(*id))?;
        let connected = match peer {
            Some(peer) => places.reach(peer.raw(), &u.peer_name, |to| sock::connect(raw, to)),
            None => self.outside(raw, u),
        };
        if let Err(error) = connected {
            tracing::warn!(%error, to = %u.peer_name, "could not connect a datagram socket again");
        }
        Ok(())
    }

    /// Connects it to a peer outside the job (a log daemon, say), which may be there again or not; without it sends fail
    /// as they do when it dies.
    fn outside(&self, raw: RawFd, u: &UnixState) -> Result<(), Fault> {
        let Some((path, _)) = u.peer_place() else {
            return sock::connect(raw, &u.peer_name).at("connect");
        };
        let found = self.b.sights.answerer(&path)?;
        sock::connect(raw, &address(&found)).at("connect")
    }

    /// Everything that must come after the data.
    fn settle(&self, id: DescId, u: &UnixState) -> Result<(), Fault> {
        let Some(own) = self.b.lend(id)? else { return Ok(()) };
        let raw = own.raw();
        if let Some((backlog, _)) = &u.listening {
            let backlog = i32::try_from(*backlog).unwrap_or(i32::MAX);
            call_as(u.caller.as_ref(), true, || sock::listen(raw, backlog)).at("listen")?;
        }
        if u.can_be_sent_to() {
            Gate::remove(raw)?;
        }
        if self.build.feeders.contains_key(&id) {
            // That the other end has left it is told as an error, which it has been told before.
            sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_ERROR).at("take an error")?;
        }
        let with_peer = self.build.other_ends.contains_key(&id);
        if u.reset && with_peer && u.kind != libc::SOCK_DGRAM {
            // Its other end is going to be closed with this unread.
            sock::send(raw, &[0], &[], None).at("send to an end that is closed")?;
        }
        for (bit, how) in [(SHUT_READ, Shutdown::Read), (SHUT_WRITE, Shutdown::Write)] {
            if u.shutdown & bit != 0 && (!with_peer || u.kind == libc::SOCK_DGRAM || u.shutdown != SHUT_READ | SHUT_WRITE) {
                sock::shutdown(raw, how).at("shut a direction down")?;
            }
        }
        u.options.restore_buffers(raw);
        u.options.restore(raw, When::Late)
    }
}

enum Sender {
    Peer(RawFd),
    Socket(Lent),
    Temporary(OwnedFd),
}

/// A sender of this user and group. There is no process yet but this one.
fn agent_as((uid, gid): (u32, u32)) -> libc::ucred {
    libc::ucred {
        pid: std::process::id().cast_signed(),
        uid,
        gid,
    }
}

/// Sends a message whole, making the sender's buffer larger for the moment where needed.
fn send_all(
    raw: RawFd,
    data: &[u8],
    (fds, whose): (&[RawFd], Option<(u32, u32)>),
    to: Option<&Addr>,
    stream: bool,
) -> Result<(), Fault> {
    let mut rest = data;
    let mut fds = fds;
    let mut creds = whose.map(agent_as);
    let mut named = whose.is_some();
    let mut grown = None;
    loop {
        match sock::send_as(raw, rest, (fds, creds), to) {
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
            // It is told as the agent's own where nobody else's can be named.
            Err(e) if named && matches!(e.raw_os_error(), Some(libc::EPERM | libc::EINVAL)) => {
                named = false;
                creds = Some(agent_as((geteuid().as_raw(), getegid().as_raw())));
            }
            Err(e) => return Err(e).at("put a message in flight back"),
        }
    }
}
