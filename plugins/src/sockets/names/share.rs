//! Nodes that share a host after a restart have its addresses in common, and programs that were started at different
//! times know it by different ones. The ports from which they connect tell their peers which of them it is: each takes
//! those that leave a remainder of its own.

use crate::sys::sock::{self, Addr};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::RawFd;
use std::sync::OnceLock;

/// Ports that are tried for one socket.
const TRIES: usize = 200;

/// The ports of a node's programs, on a host that has several names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Share {
    /// The remainder that its ports leave.
    pub(super) own: u16,
    /// When they are divided by this.
    pub(super) among: u16,
}

impl Share {
    pub(super) fn has(self, port: u16) -> bool {
        port % self.among == self.own
    }

    /// Binds a socket to `at` with one of these ports, of those that the kernel would choose from; where most of them
    /// are taken, with any.
    pub(crate) fn bind(self, socket: RawFd, at: &Addr) -> io::Result<()> {
        if self.try_bind(socket, at)? {
            return Ok(());
        }
        // Rather a wrong name than none.
        sock::bind(socket, &at.with_port(0))
    }

    /// The same for a socket that is going to connect; where most of the ports are taken it has none yet: connections
    /// to different places can have one port, but only where the kernel chooses it. Whether it has one.
    pub(crate) fn try_bind(self, socket: RawFd, at: &Addr) -> io::Result<bool> {
        // With these options a port may be bound that another connection to the same place has.
        let mut reuse = [(libc::SO_REUSEADDR, 0i32), (libc::SO_REUSEPORT, 0)];
        for (option, value) in &mut reuse {
            *value = sock::get(socket, libc::SOL_SOCKET, *option)?;
            sock::set(socket, libc::SOL_SOCKET, *option, &0i32)?;
        }
        let bound = self.bind_to_any(socket, at);
        for (option, value) in reuse {
            sock::set(socket, libc::SOL_SOCKET, option, &value)?;
        }
        bound
    }

    fn bind_to_any(self, socket: RawFd, at: &Addr) -> io::Result<bool> {
        static CHOSEN: OnceLock<Vec<u16>> = OnceLock::new();
        let ports = CHOSEN.get_or_init(sock::ephemeral_ports);
        // Like the kernel's own choice: two that ask at once hardly ask for the same.
        let begin = RandomState::new().hash_one(socket) as usize % ports.len().max(1);
        let own = ports[begin..].iter().chain(&ports[..begin]).filter(|p| self.has(**p));
        for port in own.take(TRIES) {
            match sock::bind(socket, &at.with_port(*port)) {
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                bound => return bound.map(|()| true),
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::os::fd::AsRawFd;

    #[test]
    fn sharers_get_ports_of_their_own() {
        let any = Addr::of(([127, 0, 0, 1], 0).into(), libc::AF_INET);
        let mut taken = BTreeSet::new();
        let mut held = Vec::new();
        for n in 0..30 {
            let share = Share { own: n % 3, among: 3 };
            let socket = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
            sock::set(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32).unwrap();
            share.bind(socket.as_raw_fd(), &any).unwrap();
            assert_eq!(
                sock::get::<i32>(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR).unwrap(),
                1
            );
            let port = sock::local(socket.as_raw_fd()).unwrap().port();
            assert_eq!(port % 3, n % 3);
            assert!(taken.insert(port), "{port} twice");
            held.push(socket);
        }
    }

    #[test]
    fn what_cannot_be_bound_is_refused() {
        let foreign = Addr::of(([192, 0, 2, 1], 0).into(), libc::AF_INET);
        let socket = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let refused = Share { own: 0, among: 2 }.bind(socket.as_raw_fd(), &foreign);
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
    }
}
