//! Calls on sockets: addresses, options, messages with descriptors.

use super::{check, check_len};
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// A socket address as the kernel wrote it; empty where there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Addr(pub(crate) Vec<u8>);

/// Largest address.
const ADDR_MAX: usize = size_of::<libc::sockaddr_storage>();
/// Words of a control buffer that holds the most descriptors one message can carry (253) with room to spare.
const CONTROL_WORDS: usize = 512;
/// A message's sender, where SO_PASSPIDFD is set.
const SCM_PIDFD: i32 = 4;

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

fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass a number that the kernel has just returned to them and that nobody else knows.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A socket, close-on-exec set.
pub(crate) fn socket(family: i32, kind: i32, protocol: i32) -> io::Result<OwnedFd> {
    // SAFETY: socket takes numbers only.
    check(unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) }).map(own)
}

/// A connected pair of `AF_UNIX` sockets, close-on-exec set.
pub(crate) fn pair(kind: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two numbers.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) })?;
    Ok((own(fds[0]), own(fds[1])))
}

type NameCall = unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;

fn name(fd: RawFd, call: NameCall) -> io::Result<Addr> {
    let mut raw = vec![0u8; ADDR_MAX];
    let mut len = ADDR_MAX as libc::socklen_t;
    // SAFETY: `raw` has `len` bytes; byte buffers may hold any address, the kernel writes without alignment.
    check(unsafe { call(fd, raw.as_mut_ptr().cast(), &mut len) })?;
    raw.truncate(len as usize);
    Ok(Addr(raw))
}

/// The socket's own address.
pub(crate) fn local(fd: RawFd) -> io::Result<Addr> {
    name(fd, libc::getsockname)
}

/// Its peer's address; `None` when it is not connected.
pub(crate) fn peer(fd: RawFd) -> io::Result<Option<Addr>> {
    match name(fd, libc::getpeername) {
        Ok(a) => Ok(Some(a)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTCONN | libc::EINVAL)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `bind`.
pub(crate) fn bind(fd: RawFd, addr: &Addr) -> io::Result<()> {
    // SAFETY: `addr` is valid for reading its length.
    check(unsafe { libc::bind(fd, addr.0.as_ptr().cast(), addr.0.len() as libc::socklen_t) }).map(drop)
}

/// `connect`.
pub(crate) fn connect(fd: RawFd, addr: &Addr) -> io::Result<()> {
    // SAFETY: `addr` is valid for reading its length.
    check(unsafe { libc::connect(fd, addr.0.as_ptr().cast(), addr.0.len() as libc::socklen_t) }).map(drop)
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
    // SAFETY: listen takes numbers only.
    check(unsafe { libc::listen(fd, backlog) }).map(drop)
}

/// `accept`, close-on-exec set.
pub(crate) fn accept(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: null pointers mean that the peer's address is not wanted.
    check(unsafe { libc::accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC) }).map(own)
}

/// `shutdown`.
pub(crate) fn shutdown(fd: RawFd, how: i32) -> io::Result<()> {
    // SAFETY: shutdown takes numbers only.
    check(unsafe { libc::shutdown(fd, how) }).map(drop)
}

/// Reads an option of plain type `T`.
pub(crate) fn get<T: Default>(fd: RawFd, level: i32, option: i32) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` has `len` bytes, and callers pair the option with its type, for which all bytes the kernel writes are valid.
    check(unsafe { libc::getsockopt(fd, level, option, (&raw mut value).cast(), &mut len) })?;
    Ok(value)
}

/// Reads an option whose length varies.
pub(crate) fn get_bytes(fd: RawFd, level: i32, option: i32, max: usize) -> io::Result<Vec<u8>> {
    let mut raw = vec![0u8; max];
    get_into(fd, level, option, &mut raw).map(<[u8]>::to_vec)
}

/// The same into `buf`: the part that has been written.
pub(crate) fn get_into(fd: RawFd, level: i32, option: i32, buf: &mut [u8]) -> io::Result<&[u8]> {
    let mut len = libc::socklen_t::try_from(buf.len()).map_err(io::Error::other)?;
    // SAFETY: `buf` has `len` bytes.
    check(unsafe { libc::getsockopt(fd, level, option, buf.as_mut_ptr().cast(), &mut len) })?;
    Ok(&buf[..(len as usize).min(buf.len())])
}

/// Reads instructions of a filter, of 8 bytes each, into `buf`: how many there are, of which as many are read as it has
/// room for, if there is any.
pub(crate) fn get_counted(fd: RawFd, level: i32, option: i32, buf: &mut [u8]) -> io::Result<usize> {
    let mut len = libc::socklen_t::try_from(buf.len() / 8).map_err(io::Error::other)?;
    // SAFETY: for this option the length is counted in instructions, for which `buf` has room.
    check(unsafe { libc::getsockopt(fd, level, option, buf.as_mut_ptr().cast(), &mut len) })?;
    Ok(len as usize)
}

/// Sets an option of plain type `T`.
pub(crate) fn set<T>(fd: RawFd, level: i32, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: `value` is valid for reading its size, and callers pair the option with its type.
    check(unsafe {
        libc::setsockopt(
            fd,
            level,
            option,
            (&raw const *value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    })
    .map(drop)
}

/// Sets an option from raw bytes.
pub(crate) fn set_bytes(fd: RawFd, level: i32, option: i32, raw: &[u8]) -> io::Result<()> {
    // SAFETY: `raw` is valid for reading its length.
    check(unsafe { libc::setsockopt(fd, level, option, raw.as_ptr().cast(), raw.len() as libc::socklen_t) }).map(drop)
}

/// One received message.
#[derive(Debug, Default)]
pub(crate) struct Received {
    /// Bytes read; the data is in the caller's buffer.
    pub(crate) len: usize,
    /// Sender's address.
    pub(crate) from: Addr,
    /// Descriptors it carried.
    pub(crate) fds: Vec<OwnedFd>,
    /// `MSG_*` flags of the message.
    pub(crate) flags: i32,
    /// Process, user and group of its sender, where SO_PASSCRED is set and the kernel knows them.
    pub(crate) creds: Option<libc::ucred>,
    /// Where several datagrams have come as one (UDP_GRO): how long each is, but for the last.
    pub(crate) segment: Option<usize>,
    /// What an internet protocol tells of it: level, type, data.
    pub(crate) told: Vec<(i32, i32, Vec<u8>)>,
}

/// `recvmsg` into `buf`, never blocking.
pub(crate) fn receive(fd: RawFd, buf: &mut [u8], flags: i32) -> io::Result<Received> {
    let mut addr = vec![0u8; ADDR_MAX];
    let mut control = vec![0u64; CONTROL_WORDS];
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_name = addr.as_mut_ptr().cast();
    msg.msg_namelen = ADDR_MAX as libc::socklen_t;
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = control.len() * 8;
    // SAFETY: every pointer in `msg` is valid for the length beside it.
    let len = check_len(unsafe { libc::recvmsg(fd, &mut msg, flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) })?;
    addr.truncate(msg.msg_namelen as usize);
    let (mut fds, mut segment, mut creds, mut told) = (Vec::new(), None, None, Vec::new());
    // SAFETY: `msg` describes the control buffer as the kernel left it.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(&msg) };
    // SAFETY: a non-null header lies within the control buffer.
    while let Some(h) = unsafe { head.as_ref() } {
        if h.cmsg_level == libc::SOL_SOCKET && [libc::SCM_RIGHTS, SCM_PIDFD].contains(&h.cmsg_type) {
            // SAFETY: the data begins behind the header.
            let data = unsafe { libc::CMSG_DATA(h) };
            let n = (h.cmsg_len - (data as usize - head as usize)) / size_of::<RawFd>();
            for i in 0..n {
                // SAFETY: the message holds `n` numbers, possibly unaligned.
                let fd = unsafe { data.cast::<RawFd>().add(i).read_unaligned() };
                // The kernel makes a pidfd of the sender with each reading; an error in place of one is no descriptor.
                let received = (fd >= 0).then(|| own(fd));
                fds.extend(received.filter(|_| h.cmsg_type == libc::SCM_RIGHTS));
            }
        }
        if h.cmsg_level == libc::SOL_SOCKET && h.cmsg_type == libc::SCM_CREDENTIALS {
            // SAFETY: the data begins behind the header, and is this structure.
            let sender = unsafe { libc::CMSG_DATA(h).cast::<libc::ucred>().read_unaligned() };
            creds = (sender.pid != 0).then_some(sender);
        }
        if h.cmsg_level == libc::SOL_UDP && h.cmsg_type == libc::UDP_GRO {
            // SAFETY: the data begins behind the header, and is a number.
            let length = unsafe { libc::CMSG_DATA(h).cast::<i32>().read_unaligned() };
            segment = usize::try_from(length).ok().filter(|n| *n > 0);
        }
        if [libc::IPPROTO_IP, libc::IPPROTO_IPV6].contains(&h.cmsg_level) {
            // SAFETY: the data begins behind the header.
            let data = unsafe { libc::CMSG_DATA(h) };
            let n = h.cmsg_len - (data as usize - head as usize);
            // SAFETY: the message has so many bytes, as the kernel has written them.
            told.push((
                h.cmsg_level,
                h.cmsg_type,
                unsafe { std::slice::from_raw_parts(data, n) }.to_vec(),
            ));
        }
        // SAFETY: `head` is a header of `msg`.
        head = unsafe { libc::CMSG_NXTHDR(&msg, head) };
    }
    Ok(Received {
        len,
        from: Addr(addr),
        fds,
        flags: msg.msg_flags,
        creds,
        segment,
        told,
    })
}

/// Peeks at what can be read now, without allocating; how much that is, also where `buf` has less room.
pub(crate) fn peek(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: `buf` is valid for writing its length.
    check_len(unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), flags) })
}

/// Peeks `len` bytes into memory of which the last byte cannot be written; returns how many bytes the kernel delivered before that.
pub(crate) fn peek_all_but_last_byte(fd: RawFd, len: usize) -> io::Result<usize> {
    const PAGE: usize = 4096;
    let writable = (len - 1).div_ceil(PAGE) * PAGE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), writable + PAGE, libc::PROT_NONE, flags, -1, 0) };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let read = || -> io::Result<usize> {
        // SAFETY: the range lies within the mapping made above.
        check(unsafe { libc::mprotect(map, writable, libc::PROT_READ | libc::PROT_WRITE) })?;
        // SAFETY: `writable` is at least `len - 1`.
        let buf = unsafe { map.cast::<u8>().add(writable - (len - 1)) };
        // SAFETY: the buffer is checked by the kernel, and its last byte lies in memory that nobody may write.
        check_len(unsafe { libc::recv(fd, buf.cast(), len, libc::MSG_PEEK | libc::MSG_DONTWAIT) })
    };
    let read = read();
    // SAFETY: the mapping made above, to which nothing refers any more.
    check(unsafe { libc::munmap(map, writable + PAGE) })?;
    read
}

/// `sendmsg` of `data` with descriptors `fds`, to `to` where given, never blocking and without SIGPIPE.
pub(crate) fn send(fd: RawFd, data: &[u8], fds: &[RawFd], to: Option<&Addr>) -> io::Result<usize> {
    send_as(fd, data, (fds, None), to)
}

/// Writes a control message at `head`, where there is room for it.
fn control(head: &mut libc::cmsghdr, (level, kind): (i32, i32), data: &[u8]) {
    head.cmsg_level = level;
    head.cmsg_type = kind;
    // SAFETY: CMSG_LEN only computes a length.
    head.cmsg_len = unsafe { libc::CMSG_LEN(data.len() as u32) } as usize;
    // SAFETY: the data begins behind the header.
    let at = unsafe { libc::CMSG_DATA(head) };
    // SAFETY: there is room, as the caller says.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at, data.len()) };
}

/// The same, with `creds` as those of its sender where given.
pub(crate) fn send_as(
    fd: RawFd,
    data: &[u8],
    (fds, creds): (&[RawFd], Option<libc::ucred>),
    to: Option<&Addr>,
) -> io::Result<usize> {
    let numbers: Vec<u8> = fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
    let sender: Vec<u8> = creds
        .iter()
        .flat_map(|c| [c.pid.to_ne_bytes(), c.uid.to_ne_bytes(), c.gid.to_ne_bytes()].concat())
        .collect();
    let all = [
        (libc::SOL_SOCKET, libc::SCM_RIGHTS, numbers),
        (libc::SOL_SOCKET, libc::SCM_CREDENTIALS, sender),
    ];
    send_with(fd, data, &all, to)
}

/// The same with control messages: level, type, data; those without data are left out.
pub(crate) fn send_with(fd: RawFd, data: &[u8], all: &[(i32, i32, Vec<u8>)], to: Option<&Addr>) -> io::Result<usize> {
    let mut iov = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    if let Some(to) = to {
        msg.msg_name = to.0.as_ptr().cast_mut().cast();
        msg.msg_namelen = to.0.len() as libc::socklen_t;
    }
    let parts: Vec<_> = all.iter().filter(|(_, _, data)| !data.is_empty()).collect();
    let mut room = vec![0u64; CONTROL_WORDS];
    if !parts.is_empty() {
        msg.msg_control = room.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE only computes a length.
        let space = |bytes: usize| unsafe { libc::CMSG_SPACE(bytes as u32) } as usize;
        // There is room for the most descriptors a message can carry, and more.
        msg.msg_controllen = parts.iter().map(|(_, _, data)| space(data.len())).sum();
        // SAFETY: `msg` describes the control buffer.
        let mut head = unsafe { libc::CMSG_FIRSTHDR(&msg) };
        for (level, kind, data) in parts {
            // SAFETY: a non-null header lies within the control buffer.
            let Some(h) = (unsafe { head.as_mut() }) else { break };
            control(h, (*level, *kind), data);
            // SAFETY: `head` is a header of `msg`.
            head = unsafe { libc::CMSG_NXTHDR(&msg, head) };
        }
    }
    // SAFETY: every pointer in `msg` is valid for the length beside it.
    check_len(unsafe { libc::sendmsg(fd, &msg, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_attempt_that_was_given_up_is_forgotten() {
        // Whose queue is full does not answer.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
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
        let left = crate::sys::apart::fork(|| {
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
