//! A listening socket that takes more connections than its backlog allows, while the job's own are made: the program may
//! have lowered the limit since they came, and strangers may come meanwhile.

use crate::fault::{At, Fault};
use crate::sys::diag::Diag;
use crate::sys::sock::{self, Addr};
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// A limit above all; the kernel has one of its own (net.core.somaxconn).
pub(super) const LARGE: i32 = i32::MAX;
/// `TCP_SYN_RECV`.
const SYN_RECV: u8 = 3;
/// Longest wait for the last step of connections on this host.
const LAST_STEP: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(1);

/// What the kernel allows.
fn most() -> i32 {
    let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn");
    text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
}

/// Gives `raw`, whose limit is `own`, the largest there is, and returns the one that it has now. (One above what the
/// kernel allows by now could not be set again; it stays.)
pub(super) fn raise(raw: RawFd, own: i32) -> io::Result<i32> {
    let most = most();
    if own >= most {
        return Ok(own);
    }
    sock::listen(raw, LARGE).map(|()| most)
}

/// Gives a raised limit back, when the connections that `clients` have made are in the queue. One whose last step the kernel
/// has still to take would find no room there.
pub(super) fn lower(raw: RawFd, own: i32, clients: &[Addr]) -> Result<(), Fault> {
    if own >= most() {
        return Ok(());
    }
    let waited = settle(clients).at("ask the kernel for connections under way (sock_diag)");
    sock::listen(raw, own).at("set its backlog back")?;
    waited
}

/// Waits until no connection from one of `clients` is in its last step.
fn settle(clients: &[Addr]) -> io::Result<()> {
    if clients.is_empty() {
        return Ok(());
    }
    let begun = Instant::now();
    let name = |at: &Addr| -> (Option<IpAddr>, u16) { (at.ip(), at.port()) };
    let mut diag = Diag::open()?;
    loop {
        let mut under_way = false;
        for family in [libc::AF_INET, libc::AF_INET6] {
            let all = diag.tcp(family, 1 << SYN_RECV)?;
            under_way |= all.iter().any(|c| clients.iter().any(|own| name(own) == name(&c.peer)));
        }
        if !under_way || begun.elapsed() > LAST_STEP {
            return Ok(());
        }
        std::thread::sleep(STEP);
    }
}
