//! UDP sockets: addresses, options, datagrams not yet read with their senders' addresses.

use crate::capture::Session;
use crate::fault::{At, Fault};
use crate::model::{DescId, Kind};
use crate::rebuild::Builder;
use crate::sockets::options::{self, Options, When};
use crate::sockets::queue;
use crate::sys::sock::{self, Addr};
use belay_image::blobs::BlobRef;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// A UDP socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UdpState {
    local: Addr,
    peer: Option<Addr>,
    queue: Vec<(BlobRef, Addr)>,
    options: Options,
}

/// Captures it.
pub(crate) fn capture(s: &mut Session<'_>, raw: RawFd) -> Result<UdpState, Fault> {
    let mut queue = Vec::new();
    for m in queue::peek(raw, libc::SOCK_DGRAM)? {
        queue.push((s.blobs.put(&m.data)?, m.from));
    }
    Ok(UdpState {
        local: sock::local(raw).at("read its address")?,
        peer: sock::peer(raw).at("read its peer")?,
        queue,
        options: options::capture(raw)?,
    })
}

/// Makes it again, bound and not yet connected.
pub(crate) fn rebuild(u: &UdpState) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(u.local.family(), libc::SOCK_DGRAM, 0).at("socket")?;
    let raw = fd.as_raw_fd();
    u.options.restore(raw, When::Early)?;
    if u.local.port() != 0 {
        // Before it was connected its own address may have been open; connecting sets it again.
        sock::bind(raw, &u.local).at(format!("bind {}", u.local))?;
    }
    u.options.restore_buffers(raw);
    Ok(fd)
}

/// Puts datagrams back, then connects and sets the remaining options.
pub(crate) fn refill(b: &Builder<'_>) -> Result<(), (DescId, Fault)> {
    let all: Vec<(DescId, &UdpState)> = b
        .descriptors
        .descriptions
        .iter()
        .enumerate()
        .filter_map(|(id, d)| match &d.kind {
            Kind::Udp(u) => Some((id, u)),
            _ => None,
        })
        .collect();
    for (id, u) in &all {
        for (data, from) in &u.queue {
            let data = b.blobs.get(data).map_err(|e| (*id, e.into()))?;
            let own = all
                .iter()
                .find(|(_, s)| s.local.port() == from.port() && s.local.ip() == from.ip());
            let own = own.map_or(Ok(None), |(own, _)| b.lend(*own)).map_err(|e| (*id, e))?;
            let sent = match own {
                Some(own) => sock::send(own.raw(), &data, &[], Some(&reachable(&u.local))).map(drop),
                None => imitate(&data, from, &u.local),
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

/// Connects it and sets the remaining options.
fn settle(u: &UdpState, raw: RawFd) -> Result<(), Fault> {
    if let Some(peer) = &u.peer {
        sock::connect(raw, peer).at(format!("connect to {peer}"))?;
    }
    u.options.restore(raw, When::Late)
}

/// Sends a datagram from an address of this host that no socket of the job has.
fn imitate(data: &[u8], from: &Addr, to: &Addr) -> std::io::Result<()> {
    let fd = sock::socket(from.family(), libc::SOCK_DGRAM, 0)?;
    sock::bind(fd.as_raw_fd(), from)?;
    sock::send(fd.as_raw_fd(), data, &[], Some(&reachable(to))).map(drop)
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
