//! Sockets: one folder per family, options common to all here.

pub(crate) mod names;
pub(crate) mod netlink;
pub(crate) mod options;
pub(crate) mod queue;
mod send_buffer;
pub(crate) mod tcp;
pub(crate) mod udp;
pub(crate) mod unix;

use crate::capture::Session;
use crate::fault::{refuse, At, Fault};
use crate::model::{DescId, Kind};
use crate::sys::sock;
use std::os::fd::RawFd;

/// Captures a socket of any family.
pub(crate) fn capture(s: &mut Session<'_>, id: DescId, raw: RawFd) -> Result<Kind, Fault> {
    let opt = |o| sock::get::<i32>(raw, libc::SOL_SOCKET, o).at("read its type");
    let (family, kind, protocol) = (opt(libc::SO_DOMAIN)?, opt(libc::SO_TYPE)?, opt(libc::SO_PROTOCOL)?);
    match (family, kind, protocol) {
        (libc::AF_UNIX, _, _) => unix::capture(s, (id, raw), kind).map(Kind::Unix),
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, libc::IPPROTO_TCP) => tcp::capture(s, id, raw).map(Kind::Tcp),
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_UDP | libc::IPPROTO_UDPLITE) => {
            udp::capture(s, (id, raw), protocol).map(Kind::Udp)
        }
        (libc::AF_NETLINK, _, _) => netlink::capture(s, (id, raw), kind, protocol).map(Kind::Netlink),
        _ => refuse(format!(
            "sockets of family {family}, type {kind}, protocol {protocol} cannot be checkpointed; close it before the checkpoint"
        )),
    }
}
