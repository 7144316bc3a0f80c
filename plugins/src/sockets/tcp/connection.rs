//! Makes a connected pair of TCP sockets with given addresses on this host.

use super::TCP_LISTEN;
use crate::fault::{refuse, At, Fault};
use crate::rebuild::Waits;
use crate::sockets::names::Share;
use crate::sockets::options::{Options, When};
use crate::sys::diag::Diag;
use crate::sys::sock::{self, Addr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

const IP_LOCAL_PORT_RANGE: i32 = 51;
/// A connection that was closed less than this ago blocks an equal one (net.ipv4.tcp_tw_reuse): a rule of the kernel, not a race.
const REUSE_DELAY: Duration = Duration::from_millis(1500);
/// How often to try meanwhile.
const REUSE_STEP: Duration = Duration::from_millis(50);
/// A closed connection keeps its port for 60 s (TCP_TIMEWAIT_LEN): a rule of the kernel, not a race.
const LINGERING: Duration = Duration::from_secs(65);
/// Ports tried in place of one that is taken.
const TRIES: u32 = 16;
/// `TCP_*` states.
const FIN_WAIT2: u8 = 5;
const TIME_WAIT: u8 = 6;
/// Connections of other programs that may be in front of ours in a queue.
const FOREIGN: usize = 64;

/// How a listening socket gets its port.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    /// Where another program has taken it, any other will do.
    pub(super) movable: bool,
    /// It is not shared with another program of the user where both allow that (SO_REUSEPORT): that may be another node of the job, and each expects its own connections.
    pub(super) alone: bool,
}

/// A listening socket bound to `local`, or, if another program has taken the port and `claim` says so, to any port.
pub(super) fn listener(
    family: i32,
    local: &Addr,
    backlog: i32,
    options: &Options,
    claim: Claim,
    waits: &Waits<'_>,
) -> Result<OwnedFd, Fault> {
    let mut at = local.clone();
    for tries in 1.. {
        if let Some(fd) = try_listen(family, &at, backlog, options, claim.alone)? {
            if at != *local {
                let now = sock::local(fd.as_raw_fd()).at("read its address")?.port();
                tracing::warn!(%local, now, "another program has taken a listening port; the job is led to another, programs outside the job are not");
            }
            return Ok(fd);
        }
        // What has a port without listening is in the kernel's lists from Linux 6.8 on only.
        let taken = tries > 1 || free_port(local, waits)? == Freed::Taken;
        if taken && claim.movable && tries < TRIES {
            at = local.with_port(0);
        } else if taken && (claim.movable || !waits.spend(REUSE_STEP)) {
            break;
        }
    }
    refuse(format!(
        "bind {local}: address in use: another program has taken the port; end it (ss -tlnp names it) and restart again"
    ))
}

/// A socket that listens at `at`; `None`: somebody else has that address.
fn try_listen(family: i32, at: &Addr, backlog: i32, options: &Options, alone: bool) -> Result<Option<OwnedFd>, Fault> {
    let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
    let raw = fd.as_raw_fd();
    options.restore(raw, When::Early)?;
    // Connections of the job that have just died stay in TIME_WAIT under this port.
    sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32).at("set SO_REUSEADDR")?;
    let shares: i32 = sock::get(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT).at("read SO_REUSEPORT")?;
    let hides = alone && shares != 0;
    if hides {
        sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT, &0i32).at("set SO_REUSEPORT")?;
    }
    let in_use = |done: &io::Result<()>| done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::AddrInUse);
    let bound = sock::bind(raw, at);
    if in_use(&bound) {
        return Ok(None);
    }
    bound.at(format!("bind {at}"))?;
    // With SO_REUSEADDR several may be bound to a port, of which the first to listen gets it: another node that restarts on this host, for one.
    let listens = sock::listen(raw, backlog);
    if in_use(&listens) {
        return Ok(None);
    }
    listens.at("listen")?;
    if hides {
        sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT, &shares).at("set SO_REUSEPORT")?;
    }
    Ok(Some(fd))
}

/// Whether a port can be bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freed {
    Yes,
    /// Another program has it.
    Taken,
}

/// Waits until no connection that the killed job has left blocks the port of `local`; with the right to do so, takes them away.
///
/// A connection that was closed before the first checkpoint stays in TIME_WAIT for a minute and keeps its port from being bound, where the program did not set SO_REUSEADDR.
fn free_port(local: &Addr, waits: &Waits<'_>) -> Result<Freed, Fault> {
    let mut diag = Diag::open().at("ask the kernel who has the port (sock_diag)")?;
    let start = Instant::now();
    let mut told = false;
    loop {
        let (mut left, mut longest) = (0, Duration::ZERO);
        for family in [libc::AF_INET, libc::AF_INET6] {
            let all = diag.tcp(family, u32::MAX).at("ask the kernel who has the port (sock_diag)")?;
            for socket in all.iter().filter(|s| s.port == local.port()) {
                if socket.inode != 0 || socket.state == TCP_LISTEN {
                    return Ok(Freed::Taken);
                }
                // In these states nothing of its data is on its way any more.
                let over = matches!(socket.state, TIME_WAIT | FIN_WAIT2);
                if !over || diag.destroy(family, socket).is_err() {
                    left += 1;
                    longest = longest.max(socket.expires);
                }
            }
        }
        if left == 0 {
            return Ok(Freed::Yes);
        }
        if start.elapsed() > LINGERING {
            return refuse(format!(
                "bind {local}: address in use: {left} connections of the killed job have not ended; restart again in a minute"
            ));
        }
        if !told {
            told = true;
            let seconds = longest.as_millis().div_ceil(1000);
            tracing::warn!(%local, connections = left, seconds, "waiting for connections of the killed job to leave TIME_WAIT");
            (waits.tell)(&format!(
                "port {} is held by {left} closed connections of the killed job (TIME_WAIT); the restart goes on in {seconds} s",
                local.port()
            ));
        }
        waits.linger(REUSE_STEP);
    }
}

/// A socket that will have any port, or has one of `share` where the node shares its host.
pub(super) fn anywhere(family: i32, share: Option<Share>) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
    if let Some(share) = share {
        let any = Addr::internet(family, 0, [0; 16], 0);
        share.bind(fd.as_raw_fd(), &any).at("bind")?;
    }
    Ok(fd)
}

/// A socket connected to `to` from `local` where that is possible, else from another port.
pub(super) fn client(family: i32, local: &Addr, to: &Addr, options: &Options) -> Result<OwnedFd, Fault> {
    let start = Instant::now();
    loop {
        for way in [Way::Bind, Way::PortRange] {
            let fd = sock::socket(family, libc::SOCK_STREAM, 0).at("socket")?;
            options.restore(fd.as_raw_fd(), When::Early)?;
            if way.connect(fd.as_raw_fd(), local, to).is_ok() {
                return Ok(fd);
            }
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

#[derive(Clone, Copy)]
enum Way {
    /// Bind to address and port: possible when every earlier user of the port allowed reuse.
    Bind,
    /// Let the kernel choose a port from a range of one: possible when earlier users of the port did not bind it themselves.
    PortRange,
}

impl Way {
    fn connect(self, raw: RawFd, local: &Addr, to: &Addr) -> io::Result<()> {
        match self {
            Way::Bind => {
                sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32)?;
                sock::bind(raw, local)?;
            }
            Way::PortRange => {
                let port = u32::from(local.port());
                sock::set(raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &(port << 16 | port))?;
                sock::set(raw, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &1i32)?;
                sock::bind(raw, &local.with_port(0))?;
            }
        }
        sock::connect(raw, to)?;
        if let Way::PortRange = self {
            sock::set(raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &0u32)?;
        }
        Ok(())
    }
}

/// Accepts the connection whose client is `client` from one of `listeners`; connections of other programs are closed.
pub(super) fn accept(listeners: &[RawFd], client: RawFd) -> Result<OwnedFd, Fault> {
    let want = sock::local(client).at("read an address")?;
    for raw in listeners {
        for _ in 0..FOREIGN {
            if crate::sys::fd::poll(*raw, libc::POLLIN).at("poll")? & libc::POLLIN == 0 {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::net::SocketAddr;
    use std::sync::Barrier;

    const NODES: usize = 4;

    /// An address that no other test has, with a port that nobody has there.
    fn free(test: u8) -> SocketAddr {
        let any = std::net::TcpListener::bind(SocketAddr::from(([127, 8, 1, test], 0))).unwrap();
        any.local_addr().unwrap()
    }

    fn port_of(fd: &OwnedFd) -> u16 {
        sock::local(fd.as_raw_fd()).unwrap().port()
    }

    fn make(at: SocketAddr, options: &Options, claim: Claim) -> Result<OwnedFd, Fault> {
        let waits = Waits {
            tell: &|_| {},
            group: None,
            spare: &Cell::new(Duration::from_secs(2)),
        };
        listener(libc::AF_INET, &Addr::of(at, libc::AF_INET), 8, options, claim, &waits)
    }

    const NODE: Claim = Claim {
        movable: true,
        alone: true,
    };

    #[test]
    fn nodes_that_restart_on_one_host_at_once_listen_at_ports_of_their_own() {
        let at = free(1);
        for _ in 0..500 {
            let start = Barrier::new(NODES);
            let node = || {
                start.wait();
                make(at, &Options::default(), NODE).unwrap()
            };
            let all: Vec<OwnedFd> = std::thread::scope(|scope| {
                let nodes: Vec<_> = (0..NODES).map(|_| scope.spawn(node)).collect();
                nodes.into_iter().map(|n| n.join().unwrap()).collect()
            });
            let ports: BTreeSet<u16> = all.iter().map(port_of).collect();
            assert_eq!(ports.len(), NODES);
            assert!(ports.contains(&at.port()));
        }
    }

    #[test]
    fn a_port_that_may_be_shared_is_not_shared_with_another_node() {
        let model = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        sock::set(model.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT, &1i32).unwrap();
        let options = crate::sockets::options::capture(model.as_raw_fd()).unwrap();
        let at = free(2);
        let shared = Claim { alone: false, ..NODE };
        let first = make(at, &options, NODE).unwrap();
        let other = make(at, &options, NODE).unwrap();
        assert_eq!(port_of(&first), at.port());
        assert_ne!(port_of(&other), at.port());
        for fd in [&first, &other] {
            assert_eq!(
                sock::get::<i32>(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT).unwrap(),
                1
            );
            // Sockets of the same node do share.
            let beside = SocketAddr::new(at.ip(), port_of(fd));
            assert_eq!(port_of(&make(beside, &options, shared).unwrap()), port_of(fd));
        }
    }

    #[test]
    fn who_has_a_port_for_a_moment_is_waited_for_and_who_keeps_it_is_named() {
        let still = Claim {
            movable: false,
            alone: true,
        };
        let at = free(3);
        let holder = make(at, &Options::default(), NODE).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn(move || {
            tell.send(()).unwrap();
            make(at, &Options::default(), still).map(|fd| port_of(&fd))
        });
        told.recv().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        drop(holder);
        assert!(matches!(waiter.join().unwrap(), Ok(now) if now == at.port()));
        let holder = make(at, &Options::default(), NODE).unwrap();
        let refused = make(at, &Options::default(), still).unwrap_err();
        assert!(format!("{refused:?}").contains("another program has taken the port"));
        drop(holder);
        // Bound, and not listening.
        let bound = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        sock::bind(bound.as_raw_fd(), &Addr::of(at, libc::AF_INET)).unwrap();
        assert_ne!(port_of(&make(at, &Options::default(), NODE).unwrap()), at.port());
    }
}
