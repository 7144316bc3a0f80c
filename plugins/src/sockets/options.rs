//! Socket options worth keeping. They are read as raw bytes and set again where a fresh socket has another value.

use super::send_buffer::SO_BUF_LOCK;
use crate::fault::{At, Fault};
use crate::sys::sock;
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;

/// When an option must be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the socket gets an address.
    Early,
    /// When the socket is connected and data in flight is back.
    Late,
}

/// An option: level, number.
type Name = (i32, i32);

const EARLY: [Name; 6] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
    (libc::IPPROTO_IP, libc::IP_FREEBIND),
    (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
    (libc::IPPROTO_TCP, libc::TCP_FASTOPEN),
];

const LATE: [Name; 51] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_BROADCAST),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (libc::SOL_SOCKET, libc::SO_PASSCRED),
    (libc::SOL_SOCKET, libc::SO_PASSSEC),
    (libc::SOL_SOCKET, 76), // SO_PASSPIDFD
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF),
    (libc::SOL_SOCKET, libc::SO_NO_CHECK),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY),
    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL),
    (libc::IPPROTO_IP, libc::IP_TOS),
    // Behind IP_TOS, which sets it too.
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::IPPROTO_IP, libc::IP_TTL),
    (libc::IPPROTO_IP, libc::IP_PKTINFO),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IP, libc::IP_RECVTTL),
    (libc::IPPROTO_IP, libc::IP_RECVTOS),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_TTL),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP),
    (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL),
    (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS),
    (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
    (libc::IPPROTO_TCP, libc::TCP_CONGESTION),
];

/// Options that only datagram sockets have, although a stream socket may let itself be asked for them.
const DATAGRAM_IP: [i32; 3] = [libc::IP_MULTICAST_TTL, libc::IP_MULTICAST_LOOP, libc::IP_MULTICAST_ALL];
/// As above.
const DATAGRAM_IPV6: [i32; 2] = [libc::IPV6_MULTICAST_HOPS, libc::IPV6_MULTICAST_LOOP];

/// Options of one socket.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Options {
    values: Vec<(i32, i32, Vec<u8>)>,
    /// SO_SNDBUF and SO_RCVBUF as the kernel reports them (twice what is set), 0 where the kernel chooses the size itself.
    buffers: (i32, i32),
}

/// Options a socket of `family` and `protocol` can have.
fn applies(name: Name, family: i32, protocol: i32) -> bool {
    match name.0 {
        libc::SOL_SOCKET => family == libc::AF_UNIX || !matches!(name.1, libc::SO_PASSCRED | libc::SO_PASSSEC | 76),
        libc::IPPROTO_IP => family == libc::AF_INET && (protocol != libc::IPPROTO_TCP || !DATAGRAM_IP.contains(&name.1)),
        libc::IPPROTO_IPV6 => family == libc::AF_INET6 && (protocol != libc::IPPROTO_TCP || !DATAGRAM_IPV6.contains(&name.1)),
        libc::IPPROTO_TCP => protocol == libc::IPPROTO_TCP,
        _ => false,
    }
}

/// Reads the options of a socket.
pub(crate) fn capture(raw: RawFd) -> Result<Options, Fault> {
    let opt = |o| sock::get::<i32>(raw, libc::SOL_SOCKET, o).at("read its type");
    let (family, protocol) = (opt(libc::SO_DOMAIN)?, opt(libc::SO_PROTOCOL)?);
    let values = EARLY
        .iter()
        .chain(&LATE)
        .filter(|name| applies(**name, family, protocol))
        .filter_map(|(level, option)| {
            // An option that this kernel or this kind of socket does not have needs no keeping.
            let raw = sock::get_bytes(raw, *level, *option, 32).ok()?;
            Some((*level, *option, raw))
        })
        .collect();
    // Kernels before 5.14 do not tell; there a size that differs from a fresh socket's is taken for chosen.
    let lock = sock::get::<i32>(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(3);
    let chosen = |bit: i32, option: i32| if lock & bit == 0 { Ok(0) } else { opt(option) };
    Ok(Options {
        values,
        buffers: (chosen(1, libc::SO_SNDBUF)?, chosen(2, libc::SO_RCVBUF)?),
    })
}

impl Options {
    /// Sets whether addresses may be shared to what it was: the rebuild uses that option itself. (The other early options follow from the address
    /// or cannot be changed any more.)
    pub(crate) fn restore_reuse(&self, raw: RawFd) -> Result<(), Fault> {
        for (level, option, value) in &self.values {
            if (*level, *option) == (libc::SOL_SOCKET, libc::SO_REUSEADDR) {
                sock::set_bytes(raw, *level, *option, value).at("set SO_REUSEADDR")?;
            }
        }
        Ok(())
    }

    /// Sets the options of one stage. A failure is returned with the option named.
    pub(crate) fn restore(&self, raw: RawFd, when: When) -> Result<(), Fault> {
        for (level, option, value) in &self.values {
            let early = EARLY.contains(&(*level, *option));
            if early != (when == When::Early) {
                continue;
            }
            if sock::get_bytes(raw, *level, *option, 32).is_ok_and(|now| now == *value) {
                continue;
            }
            sock::set_bytes(raw, *level, *option, value).at(format!("set option {option} of level {level}"))?;
        }
        Ok(())
    }

    /// Sets the sizes of the buffers where they differ from a fresh socket's, as far as the system's limits allow.
    pub(crate) fn restore_buffers(&self, raw: RawFd) {
        let (send, receive) = self.buffers;
        for (option, force, want) in [
            (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, send),
            (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, receive),
        ] {
            let now = sock::get::<i32>(raw, libc::SOL_SOCKET, option).unwrap_or(want);
            if now == want || want == 0 {
                continue;
            }
            // A buffer that is smaller than before slows a program down and breaks nothing.
            let half = want / 2;
            if sock::set(raw, libc::SOL_SOCKET, force, &half).is_err() {
                if let Err(error) = sock::set(raw, libc::SOL_SOCKET, option, &half) {
                    tracing::debug!(%error, option, "could not set the size of a socket buffer");
                }
            }
        }
    }
}
