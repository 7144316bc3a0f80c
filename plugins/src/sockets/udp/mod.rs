//! UDP and UDP-Lite sockets: addresses, options, multicast groups, datagrams not yet read with their senders' addresses.

mod groups;

use crate::builder::Builder;
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description};
use crate::session::Session;
use crate::sockets::options::{self, Options, When};
use crate::sockets::queue;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use belay_image::blobs::BlobRef;
use groups::{Groups, Membership};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const UDP_CORK: i32 = 1;
/// What memory a socket uses; the first number is that of what it has received.
const SO_MEMINFO: i32 = 55;
/// Longest wait for an answer from this host, milliseconds.
const ANSWER_MS: i32 = 1000;
const SHUT_READ: u8 = 1;

/// A UDP socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UdpState {
    local: Addr,
    peer: Option<Addr>,
    queue: Vec<(BlobRef, Addr)>,
    options: Options,
    /// IPPROTO_UDP, or IPPROTO_UDPLITE.
    #[serde(default = "plain")]
    protocol: i32,
    /// Bit 0: no more reading, bit 1: no more writing.
    #[serde(default)]
    shutdown: u8,
    /// Multicast groups.
    #[serde(default)]
    groups: Vec<Membership>,
    /// An error waits to be told.
    #[serde(default)]
    failed: bool,
}

fn plain() -> i32 {
    libc::IPPROTO_UDP
}

/// What the kernel tells of all UDP sockets at once, and of the groups of the host.
#[derive(Debug, Default)]
struct UdpSet {
    /// For a family and protocol that has been asked for, what is shut down, by inode.
    shut: HashMap<(i32, i32), HashMap<u32, u8>>,
    groups: Option<Groups>,
}

/// The kind.
pub(crate) struct Udp;

impl Kind for Udp {
    const NAME: &'static str = "Udp";
    const VERSION: u32 = 1;
    type State = UdpState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        const PROTOCOLS: [i32; 2] = [libc::IPPROTO_UDP, libc::IPPROTO_UDPLITE];
        let of_internet = |family: &i32| [libc::AF_INET, libc::AF_INET6].contains(family);
        matches!(look, Look::Socket(family, libc::SOCK_DGRAM, protocol) if of_internet(family) && PROTOCOLS.contains(protocol))
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<UdpState, Fault> {
        let Look::Socket(_, _, protocol) = seen.look else {
            return refuse("is no socket");
        };
        capture(s, (seen.id, seen.raw()), protocol)
    }

    /// Makes it again, bound and not yet connected.
    fn rebuild(_: &mut Builder<'_>, _: &Description, state: &UdpState) -> Result<Option<OwnedFd>, Fault> {
        make(state).map(Some)
    }

    fn refill(b: &mut Builder<'_>) -> Result<(), Refusal> {
        refill(b).map_err(|(id, e)| b.descriptors.refusal(id, &e))
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join);
    nothing!(install, install_late, settle, install_own, complete);
}

fn capture(s: &mut Session<'_>, (id, raw): (DescId, RawFd), protocol: i32) -> Result<UdpState, Fault> {
    let local = sock::local(raw).at("read its address")?;
    let corked = sock::get::<i32>(raw, protocol, UDP_CORK).unwrap_or(0) != 0;
    if corked && fd::ioctl_get::<i32>(raw, libc::TIOCOUTQ).at("ask what it holds back (SIOCOUTQ)")? > 0 {
        return not_now("a datagram that is written in pieces (UDP_CORK) has not been sent");
    }
    let shutdown = shutdown(s, (id, raw), local.family(), protocol)?;
    let groups = &mut s.sets.of::<UdpSet>().groups;
    let groups = groups.get_or_insert_with(Groups::of_host).joined(raw, local.family())?;
    let error = pending_error(raw)?;
    let unread = match error {
        None => queue::peek(raw, libc::SOCK_DGRAM)?,
        Some(_) => Vec::new(),
    };
    let queue = unread.into_iter().map(|m| Ok((s.blobs.put(&m.data)?, m.from)));
    let queue = queue.collect::<Result<_, Fault>>()?;
    Ok(UdpState {
        local,
        peer: sock::peer(raw).at("read its peer")?,
        queue,
        options: options::of(s, (id, raw), false)?,
        protocol,
        shutdown,
        groups,
        failed: error == Some(true),
    })
}

/// Whether an error waits to be told, where the socket has one or something in its error queue, and no datagram that
/// could be read. (Reading would take the error away, and so would asking for it.)
fn pending_error(raw: RawFd) -> Result<Option<bool>, Fault> {
    let events = fd::poll(raw, libc::POLLIN).at("poll")?;
    if events & libc::POLLERR == 0 {
        return Ok(None);
    }
    // What is in the error queue counts as received.
    let counts = sock::get_bytes(raw, libc::SOL_SOCKET, SO_MEMINFO, 64).at("read SO_MEMINFO")?;
    let queued = counts.iter().take(size_of::<u32>()).any(|byte| *byte != 0);
    let keeps = |(level, option)| sock::get::<i32>(raw, level, option).is_ok_and(|on| on != 0);
    let errors = [(libc::IPPROTO_IP, libc::IP_RECVERR), (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)];
    if events & libc::POLLIN != 0 || queued && errors.into_iter().any(keeps) {
        return not_now("an error or its error queue has not been read, without which the rest cannot be read");
    }
    Ok(Some(!queued))
}

/// Which directions are shut down. That nothing more may be sent is known to socket diagnosis only.
fn shutdown(s: &mut Session<'_>, (id, raw): (DescId, RawFd), family: i32, protocol: i32) -> Result<u8, Fault> {
    if !s.sets.of::<UdpSet>().shut.contains_key(&(family, protocol)) {
        let all = s.diag()?.internet(family, protocol, u32::MAX).unwrap_or_else(|error| {
            tracing::debug!(%error, "the kernel does not tell of UDP sockets");
            Vec::new()
        });
        let shut = all.into_iter().filter(|u| u.shutdown != 0).map(|u| (u.inode, u.shutdown));
        let shut = shut.collect();
        s.sets.of::<UdpSet>().shut.insert((family, protocol), shut);
    }
    let shut = &s.sets.of::<UdpSet>().shut[&(family, protocol)];
    let known = u32::try_from(s.found[id].stat.st_ino)
        .ok()
        .and_then(|ino| shut.get(&ino).copied());
    let no_more = fd::poll(raw, libc::POLLRDHUP).at("poll")?;
    let both = SHUT_READ | SHUT_READ << 1;
    Ok(match (known, no_more) {
        (Some(shut), _) => shut,
        (None, events) if events & libc::POLLHUP != 0 => both,
        (None, events) if events & libc::POLLRDHUP != 0 => SHUT_READ,
        (None, _) => 0,
    })
}

fn make(u: &UdpState) -> Result<OwnedFd, Fault> {
    // Tied to a device it could not be sent again what it has not read; where it shares its address with another
    // socket, it must be.
    let fd = match bound(u, &u.options.of_any_device())? {
        Some(fd) => fd,
        None => match bound(u, &u.options)? {
            Some(fd) => fd,
            None => return Err(io::Error::from_raw_os_error(libc::EADDRINUSE)).at(format!("bind {}", u.local)),
        },
    };
    u.options.restore_buffers(fd.as_raw_fd());
    Ok(fd)
}

/// A socket with these options at the address of `u`; `None` where another one has it.
fn bound(u: &UdpState, options: &Options) -> Result<Option<OwnedFd>, Fault> {
    let fd = sock::socket(u.local.family(), libc::SOCK_DGRAM, u.protocol).at("socket")?;
    let raw = fd.as_raw_fd();
    options.restore(raw, When::Early)?;
    let bound = if u.local.port() == 0 {
        // IP_BIND_ADDRESS_NO_PORT: the port comes with the first datagram.
        let own = u.local.ip().filter(|ip| !ip.is_unspecified());
        own.map_or(Ok(()), |_| sock::bind_host(raw, &u.local))
    } else if chosen_by_route(u) {
        // Before it was connected its own address may have been open; connecting sets it again.
        sock::bind(raw, &Addr::internet(u.local.family(), u.local.port(), [0; 16], 0))
    } else {
        sock::bind(raw, &u.local)
    };
    match bound {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Ok(None),
        done => done.at(format!("bind {}", u.local)).map(|()| Some(fd)),
    }
}

/// Whether connecting gives `u` its address. (Bound to an address of IPv6 a socket speaks that only; this one did not.)
fn chosen_by_route(u: &UdpState) -> bool {
    let peer = u.peer.as_ref().filter(|_| u.options.speak_both());
    let own = u.local.ip().filter(IpAddr::is_ipv6);
    own.is_some() && peer.is_some_and(|peer| sock::source(peer).is_ok_and(|source| source == own))
}

/// Puts datagrams back, then connects and sets the remaining options.
fn refill(b: &Builder<'_>) -> Result<(), (DescId, Fault)> {
    let all: Vec<(DescId, &UdpState)> = b.descriptors.each().collect();
    for (id, u) in all.iter().filter(|(_, u)| !u.queue.is_empty()) {
        let done = b
            .lend(*id)
            .and_then(|fd| fd.map_or(Ok(()), |fd| unread(b, &all, u, fd.raw())));
        done.map_err(|e| (*id, e))?;
    }
    for (id, u) in &all {
        let done = b.lend(*id).and_then(|fd| fd.map_or(Ok(()), |fd| settle(u, fd.raw())));
        done.map_err(|e| (*id, e))?;
    }
    Ok(())
}

/// Puts back what `u`, which is `raw` now, had not read. Where others may have its port, it is connected to each sender
/// meanwhile: then it is the one that the kernel chooses.
///
/// A socket of IPv6 would never again hear of others than the last: the kernel forgets to take that back
/// (`__udp_disconnect`). So this is done where it gets another peer at once.
fn unread(b: &Builder<'_>, all: &[(DescId, &UdpState)], u: &UdpState, raw: RawFd) -> Result<(), Fault> {
    let shared = u.options.share_address() && connects_for_a_moment(u);
    let processor: i32 = sock::get(raw, libc::SOL_SOCKET, libc::SO_INCOMING_CPU).at("read SO_INCOMING_CPU")?;
    for (data, from) in &u.queue {
        let data = b.blobs.get(data)?;
        let to = match shared {
            true => sock::connect(raw, from).and_then(|()| sock::local(raw)),
            false => Ok(reachable(&u.local, from)),
        };
        let sent = match to {
            Err(e) => Err(e),
            Ok(to) => match sender(all, (u.protocol, from, &to)).map_or(Ok(None), |own| b.lend(own))? {
                Some(own) => send(own.raw(), &data, &to),
                None => imitate((u.protocol, from, &to), &data),
            },
        };
        if let Err(error) = sent {
            // As on any network: a datagram may be lost.
            tracing::warn!(%error, %from, to = %u.local, "could not put a datagram back");
        }
    }
    if shared {
        sock::dissolve(raw).at("end a connection")?;
        // That of the last datagram: the kernel would go on to prefer this socket to others at the port.
        sock::set(raw, libc::SOL_SOCKET, libc::SO_INCOMING_CPU, &processor).at("set SO_INCOMING_CPU back")?;
    }
    Ok(())
}

/// Whether it can be connected for a moment.
fn connects_for_a_moment(u: &UdpState) -> bool {
    u.local.family() == libc::AF_INET || u.peer.is_some()
}

/// The socket of the job from which a datagram has this address when it is sent to `to`.
fn sender(all: &[(DescId, &UdpState)], (protocol, from, to): (i32, &Addr, &Addr)) -> Option<DescId> {
    let speaks = |s: &UdpState| from.ip().is_some_and(|ip| ip.is_ipv4()) || s.local.family() == libc::AF_INET6;
    let at_port = || {
        all.iter()
            .filter(|(_, s)| s.protocol == protocol && s.local.port() == from.port())
    };
    let by_name = at_port().find(|(_, s)| s.local.ip() == from.ip());
    let of_any = || at_port().find(|(_, s)| s.local.ip().is_some_and(|ip| ip.is_unspecified()) && speaks(s));
    let by_route = || of_any().filter(|_| sock::source(to).is_ok_and(|source| source == from.ip()));
    by_name.or_else(by_route).map(|(id, _)| *id)
}

/// Sends a datagram from `raw` to `to`, which may be written as the other family does.
fn send(raw: RawFd, data: &[u8], to: &Addr) -> io::Result<()> {
    let family = sock::local(raw)?.family();
    let to = match to.ip() {
        Some(ip) if family != to.family() => Addr::of(SocketAddr::new(ip, to.port()), family),
        _ => to.clone(),
    };
    sock::send(raw, data, &[], Some(&to)).map(drop)
}

/// Connects it, and does everything else that must come after the data.
fn settle(u: &UdpState, raw: RawFd) -> Result<(), Fault> {
    if u.failed {
        if let Err(error) = fail(u, raw) {
            tracing::warn!(%error, local = %u.local, "an error that a socket had not told yet is lost");
        }
    }
    if let Some(peer) = &u.peer {
        sock::connect(raw, peer).at(format!("connect to {peer}"))?;
    }
    u.groups.iter().try_for_each(|m| groups::join(raw, m))?;
    u.options.restore(raw, When::Late)?;
    for (bit, how) in [(SHUT_READ, libc::SHUT_RD), (SHUT_READ << 1, libc::SHUT_WR)] {
        if u.shutdown & bit == 0 {
            continue;
        }
        match sock::shutdown(raw, how) {
            // It is shut down nevertheless.
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => {}
            done => done.at("shut a direction down")?,
        }
    }
    Ok(())
}

/// Gives the socket an error to tell: it sends to a port of this host at which nobody is. (The kernel does not tell which
/// error it was; a socket hears of hardly any other.)
fn fail(u: &UdpState, raw: RawFd) -> io::Result<()> {
    if !connects_for_a_moment(u) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let family = u.local.family();
    let own = u.local.ip().filter(|ip| !ip.is_unspecified());
    let known = own.or_else(|| u.peer.as_ref()?.ip());
    let ip = own.unwrap_or(match known.map_or(family == libc::AF_INET6, |ip| ip.is_ipv6()) {
        true => Ipv6Addr::LOCALHOST.into(),
        false => Ipv4Addr::LOCALHOST.into(),
    });
    // Has the port, and takes nothing but what it sends itself.
    let nobody = sock::socket(family, libc::SOCK_DGRAM, u.protocol)?;
    sock::bind(nobody.as_raw_fd(), &Addr::of(SocketAddr::new(ip, 0), family))?;
    let at = sock::local(nobody.as_raw_fd())?;
    sock::connect(nobody.as_raw_fd(), &at)?;
    sock::connect(raw, &at)?;
    sock::send(raw, &[0], &[], None)?;
    let told = fd::wait(raw, libc::POLLERR, ANSWER_MS)?;
    sock::dissolve(raw)?;
    told.then_some(()).ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Sends a datagram from an address of this host that no socket of the job has.
fn imitate((protocol, from, to): (i32, &Addr, &Addr), data: &[u8]) -> io::Result<()> {
    let fd = sock::socket(from.family(), libc::SOCK_DGRAM, protocol)?;
    sock::bind(fd.as_raw_fd(), from)?;
    send(fd.as_raw_fd(), data, to)
}

/// An address under which a socket bound to `local` is reached from `from`, which is on this host.
fn reachable(local: &Addr, from: &Addr) -> Addr {
    match local.ip().is_some_and(|ip| ip.is_unspecified()) {
        true => from.with_port(local.port()),
        false => local.clone(),
    }
}
