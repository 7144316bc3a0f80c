//! Makes a connected pair of TCP sockets with given addresses on this host.

use super::listening;
use crate::fault::{refuse, At, Fault};
use crate::sockets::names::Share;
use crate::sockets::options::{Options, When};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

const IP_LOCAL_PORT_RANGE: i32 = 51;
/// A connection that was closed less than this ago blocks an equal one (net.ipv4.tcp_tw_reuse): a rule of the kernel, not a race.
const REUSE_DELAY: Duration = Duration::from_millis(1500);
/// How often to try meanwhile.
const REUSE_STEP: Duration = Duration::from_millis(50);
/// Longest wait for an answer from this host, milliseconds.
const ANSWER_MS: i32 = 1000;
/// Connections of other programs that may be in front of ours in a queue.
const FOREIGN: usize = 64;

/// A socket that will have any port, or has one of `share` where one is free.
pub(super) fn anywhere(family: i32, share: Option<Share>) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
    if let Some(share) = share {
        let any = Addr::internet(family, 0, [0; 16], 0);
        share.try_bind(fd.as_raw_fd(), &any).at("bind")?;
    }
    Ok(fd)
}

/// A socket connected to `to` from `local` where that is possible, else from another port.
pub(super) fn client(family: i32, local: &Addr, to: &Addr, options: &Options) -> Result<OwnedFd, Fault> {
    let start = Instant::now();
    let mut cleared = false;
    // A socket that was bound to an address of IPv6 speaks that only.
    let unbound = options.speak_both() && local.ip().is_some_and(|ip| ip.is_ipv6() && !ip.is_unspecified());
    let ways: &[Way] = if unbound {
        &[Way::Unbound, Way::Bind, Way::PortRange]
    } else {
        &[Way::Bind, Way::PortRange]
    };
    loop {
        for way in ways {
            let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
            options.restore(fd.as_raw_fd(), When::Early)?;
            if way.connect(fd.as_raw_fd(), local, to).is_ok() {
                return Ok(fd);
            }
        }
        // What is left of it in TIME_WAIT, taken away where that is allowed.
        if !std::mem::replace(&mut cleared, true) && listening::clear(local).at("ask the kernel who has the port (sock_diag)")? {
            continue;
        }
        if start.elapsed() > REUSE_DELAY {
            break;
        }
        std::thread::sleep(REUSE_STEP);
    }
    let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
    options.restore(fd.as_raw_fd(), When::Early)?;
    sock::connect(fd.as_raw_fd(), to).at(format!("connect to {to}"))?;
    tracing::warn!(%local, %to, "a connection got another local port because its own is still in use");
    Ok(fd)
}

/// A socket that begins to connect to `to` from `local`; none where that is not possible from there.
pub(super) fn begin(family: i32, local: &Addr, to: &Addr, options: &Options) -> Result<Option<OwnedFd>, Fault> {
    // One that is not bound is free for another attempt afterwards.
    let by_route = sock::source(to).is_ok_and(|source| source == local.ip());
    let ways = [Way::Unbound, Way::Bind, Way::PortRange];
    for way in &ways[usize::from(!by_route)..] {
        let fd = sock::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).at("socket")?;
        options.restore(fd.as_raw_fd(), When::Early)?;
        if way.connect(fd.as_raw_fd(), local, to).is_ok() {
            return Ok(Some(fd));
        }
    }
    Ok(None)
}

/// A socket whose attempt to connect from `local` has been refused, where that is possible from there, else from
/// elsewhere on this host; it is still to be told.
pub(super) fn refused(family: i32, local: &Addr, options: &Options) -> Result<OwnedFd, Fault> {
    // Nobody else can have this port, and nobody listens there.
    let nobody = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
    let raw = nobody.as_raw_fd();
    let anywhere = loopback(family);
    if ![local.with_port(0), anywhere].iter().any(|at| sock::bind(raw, at).is_ok()) {
        return refuse("no address of this host can be had (is the loopback interface up?)");
    }
    let to = sock::local(raw).at("read an address")?;
    let begun = begin(family, local, &to, options)?.map_or_else(|| begin_anywhere(family, &to, options), Ok)?;
    if !fd::wait(begun.as_raw_fd(), libc::POLLERR, ANSWER_MS).at("poll")? {
        return refuse("an attempt to connect to a closed port of this host was not refused");
    }
    Ok(begun)
}

/// A socket that begins to connect to `to` from any address.
fn begin_anywhere(family: i32, to: &Addr, options: &Options) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).at("socket")?;
    options.restore(fd.as_raw_fd(), When::Early)?;
    match sock::connect(fd.as_raw_fd(), to) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e).at(format!("connect to {to}")),
        _ => Ok(fd),
    }
}

/// An address of this host with any port.
pub(super) fn loopback(family: i32) -> Addr {
    let ip = match family {
        libc::AF_INET6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
        _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    Addr::of(SocketAddr::new(ip, 0), family)
}

#[derive(Clone, Copy)]
enum Way {
    /// Bind to address and port: possible when every earlier user of the port allowed reuse.
    Bind,
    /// Let the kernel choose a port from a range of one: possible when earlier users of the port did not bind it themselves.
    PortRange,
    /// The same without an address of its own, if it gets the right one nevertheless.
    Unbound,
}

impl Way {
    fn connect(self, raw: RawFd, local: &Addr, to: &Addr) -> io::Result<()> {
        match self {
            Way::Bind => {
                sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32)?;
                sock::bind(raw, local)?;
            }
            Way::Unbound => only_port(raw, local.port())?,
            Way::PortRange => {
                only_port(raw, local.port())?;
                sock::bind_host(raw, local)?;
            }
        }
        match sock::connect(raw, to) {
            // Only a socket that does not wait says so.
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            done => done?,
        }
        if let Way::Bind = self {
            return Ok(());
        }
        sock::set(raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &0u32)?;
        let now = sock::local(raw)?;
        if (now.ip(), now.port()) == (local.ip(), local.port()) {
            Ok(())
        } else {
            Err(io::ErrorKind::AddrNotAvailable.into())
        }
    }
}

/// Lets the kernel choose this port only.
fn only_port(raw: RawFd, port: u16) -> io::Result<()> {
    let port = u32::from(port);
    sock::set(raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &(port << 16 | port))
}

/// Accepts the connection whose client is `client` from one of `listeners`; connections of other programs are closed.
pub(super) fn accept(listeners: &[RawFd], client: RawFd) -> Result<OwnedFd, Fault> {
    let want = sock::local(client).at("read an address")?;
    for raw in listeners {
        for _ in 0..FOREIGN {
            if fd::poll(*raw, libc::POLLIN).at("poll")? & libc::POLLIN == 0 {
                break;
            }
            let fd = sock::accept(*raw).at("accept")?;
            let from = sock::peer(fd.as_raw_fd()).at("read an address")?.unwrap_or_default();
            if (from.ip(), from.port()) == (want.ip(), want.port()) {
                return Ok(fd);
            }
        }
    }
    refuse("its connection did not arrive at the listening socket")
}
