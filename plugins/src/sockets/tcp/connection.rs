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
/// Longest wait for a connection to a socket of this restart: it takes microseconds, and a few seconds where strangers
/// fill the queue.
const CONNECTION: Duration = Duration::from_secs(10);
/// How often to look meanwhile, milliseconds.
const LOOK_MS: i32 = 2;

/// A socket that will have any port, or has one of `share` where one is free.
pub(super) fn anywhere(family: i32, share: Option<Share>) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
    if let Some(share) = share {
        let any = Addr::internet(family, 0, [0; 16], 0);
        share.try_bind(fd.as_raw_fd(), &any).at("bind")?;
    }
    Ok(fd)
}

/// A socket connected to `to` from `local` where that is possible, else from another port; and its other end, where it
/// has been accepted from one of `listeners`, whose queue nobody else is to stay in.
pub(super) fn client(
    family: i32,
    (local, to): (&Addr, &Addr),
    options: &Options,
    listeners: &[RawFd],
) -> Result<(OwnedFd, Option<OwnedFd>), Fault> {
    let start = Instant::now();
    let mut cleared = false;
    // A socket that was bound to an address of IPv6 speaks that only.
    let unbound = options.speak_both() && local.ip().is_some_and(|ip| ip.is_ipv6() && !ip.is_unspecified());
    let ways: &[Way] = if local.port() == 0 {
        &[Way::Anywhere]
    } else if unbound {
        &[Way::Unbound, Way::Bind, Way::PortRange]
    } else {
        &[Way::Bind, Way::PortRange]
    };
    let fresh = || {
        // The kernel would wait for minutes for an answer.
        let fd = sock::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).at("socket")?;
        options.restore(fd.as_raw_fd(), When::Early)?;
        Ok::<_, Fault>(fd)
    };
    loop {
        for way in ways {
            let fd = fresh()?;
            if way.connect(fd.as_raw_fd(), local, to).is_err() {
                continue;
            }
            match finish(fd.as_raw_fd(), listeners) {
                Ok(accepted) => return waiting(fd, accepted),
                Err(e) if e.kind() == io::ErrorKind::TimedOut => return nobody_answers(to),
                Err(_) => {}
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
    let fd = fresh()?;
    match sock::connect(fd.as_raw_fd(), to) {
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
        done => done.at(format!("connect to {to}"))?,
    }
    let accepted = match finish(fd.as_raw_fd(), listeners) {
        Err(e) if e.kind() == io::ErrorKind::TimedOut => return nobody_answers(to),
        done => done.at(format!("connect to {to}"))?,
    };
    tracing::warn!(%local, %to, "a connection got another local port because its own is still in use");
    waiting(fd, accepted)
}

fn nobody_answers<T>(to: &Addr) -> Result<T, Fault> {
    refuse(format!(
        "connect to {to}: no answer within {} s; do other programs fill the queue of the socket that listens there?",
        CONNECTION.as_secs()
    ))
}

/// The same socket as one whose calls wait.
fn waiting(fd: OwnedFd, accepted: Option<OwnedFd>) -> Result<(OwnedFd, Option<OwnedFd>), Fault> {
    let flags = fd::flags(fd.as_raw_fd()).at("read its flags")?;
    fd::set_flags(fd.as_raw_fd(), flags & !libc::O_NONBLOCK).at("set its flags")?;
    Ok((fd, accepted))
}

/// Waits until `client`, which has begun to connect, is connected, and where there are `listeners` accepts it from one of
/// them. Connections of other programs are closed: in front of this one they would keep it out.
fn finish(client: RawFd, listeners: &[RawFd]) -> io::Result<Option<OwnedFd>> {
    let begun = Instant::now();
    let want = sock::local(client)?;
    loop {
        for raw in listeners {
            while fd::poll(*raw, libc::POLLIN)? & libc::POLLIN != 0 && begun.elapsed() < CONNECTION {
                let accepted = sock::accept(*raw)?;
                let from = sock::peer(accepted.as_raw_fd())?.unwrap_or_default();
                if (from.ip(), from.port()) == (want.ip(), want.port()) {
                    return Ok(Some(accepted));
                }
            }
        }
        let events = fd::poll(client, libc::POLLOUT)?;
        if events & (libc::POLLERR | libc::POLLHUP) != 0 {
            let e = sock::get::<i32>(client, libc::SOL_SOCKET, libc::SO_ERROR)?;
            return Err(io::Error::from_raw_os_error(if e == 0 { libc::ECONNREFUSED } else { e }));
        }
        if events & libc::POLLOUT != 0 && listeners.is_empty() {
            return Ok(None);
        }
        if begun.elapsed() > CONNECTION {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match listeners {
            [] => fd::wait(client, libc::POLLOUT, LOOK_MS)?,
            [one, ..] => fd::wait(*one, libc::POLLIN, LOOK_MS)?,
        };
    }
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
    /// Any port of the address that the route chooses. To bind it first would take the kernel long where many ports are taken.
    Anywhere,
}

impl Way {
    fn connect(self, raw: RawFd, local: &Addr, to: &Addr) -> io::Result<()> {
        match self {
            Way::Bind => {
                sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32)?;
                sock::bind(raw, local)?;
            }
            Way::Anywhere => {}
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
        if let Way::Bind | Way::Anywhere = self {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn strangers_in_the_queue_do_not_keep_the_own_connection_out() {
        let at = SocketAddr::from(([127, 8, 2, 1], 0));
        let listener = TcpListener::bind(at).unwrap();
        let raw = listener.as_raw_fd();
        sock::listen(raw, 0).unwrap();
        let to = Addr::of(listener.local_addr().unwrap(), libc::AF_INET);
        let strangers = [0; 4].map(|_| begin_anywhere(libc::AF_INET, &to, &Options::default()).unwrap());
        assert!(fd::wait(raw, libc::POLLIN, ANSWER_MS).unwrap());
        let local = TcpListener::bind(at).unwrap().local_addr().unwrap();
        let local = Addr::of(local, libc::AF_INET);
        let (client, server) = client(libc::AF_INET, (&local, &to), &Options::default(), &[raw]).unwrap();
        assert_eq!(sock::local(client.as_raw_fd()).unwrap(), local);
        assert_eq!(sock::peer(server.unwrap().as_raw_fd()).unwrap(), Some(local));
        assert_eq!(fd::flags(client.as_raw_fd()).unwrap() & libc::O_NONBLOCK, 0);
        drop(strangers);
    }
}
