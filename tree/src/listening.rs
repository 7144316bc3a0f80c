//! Where a node listens: at addresses that are named, each with a socket of its own, not at all that the host has or gets.

use crate::error::TreeError;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// The sockets. Copies are of the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Listeners(Vec<(SocketAddr, Arc<TcpListener>)>);

/// More connections than the default backlog has room for come when a thousand nodes start at once.
const BACKLOG: i32 = 4096;

fn listen(at: SocketAddr) -> std::io::Result<(SocketAddr, Arc<TcpListener>)> {
    let listener = TcpListener::bind(at)?;
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok((listener.local_addr()?, Arc::new(listener)))
}

impl Listeners {
    /// Listens at each of `addresses` where that is possible, which must be one at least: at one port, unless somebody
    /// else has it at some.
    pub(crate) fn open(addresses: &[IpAddr]) -> Result<Self, TreeError> {
        Self::default().moved(addresses)
    }

    /// These where they are at one of `addresses`, and new ones at the others.
    pub(crate) fn moved(&self, addresses: &[IpAddr]) -> Result<Self, TreeError> {
        let mut all: Vec<(SocketAddr, Arc<TcpListener>)> = Vec::new();
        let mut failure = std::io::Error::other("no address to listen at");
        for ip in addresses {
            let port = self.0.first().or(all.first()).map_or(0, |(at, _)| at.port());
            let known = self.0.iter().find(|(at, _)| at.ip() == *ip).cloned();
            let one = known.map_or_else(|| listen((*ip, port).into()).or_else(|_| listen((*ip, 0).into())), Ok);
            match one {
                Ok(one) => all.push(one),
                Err(e) => {
                    // An address of version 6 is not to be had before the kernel has looked for others that have it.
                    tracing::debug!(%ip, error = %e, "not listened at");
                    failure = std::io::Error::new(e.kind(), format!("{ip}: {e}"));
                }
            }
        }
        match all.is_empty() {
            true => Err(TreeError::System("listen for other nodes", failure)),
            false => Ok(Self(all)),
        }
    }

    /// Where they are.
    pub(crate) fn addresses(&self) -> Vec<String> {
        self.0.iter().map(|(at, _)| at.to_string()).collect()
    }

    /// To wait for.
    pub(crate) fn raw(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.0.iter().map(|(_, listener)| listener.as_raw_fd())
    }

    /// Those of them that are ready, according to `is`.
    pub(crate) fn ready(&self, is: impl Fn(RawFd) -> bool) -> impl Iterator<Item = &TcpListener> {
        let ready = self.0.iter().filter(move |(_, l)| is(l.as_raw_fd()));
        ready.map(|(_, listener)| &**listener)
    }
}

/// Where a node listens that has reached another from its address `local`: there, as others of the job reach it so too.
/// From the host itself nothing is known, and it listens at all addresses that it has.
pub(crate) fn beside(local: Option<IpAddr>) -> Vec<IpAddr> {
    match local.filter(|ip| !ip.is_loopback()) {
        Some(ip) => vec![ip],
        None => belay_kernel::net::addresses(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn nobody_is_heard_where_nobody_was_told_to_come() {
        let [one, other]: [IpAddr; 2] = [[127, 0, 0, 1].into(), [127, 0, 0, 2].into()];
        let first = Listeners::open(&[one]).unwrap();
        let at: SocketAddr = first.addresses()[0].parse().unwrap();
        assert!(TcpStream::connect(at).is_ok());
        assert!(TcpStream::connect((other, at.port())).is_err());
        let both = first.moved(&[one, other]).unwrap();
        assert_eq!(both.addresses()[0], at.to_string());
        let second: SocketAddr = both.addresses()[1].parse().unwrap();
        drop(first);
        assert!(TcpStream::connect(second).is_ok() && TcpStream::connect(at).is_ok());
        let left = both.moved(&[other]).unwrap();
        drop(both);
        assert!(TcpStream::connect(second).is_ok() && TcpStream::connect(at).is_err());
        assert_eq!(left.addresses(), [second.to_string()]);
    }

    #[test]
    fn an_address_that_cannot_be_had_does_not_keep_the_others() {
        // Of the documentation: no host has it.
        let foreign: IpAddr = [192, 0, 2, 1].into();
        let some = Listeners::open(&[foreign, [127, 0, 0, 1].into()]).unwrap();
        assert_eq!(some.addresses().len(), 1);
        assert!(matches!(Listeners::open(&[foreign]), Err(TreeError::System(..))));
    }
}
