//! Addresses under which other hosts can reach this one.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses of this host's interfaces, loopback last: other agents of the job may run on the same host.
pub fn addresses() -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = interfaces().into_iter().map(|(_, ip)| ip).collect();
    all.dedup();
    all
}

/// The same, each with the name of its interface.
pub fn interfaces() -> Vec<(String, IpAddr)> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is valid for writing; the list is freed below.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return vec![("lo".into(), IpAddr::V4(Ipv4Addr::LOCALHOST))];
    }
    let mut found = Vec::new();
    let mut at = head;
    while !at.is_null() {
        // SAFETY: an element of the list that getifaddrs has made.
        let entry = unsafe { &*at };
        if entry.ifa_flags & libc::IFF_UP.cast_unsigned() != 0 && !entry.ifa_addr.is_null() {
            // SAFETY: the address is as long as its family says.
            let ip = unsafe { address(entry.ifa_addr) };
            // SAFETY: every element has a name, which ends with a zero byte.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) };
            found.extend(ip.map(|ip| (name.to_string_lossy().into_owned(), ip)));
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs and is not used any more.
    unsafe { libc::freeifaddrs(head) };
    found.sort_by_key(|(_, a)| (a.is_loopback(), a.is_ipv6()));
    found
}

/// The number of the interface with this name.
pub fn index_of(name: &CStr) -> std::io::Result<u32> {
    // SAFETY: `name` is a valid C string.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(std::io::Error::last_os_error()),
        index => Ok(index),
    }
}

/// # Safety
/// `raw` points to a socket address of the length that its family implies.
unsafe fn address(raw: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: every socket address begins with its family.
    match i32::from(unsafe { (*raw).sa_family }) {
        libc::AF_INET => {
            // SAFETY: of that family, says the caller. The kernel's lists are aligned for any address.
            let v4 = unsafe { *raw.cast::<libc::sockaddr_in>() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { *raw.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            // Link-local addresses mean nothing without an interface.
            (ip.segments()[0] & 0xffc0 != 0xfe80).then_some(ip.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_comes_last() {
        let all = addresses();
        assert!(all.iter().any(IpAddr::is_loopback));
        let first = all.iter().position(IpAddr::is_loopback).unwrap();
        assert!(all[first..].iter().all(IpAddr::is_loopback));
    }
}
