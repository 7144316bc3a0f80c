//! Multicast groups of a datagram socket.
//!
//! The kernel lists which groups the host's interfaces have, not for whom. But a socket that is asked for the senders
//! it accepts in a group of an interface says whether it has joined it.

use crate::fault::{At, Fault};
use crate::sys::{fd, sock};
use belay_kernel::ioctl;
use belay_kernel::numbers::lend;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::RawFd;

const MCAST_MSFILTER: i32 = 48;
const EXCLUDE: u32 = 0;
/// `struct group_filter`: interface, group, mode, number of senders, senders.
const GROUP_AT: usize = 8;
const MODE_AT: usize = 136;
const COUNT_AT: usize = 140;
const SENDERS_AT: usize = 144;
const ADDRESS: usize = size_of::<libc::sockaddr_storage>();
/// Most senders for which the kernel's default limits leave room (`net.ipv4.igmp_max_msf`, `net.ipv6.mld_max_msf`: 10,
/// 64), and more.
const SENDERS: usize = 1024;

/// A group that a socket has joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Membership {
    group: IpAddr,
    interface: String,
    /// Only datagrams of these senders are received, else all but theirs.
    only: bool,
    senders: Vec<IpAddr>,
}

/// The groups of this host's interfaces, where a socket may have joined them: (interface, its number, group).
#[derive(Debug, Default)]
pub(super) struct Groups(Vec<(String, u32, IpAddr)>);

impl Groups {
    pub(super) fn of_host() -> Self {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
        let mut all = v4(&read("igmp"));
        all.extend(v6(&read("igmp6")));
        Self(all)
    }

    /// Those that `raw`, of this family, has joined.
    pub(super) fn joined(&self, raw: RawFd, family: i32) -> Result<Vec<Membership>, Fault> {
        let mut out = Vec::new();
        for (interface, index, group) in &self.0 {
            if group.is_ipv6() && family == libc::AF_INET {
                continue;
            }
            match senders(raw, *group, *index) {
                Ok((only, senders)) => out.push(Membership {
                    group: *group,
                    interface: interface.clone(),
                    only,
                    senders,
                }),
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {}
                Err(e) => return Err(e).at(format!("ask whether it has joined group {group}")),
            }
        }
        Ok(out)
    }
}

/// From `/proc/net/igmp`: a line for each interface, and under it one for each group.
fn v4(text: &str) -> Vec<(String, u32, IpAddr)> {
    let (mut out, mut interface) = (Vec::new(), None);
    for line in text.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if !line.starts_with(['\t', ' ']) {
            interface = words.first().and_then(|i| i.parse().ok()).zip(words.get(1).copied());
            continue;
        }
        let group = words.first().and_then(|g| u32::from_str_radix(g, 16).ok());
        let users = words.get(1).and_then(|n| n.parse::<u32>().ok()).unwrap_or(2);
        if let (Some((index, name)), Some(group)) = (interface, group) {
            let group = Ipv4Addr::from(group.to_ne_bytes());
            // The kernel itself is in the group of all hosts.
            if users > 1 || group != Ipv4Addr::new(224, 0, 0, 1) {
                out.push((name.trim_end_matches(':').to_owned(), index, IpAddr::V4(group)));
            }
        }
    }
    out
}

/// From `/proc/net/igmp6`: a line for each group of each interface.
fn v6(text: &str) -> Vec<(String, u32, IpAddr)> {
    let group = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [index, name, group, users, ..] = words.as_slice() else {
            return None;
        };
        let group = Ipv6Addr::from(u128::from_str_radix(group, 16).ok()?);
        let s = group.segments();
        // The kernel itself is in those of all nodes, and of its own addresses.
        let own = group.octets()[2..15].iter().all(|b| *b == 0) && s[7] <= 2 || s[0] == 0xff02 && s[5] == 1 && s[6] >> 8 == 0xff;
        let asked = !own || users.parse::<u32>().map_or(true, |n| n > 1);
        asked.then_some(((*name).to_owned(), index.parse().ok()?, IpAddr::V6(group)))
    };
    text.lines().filter_map(group).collect()
}

fn level(group: IpAddr) -> i32 {
    if group.is_ipv4() {
        libc::IPPROTO_IP
    } else {
        libc::IPPROTO_IPV6
    }
}

/// `struct sockaddr_storage` of an address.
fn storage(ip: IpAddr) -> [u8; ADDRESS] {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut out = [0; ADDRESS];
    let raw = sock::Addr::of((ip, 0).into(), family).0;
    out[..raw.len()].copy_from_slice(&raw);
    out
}

/// `struct group_filter` with these senders.
fn filter(group: IpAddr, interface: u32, mode: u32, senders: &[IpAddr]) -> Vec<u8> {
    let mut raw = vec![0; GROUP_AT];
    raw[..4].copy_from_slice(&interface.to_ne_bytes());
    raw.extend_from_slice(&storage(group));
    raw.extend_from_slice(&mode.to_ne_bytes());
    raw.extend_from_slice(&(senders.len() as u32).to_ne_bytes());
    senders.iter().for_each(|s| raw.extend_from_slice(&storage(*s)));
    raw
}

/// Whose datagrams `raw` receives in a group that it has joined: (of these only, of these or of all others).
fn senders(raw: RawFd, group: IpAddr, interface: u32) -> io::Result<(bool, Vec<IpAddr>)> {
    let mut buf = filter(group, interface, EXCLUDE, &[]);
    buf[COUNT_AT..SENDERS_AT].copy_from_slice(&(SENDERS as u32).to_ne_bytes());
    buf.resize(SENDERS_AT + SENDERS * ADDRESS, 0);
    sock::get_into(raw, level(group), MCAST_MSFILTER, &mut buf)?;
    let word = |at: usize| u32::from_ne_bytes([buf[at], buf[at + 1], buf[at + 2], buf[at + 3]]);
    let count = word(COUNT_AT) as usize;
    if count > SENDERS {
        return Err(io::Error::other(format!("it names {count} senders")));
    }
    let all = buf[SENDERS_AT..].chunks_exact(ADDRESS).take(count);
    let ips = all.filter_map(|a| sock::Addr(a.to_vec()).ip());
    Ok((word(MODE_AT) != EXCLUDE, ips.collect()))
}

/// Joins a group again.
pub(super) fn join(raw: RawFd, m: &Membership) -> Result<(), Fault> {
    let index = fd::c_path(m.interface.as_ref()).at("name")?;
    let joined = belay_kernel::net::index_of(&index).and_then(|index| join_at(raw, m, index));
    joined.at(format!("join group {} of interface {}", m.group, m.interface))
}

fn join_at(raw: RawFd, m: &Membership, index: u32) -> io::Result<()> {
    match m.group {
        IpAddr::V4(group) => {
            // Whether the program leaves it by the number of the interface or by its address: both are known then.
            let own = address_of(raw, &m.interface).unwrap_or_default();
            let request = [group.octets(), own, index.to_ne_bytes()];
            sock::set(raw, libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, &request)?;
        }
        IpAddr::V6(group) => {
            let mut request = [0u8; 20];
            request[..16].copy_from_slice(&group.octets());
            request[16..].copy_from_slice(&index.to_ne_bytes());
            sock::set(raw, libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, &request)?;
        }
    }
    if !m.only && m.senders.is_empty() {
        return Ok(());
    }
    let mode = if m.only { 1 } else { EXCLUDE };
    sock::set_bytes(raw, level(m.group), MCAST_MSFILTER, &filter(m.group, index, mode, &m.senders))
}

/// The first IPv4 address of an interface.
fn address_of(raw: RawFd, interface: &str) -> io::Result<[u8; 4]> {
    const NAME: usize = libc::IFNAMSIZ;
    // `struct ifreq`.
    let mut request = [0u8; 40];
    let name = interface.as_bytes().get(..interface.len().min(NAME - 1)).unwrap_or_default();
    request[..name.len()].copy_from_slice(name);
    let told = ioctl::exchange(lend(raw)?, ioctl::INTERFACE_ADDRESS, request)?;
    let at = NAME + 4;
    Ok([told[at], told[at + 1], told[at + 2], told[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn the_lists_of_the_kernel_are_read() {
        let igmp = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n1\tlo        :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n2\teth0      :     2      V3\n\t\t\t\tFB0000E0     1 0:00000000\t\t0\n\t\t\t\t010000E0     2 0:00000000\t\t0\n";
        let all = v4(igmp);
        assert_eq!(
            all,
            [
                ("eth0".into(), 2, "224.0.0.251".parse().unwrap()),
                ("eth0".into(), 2, "224.0.0.1".parse().unwrap())
            ]
        );
        let igmp6 = "1    lo              ff020000000000000000000000000001     1 0000000C 0\n2    eth0            ff0200000000000000000001ff000002     1 00000004 0\n2    eth0            ff150000000000000000000000001234     1 00000004 0\n2    eth0            ff020000000000000000000000000001     2 0000000C 0\n";
        let all: Vec<IpAddr> = v6(igmp6).into_iter().map(|(_, _, group)| group).collect();
        assert_eq!(all, ["ff15::1234".parse::<IpAddr>().unwrap(), "ff02::1".parse().unwrap()]);
    }

    #[test]
    fn what_one_socket_has_joined_another_joins_again() {
        let groups = |family| {
            let fd = sock::socket(family, libc::SOCK_DGRAM, 0).unwrap();
            let of = |group: &str, only, senders: &[&str]| Membership {
                group: group.parse().unwrap(),
                interface: "lo".into(),
                only,
                senders: senders.iter().map(|s| s.parse().unwrap()).collect(),
            };
            let mut all = vec![of("239.8.7.6", false, &[]), of("239.8.7.5", true, &["10.1.2.3"])];
            if family == libc::AF_INET6 {
                all.extend([of("ff15::8765", false, &["fd00::1"]), of("ff15::8764", false, &[])]);
            }
            all.iter().for_each(|m| join(fd.as_raw_fd(), m).unwrap());
            let mut found = Groups::of_host().joined(fd.as_raw_fd(), family).unwrap();
            found.sort_by_key(|m| m.group);
            all.sort_by_key(|m| m.group);
            assert_eq!(found, all);
        };
        groups(libc::AF_INET);
        groups(libc::AF_INET6);
    }
}
