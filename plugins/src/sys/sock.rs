//! Calls on sockets: addresses, options, messages with descriptors.

use belay_kernel::numbers::lend;
use belay_kernel::plain::Plain;
use belay_kernel::sockets::{self, Received};
use rustix::net::{AddressFamily, Protocol, RecvFlags, Shutdown, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io;
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// A socket address as the kernel wrote it; empty where there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Addr(pub(crate) Vec<u8>);

impl Addr {
    /// An internet address; `host` holds an IPv4 address in its first four bytes. The interface counts for link-local
    /// addresses only.
    pub(crate) fn internet(family: i32, port: u16, host: [u8; 16], interface: u32) -> Self {
        let mut raw = u16::try_from(family).unwrap_or(0).to_ne_bytes().to_vec();
        raw.extend_from_slice(&port.to_be_bytes());
        if family == libc::AF_INET6 {
            let local = std::net::Ipv6Addr::from(host).is_unicast_link_local();
            raw.extend_from_slice(&[0; 4]);
            raw.extend_from_slice(&host);
            raw.extend_from_slice(&(if local { interface } else { 0 }).to_ne_bytes());
        } else {
            raw.extend_from_slice(&host[..4]);
            raw.extend_from_slice(&[0; 8]);
        }
        Self(raw)
    }

    /// `at` as a socket of `family` means it: IPv4 addresses are written as IPv6 ones for AF_INET6.
    pub(crate) fn of(at: std::net::SocketAddr, family: i32) -> Self {
        let host = match (at.ip(), family) {
            (std::net::IpAddr::V4(ip), libc::AF_INET6) => ip.to_ipv6_mapped().octets(),
            (std::net::IpAddr::V4(ip), _) => {
                let mut host = [0; 16];
                host[..4].copy_from_slice(&ip.octets());
                host
            }
            (std::net::IpAddr::V6(ip), _) => ip.octets(),
        };
        Self::internet(family, at.port(), host, 0)
    }

    /// A name in the host's list of abstract names.
    pub(crate) fn abstract_name(name: &str) -> Self {
        let mut raw = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
        raw.push(0);
        raw.extend_from_slice(name.as_bytes());
        Self(raw)
    }

    /// Bound to it, a `AF_UNIX` socket gets an abstract name that nobody has.
    pub(crate) fn any_unix() -> Self {
        Self((libc::AF_UNIX as u16).to_ne_bytes().to_vec())
    }

    /// Address family, `AF_UNSPEC` where there is no address.
    pub(crate) fn family(&self) -> i32 {
        match self.0.as_slice() {
            [a, b, ..] => i32::from(u16::from_ne_bytes([*a, *b])),
            _ => libc::AF_UNSPEC,
        }
    }

    /// Name of a `AF_UNIX` address behind the family; empty for an unnamed socket.
    pub(crate) fn unix_name(&self) -> &[u8] {
        self.0.get(2..).unwrap_or_default()
    }

    /// Whether this is a `AF_UNIX` address without name.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.unix_name().is_empty()
    }

    /// The `AF_UNIX` address of a file.
    pub(crate) fn unix(path: &std::path::Path) -> Self {
        use std::os::unix::ffi::OsStrExt;
        let mut raw = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
        raw.extend_from_slice(path.as_os_str().as_bytes());
        raw.push(0);
        Self(raw)
    }

    /// File of a `AF_UNIX` address that has one.
    pub(crate) fn unix_path(&self) -> Option<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        match self.unix_name() {
            [] | [0, ..] => None,
            name => {
                let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
                Some(PathBuf::from(std::ffi::OsStr::from_bytes(&name[..end])))
            }
        }
    }

    /// Port of an internet address, 0 for others.
    pub(crate) fn port(&self) -> u16 {
        match (self.family(), self.0.get(2..4)) {
            (libc::AF_INET | libc::AF_INET6, Some(p)) => u16::from_be_bytes([p[0], p[1]]),
            _ => 0,
        }
    }

    /// The same internet address with another port.
    pub(crate) fn with_port(&self, port: u16) -> Self {
        let mut a = self.clone();
        if let Some(p) = a.0.get_mut(2..4) {
            p.copy_from_slice(&port.to_be_bytes());
        }
        a
    }

    /// The internet host, IPv4-mapped addresses as IPv4.
    pub(crate) fn ip(&self) -> Option<std::net::IpAddr> {
        use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
        match self.family() {
            libc::AF_INET => {
                let b: [u8; 4] = self.0.get(4..8)?.try_into().ok()?;
                Some(IpAddr::V4(Ipv4Addr::from(b)))
            }
            libc::AF_INET6 => {
                let b: [u8; 16] = self.0.get(8..24)?.try_into().ok()?;
                let v6 = Ipv6Addr::from(b);
                Some(v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4))
            }
            _ => None,
        }
    }
}

impl std::fmt::Display for Addr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ip() {
            Some(std::net::IpAddr::V6(ip)) => write!(f, "[{ip}]:{}", self.port()),
            Some(ip) => write!(f, "{ip}:{}", self.port()),
            None if self.is_unnamed() => f.write_str("unnamed"),
            None => match self.unix_path() {
                Some(path) => write!(f, "{}", path.display()),
                None => write!(f, "@{}", String::from_utf8_lossy(&self.unix_name()[1..])),
            },
        }
    }
}

/// Type and flags of the second argument of `socket`; close-on-exec is set.
fn kind_and_flags(kind: i32) -> (SocketType, SocketFlags) {
    let kind = kind.cast_unsigned();
    let flags = SocketFlags::from_bits_retain(kind & !KIND) | SocketFlags::CLOEXEC;
    (SocketType::from_raw(kind & KIND), flags)
}

/// The part of it that is the type (`SOCK_TYPE_MASK`).
const KIND: u32 = 0xf;

/// A socket, close-on-exec set.
pub(crate) fn socket(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    let Ok(family) = u16::try_from(family) else {
        return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT));
    };
    let (kind, flags) = kind_and_flags(kind);
    let protocol = NonZero::new(protocol.cast_unsigned()).map(Protocol::from_raw);
    Ok(rustix::net::socket_with(
        AddressFamily::from_raw(family),
        kind,
        flags,
        protocol,
    )?)
}

/// A connected pair of `AF_UNIX` sockets, close-on-exec set.
pub(crate) fn pair(kind: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let (kind, flags) = kind_and_flags(kind);
    Ok(rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?)
}

/// The socket's own address.
pub(crate) fn local(fd: RawFd) -> io::Result<Addr> {
    sockets::local(lend(fd)?).map(Addr)
}

/// Its peer's address; `None` when it is not connected.
pub(crate) fn peer(fd: RawFd) -> io::Result<Option<Addr>> {
    match sockets::peer(lend(fd)?) {
        Ok(a) => Ok(Some(Addr(a))),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTCONN | libc::EINVAL)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `bind`.
pub(crate) fn bind(fd: RawFd, addr: &Addr) -> io::Result<()> {
    sockets::bind(lend(fd)?, &addr.0)
}

/// `connect`.
pub(crate) fn connect(fd: RawFd, addr: &Addr) -> io::Result<()> {
    sockets::connect(lend(fd)?, &addr.0)
}

/// Gives a socket the host of `addr`, and no port yet.
pub(crate) fn bind_host(fd: RawFd, addr: &Addr) -> io::Result<()> {
    set(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &1i32)?;
    bind(fd, &addr.with_port(0))
}

/// The host from which a socket without address reaches `to`.
pub(crate) fn source(to: &Addr) -> io::Result<Option<std::net::IpAddr>> {
    let probe = socket(to.family(), libc::SOCK_DGRAM, 0)?;
    connect(probe.as_raw_fd(), to)?;
    Ok(local(probe.as_raw_fd())?.ip())
}

/// Ends the connection of a socket: for one of datagrams, that is all.
pub(crate) fn dissolve(fd: RawFd) -> io::Result<()> {
    connect(fd, &Addr(vec![0; size_of::<libc::sockaddr>()]))
}

/// Ends a connection, or the attempt to make one, so that another can be made. The socket does not remember it: the kernel leaves
/// ECONNRESET behind (`tcp_disconnect`), which who asks before the next attempt would hear.
pub(crate) fn disconnect(fd: RawFd) -> io::Result<()> {
    dissolve(fd)?;
    get::<i32>(fd, libc::SOL_SOCKET, libc::SO_ERROR).map(drop)
}

fn setting(name: &str) -> String {
    std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default()
}

/// The first and the last port that the kernel chooses by itself.
pub(crate) fn ephemeral_range() -> RangeInclusive<u16> {
    let range = setting("ip_local_port_range");
    let mut limits = range.split_whitespace().filter_map(|w| w.parse::<u16>().ok());
    limits.next().unwrap_or(32768)..=limits.next().unwrap_or(60999)
}

/// The ports of these that nobody has reserved, in order.
pub(crate) fn ephemeral_ports() -> Vec<u16> {
    let reserved = setting("ip_local_reserved_ports");
    let reserved: Vec<(u16, u16)> = reserved.trim().split(',').filter_map(port_or_range).collect();
    let is_free = |port: &u16| !reserved.iter().any(|(from, to)| (from..=to).contains(&port));
    ephemeral_range().filter(is_free).collect()
}

/// `7` or `7-9`.
fn port_or_range(text: &str) -> Option<(u16, u16)> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    Some((from.parse().ok()?, to.parse().ok()?))
}

/// `listen`.
pub(crate) fn listen(fd: RawFd, backlog: i32) -> io::Result<()> {
    Ok(rustix::net::listen(lend(fd)?, backlog)?)
}

/// `accept`, close-on-exec set.
pub(crate) fn accept(fd: RawFd) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(lend(fd)?, SocketFlags::CLOEXEC)?)
}

/// `shutdown`.
pub(crate) fn shutdown(fd: RawFd, how: Shutdown) -> io::Result<()> {
    Ok(rustix::net::shutdown(lend(fd)?, how)?)
}

/// Reads an option of plain type `T`.
pub(crate) fn get<T: Plain>(fd: RawFd, level: i32, option: i32) -> io::Result<T> {
    sockets::option(lend(fd)?, level, option)
}

/// Reads an option whose length varies.
pub(crate) fn get_bytes(fd: RawFd, level: i32, option: i32, max: usize) -> io::Result<Vec<u8>> {
    let mut raw = vec![0u8; max];
    get_into(fd, level, option, &mut raw).map(<[u8]>::to_vec)
}

/// The same into `buf`: the part that has been written.
pub(crate) fn get_into(fd: RawFd, level: i32, option: i32, buf: &mut [u8]) -> io::Result<&[u8]> {
    sockets::option_into(lend(fd)?, level, option, buf)
}

/// Sets an option of plain type `T`.
pub(crate) fn set<T: Plain>(fd: RawFd, level: i32, option: i32, value: &T) -> io::Result<()> {
    sockets::set_option(lend(fd)?, level, option, value)
}

/// Sets an option from raw bytes.
pub(crate) fn set_bytes(fd: RawFd, level: i32, option: i32, raw: &[u8]) -> io::Result<()> {
    sockets::set_option_bytes(lend(fd)?, level, option, raw)
}

/// `recvmsg` into `buf`, never blocking.
pub(crate) fn receive(fd: RawFd, buf: &mut [u8], flags: i32) -> io::Result<Received> {
    sockets::receive(lend(fd)?, buf, flags)
}

/// Peeks at what can be read now, without allocating; how much of it is in `buf`.
pub(crate) fn peek(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    let (_, len) = rustix::net::recv(lend(fd)?, buf, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    Ok(len)
}

/// Peeks `len` bytes into memory of which the last byte cannot be written; returns how many bytes the kernel delivered before that.
pub(crate) fn peek_all_but_last_byte(fd: RawFd, len: usize) -> io::Result<usize> {
    sockets::peek_all_but_last_byte(lend(fd)?, len)
}

/// `sendmsg` of `data` with descriptors `fds`, to `to` where given, never blocking and without SIGPIPE.
pub(crate) fn send(fd: RawFd, data: &[u8], fds: &[RawFd], to: Option<&Addr>) -> io::Result<usize> {
    send_as(fd, data, (fds, None), to)
}

/// The same, with `creds` as those of its sender where given.
pub(crate) fn send_as(fd: RawFd, data: &[u8], beside: (&[RawFd], Option<libc::ucred>), to: Option<&Addr>) -> io::Result<usize> {
    sockets::send(lend(fd)?, data, beside, to.map(|to| to.0.as_slice()))
}

/// The same with control messages: level, type, data; those without data are left out.
pub(crate) fn send_with(fd: RawFd, data: &[u8], all: &[(i32, i32, Vec<u8>)], to: Option<&Addr>) -> io::Result<usize> {
    sockets::send_with(lend(fd)?, data, all, to.map(|to| to.0.as_slice()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_attempt_that_was_given_up_is_forgotten() {
        // Whose queue is full does not answer.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(listener.as_raw_fd(), 0).unwrap();
        let to = Addr::of(listener.local_addr().unwrap(), libc::AF_INET);
        let attempts = [0; 4].map(|_| {
            let fd = socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).unwrap();
            assert_eq!(
                connect(fd.as_raw_fd(), &to).unwrap_err().raw_os_error(),
                Some(libc::EINPROGRESS)
            );
            fd
        });
        let raw = attempts[3].as_raw_fd();
        disconnect(raw).unwrap();
        assert_eq!(get::<i32>(raw, libc::SOL_SOCKET, libc::SO_ERROR).unwrap(), 0);
    }

    #[test]
    fn the_sender_of_what_is_read_leaves_no_descriptor() {
        const SO_PASSPIDFD: i32 = 76;
        let left = belay_kernel::apart::fork(|| {
            let (a, b) = pair(libc::SOCK_STREAM).unwrap();
            // Kernels before 6.5 do not have it.
            let _ = set(b.as_raw_fd(), libc::SOL_SOCKET, SO_PASSPIDFD, &1i32);
            send(a.as_raw_fd(), b"x", &[a.as_raw_fd()], None).unwrap();
            let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
            let before = open();
            let received = receive(b.as_raw_fd(), &mut [0], libc::MSG_PEEK).unwrap();
            vec![
                u8::try_from(received.fds.len()).unwrap(),
                u8::try_from(open() - before).unwrap(),
            ]
        });
        assert_eq!(left.unwrap(), [1, 1]);
    }
}
