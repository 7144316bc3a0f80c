//! TCP sockets of the manager, and addresses as programs give them.

use super::wire::LONGEST;
use crate::errno;
use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use std::mem::{size_of, size_of_val, zeroed};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// An address of the kinds that there are here.
///
/// # Safety
/// Null, or an address as long as its family's are.
pub(super) unsafe fn read_address(address: *const sockaddr) -> Option<SocketAddr> {
    match i32::from(address.as_ref()?.sa_family) {
        libc::AF_INET => {
            let a = &*address.cast::<sockaddr_in>();
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(a.sin_port))))
        }
        libc::AF_INET6 => {
            let a = &*address.cast::<sockaddr_in6>();
            let (ip, port) = (a.sin6_addr.s6_addr.into(), u16::from_be(a.sin6_port));
            Some(SocketAddr::V6(SocketAddrV6::new(ip, port, a.sin6_flowinfo, a.sin6_scope_id)))
        }
        _ => None,
    }
}

/// The same for the kernel and for programs, and its length.
pub(super) fn write_address(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
    // SAFETY: numbers, for which zero is a value.
    let mut storage: sockaddr_storage = unsafe { zeroed() };
    let at = std::ptr::from_mut(&mut storage);
    let length = match address {
        SocketAddr::V4(a) => {
            // SAFETY: there is room for any address.
            let to = unsafe { &mut *at.cast::<sockaddr_in>() };
            to.sin_family = libc::AF_INET as u16;
            to.sin_port = a.port().to_be();
            to.sin_addr.s_addr = u32::from(*a.ip()).to_be();
            size_of::<sockaddr_in>()
        }
        SocketAddr::V6(a) => {
            // SAFETY: as above.
            let to = unsafe { &mut *at.cast::<sockaddr_in6>() };
            to.sin6_family = libc::AF_INET6 as u16;
            to.sin6_port = a.port().to_be();
            to.sin6_addr.s6_addr = a.ip().octets();
            (to.sin6_flowinfo, to.sin6_scope_id) = (a.flowinfo(), a.scope_id());
            size_of::<sockaddr_in6>()
        }
    };
    (storage, length as socklen_t)
}

/// The same host and port with an address of IPv4 said as such.
fn plain(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(a) => match a.ip().to_ipv4_mapped() {
            Some(ip) => SocketAddr::new(IpAddr::V4(ip), a.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

/// What a call says: its answer, or its errno.
fn answer(n: isize) -> Result<usize, c_int> {
    usize::try_from(n).map_err(|_| errno())
}

/// A descriptor of the manager's. With its owner the connection ends, also where a forked child has the descriptor too.
#[derive(Debug)]
pub(super) struct Socket(c_int);

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe {
            libc::shutdown(self.0, libc::SHUT_RDWR);
            libc::close(self.0);
        }
    }
}

impl Socket {
    fn make(like: SocketAddr, kind: c_int) -> Result<Self, c_int> {
        let family = if like.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        // SAFETY: numbers only.
        let fd = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
        answer(fd as isize).map(|_| Socket(fd))
    }

    /// One for connections from or to such an address.
    pub(super) fn stream(like: SocketAddr) -> Result<Self, c_int> {
        let made = Self::make(like, libc::SOCK_STREAM)?;
        made.hurry();
        Ok(made)
    }

    /// Whether its port is free for others when its connections have ended, and meanwhile for those who say the same.
    fn share(&self, shared: bool) {
        self.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, shared.into());
    }

    /// Messages are sent at once, and a host that is gone is noticed within a minute, as adapters do.
    fn hurry(&self) {
        self.set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
        self.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        self.set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 20);
        self.set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5);
        self.set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 6);
    }

    pub(super) fn fd(&self) -> c_int {
        self.0
    }

    pub(super) fn set(&self, level: c_int, name: c_int, value: c_int) {
        let length = size_of_val(&value) as socklen_t;
        // SAFETY: a value that lives.
        unsafe { libc::setsockopt(self.0, level, name, std::ptr::from_ref(&value).cast(), length) };
    }

    /// Takes a port, which nobody else has but connections: as with adapters, it is free at once when nobody else listens.
    /// `shared`: also with others that say so, none of which listens.
    pub(super) fn bind(&self, address: SocketAddr, shared: bool) -> Result<(), c_int> {
        let (storage, length) = write_address(address);
        // SAFETY: an address of this length.
        let bind = || answer(unsafe { libc::bind(self.0, std::ptr::from_ref(&storage).cast(), length) } as isize);
        self.share(shared);
        match bind() {
            // Perhaps only by connections that have ended. Who is asked next is told that the port is taken.
            Err(libc::EADDRINUSE) if !shared => {
                self.share(true);
                bind()?;
                self.share(false);
            }
            bound => {
                bound?;
            }
        }
        Ok(())
    }

    /// Who listens has the port alone, but for connections of before.
    pub(super) fn listen(&self, backlog: c_int) -> Result<(), c_int> {
        self.share(true);
        // SAFETY: numbers only.
        answer(unsafe { libc::listen(self.0, backlog) } as isize).map(|_| ())
    }

    /// Begins to connect: who asks waits until it can be written to.
    pub(super) fn connect(&self, address: SocketAddr) -> Result<(), c_int> {
        self.share(true);
        let (storage, length) = write_address(address);
        // SAFETY: an address of this length.
        match answer(unsafe { libc::connect(self.0, std::ptr::from_ref(&storage).cast(), length) } as isize) {
            Err(error) if error != libc::EINPROGRESS && error != libc::EINTR => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether it is known by now that it could connect, or that it could not.
    pub(super) fn is_decided(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.0,
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: one element.
        unsafe { libc::poll(&mut poll, 1, 0) > 0 }
    }

    /// Why it could not connect; 0 where it could.
    pub(super) fn error(&self) -> c_int {
        let (mut error, mut length) = (0, size_of::<c_int>() as socklen_t);
        // SAFETY: room for a number.
        unsafe {
            libc::getsockopt(
                self.0,
                libc::SOL_SOCKET,
                libc::SO_ERROR,
                std::ptr::from_mut(&mut error).cast(),
                &mut length,
            )
        };
        error
    }

    /// The next that has come.
    pub(super) fn accept(&self) -> Result<Self, c_int> {
        let how = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: nobody wants the address.
        let fd = unsafe { libc::accept4(self.0, std::ptr::null_mut(), std::ptr::null_mut(), how) };
        answer(fd as isize)?;
        let made = Socket(fd);
        made.hurry();
        Ok(made)
    }

    /// Sends a message, which always has room: there are never two that nobody has read.
    pub(super) fn send(&self, bytes: &[u8]) -> Result<(), c_int> {
        // SAFETY: bytes that live.
        let sent = unsafe { libc::send(self.0, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        match answer(sent)? {
            n if n == bytes.len() => Ok(()),
            _ => Err(libc::ENOBUFS),
        }
    }

    /// Appends what has come to `to`, up to the longest message. False at the end of the connection, however it came.
    pub(super) fn receive(&self, to: &mut Vec<u8>) -> bool {
        let mut bytes = [0u8; LONGEST];
        let room = LONGEST.saturating_sub(to.len()).max(1);
        // SAFETY: as much as there is room for.
        let got = unsafe { libc::recv(self.0, bytes.as_mut_ptr().cast(), room, 0) };
        match answer(got) {
            Ok(0) => false,
            Ok(n) => {
                to.extend(&bytes[..n]);
                true
            }
            Err(error) => matches!(error, libc::EAGAIN | libc::EINTR),
        }
    }

    fn named(&self, ask: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int) -> Option<SocketAddr> {
        // SAFETY: numbers, for which zero is a value.
        let mut storage: sockaddr_storage = unsafe { zeroed() };
        let mut length = size_of::<sockaddr_storage>() as socklen_t;
        let at = std::ptr::from_mut(&mut storage).cast::<sockaddr>();
        // SAFETY: room for any address, and what is there then is one.
        unsafe {
            if ask(self.0, at, &mut length) != 0 {
                return None;
            }
            read_address(at).map(plain)
        }
    }

    pub(super) fn local(&self) -> Option<SocketAddr> {
        self.named(libc::getsockname)
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.named(libc::getpeername)
    }
}

/// The address of this host from which packets to another go. Sends none.
pub(super) fn source_towards(destination: SocketAddr) -> Option<IpAddr> {
    let socket = Socket::make(destination, libc::SOCK_DGRAM).ok()?;
    // A datagram socket without a port to name leads nowhere.
    let port = destination.port().max(1);
    socket.connect(SocketAddr::new(destination.ip(), port)).ok()?;
    socket.local().map(|a| a.ip())
}
