//! Datagrams that have not been read, with what the kernel tells of each to a program that asks: to which address of this
//! host it came, with how many hops left and in which class, and which have come as one (UDP_GRO).
//!
//! It tells what the program has asked for by options of the socket, and no other program sees the rest; so the options of
//! the socket, which the program goes on to use, stay as they are.

use crate::fault::Fault;
use crate::sockets::queue;
use crate::sys::sock::Addr;
use belay_kernel::sockets::Received;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::RawFd;

const UDP_SEGMENT: i32 = 103;
/// Most that are sent as one, and bytes of them.
const SEGMENTS: usize = 64;
const BYTES: usize = 65_000;

/// A control message: level, type, data.
type Message = (i32, i32, Vec<u8>);

/// What is told of a datagram.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Told {
    /// Where it came to.
    #[serde(default)]
    pub(super) to: Option<IpAddr>,
    /// Hops that it had left.
    #[serde(default)]
    pub(super) hops: Option<u8>,
    /// Class of traffic.
    #[serde(default)]
    pub(super) class: Option<u8>,
    /// It has come as one with the one before it.
    #[serde(default)]
    pub(super) follows: bool,
}

/// Datagrams that have come as one; mostly it is one.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) parts: Vec<Vec<u8>>,
    pub(super) from: Addr,
    pub(super) told: Told,
}

impl Waiting {
    fn of(r: Received, buf: &[u8]) -> Self {
        let data = &buf[..r.len];
        Self {
            parts: match r.segment.filter(|segment| *segment < r.len) {
                Some(segment) => data.chunks(segment).map(<[u8]>::to_vec).collect(),
                None => vec![data.to_vec()],
            },
            from: Addr(r.from),
            told: Told::of(&r.told),
        }
    }
}

/// All datagrams in the queue of `raw`, which stay there.
pub(super) fn peek(raw: RawFd) -> Result<Vec<Waiting>, Fault> {
    queue::peek_datagrams(raw, |r, buf| Ok(Waiting::of(r, buf)))
}

impl Told {
    fn of(messages: &[Message]) -> Self {
        let mut out = Self::default();
        for (level, kind, data) in messages {
            let number = || match data.as_slice() {
                [one] => Some(*one),
                more => u8::try_from(i32::from_ne_bytes(*more.first_chunk()?)).ok(),
            };
            let v4 = |at: usize| Some(IpAddr::from(Ipv4Addr::from(*data.get(at..)?.first_chunk::<4>()?)));
            let v6 = |at: usize| Some(IpAddr::from(Ipv6Addr::from(*data.get(at..)?.first_chunk::<16>()?)).to_canonical());
            match (*level, *kind) {
                // Interface, chosen address, address.
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => out.to = v4(8),
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => out.to = v6(0),
                // Addresses with their ports.
                (libc::IPPROTO_IP, libc::IP_ORIGDSTADDR) => out.to = out.to.or_else(|| v4(4)),
                (libc::IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR) => out.to = out.to.or_else(|| v6(8)),
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => out.hops = number(),
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => out.class = number(),
                _ => {}
            }
        }
        out
    }

    /// Control messages with which it is sent to `ip` so that the same is told of it again.
    pub(super) fn messages(&self, ip: IpAddr) -> Vec<Message> {
        let (level, hops, class) = match ip.to_canonical() {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TTL, libc::IP_TOS),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, libc::IPV6_TCLASS),
        };
        let number = |kind, n: u8| (level, kind, i32::from(n).to_ne_bytes().to_vec());
        // None can be sent without any hops left.
        let left = self.hops.filter(|n| *n > 0).map(|n| number(hops, n));
        left.into_iter().chain(self.class.map(|n| number(class, n))).collect()
    }
}

/// How `parts` are sent as one: all of them, and the control message for it. `None`: they cannot be.
pub(super) fn as_one(parts: &[Vec<u8>]) -> Option<(Vec<u8>, Message)> {
    let (last, others) = parts.split_last()?;
    let length = others.first()?.len();
    let alike = others.iter().all(|p| p.len() == length) && (1..=length).contains(&last.len());
    let all = parts.concat();
    let fits = parts.len() <= SEGMENTS && all.len() <= BYTES;
    let length = u16::try_from(length).ok().filter(|_| alike && fits)?;
    Some((all, (libc::IPPROTO_UDP, UDP_SEGMENT, length.to_ne_bytes().to_vec())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::sock;
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    /// Of IPv4 and of IPv6.
    #[test]
    fn what_is_told_of_a_datagram_can_be_sent_again() {
        type Case<'a> = (&'a str, &'a str, &'a [(i32, i32)]);
        let on: &[Case] = &[
            ("0.0.0.0:0", "127.0.0.5", &[(0, 8), (0, 12), (0, 13)]),
            ("[::]:0", "::1", &[(41, 49), (41, 51), (41, 66)]),
        ];
        for (any, ip, options) in on {
            let Ok(to) = UdpSocket::bind(any) else { continue };
            for (level, option) in *options {
                sock::set(to.as_raw_fd(), *level, *option, &1i32).unwrap();
            }
            let ip: IpAddr = ip.parse().unwrap();
            let at = Addr::of(
                (ip, to.local_addr().unwrap().port()).into(),
                if ip.is_ipv4() { 2 } else { 10 },
            );
            let told = Told {
                to: Some(ip),
                hops: Some(77),
                class: Some(0x28),
                follows: false,
            };
            let from = UdpSocket::bind(any).unwrap();
            sock::send_with(from.as_raw_fd(), b"x", &told.messages(ip), Some(&at)).unwrap();
            let seen = peek(to.as_raw_fd()).unwrap();
            assert_eq!(seen.len(), 1);
            assert_eq!(seen[0].told, told);
        }
    }

    #[test]
    fn only_what_may_have_come_as_one_is_sent_so() {
        let of = |lengths: &[usize]| as_one(&lengths.iter().map(|n| vec![1; *n]).collect::<Vec<_>>()).map(|(all, _)| all.len());
        assert_eq!(of(&[10, 10, 3]), Some(23));
        assert_eq!(of(&[10, 10]), Some(20));
        for odd in [
            &[][..],
            &[10],
            &[10, 3, 10],
            &[3, 10],
            &[10, 0],
            &[0, 0],
            &[1; 65],
            &[40_000, 40_000],
        ] {
            assert_eq!(of(odd), None, "{odd:?}");
        }
    }
}
