//! Makes TCP sockets again: listening ones, pairs, ends whose other end is gone, connections that wait to be accepted.

use super::listening::{self, Bound, Claim};
use super::{backlog, connection, drain, remote, Role, TcpState};
use crate::builder::{Builder, Waits};
use crate::fault::{refuse, At, Fault};
use crate::keep::Lent;
use crate::model::DescId;
use crate::sockets::names::{self, Listening, Names, Page, View};
use crate::sockets::options::When;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use rustix::net::Shutdown;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// A TCP socket of the job.
type Socket = (DescId, TcpState);

/// One socket and what is wrong with it.
type Failed = (DescId, Fault);

/// Makes all TCP sockets of the job, with data in flight.
pub(super) fn rebuild(b: &mut Builder<'_>) -> Result<(), Failed> {
    let all: Vec<Socket> = b.descriptors.each().map(|(id, t)| (id, TcpState::clone(t))).collect();
    take_ports(b, &all)?;
    remote::rebuild(b, &all)?;
    // From here on, what lies on this node has the addresses of this node.
    let all: Vec<Socket> = all.iter().map(|(id, t)| (*id, placed(b, t))).collect();
    make_pairs(b, &all)?;
    make_ends(b, &all)?;
    give_options(b, &all)?;
    let waiters = make_waiting(b, &all)?;
    lower_backlogs(b, &all, &waiters)?;
    // Who was connecting finds the queues as full as they were.
    make_connecting(b, &all)?;
    settle_all(b, &all)
}

/// Makes the sockets that listen or are bound; then it is known where the addresses of the job are.
fn take_ports(b: &mut Builder<'_>, all: &[Socket]) -> Result<(), Failed> {
    let mut page = Page {
        names: b.descriptors.parts.get::<Names>().cloned().unwrap_or_default(),
        now: names::addresses(),
        listening: Vec::new(),
        bound: Vec::new(),
    };
    let mut inner = HashSet::new();
    let mut ports: BTreeMap<u16, Vec<&Socket>> = BTreeMap::new();
    for socket in all {
        let port = socket.1.local.port();
        match socket.1.role {
            Role::Unconnected if port == 0 => {}
            Role::Listening(_) | Role::Unconnected => ports.entry(port).or_default().push(socket),
            Role::Pair(_) | Role::Waiting(_) => drop(inner.insert(port)),
            _ => {}
        }
    }
    for (port, sockets) in ports {
        bind_again(b, &mut page, port, &sockets).map_err(|e| (sockets[0].0, e))?;
    }
    let first = all.first().map_or(0, |(id, _)| *id);
    b.book = Some(remote::book(b, page, inner).map_err(|e| (first, e))?);
    Ok(())
}

/// Makes the connections within the job, and the sockets that have none.
fn make_pairs(b: &mut Builder<'_>, all: &[Socket]) -> Result<(), Failed> {
    let states: HashMap<DescId, &TcpState> = all.iter().map(|(id, t)| (*id, t)).collect();
    let listening: Vec<&Socket> = all.iter().filter(|(_, t)| matches!(t.role, Role::Listening(_))).collect();
    for (id, t) in all {
        if b.has(*id) {
            continue;
        }
        let made = match t.role {
            Role::Pair(other) => match states.get(&other) {
                Some(o) => pair(b, &listening, (*id, t), (other, o)),
                None => refuse("the image names another end that it does not have"),
            },
            Role::Unconnected => unconnected(t).and_then(|fd| b.put(*id, fd)),
            // When all have their ports that hold them.
            _ => Ok(()),
        };
        made.map_err(|e| (*id, e))?;
    }
    Ok(())
}

/// Makes the sockets whose other end is gone.
fn make_ends(b: &mut Builder<'_>, all: &[Socket]) -> Result<(), Failed> {
    let mut doors = BTreeMap::new();
    for (id, t) in all {
        // Restarted without the other nodes, what led there is reset.
        if matches!(t.role, Role::PeerClosed | Role::Reset | Role::Remote) && !b.has(*id) {
            alone(b, &mut doors, (*id, t)).map_err(|e| (*id, e))?;
        }
    }
    Ok(())
}

/// Gives the sockets that listen their options: what waits to be accepted gets its own from them.
fn give_options(b: &Builder<'_>, all: &[Socket]) -> Result<(), Failed> {
    for (id, t) in all.iter().filter(|(_, t)| matches!(t.role, Role::Listening(_))) {
        on_made(b, *id, |raw| {
            t.options.restore_buffers(raw);
            t.options.restore(raw, When::Listening)
        })?;
    }
    Ok(())
}

/// Makes the connections that wait to be accepted; the addresses of their other ends.
fn make_waiting(b: &mut Builder<'_>, all: &[Socket]) -> Result<Vec<Addr>, Failed> {
    let mut waiters = Vec::new();
    for (id, t) in all {
        let Role::Waiting(_) = t.role else { continue };
        let made = t.peer.as_ref().map_or_else(
            || refuse("the image names no peer"),
            |peer| waiting(b, t, peer).and_then(|fd| Ok((sock::local(fd.as_raw_fd()).at("read its address")?, fd))),
        );
        let put = made.and_then(|(local, fd)| {
            waiters.push(local);
            b.put(*id, fd)
        });
        put.map_err(|e| (*id, e))?;
    }
    Ok(waiters)
}

/// Gives the sockets that listen the backlogs that they had.
fn lower_backlogs(b: &Builder<'_>, all: &[Socket], waiters: &[Addr]) -> Result<(), Failed> {
    for (id, t) in all {
        if let Role::Listening(own) = t.role {
            on_made(b, *id, |raw| backlog::lower(raw, own, waiters))?;
        }
    }
    Ok(())
}

/// Makes the sockets that were connecting, or had tried to.
fn make_connecting(b: &mut Builder<'_>, all: &[Socket]) -> Result<(), Failed> {
    for (id, t) in all {
        let made = match t.role {
            Role::Connecting => connecting(b, t).and_then(|fd| b.put(*id, fd)),
            Role::Refused | Role::Failed => failed(t).and_then(|fd| b.put(*id, fd)),
            _ => Ok(()),
        };
        made.map_err(|e| (*id, e))?;
    }
    Ok(())
}

/// Gives all of them what was not needed to make them.
fn settle_all(b: &Builder<'_>, all: &[Socket]) -> Result<(), Failed> {
    all.iter().try_for_each(|(id, t)| on_made(b, *id, |raw| settle(t, raw)))
}

/// Does something with the socket of this description, where it has been made.
fn on_made(b: &Builder<'_>, id: DescId, work: impl FnOnce(RawFd) -> Result<(), Fault>) -> Result<(), Failed> {
    let done = b.lend(id).and_then(|fd| fd.map_or(Ok(()), |fd| work(fd.raw())));
    done.map_err(|e| (id, e))
}

/// Makes the sockets that listen at `port` or are bound to it: where they were, or, if another program has taken the
/// port, where there is room and the job can be led.
fn bind_again(b: &mut Builder<'_>, page: &mut Page, port: u16, sockets: &[&Socket]) -> Result<(), Fault> {
    let bound = sockets.iter().map(|(_, t)| Bound {
        family: t.family,
        at: match t.local.ip().and_then(|ip| page.place(ip)) {
            Some(ip) => Addr::of(SocketAddr::new(ip, port), t.family),
            None => t.local.clone(),
        },
        backlog: match t.role {
            // Until the connections are there that it has accepted.
            Role::Listening(_) => Some(backlog::LARGE),
            _ => None,
        },
        options: &t.options,
    });
    let claim = Claim {
        // No program outside the job expects it at a port that the kernel has chosen.
        movable: b.group.is_some() || sock::ephemeral_range().contains(&port),
        alone: b.group.is_some(),
    };
    let made = listening::bind_all(&bound.collect::<Vec<_>>(), claim, &b.waits())?;
    for ((id, t), fd) in sockets.iter().zip(made) {
        let now = sock::local(fd.as_raw_fd()).at("read its address")?.port();
        match t.local.ip() {
            // One that does not listen yet is led to as well, if need be: it may.
            Some(ip) if now != port || matches!(t.role, Role::Listening(_)) => page.listening.push(Listening { ip, port, now }),
            _ => page.bound.push(port),
        }
        b.put(*id, fd)?;
    }
    Ok(())
}

/// The socket with the addresses that it has now.
fn placed(b: &Builder<'_>, t: &TcpState) -> TcpState {
    let Some(book) = &b.book else { return t.clone() };
    let internet = |a: &Addr| Some(SocketAddr::new(a.ip()?, a.port()));
    let moved = |a: &Addr, to: Option<SocketAddr>| to.map_or_else(|| a.clone(), |to| Addr::of(to, a.family()));
    // A listening socket's port may have been moved, and with it that of what it accepts.
    let local = moved(
        &t.local,
        internet(&t.local).and_then(|at| book.lead(at, View::Checkpoint).or_else(|| book.place(at))),
    );
    let peer = t.peer.as_ref().map(|p| {
        moved(
            p,
            internet(p).and_then(|at| book.lead(at, View::Checkpoint).or_else(|| book.place(at))),
        )
    });
    TcpState {
        local,
        peer,
        ..t.clone()
    }
}

/// Options last: they were used for the making.
fn settle(t: &TcpState, raw: RawFd) -> Result<(), Fault> {
    t.options.restore_buffers(raw);
    if t.role == Role::Unconnected && t.received_fin {
        match sock::shutdown(raw, Shutdown::Read) {
            // It is shut down nevertheless.
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => {}
            done => done.at("shut reading down")?,
        }
    }
    match (t.options.restore(raw, When::Late), t.role) {
        // Some options cannot be set where there is no connection any more.
        (Err(error), Role::PeerClosed | Role::Reset | Role::Remote | Role::Refused | Role::Failed) => {
            tracing::warn!(%error, "an option of a connection that has ended is lost");
            Ok(())
        }
        (done, _) => done,
    }
}

/// A socket without port. It may have an address (IP_BIND_ADDRESS_NO_PORT).
fn unconnected(t: &TcpState) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(t.family, libc::SOCK_STREAM, 0).at("socket")?;
    t.options.restore(fd.as_raw_fd(), When::Unconnected)?;
    if t.local.ip().is_some_and(|ip| !ip.is_unspecified()) {
        sock::bind_host(fd.as_raw_fd(), &t.local).at(format!("bind {}", t.local))?;
    }
    Ok(fd)
}

/// A socket whose attempt to connect has failed.
fn failed(t: &TcpState) -> Result<OwnedFd, Fault> {
    let fd = connection::refused(t.family, &t.local, &t.options.of_any_device())?;
    if t.role == Role::Failed {
        sock::get::<i32>(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ERROR).at("read its error")?;
    }
    Ok(fd)
}

/// A connection that waits to be accepted, with what it had sent.
fn waiting(b: &Builder<'_>, t: &TcpState, peer: &Addr) -> Result<OwnedFd, Fault> {
    let (fd, _) = connection::client(t.family, (&t.local, peer), &t.options, &[])?;
    if let Some(early) = &t.early {
        let data = b.blobs.get(early)?;
        drain::put_back(fd.as_raw_fd(), fd.as_raw_fd(), &data)?;
    }
    for (is_shut, how) in [(t.sent_fin, Shutdown::Write), (t.received_fin, Shutdown::Read)] {
        if is_shut {
            sock::shutdown(fd.as_raw_fd(), how).at("shut it down as before")?;
        }
    }
    Ok(fd)
}

/// Starts the connection attempt anew; how it ends is for the program to see.
fn connecting(b: &Builder<'_>, t: &TcpState) -> Result<OwnedFd, Fault> {
    // Where ports tell who it is, it may have had the one of another.
    if let (Some(peer), None) = (&t.peer, t.share(b.book.as_ref())) {
        if let Some(begun) = connection::begin(t.family, &t.local, peer, &t.options)? {
            return Ok(begun);
        }
    }
    let fd = connection::anywhere(t.family, t.share(b.book.as_ref()))?;
    fd::set_flags(fd.as_raw_fd(), libc::O_NONBLOCK).at("set O_NONBLOCK")?;
    t.options.restore(fd.as_raw_fd(), When::Early)?;
    if let Some(peer) = &t.peer {
        match sock::connect(fd.as_raw_fd(), peer) {
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => tracing::warn!(%error, %peer, "could not start a connection again"),
            Ok(()) => {}
        }
    }
    Ok(fd)
}

/// A pair, with data in flight both ways.
fn pair(b: &mut Builder<'_>, listening: &[&Socket], x: (DescId, &TcpState), y: (DescId, &TcpState)) -> Result<(), Fault> {
    // The accepted side is the one whose port a socket of the job listens on; without one, the lower port: clients'
    // ports are chosen high.
    let x_serves = match (
        listeners(listening, &x.1.local).next().is_none(),
        listeners(listening, &y.1.local).next().is_none(),
    ) {
        (false, true) => true,
        (true, false) => false,
        _ => x.1.local.port() <= y.1.local.port(),
    };
    let (server, client) = if x_serves { (x, y) } else { (y, x) };
    let own: Vec<Lent> = listeners(listening, &server.1.local)
        .filter_map(|id| b.lend(id).transpose())
        .collect::<Result<_, _>>()?;
    let raws: Vec<RawFd> = own.iter().map(Lent::raw).collect();
    let (s, c) = match connect(&raws, server.1, client.1, &b.waits()) {
        Ok(made) => made,
        Err(e) if b.has(server.0) => return Err(e),
        Err(error) => {
            // An address that is not this host's any more, or a port that is still blocked: both ends are ours, so any
            // other will do.
            tracing::warn!(%error, from = %client.1.local, to = %server.1.local, "a connection gets other addresses");
            let any = |t: &TcpState| connection::loopback(t.family);
            let server = TcpState {
                local: any(server.1),
                ..server.1.clone()
            };
            let client = TcpState {
                local: any(client.1),
                ..client.1.clone()
            };
            connect(&[], &server, &client, &b.waits())?
        }
    };
    exchange(b, server.1, &s, &c)?;
    exchange(b, client.1, &c, &s)?;
    for (t, fd) in [(server.1, &s), (client.1, &c)] {
        if t.sent_fin {
            sock::shutdown(fd.as_raw_fd(), Shutdown::Write).at("shut writing down")?;
        }
    }
    for (t, o, fd) in [(server.1, client.1, &s), (client.1, server.1, &c)] {
        if t.received_fin && !o.sent_fin {
            sock::shutdown(fd.as_raw_fd(), Shutdown::Read).at("shut reading down")?;
        }
    }
    b.put(server.0, s)?;
    b.put(client.0, c)
}

/// Sends what `to` had not read from its other end.
fn exchange(b: &Builder<'_>, state: &TcpState, to: &OwnedFd, from: &OwnedFd) -> Result<(), Fault> {
    let Some(at) = &state.received else { return Ok(()) };
    drain::put_back(from.as_raw_fd(), to.as_raw_fd(), &b.blobs.get(at)?)
}

/// Those of the job's listening sockets that accept connections to `local`.
fn listeners<'a>(listening: &'a [&'a (DescId, TcpState)], local: &'a Addr) -> impl Iterator<Item = DescId> + 'a {
    listening
        .iter()
        .filter(|(_, l)| l.local.port() == local.port())
        .filter(|(_, l)| l.local.ip() == local.ip() || l.local.ip().is_some_and(|ip| ip.is_unspecified()))
        .map(|(id, _)| *id)
}

/// Connects the pair through the job's own listening sockets or one made for the moment: (server, client).
fn connect(own: &[RawFd], server: &TcpState, client: &TcpState, waits: &Waits<'_>) -> Result<(OwnedFd, OwnedFd), Fault> {
    let temporary = if own.is_empty() { Some(door(server, waits)?) } else { None };
    let raws: Vec<RawFd> = own
        .iter()
        .copied()
        .chain(temporary.as_ref().map(AsRawFd::as_raw_fd))
        .collect();
    let to = match &temporary {
        Some(t) => sock::local(t.as_raw_fd()).at("read an address")?,
        None => server.local.clone(),
    };
    let to = if to.family() == client.family {
        to
    } else {
        client.peer.clone().unwrap_or(to)
    };
    for listener in &raws {
        server.options.restore(*listener, When::Accepting)?;
    }
    match connection::client(client.family, (&client.local, &to), &client.options, &raws)? {
        (c, Some(s)) => Ok((s, c)),
        (_, None) => refuse("its connection did not arrive at the listening socket"),
    }
}

/// A socket that listens for the moment where `server` was.
fn door(server: &TcpState, waits: &Waits<'_>) -> Result<OwnedFd, Fault> {
    let moment = Bound {
        family: server.family,
        at: server.local.clone(),
        backlog: Some(backlog::LARGE),
        options: &server.options,
    };
    let claim = Claim {
        movable: false,
        alone: true,
    };
    let mut made = listening::bind_all(&[moment], claim, waits)?;
    made.pop().map_or_else(|| refuse("no socket was made"), Ok)
}

/// Sockets by family that listen at ports of their own for connections whose other end is gone, and how many came there.
type Doors = BTreeMap<i32, (OwnedFd, u32)>;

/// So many connections at most come to one port: each has another port at its other end, and the kernel looks for a free one.
const VISITS: u32 = 4096;

/// A socket whose other end is gone: a connection on this host whose other end is closed in good order, or reset.
fn alone(b: &mut Builder<'_>, doors: &mut Doors, (id, t): (DescId, &TcpState)) -> Result<(), Fault> {
    let any = TcpState {
        local: connection::loopback(t.family),
        peer: None,
        options: t.options.of_any_device(),
        ..t.clone()
    };
    let through = |doors: &mut Doors| {
        if doors.get(&t.family).is_none_or(|(_, visits)| *visits >= VISITS) {
            doors.insert(t.family, (door(&any, &b.waits())?, 0));
        }
        let Some((door, visits)) = doors.get_mut(&t.family) else {
            return refuse("no socket was made");
        };
        *visits += 1;
        let local = sock::local(door.as_raw_fd()).at("read an address")?;
        let server = TcpState { local, ..any.clone() };
        connect(&[door.as_raw_fd()], &server, &any, &b.waits())
    };
    let (gone, own) = match through(doors) {
        Err(Fault::Call { step, source }) if source.kind() == io::ErrorKind::AddrNotAvailable => {
            return refuse(format!("{step}: {source} (is the loopback interface up?)"))
        }
        made => made?,
    };
    exchange(b, t, &own, &gone)?;
    if t.sent_fin {
        sock::shutdown(own.as_raw_fd(), Shutdown::Write).at("shut writing down")?;
    }
    if matches!(t.role, Role::Reset | Role::Remote) {
        // Closing with a linger time of zero sends a reset.
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        sock::set(gone.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &linger).at("set SO_LINGER")?;
    }
    drop(gone);
    b.put(id, own)
}
