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
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const UDP_CORK: i32 = 1;
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
    let mut queue = Vec::new();
    for m in queue::peek(raw, libc::SOCK_DGRAM)? {
        queue.push((s.blobs.put(&m.data)?, m.from));
    }
    Ok(UdpState {
        local,
        peer: sock::peer(raw).at("read its peer")?,
        queue,
        options: options::of(s, (id, raw), false)?,
        protocol,
        shutdown,
        groups,
    })
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
    // Tied to a device it could not be sent again what it has not read; where it shares its address with another socket, it must be.
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
    if u.local.port() != 0 {
        // Before it was connected its own address may have been open; connecting sets it again.
        let at = if chosen_by_route(u)? {
            Addr::internet(u.local.family(), u.local.port(), [0; 16], 0)
        } else {
            u.local.clone()
        };
        match sock::bind(raw, &at) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Ok(None),
            done => done.at(format!("bind {}", u.local))?,
        }
    }
    Ok(Some(fd))
}

/// Whether connecting gives `u` its address. (Bound to an address of IPv6 a socket speaks that only; this one did not.)
fn chosen_by_route(u: &UdpState) -> Result<bool, Fault> {
    let Some(peer) = u.peer.as_ref().filter(|_| u.options.speak_both()) else {
        return Ok(false);
    };
    let probe = sock::socket(u.local.family(), libc::SOCK_DGRAM, u.protocol).at("socket")?;
    let connected = sock::connect(probe.as_raw_fd(), peer).is_ok();
    Ok(connected
        && u.local.ip().is_some_and(|ip| ip.is_ipv6())
        && sock::local(probe.as_raw_fd()).at("read an address")?.ip() == u.local.ip())
}

/// Puts datagrams back, then connects and sets the remaining options.
fn refill(b: &Builder<'_>) -> Result<(), (DescId, Fault)> {
    let all: Vec<(DescId, &UdpState)> = b.descriptors.each().collect();
    for (id, u) in &all {
        for (data, from) in &u.queue {
            let data = b.blobs.get(data).map_err(|e| (*id, e.into()))?;
            let own = all
                .iter()
                .find(|(_, s)| s.protocol == u.protocol && s.local.port() == from.port() && s.local.ip() == from.ip());
            let own = own.map_or(Ok(None), |(own, _)| b.lend(*own)).map_err(|e| (*id, e))?;
            let sent = match own {
                Some(own) => sock::send(own.raw(), &data, &[], Some(&reachable(&u.local))).map(drop),
                None => imitate(u, &data, from),
            };
            if let Err(error) = sent {
                // As on any network: a datagram may be lost.
                tracing::warn!(%error, %from, to = %u.local, "could not put a datagram back");
            }
        }
    }
    for (id, u) in &all {
        let done = b.lend(*id).and_then(|fd| fd.map_or(Ok(()), |fd| settle(u, fd.raw())));
        done.map_err(|e| (*id, e))?;
    }
    Ok(())
}

/// Connects it, and does everything else that must come after the data.
fn settle(u: &UdpState, raw: RawFd) -> Result<(), Fault> {
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

/// Sends a datagram to `u` from an address of this host that no socket of the job has.
fn imitate(u: &UdpState, data: &[u8], from: &Addr) -> io::Result<()> {
    let fd = sock::socket(from.family(), libc::SOCK_DGRAM, u.protocol)?;
    sock::bind(fd.as_raw_fd(), from)?;
    sock::send(fd.as_raw_fd(), data, &[], Some(&reachable(&u.local))).map(drop)
}

/// An address under which a socket bound to `local` can be reached from this host.
fn reachable(local: &Addr) -> Addr {
    let mut a = local.clone();
    match (a.family(), a.ip().is_some_and(|ip| ip.is_unspecified())) {
        (libc::AF_INET, true) => a.0[4..8].copy_from_slice(&[127, 0, 0, 1]),
        (libc::AF_INET6, true) => a.0[8..24].copy_from_slice(&std::net::Ipv6Addr::LOCALHOST.octets()),
        _ => {}
    }
    a
}
