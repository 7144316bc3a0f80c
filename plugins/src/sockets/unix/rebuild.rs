//! Makes `AF_UNIX` sockets again: listening ones, connected pairs, then connections that wait to be accepted.
//!
//! A socket that was accepted has its listener's name, and two sockets cannot be bound to one name; so such a pair is
//! made as it was made first: by connecting to a listener of that name, the job's own or one made for the moment. Pairs
//! without names come from `socketpair`.
//!
//! Others can reach a socket as soon as it has its name. Who connects to a listener while it is used here is turned
//! away, and what is sent to datagram sockets falls through a filter ([`Gate`]) until their queues are back.

use super::caller::{call_as, Caller};
use super::gate::Gate;
use super::places::Places;
use super::{BoundFile, Peer, UnixState};
use crate::builder::Builder;
use crate::fault::{refuse, At, Fault};
use crate::keep::{HoldId, Store};
use crate::limit::RaisedLimit;
use crate::model::DescId;
use crate::sockets::options::When;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// While connections are made, as many may wait as the system lets.
const ROOM: i32 = i32::MAX;

/// How long those who keep the queue of a listener full are turned away.
const PATIENCE: Duration = Duration::from_secs(10);

/// A socket of the job.
pub(super) type Socket = (DescId, UnixState);

/// What the refill needs beside the sockets themselves.
#[derive(Debug)]
pub(super) struct UnixBuild {
    /// For a socket whose peer is not in the job: the other end, closed after the refill.
    pub(super) other_ends: HashMap<DescId, HoldId>,
    /// These.
    pub(super) ends: Store,
    /// For a connected socket: the description at the other end, where messages for it can be sent from without address.
    pub(super) peers: HashMap<DescId, DescId>,
    /// For a socket without name, the one that was its peer in a pair, and that is going to be connected elsewhere: the
    /// only one that can send to it.
    pub(super) feeders: HashMap<DescId, DescId>,
    /// The files of bound sockets.
    pub(super) places: Places,
}

/// Makes all `AF_UNIX` sockets of the job.
pub(super) fn rebuild(b: &mut Builder<'_>) -> Result<UnixBuild, (DescId, Fault)> {
    let all: Vec<Socket> = b.descriptors.each().map(|(id, u)| (id, UnixState::clone(u))).collect();
    let by_ino: HashMap<u32, usize> = all.iter().enumerate().map(|(at, (_, u))| (u.ino, at)).collect();
    let mut waiting: HashMap<u32, usize> = HashMap::new();
    let mut build = UnixBuild {
        other_ends: HashMap::new(),
        ends: Store::new(0, RaisedLimit::highest()),
        peers: HashMap::new(),
        feeders: HashMap::new(),
        places: Places::new(b.sights.clone()),
    };
    let listening: Vec<&Socket> = all.iter().filter(|(_, l)| l.listening.is_some()).collect();
    for (at, (id, u)) in all.iter().enumerate() {
        if let Some((_, clients)) = &u.listening {
            let fd = listener(&build.places, u, u.caller.as_ref()).map_err(|e| (*id, e))?;
            b.put(*id, fd).map_err(|e| (*id, e))?;
            waiting.extend(clients.iter().map(|c| (*c, at)));
        }
    }
    for (id, u) in &all {
        let from = one_sided(&all, &by_ino, u).filter(|(a, _)| !b.has(*a) && !b.has(*id));
        if let Some((a, p)) = from {
            let (own, other) = bound_pair(&build.places, u, Some(p)).map_err(|e| (*id, e))?;
            b.put(*id, own).and_then(|()| b.put(*a, other)).map_err(|e| (*id, e))?;
            build.feeders.insert(*id, *a);
        }
    }
    for (id, u) in &all {
        if b.has(*id) || waiting.contains_key(&u.ino) {
            continue;
        }
        connected(b, &mut build, (&all, &listening), &by_ino, *id, u).map_err(|e| (*id, e))?;
    }
    for (listener_id, l) in &all {
        if let (Some(_), Some(fd)) = (&l.listening, b.lend(*listener_id).map_err(|e| (*listener_id, e))?) {
            // Those that wait get them from it.
            l.options.restore(fd.raw(), When::Listening).map_err(|e| (*listener_id, e))?;
        }
        let clients = l.listening.iter().flat_map(|(_, clients)| clients);
        for (at, client) in clients.enumerate() {
            let Some((id, u)) = by_ino.get(client).map(|at| &all[*at]) else {
                continue; // A client outside the job: gone.
            };
            let by = l.waiting.get(at).and_then(Option::as_ref);
            let fd = waiting_client((b, &build.places), (u, by), (*listener_id, l)).map_err(|e| (*listener_id, e))?;
            b.put(*id, fd).map_err(|e| (*id, e))?;
        }
    }
    Ok(build)
}

/// A listening socket of `caller`, for now with room for all.
fn listener(places: &Places, u: &UnixState, caller: Option<&Caller>) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(libc::AF_UNIX, u.kind, 0).at("socket")?;
    places.bind(fd.as_raw_fd(), &u.name, u.file.as_ref())?;
    listens(fd.as_raw_fd(), caller).at("listen")?;
    Ok(fd)
}

/// Lets `caller` be told to who connects to `at` from now on.
fn listens(at: RawFd, caller: Option<&Caller>) -> io::Result<()> {
    call_as(caller, true, || sock::listen(at, ROOM))
}

/// The other socket of a pair, of which this one, without a name, is still the end, while that one has another peer.
fn one_sided<'a>(all: &'a [Socket], by_ino: &HashMap<u32, usize>, u: &UnixState) -> Option<&'a Socket> {
    let Peer::Inode(ino) = u.peer else { return None };
    let other = by_ino.get(&ino).map(|at| &all[*at])?;
    let is_pair = u.kind == libc::SOCK_DGRAM && u.name.is_unnamed() && (u.peer_name.is_unnamed() || !u.queue.is_empty());
    (is_pair && other.1.peer != Peer::Inode(u.ino)).then_some(other)
}

/// A client whose connection, made `by` whom where that is known, waits to be accepted.
fn waiting_client(
    (b, places): (&Builder<'_>, &Places),
    (u, by): (&UnixState, Option<&Caller>),
    (id, l): (DescId, &UnixState),
) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(libc::AF_UNIX, u.kind | libc::SOCK_NONBLOCK, 0).at("socket")?;
    places.bind(fd.as_raw_fd(), &u.name, u.file.as_ref())?;
    let Some(to) = b.lend(id)? else {
        return refuse("no listener to connect to");
    };
    let owner = u.options.owner().map(Caller::owner);
    let ends = Ends {
        listens: u.caller.as_ref(),
        connects: by.or(owner.as_ref()),
        inside: true,
    };
    if !connects((places, ends), to.raw(), &l.name, fd.as_raw_fd())? {
        return refuse(format!(
            "others keep the queue of {} full; stop them and restart again",
            l.name
        ));
    }
    Ok(fd)
}

/// A socket that is neither listening nor waiting: with its peer where that is in the job.
fn connected(
    b: &mut Builder<'_>,
    build: &mut UnixBuild,
    (all, listening): (&[Socket], &[&Socket]),
    by_ino: &HashMap<u32, usize>,
    id: DescId,
    u: &UnixState,
) -> Result<(), Fault> {
    let peer = match u.peer {
        Peer::Inode(ino) => by_ino.get(&ino).map(|at| &all[*at]),
        Peer::None | Peer::Gone => None,
    };
    let mutual = peer.filter(|(_, p)| p.peer == Peer::Inode(u.ino));
    let pairs = u.kind != libc::SOCK_DGRAM;
    let was_paired = match u.peer {
        Peer::Gone => u.name.is_unnamed() || u.peer_name.is_unnamed(),
        // Nobody else can have sent to it.
        _ => u.name.is_unnamed() && (u.peer_name.is_unnamed() || !u.queue.is_empty()),
    };
    match (mutual, u.peer) {
        (Some((other, p)), _) if pairs || u.name.is_unnamed() || p.name.is_unnamed() => {
            let (a, c) = if pairs {
                pair((b, &build.places), listening, u, Some(p))?
            } else {
                bound_pair(&build.places, u, Some(p))?
            };
            b.put(id, a)?;
            b.put(*other, c)?;
            build.peers.insert(id, *other);
            build.peers.insert(*other, id);
        }
        (None, Peer::Gone | Peer::Inode(_)) if pairs => {
            let (a, c) = pair((b, &build.places), listening, u, None)?;
            b.put(id, a)?;
            build.other_ends.insert(id, b.hold_in(&mut build.ends, c)?);
        }
        (None, Peer::Gone | Peer::Inode(_)) if was_paired => {
            let (a, c) = bound_pair(&build.places, u, None)?;
            b.put(id, a)?;
            build.other_ends.insert(id, b.hold_in(&mut build.ends, c)?);
        }
        (_, peer) => {
            let fd = sock::socket(libc::AF_UNIX, u.kind, 0).at("socket")?;
            if u.can_be_sent_to() {
                Gate::close(fd.as_raw_fd())?;
            }
            build.places.bind(fd.as_raw_fd(), &u.name, u.file.as_ref())?;
            b.put(id, fd)?;
            // It is connected when what it had received from others before is back.
            if peer == Peer::Gone {
                let c = in_place_of(&build.places, &u.peer_name)?;
                build.other_ends.insert(id, b.hold_in(&mut build.ends, c)?);
            }
        }
    }
    Ok(())
}

/// A datagram socket with the name of one that is gone, or, where that cannot be had, with another.
fn in_place_of(places: &Places, name: &Addr) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).at("socket")?;
    let named = match name.unix_path() {
        Some(path) => places.bind_apart(fd.as_raw_fd(), name, &path, &BoundFile::default()),
        None => sock::bind(fd.as_raw_fd(), name).at(format!("bind {name}")),
    };
    if let Err(error) = named {
        tracing::debug!(%error, %name, "the name of a socket that is gone cannot be had");
        sock::bind(fd.as_raw_fd(), &Addr::any_unix()).at("bind")?;
    }
    Ok(fd)
}

/// A pair from `socketpair`, then bound: datagram sockets may each have a name of their own.
fn bound_pair(places: &Places, u: &UnixState, p: Option<&UnixState>) -> Result<(OwnedFd, OwnedFd), Fault> {
    let (a, c) = unnamed_pair(u, p.is_some())?;
    places.bind(a.as_raw_fd(), &u.name, u.file.as_ref())?;
    if let Some(p) = p {
        places.bind(c.as_raw_fd(), &p.name, p.file.as_ref())?;
    }
    Ok((a, c))
}

/// A pair from `socketpair`. Whoever has made it is told at both ends.
fn unnamed_pair(u: &UnixState, inside: bool) -> Result<(OwnedFd, OwnedFd), Fault> {
    call_as(u.caller.as_ref(), inside, || sock::pair(u.kind)).at("socketpair")
}

/// A connected pair of stream or seqpacket sockets: (`u`, its peer).
fn pair(
    (b, places): (&Builder<'_>, &Places),
    listening: &[&Socket],
    u: &UnixState,
    p: Option<&UnixState>,
) -> Result<(OwnedFd, OwnedFd), Fault> {
    let of_listener = |name: &Addr| {
        listening
            .iter()
            .find(|(id, l)| l.kind == u.kind && l.name == *name && !name.is_unnamed() && b.has(*id))
            .map(|(id, _)| *id)
    };
    let peer_named = p.is_some_and(|p| !p.name.is_unnamed());
    let serves = |s: &UnixState| of_listener(&s.name).is_some();
    if u.name.is_unnamed() && !peer_named {
        return unnamed_pair(u, p.is_some());
    }
    // The accepted side is the one whose name belongs to a listener; without one, the side that has a name.
    let u_serves = serves(u) || (!u.name.is_unnamed() && !p.is_some_and(|p| serves(p) || (peer_named && u.name.is_unnamed())));
    let (server, client) = if u_serves { (u, p) } else { (p.unwrap_or(u), Some(u)) };
    let own = of_listener(&server.name);
    let ends = Ends {
        listens: client.and_then(|client| client.caller.as_ref()),
        connects: server.caller.as_ref(),
        inside: p.is_some(),
    };
    let temporary = match own {
        Some(_) => None,
        None => Some(listener(places, server, ends.listens)?),
    };
    let own = own.map_or(Ok(None), |id| b.lend(id))?;
    let at = match (&own, &temporary) {
        (Some(own), _) => own.raw(),
        (None, Some(t)) => t.as_raw_fd(),
        (None, None) => return refuse("no listener to connect to"),
    };
    let c = sock::socket(libc::AF_UNIX, server.kind | libc::SOCK_NONBLOCK, 0).at("socket")?;
    if let Some(client) = client {
        places.bind(c.as_raw_fd(), &client.name, client.file.as_ref())?;
    }
    let s = accepted((places, ends), at, c.as_raw_fd())?;
    if let Some(temporary) = &temporary {
        places.let_go(temporary.as_raw_fd()).at("stat")?;
    }
    Ok(if u_serves { (s, c) } else { (c, s) })
}

/// Who is told at the ends of a connection.
#[derive(Clone, Copy)]
struct Ends<'a> {
    /// To the client.
    listens: Option<&'a Caller>,
    /// To the server.
    connects: Option<&'a Caller>,
    /// Both ends are the job's.
    inside: bool,
}

/// Connects `client` to listener `at`, and accepts that connection: those of others, which come in between, are closed.
fn accepted((places, ends): (&Places, Ends<'_>), at: RawFd, client: RawFd) -> Result<OwnedFd, Fault> {
    let name = sock::local(at).at("read a name")?;
    let begin = Instant::now();
    while !connects((places, ends), at, &name, client)? {
        if begin.elapsed() > PATIENCE {
            return refuse(format!("others keep the queue of {name} full; stop them and restart again"));
        }
        while fd::poll(at, libc::POLLIN).at("poll")? & libc::POLLIN != 0 {
            drop(sock::accept(at).at("accept")?);
        }
    }
    loop {
        let s = sock::accept(at).at("accept")?;
        // The kernel has noted who connected.
        let [pid, ..] = sock::get::<[u32; 3]>(s.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED).at("ask for its peer")?;
        if pid == std::process::id() {
            return Ok(s);
        }
    }
}

/// Connects `client` to listener `at`, called `name`; whether there was room.
fn connects((places, ends): (&Places, Ends<'_>), at: RawFd, name: &Addr, client: RawFd) -> Result<bool, Fault> {
    if ends.listens.is_some() && Caller::told_by(at)?.as_ref() != ends.listens {
        listens(at, ends.listens).at("listen")?;
    }
    let mut has_room = true;
    let connect = |to: &Addr| call_as(ends.connects, ends.inside, || sock::connect(client, to));
    places.reach(at, name, |to| match connect(to) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            has_room = false;
            Ok(())
        }
        done => done,
    })?;
    Ok(has_room)
}
