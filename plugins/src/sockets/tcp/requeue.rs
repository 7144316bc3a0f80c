//! Connections that wait to be accepted and carry data already.
//!
//! Their data can be read only by accepting them. So all connections of the queue are accepted, their data is read, and
//! each client's socket is disconnected and connected again from the same port: a TCP socket can do that and stays the
//! same socket for its program. Then its data is sent again. The order of the queue is kept. This is possible when both
//! ends are the job's.
//!
//! A process of its own does so: connections that the agent held would end with it, when it is killed.

use super::drain::{self, Direction};
use super::info::{End, Info};
use crate::fault::{not_now, refuse, At, Fault};
use crate::sys::sock::{self, Addr};
use crate::sys::{apart, fd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const IP_LOCAL_PORT_RANGE: i32 = 51;
/// Longest wait for a connection on this host, milliseconds.
const CONNECT_MS: i32 = 1000;

/// The connecting end of one such connection.
#[derive(Debug)]
pub(super) struct Client {
    /// Its socket.
    pub(super) raw: RawFd,
    /// Its address.
    pub(super) local: Addr,
    /// The address it connected to.
    pub(super) peer: Addr,
    /// It has shut writing down.
    pub(super) closing: bool,
}

/// Takes the connections of `clients` out of the queue of `listener` and puts them back; returns what each had sent.
pub(super) fn requeue(listener: RawFd, clients: &[Client]) -> Result<Vec<Vec<u8>>, Fault> {
    let said = apart::fork(|| Said::of(here(listener, clients)).encode()).at("put connections back into their queue")?;
    match Said::decode(&said) {
        Some(Said::Data(data)) if data.len() == clients.len() => Ok(data),
        Some(Said::Refused(reason)) => refuse(reason),
        Some(Said::Passing(reason)) => not_now(reason),
        _ => refuse("put connections back into their queue: not understood"),
    }
}

/// What the process says that has done so.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Data(Vec<Vec<u8>>),
    Refused(String),
    Passing(String),
}

impl Said {
    fn of(done: Result<Vec<Vec<u8>>, Fault>) -> Self {
        match done {
            Ok(data) => Self::Data(data),
            Err(Fault::Passing(reason)) => Self::Passing(reason),
            Err(fault) => Self::Refused(fault.to_string()),
        }
    }

    /// A letter, then byte strings, each after its length.
    fn encode(&self) -> Vec<u8> {
        let strings = |kind: u8, all: &[&[u8]]| {
            let mut out = vec![kind];
            for one in all {
                out.extend_from_slice(&(one.len() as u64).to_le_bytes());
                out.extend_from_slice(one);
            }
            out
        };
        match self {
            Self::Data(all) => strings(b'd', &all.iter().map(Vec::as_slice).collect::<Vec<_>>()),
            Self::Refused(reason) => strings(b'r', &[reason.as_bytes()]),
            Self::Passing(reason) => strings(b'p', &[reason.as_bytes()]),
        }
    }

    fn decode(said: &[u8]) -> Option<Self> {
        let (kind, mut rest) = said.split_first()?;
        let mut all = Vec::new();
        while let Some((length, behind)) = rest.split_first_chunk() {
            let (one, next) = behind.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
            all.push(one.to_vec());
            rest = next;
        }
        let reason = || Some(String::from_utf8_lossy(all.first()?).into_owned());
        match kind {
            b'd' => Some(Self::Data(all)),
            b'r' => reason().map(Self::Refused),
            b'p' => reason().map(Self::Passing),
            _ => None,
        }
    }
}

fn here(listener: RawFd, clients: &[Client]) -> Result<Vec<Vec<u8>>, Fault> {
    let waiting = Info::of(listener).at("read its state (TCP_INFO)")?.waiting;
    if waiting as usize != clients.len() {
        return not_now(format!(
            "{waiting} connections wait to be accepted, of which {} are the job's own; the data of the others cannot be kept",
            clients.len()
        ));
    }
    let mut accepted: Vec<(usize, OwnedFd)> = Vec::new();
    while accepted.len() < clients.len() && fd::poll(listener, libc::POLLIN).at("poll")? & libc::POLLIN != 0 {
        let end = sock::accept(listener).at("accept")?;
        let from = sock::peer(end.as_raw_fd()).at("read an address")?.unwrap_or_default();
        let same = |c: &Client| (c.local.ip(), c.local.port()) == (from.ip(), from.port());
        if let Some(at) = clients.iter().position(same) {
            accepted.push((at, end));
        }
    }
    let mut data = vec![Vec::new(); clients.len()];
    let mut failed = None;
    for (at, end) in &accepted {
        let c = &clients[*at];
        let sent = drain::in_flight(Direction {
            sender: End {
                raw: c.raw,
                closing: c.closing,
            },
            receiver: End {
                raw: end.as_raw_fd(),
                closing: false,
            },
        });
        match sent {
            Ok(sent) => data[*at] = sent,
            Err(e) => failed = Some(e),
        }
    }
    // Whatever happened, every connection goes back.
    for (at, end) in accepted {
        let c = &clients[at];
        if let Err(e) = again(c, &data[at]) {
            failed = Some(e);
        }
        drop(end);
    }
    failed.map_or(Ok(data), Err)
}

/// Connects the same socket again from the same port and sends `data`.
fn again(c: &Client, data: &[u8]) -> Result<(), Fault> {
    sock::disconnect(c.raw).at("disconnect a connection that waits to be accepted")?;
    // The same port as before, without fixing it. Where the program had chosen it, it still has it and the range is not looked at.
    let port = u32::from(c.local.port());
    // (Kernels before 6.3 cannot do that; there the connection gets another port.)
    let chosen = sock::set(c.raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &(port << 16 | port)).is_ok();
    let mut connected = connect(c);
    if chosen {
        sock::set(c.raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &0u32).at("choose its port")?;
        if connected.is_err() {
            connected = connect(c);
        }
    }
    connected.at(format!("connect to {} again", c.peer))?;
    let n = drain::send_again(c.raw, c.raw, data).at("send its data again")?;
    if n != data.len() {
        return refuse(format!("only {n} of {} bytes could be sent again", data.len()));
    }
    if c.closing {
        sock::shutdown(c.raw, libc::SHUT_WR).at("shut writing down")?;
    }
    Ok(())
}

/// `connect` that waits for its end. It is begun as on a socket that does not block: then the kernel leaves the attempt
/// unfinished for the next `connect` on the socket, which returns 0. That may be one of the program's that the
/// checkpoint has interrupted and that is issued anew; on a connected socket it would get EISCONN.
fn connect(c: &Client) -> io::Result<()> {
    let flags = fd::flags(c.raw)?;
    fd::set_flags(c.raw, flags | libc::O_NONBLOCK)?;
    let begun = sock::connect(c.raw, &c.peer);
    fd::set_flags(c.raw, flags)?;
    match begun {
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {
            if !fd::wait(c.raw, libc::POLLOUT, CONNECT_MS)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match sock::get::<i32>(c.raw, libc::SOL_SOCKET, libc::SO_ERROR)? {
                0 => Ok(()),
                e => Err(io::Error::from_raw_os_error(e)),
            }
        }
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        for said in [
            Said::Data(vec![b"some".to_vec(), Vec::new(), b"more".to_vec()]),
            Said::Data(Vec::new()),
            Said::Refused("no".into()),
            Said::Passing("not now".into()),
        ] {
            assert_eq!(Said::decode(&said.encode()), Some(said));
        }
        assert_eq!(Said::decode(b""), None);
        assert_eq!(Said::decode(b"d\x09\0\0\0\0\0\0\0short"), None);
    }
}
