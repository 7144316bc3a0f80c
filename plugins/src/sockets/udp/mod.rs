//! UDP and UDP-Lite sockets: addresses, options, multicast groups, datagrams not yet read with their senders' addresses.

mod groups;
mod waiting;

use crate::builder::Builder;
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description};
use crate::session::Session;
use crate::sockets::names;
use crate::sockets::options::{self, Options, When};
use crate::sockets::send_buffer::Enlarged;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use belay_image::blobs::BlobRef;
use groups::{Groups, Membership};
use rustix::net::Shutdown;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};
use waiting::Told;

const UDP_CORK: i32 = 1;
/// What memory a socket uses; the first number is that of what it has received.
const SO_MEMINFO: i32 = 55;
/// Longest wait for an answer from this host, milliseconds.
const ANSWER_MS: i32 = 1000;
const SHUT_READ: u8 = 1;
/// Longest wait until a datagram of this host has arrived.
const ARRIVAL: Duration = Duration::from_secs(1);
/// How often to look meanwhile.
const LOOK: Duration = Duration::from_micros(100);
/// Options that decide when a datagram arrives how it is kept: UDP_GRO, IP_PKTINFO, IPV6_RECVPKTINFO.
const KEEPING: [(i32, i32); 3] = [
    (libc::IPPROTO_UDP, libc::UDP_GRO),
    (libc::IPPROTO_IP, libc::IP_PKTINFO),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
];

/// A UDP socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UdpState {
    local: Addr,
    peer: Option<Addr>,
    queue: Vec<(BlobRef, Addr)>,
    /// What is told of each of these, where anything is.
    #[serde(default)]
    told: Vec<Told>,
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
    if corked && fd::unsent_bytes(raw).at("ask what it holds back (SIOCOUTQ)")? > 0 {
        return not_now("a datagram that is written in pieces (UDP_CORK) has not been sent");
    }
    let shutdown = shutdown(s, (id, raw), local.family(), protocol)?;
    let groups = &mut s.sets.of::<UdpSet>().groups;
    let groups = groups.get_or_insert_with(Groups::of_host).joined(raw, local.family())?;
    let error = pending_error(raw)?;
    let unread = match error {
        None => waiting::peek(raw)?,
        Some(_) => Vec::new(),
    };
    let (mut queue, mut told) = (Vec::new(), Vec::new());
    for m in unread {
        for (at, data) in m.parts.iter().enumerate() {
            queue.push((s.blobs.put(data)?, m.from.clone()));
            told.push(Told {
                follows: at > 0,
                ..m.told.clone()
            });
        }
    }
    if told.iter().all(|t| *t == Told::default()) {
        told.clear();
    }
    Ok(UdpState {
        local,
        peer: sock::peer(raw).at("read its peer")?,
        queue,
        told,
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
    // The program may have made it smaller than what was in it, and what comes singly takes more of it.
    let larger = Enlarged::of_datagrams(raw);
    u.options.restore_ahead(raw, &KEEPING)?;
    let here = names::addresses();
    let (mut lost, mut elsewhere, mut patience) = (0, 0, ARRIVAL);
    let mut at = 0;
    while let Some((_, from)) = u.queue.get(at) {
        let told = u.told.get(at).cloned().unwrap_or_default();
        let follows = |n: &usize| u.told.get(*n).is_some_and(|t| t.follows);
        let end = (at + 1..u.queue.len()).find(|n| !follows(n)).unwrap_or(u.queue.len());
        let parts = u.queue[at..end].iter().map(|(data, _)| b.blobs.get(data));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        at = end;
        let to = match shared {
            true => sock::connect(raw, from).and_then(|()| sock::local(raw)),
            false => Ok(destination(u, from, &told, &here)),
        };
        let before = Arrived::at(raw).at("read SO_MEMINFO")?;
        let sent = match to {
            Err(e) => Err(e),
            Ok(to) => {
                elsewhere += usize::from(told.to.is_some_and(|ip| to.ip().is_none_or(|to| to.to_canonical() != ip)));
                match sender(all, (u.protocol, from, &to)).map_or(Ok(None), |own| b.lend(own))? {
                    Some(own) => send(own.raw(), &parts, &told, &to),
                    None => imitate((u.protocol, from, &to), &parts, &told),
                }
            }
        };
        match sent {
            // As on any network: a datagram may be lost.
            Err(error) => tracing::warn!(%error, %from, to = %u.local, "could not put a datagram back"),
            Ok(()) => lost += usize::from(!before.has_more(raw, &mut patience).at("read SO_MEMINFO")?),
        }
    }
    if lost > 0 {
        tracing::warn!(lost, of = u.queue.len(), to = %u.local, "datagrams that had not been read could not be put back");
    }
    if elsewhere > 0 {
        tracing::warn!(
            datagrams = elsewhere,
            to = %u.local,
            "of datagrams that had not been read the address to which they came is another now (IP_PKTINFO)"
        );
    }
    drop(larger);
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

/// Sends datagrams from `raw` to `to`, which may be written as the other family does: as one where they have come so.
fn send(raw: RawFd, parts: &[Vec<u8>], told: &Told, to: &Addr) -> io::Result<()> {
    let family = sock::local(raw)?.family();
    let mut control = to.ip().map(|ip| told.messages(ip)).unwrap_or_default();
    let to = match to.ip() {
        Some(ip) if family != to.family() => Addr::of(SocketAddr::new(ip, to.port()), family),
        _ => to.clone(),
    };
    if let Some((all, length)) = waiting::as_one(parts) {
        control.push(length);
        if sock::send_with(raw, &all, &control, Some(&to)).is_ok() {
            return Ok(());
        }
        // Not every way can carry that.
        control.pop();
    }
    parts.iter().try_for_each(|data| {
        let sent = sock::send_with(raw, data, &control, Some(&to));
        sent.or_else(|_| sock::send(raw, data, &[], Some(&to))).map(drop)
    })
}

/// What a socket has received, and what it had no room for.
struct Arrived {
    bytes: u32,
    dropped: u32,
}

impl Arrived {
    fn at(raw: RawFd) -> io::Result<Self> {
        let counts = sock::get_bytes(raw, libc::SOL_SOCKET, SO_MEMINFO, 64)?;
        let word = |at: usize| {
            counts
                .get(4 * at..)
                .and_then(|c| c.first_chunk())
                .map_or(0, |c| u32::from_ne_bytes(*c))
        };
        // SK_MEMINFO_RMEM_ALLOC and SK_MEMINFO_DROPS.
        Ok(Self {
            bytes: word(0),
            dropped: word(8),
        })
    }

    /// Waits until more has come than then; whether it has. Where one does not come, others are not waited for as long.
    fn has_more(&self, raw: RawFd, patience: &mut Duration) -> io::Result<bool> {
        let begun = Instant::now();
        loop {
            let now = Self::at(raw)?;
            if now.dropped != self.dropped {
                return Ok(false);
            }
            if now.bytes > self.bytes {
                return Ok(true);
            }
            if begun.elapsed() >= *patience {
                *patience = LOOK * 10;
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
    }
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
    for (bit, how) in [(SHUT_READ, Shutdown::Read), (SHUT_READ << 1, Shutdown::Write)] {
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

/// Sends datagrams from an address of this host that no socket of the job has.
fn imitate((protocol, from, to): (i32, &Addr, &Addr), parts: &[Vec<u8>], told: &Told) -> io::Result<()> {
    let fd = sock::socket(from.family(), libc::SOCK_DGRAM, protocol)?;
    sock::bind(fd.as_raw_fd(), from)?;
    send(fd.as_raw_fd(), parts, told, to)
}

/// Where a datagram from `from` is sent that is to come to `u`: to the address to which it came, where that is one of
/// this host, which has the addresses `here`. (To those of groups others would listen too.)
fn destination(u: &UdpState, from: &Addr, told: &Told, here: &[IpAddr]) -> Addr {
    let any = u.local.ip().is_some_and(|ip| ip.is_unspecified());
    // One of a link counts only together with the interface.
    let whole = |ip: &IpAddr| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    match told
        .to
        .filter(|ip| any && whole(ip) && (ip.is_loopback() || here.contains(ip)))
    {
        Some(ip) => Addr::of(SocketAddr::new(ip, u.local.port()), family_of(ip)),
        None => reachable(&u.local, from),
    }
}

fn family_of(ip: IpAddr) -> i32 {
    match ip {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    }
}

/// An address under which a socket bound to `local` is reached from `from`, which is on this host.
fn reachable(local: &Addr, from: &Addr) -> Addr {
    match local.ip().is_some_and(|ip| ip.is_unspecified()) {
        true => from.with_port(local.port()),
        false => local.clone(),
    }
}
