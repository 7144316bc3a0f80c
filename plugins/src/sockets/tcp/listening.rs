//! Gives sockets their ports again: those that listen, and those that are bound only.

use super::TCP_LISTEN;
use crate::builder::Waits;
use crate::fault::{refuse, At, Fault};
use crate::sockets::options::{Options, When};
use crate::sys::diag::Diag;
use crate::sys::sock::{self, Addr};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How often to look meanwhile.
const STEP: Duration = Duration::from_millis(50);
/// A closed connection keeps its port for 60 s (TCP_TIMEWAIT_LEN): a rule of the kernel, not a race.
const LINGERING: Duration = Duration::from_secs(65);
/// How long connections that nobody has any more may go on to deliver what they hold: a peer that is there answers
/// within milliseconds. Of one that is cut off the kernel would try for minutes.
const DELIVERY: Duration = Duration::from_secs(2);
/// How long somebody who has a port is waited for: it may be another node that restarts on this host, and gives it back.
const PATIENCE: Duration = Duration::from_millis(500);
/// Ports tried in place of one that is taken.
const TRIES: u32 = 16;
/// `TCP_*` states.
const FIN_WAIT2: u8 = 5;
const TIME_WAIT: u8 = 6;

/// A socket that is to have a port.
#[derive(Debug)]
pub(super) struct Bound<'a> {
    pub(super) family: i32,
    pub(super) at: Addr,
    /// It listens, and so many may wait to be accepted.
    pub(super) backlog: Option<i32>,
    pub(super) options: &'a Options,
}

impl Bound<'_> {
    /// Those that do not listen come first: a port at which somebody listens cannot be bound. Of the others those for
    /// all addresses do, which keep everybody else from the port.
    fn rank(&self) -> (bool, bool, bool) {
        let specific = self.at.ip().is_some_and(|ip| !ip.is_unspecified());
        (self.backlog.is_some(), specific, self.family == libc::AF_INET)
    }
}

/// How sockets get their port.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    /// Where another program has taken it, any other will do.
    pub(super) movable: bool,
    /// It is not shared with another program of the user where both allow that (SO_REUSEPORT): that may be another node
    /// of the job, and each expects its own connections.
    pub(super) alone: bool,
}

/// A socket that has a port.
struct Made {
    /// Its place in the order of the caller.
    place: usize,
    fd: OwnedFd,
    /// Where it listens.
    ip: Option<IpAddr>,
    /// Bound to any IPv6 address, it accepts IPv4 too.
    dual: bool,
}

/// Makes `sockets`, which have one port: that, or, if another program has taken it for one of them and `claim` says so,
/// all of them another.
pub(super) fn bind_all(sockets: &[Bound<'_>], claim: Claim, waits: &Waits<'_>) -> Result<Vec<OwnedFd>, Fault> {
    if !claim.alone {
        outlast(sockets, waits)?;
    }
    let own = sockets.first().map_or(0, |s| s.at.port());
    let mut order: Vec<usize> = (0..sockets.len()).collect();
    order.sort_by_key(|i| sockets[*i].rank());
    let (mut port, mut freed, mut others, mut told) = (own, Vec::new(), 0, None);
    // The other nodes wait for this one.
    let mut patience = if waits.group.is_some() { PATIENCE } else { Duration::MAX };
    let mut lingering: Option<Instant> = None;
    loop {
        let taken = match try_bind(sockets, &order, port, claim.alone)? {
            Ok(mut made) => {
                if port != own {
                    let now = sock::local(made[0].fd.as_raw_fd()).at("read its address")?.port();
                    tracing::warn!(
                        port = own,
                        now,
                        sockets = made.len(),
                        "another program has taken a port; the job is led to another, programs outside the job are not"
                    );
                }
                made.sort_by_key(|m| m.place);
                return Ok(made.into_iter().map(|m| m.fd).collect());
            }
            Err(taken) => taken,
        };
        if port != own {
            others += 1;
            if others < TRIES {
                continue;
            }
            return refuse(format!(
                "bind {taken}: address in use, and so are {TRIES} others in its place"
            ));
        }
        // Each address may be held by closed connections. (What has a port without listening is in the kernel's lists
        // from Linux 6.8 on only.)
        let late = lingering.is_some_and(|since| since.elapsed() > DELIVERY);
        match holders(&taken, late).at("ask the kernel who has the port (sock_diag)")?.0 {
            Holders::Nobody if !freed.contains(&taken) => {
                freed.push(taken);
                continue;
            }
            // Whether one of them really keeps the port is not told: that is tried again and again.
            Holders::Lingering(connections, longest) => {
                if lingering.get_or_insert_with(Instant::now).elapsed() > LINGERING {
                    return refuse(format!(
                        "bind {taken}: address in use: {connections} closed connections of this job, or of another program at that port, have not ended; restart again in a minute"
                    ));
                }
                if late && told.replace(taken.port()).is_none() {
                    tell(&taken, connections, longest, waits);
                }
                waits.linger(STEP);
                continue;
            }
            Holders::Nobody | Holders::Program => {}
        }
        if claim.movable {
            port = 0;
        } else if patience.is_zero() || !waits.spend(STEP) {
            return refuse(format!(
                "bind {taken}: address in use: another program has taken the port; end it (ss -tanp names it) and restart again"
            ));
        } else {
            patience = patience.saturating_sub(STEP);
        }
    }
}

/// Waits for those to go who listen at a port that they share (SO_REUSEPORT). They do not keep it from being bound:
/// where they are what is left of the killed job, they would only take the connections that are made to it now.
fn outlast(sockets: &[Bound<'_>], waits: &Waits<'_>) -> Result<(), Fault> {
    let mut patience = PATIENCE;
    for s in sockets.iter().filter(|s| s.backlog.is_some() && s.options.share_port()) {
        let is_taken = || -> Result<bool, Fault> {
            Ok(holders(&s.at, false).at("ask the kernel who has the port (sock_diag)")?.0 == Holders::Program)
        };
        while !patience.is_zero() && is_taken()? && waits.spend(STEP) {
            patience = patience.saturating_sub(STEP);
        }
    }
    Ok(())
}

/// Says that closed connections are waited for.
fn tell(local: &Addr, connections: usize, longest: Duration, waits: &Waits<'_>) {
    let seconds = longest.as_millis().div_ceil(1000);
    tracing::warn!(%local, connections, seconds, "waiting for closed connections to leave TIME_WAIT");
    (waits.tell)(&format!(
        "port {} is held by {connections} closed connections (TIME_WAIT) of this job, or of another program at that port; the restart goes on in {seconds} s at most",
        local.port()
    ));
}

/// Makes `sockets` in this order, with this port or, for 0, with one that the kernel chooses; the error is an address
/// that somebody else has.
fn try_bind(sockets: &[Bound<'_>], order: &[usize], port: u16, alone: bool) -> Result<Result<Vec<Made>, Addr>, Fault> {
    let mut made: Vec<Made> = Vec::with_capacity(order.len());
    for &place in order {
        let s = &sockets[place];
        let port = match made.first() {
            Some(first) if port == 0 => sock::local(first.fd.as_raw_fd()).at("read its address")?.port(),
            _ => port,
        };
        let at = s.at.with_port(port);
        // Where an own one listens, that keeps the others away, and shares with this one.
        let hides = alone && s.backlog.is_some() && !made.iter().any(|m| m.is_beside(s.at.ip()));
        // Sockets that listen at one address can be made together only while all of them allow that, whatever has been set since.
        let listens_there = |o: &Bound<'_>| {
            let ips = o.at.ip().zip(s.at.ip());
            o.backlog.is_some() && ips.is_some_and(|(a, b)| covers(a, true, b) || covers(b, true, a))
        };
        let crowd = s.backlog.is_some() && sockets.iter().filter(|o| listens_there(o)).count() > 1;
        let Some(fd) = try_listen(s, &at, (hides, crowd))? else {
            return Ok(Err(at));
        };
        let dual = s.family == libc::AF_INET6
            && sock::get::<i32>(fd.as_raw_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY).at("read IPV6_V6ONLY")? == 0;
        let ip = s.at.ip().filter(|_| s.backlog.is_some());
        made.push(Made { place, fd, ip, dual });
    }
    Ok(Ok(made))
}

impl Made {
    /// Whether it listens at `ip` too.
    fn is_beside(&self, ip: Option<IpAddr>) -> bool {
        self.ip.zip(ip).is_some_and(|(own, ip)| covers(own, self.dual, ip))
    }
}

/// Whether a socket at `own`, which accepts IPv4 and IPv6 where it is `dual`, listens at `ip` too.
fn covers(own: IpAddr, dual: bool, ip: IpAddr) -> bool {
    own == ip || own.is_unspecified() && (own.is_ipv4() == ip.is_ipv4() || own.is_ipv6() && dual)
}

/// A socket at `at`, which listens if it is to; `None`: somebody else has that address.
fn try_listen(s: &Bound<'_>, at: &Addr, (hides, crowd): (bool, bool)) -> Result<Option<OwnedFd>, Fault> {
    let fd = sock::socket(s.family, libc::SOCK_STREAM, 0).at("socket")?;
    let raw = fd.as_raw_fd();
    s.options.restore(raw, When::Unconnected)?;
    // Connections of the job that have just died stay in TIME_WAIT under this port.
    sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32).at("set SO_REUSEADDR")?;
    if crowd {
        sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT, &1i32).at("set SO_REUSEPORT")?;
    }
    let shares: i32 = sock::get(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT).at("read SO_REUSEPORT")?;
    if hides {
        sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT, &0i32).at("set SO_REUSEPORT")?;
    }
    let in_use = |done: &io::Result<()>| done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::AddrInUse);
    let bound = sock::bind(raw, at);
    if in_use(&bound) {
        return Ok(None);
    }
    bound.at(format!("bind {at}"))?;
    if let Some(backlog) = s.backlog {
        // With SO_REUSEADDR several may be bound to a port, of which the first to listen gets it: another node that
        // restarts on this host, for one.
        let listens = sock::listen(raw, backlog);
        if in_use(&listens) {
            return Ok(None);
        }
        listens.at("listen")?;
    }
    if hides {
        sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEPORT, &shares).at("set SO_REUSEPORT")?;
    }
    Ok(Some(fd))
}

/// Who has a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holders {
    Nobody,
    /// A program that lives.
    Program,
    /// So many closed connections, the last of which leaves the port in so long.
    Lingering(usize, Duration),
}

/// Finds out who has the port of `local`. With the right to do so, takes closed connections away: those that have
/// delivered all, and where it is `late` the others.
///
/// A connection whose end here was the first to be closed stays in TIME_WAIT for a minute and keeps its port from being
/// bound, where the program did not set SO_REUSEADDR.
fn holders(local: &Addr, late: bool) -> io::Result<(Holders, bool)> {
    let mut diag = Diag::open()?;
    let is_there = |at: &Addr| match (at.ip(), local.ip()) {
        // Whether one of any IPv6 address has IPv4 ones too is not told.
        (Some(a), Some(b)) => covers(a, true, b) || covers(b, true, a),
        _ => false,
    };
    let (mut left, mut longest, mut taken) = (0, Duration::ZERO, false);
    for family in [libc::AF_INET, libc::AF_INET6] {
        let all = diag.tcp(family, u32::MAX)?;
        for socket in all.iter().filter(|s| s.local.port() == local.port() && is_there(&s.local)) {
            if socket.inode != 0 || socket.state == TCP_LISTEN {
                return Ok((Holders::Program, taken));
            }
            // In these states nothing of its data is on its way any more.
            let over = late || matches!(socket.state, TIME_WAIT | FIN_WAIT2);
            if over && diag.destroy(family, socket).is_ok() {
                taken = true;
            } else {
                left += 1;
                longest = longest.max(socket.expires);
            }
        }
    }
    let who = if left == 0 {
        Holders::Nobody
    } else {
        Holders::Lingering(left, longest)
    };
    Ok((who, taken))
}

/// Takes closed connections away from the port of `local`, where that is allowed; says whether there were any.
pub(super) fn clear(local: &Addr) -> io::Result<bool> {
    holders(local, false).map(|(_, taken)| taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_kernel::numbers;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::net::SocketAddr;
    use std::os::fd::RawFd;
    use std::panic::AssertUnwindSafe;
    use std::sync::Barrier;

    const NODES: usize = 4;

    /// Runs `test` in a descriptor table of its own, which the processes that other tests fork do not copy: who closes a
    /// port here has closed it.
    fn alone(test: impl FnOnce() + Send) {
        let run = || {
            numbers::close(3, RawFd::MAX)?;
            Ok(std::panic::catch_unwind(AssertUnwindSafe(test)))
        };
        if let Err(panic) = numbers::in_own_table(run).unwrap() {
            std::panic::resume_unwind(panic);
        }
    }

    /// An address that no other test has, with a port that nobody has at any address and that the kernel gives nobody.
    fn free(test: u8) -> SocketAddr {
        let nobody = |port: &u16| std::net::TcpListener::bind(("0.0.0.0", *port)).is_ok();
        let first = 12_000 + (std::process::id() % 64) as u16 * 256 + u16::from(test) * 16;
        SocketAddr::from(([127, 8, 1, test], (first..).find(nobody).unwrap()))
    }

    fn port_of(fd: &OwnedFd) -> u16 {
        sock::local(fd.as_raw_fd()).unwrap().port()
    }

    fn make(at: SocketAddr, options: &Options, claim: Claim) -> Result<OwnedFd, Fault> {
        make_all(&[(at, Some(8))], options, claim).map(|mut all| all.remove(0))
    }

    fn make_all(all: &[(SocketAddr, Option<i32>)], options: &Options, claim: Claim) -> Result<Vec<OwnedFd>, Fault> {
        let family = |at: &SocketAddr| if at.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let bound = all.iter().map(|(at, backlog)| Bound {
            family: family(at),
            at: Addr::of(*at, family(at)),
            backlog: *backlog,
            options,
        });
        patiently(|waits| bind_all(&bound.collect::<Vec<_>>(), claim, waits))
    }

    fn patiently<T>(task: impl FnOnce(&Waits<'_>) -> T) -> T {
        task(&Waits {
            tell: &|_| {},
            group: None,
            spare: &Cell::new(Duration::from_secs(2)),
        })
    }

    const NODE: Claim = Claim {
        movable: true,
        alone: true,
    };

    const STILL: Claim = Claim {
        movable: false,
        alone: true,
    };

    /// Those of a socket that allows others to have its port.
    fn sharing() -> Options {
        let model = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        sock::set(model.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT, &1i32).unwrap();
        crate::sockets::options::capture(model.as_raw_fd(), false).unwrap()
    }

    #[test]
    fn nodes_that_restart_on_one_host_at_once_listen_at_ports_of_their_own() {
        alone(|| {
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
        });
    }

    #[test]
    fn a_port_that_may_be_shared_is_not_shared_with_another_node() {
        alone(|| {
            let options = sharing();
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
        });
    }

    #[test]
    fn who_is_about_to_give_a_shared_port_up_is_waited_for() {
        alone(|| {
            let options = sharing();
            let at = free(13);
            let shared = Claim { alone: false, ..STILL };
            let holder = make(at, &options, NODE).unwrap();
            let own = options.clone();
            let waiter = std::thread::spawn(move || make(at, &own, shared));
            std::thread::sleep(PATIENCE / 4);
            assert!(!waiter.is_finished());
            drop(holder);
            let first = waiter.join().unwrap().unwrap();
            // Who stays is shared with.
            let second = make(at, &options, shared).unwrap();
            assert_eq!((port_of(&first), port_of(&second)), (at.port(), at.port()));
        });
    }

    #[test]
    fn sockets_of_one_port_move_together() {
        alone(|| {
            let at = free(4);
            let beside = |ip: &str, port: u16| SocketAddr::new(ip.parse().unwrap(), port);
            let all = [
                (beside("::1", at.port()), Some(8)),
                (at, Some(8)),
                (beside("127.8.1.5", at.port()), None),
            ];
            let ports = |claim| {
                let made = make_all(&all, &Options::default(), claim).unwrap();
                let listens = |fd: &OwnedFd| sock::get::<i32>(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ACCEPTCONN).unwrap() == 1;
                assert_eq!(made.iter().map(listens).collect::<Vec<_>>(), [true, true, false]);
                let ips = made.iter().map(|fd| sock::local(fd.as_raw_fd()).unwrap().ip().unwrap());
                assert!(ips.eq(all.iter().map(|(at, _)| at.ip())), "the caller's order");
                made.iter().map(port_of).collect::<BTreeSet<_>>()
            };
            assert_eq!(ports(NODE), BTreeSet::from([at.port()]));
            for taken in [at, beside("127.8.1.5", at.port())] {
                let _holder = make(taken, &Options::default(), NODE).unwrap();
                let now = ports(NODE);
                assert!(now.len() == 1 && !now.contains(&at.port()), "{now:?} for {taken}");
            }
            // A program at another address of this host is none of our business.
            let _beside = make(beside("127.8.1.6", at.port()), &Options::default(), NODE).unwrap();
            assert_eq!(ports(STILL), BTreeSet::from([at.port()]));
            for (ip, who) in [
                ("127.8.1.5", Holders::Nobody),
                ("127.8.1.6", Holders::Program),
                ("0.0.0.0", Holders::Program),
            ] {
                let at = Addr::of(beside(ip, at.port()), libc::AF_INET);
                assert_eq!(holders(&at, false).unwrap().0, who, "{ip}");
            }
        });
    }

    /// A connection in TIME_WAIT that keeps `at` from being bound.
    fn close_at(at: SocketAddr) {
        let server = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        sock::bind(server.as_raw_fd(), &Addr::of(at, libc::AF_INET)).unwrap();
        sock::listen(server.as_raw_fd(), 1).unwrap();
        let server = std::net::TcpListener::from(server);
        let client = std::net::TcpStream::connect(at).unwrap();
        drop(server.accept().unwrap());
        drop(client);
    }

    #[test]
    fn closed_connections_give_way_at_each_address_of_a_port() {
        alone(|| {
            let at = free(9);
            let all = [9, 10, 11].map(|last| (SocketAddr::from(([127, 8, 1, last], at.port())), Some(8)));
            all.iter().for_each(|(at, _)| close_at(*at));
            let made = make_all(&all, &Options::default(), NODE).unwrap();
            assert!(made.iter().all(|fd| port_of(fd) == at.port()));
        });
    }

    /// Its data are on their way to somebody who does not read them; a connection without SO_REUSEADDR keeps the port meanwhile.
    #[test]
    fn what_is_not_delivered_gives_way_later() {
        alone(|| {
            let at = free(12);
            let server = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
            let local = Addr::of(at, libc::AF_INET);
            sock::bind(server.as_raw_fd(), &local).unwrap();
            sock::listen(server.as_raw_fd(), 1).unwrap();
            let server = std::net::TcpListener::from(server);
            let _reader = std::net::TcpStream::connect(at).unwrap();
            let (mut writer, _) = server.accept().unwrap();
            writer.set_nonblocking(true).unwrap();
            while io::Write::write(&mut writer, &[0; 1 << 16]).is_ok() {}
            drop((server, writer));
            assert!(matches!(holders(&local, false).unwrap().0, Holders::Lingering(1, _)));
            if Diag::open().unwrap().may_destroy() {
                assert_eq!(holders(&local, true).unwrap(), (Holders::Nobody, true));
                make(at, &Options::default(), STILL).unwrap();
            }
        });
    }

    #[test]
    fn who_is_bound_where_the_job_itself_listens_is_bound_again() {
        alone(|| {
            let at = free(7);
            for all in [[(at, Some(8)), (at, None)], [(at, None), (at, Some(8))]] {
                let made = make_all(&all, &Options::default(), STILL).unwrap();
                assert!(made.iter().all(|fd| port_of(fd) == at.port()));
            }
        });
    }

    #[test]
    fn a_port_shared_by_one_node_is_not_shared_with_another_at_any_address() {
        alone(|| {
            let options = sharing();
            let any = |port| (SocketAddr::from(([0, 0, 0, 0], port)), Some(8));
            let at = free(8);
            // The other node has all addresses, this one a specific one and all, in the order in which the program made them.
            let port = at.port();
            let own = [(at, Some(8)), any(port), any(port)];
            let alone = make_all(&own, &options, NODE).unwrap();
            assert!(alone.iter().all(|fd| port_of(fd) == port), "its own sockets share");
            drop(alone);
            let other = make_all(&[any(port)], &options, NODE).unwrap();
            let own = make_all(&own, &options, NODE).unwrap();
            assert_eq!(port_of(&other[0]), port);
            assert!(own.iter().all(|fd| port_of(fd) != port));
        });
    }

    #[test]
    fn who_has_a_port_for_a_moment_is_waited_for_and_who_keeps_it_is_named() {
        alone(|| {
            let at = free(3);
            let holder = make(at, &Options::default(), NODE).unwrap();
            let (tell, told) = std::sync::mpsc::channel();
            let waiter = std::thread::spawn(move || {
                tell.send(()).unwrap();
                make(at, &Options::default(), STILL).map(|fd| port_of(&fd))
            });
            told.recv().unwrap();
            std::thread::sleep(PATIENCE * 2);
            drop(holder);
            assert!(matches!(waiter.join().unwrap(), Ok(now) if now == at.port()));
            let holder = make(at, &Options::default(), NODE).unwrap();
            let refused = make(at, &Options::default(), STILL).unwrap_err();
            assert!(format!("{refused:?}").contains("another program has taken the port"));
            drop(holder);
            // Bound, and not listening.
            let bound = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
            sock::bind(bound.as_raw_fd(), &Addr::of(at, libc::AF_INET)).unwrap();
            assert_ne!(port_of(&make(at, &Options::default(), NODE).unwrap()), at.port());
        });
    }
}
