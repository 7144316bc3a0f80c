//! Connections that wait to be accepted and carry data already.
//!
//! Their data can be read only by accepting them. So all connections of the queue are accepted, their data is read, and
//! each client's socket is disconnected and connected again from the same port: a TCP socket can do that and stays the
//! same socket for its program. Then its data is sent again. The order of the queue is kept. This is possible when both
//! ends are the job's.
//!
//! A process of its own does so: connections that the agent held would end with it, when it is killed.

use super::backlog;
use super::drain::{self, Direction};
use super::info::{End, Info};
use super::said::apart;
use crate::fault::{not_now, At, Fault};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use rustix::net::Shutdown;
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
    /// It has shut reading down.
    pub(super) deaf: bool,
}

/// Takes the connections of `clients` out of the queues of `listeners`, which share an address, and puts them back;
/// returns what each had sent.
pub(super) fn requeue(listeners: &[RawFd], clients: &[Client]) -> Result<Vec<Vec<u8>>, Fault> {
    apart("put connections back into their queue", |_| here(listeners, clients))
}

fn here(listeners: &[RawFd], clients: &[Client]) -> Result<Vec<Vec<u8>>, Fault> {
    let info = |l: &RawFd| Info::of(*l).at("read its state (TCP_INFO)");
    let infos = listeners.iter().map(info).collect::<Result<Vec<_>, Fault>>()?;
    let waiting: Vec<usize> = infos.iter().map(|i| i.waiting as usize).collect();
    let all: usize = waiting.iter().sum();
    if all != clients.len() {
        return not_now(format!(
            "{all} connections wait to be accepted, of which {} are the job's own; the data of the others cannot be kept",
            clients.len()
        ));
    }
    let limits: Vec<i32> = infos.iter().map(|i| i32::try_from(i.backlog).unwrap_or(i32::MAX)).collect();
    let raised = raise(listeners, &limits);
    let done = raised.and_then(|room| {
        // Of those that share an address any may get one.
        if clients.len() > room {
            return not_now(format!(
                "{all} connections wait to be accepted, and there is room for {room} by now (net.core.somaxconn), so they could not be put back"
            ));
        }
        take_all(listeners, &waiting, clients)
    });
    let addresses: Vec<Addr> = clients.iter().map(|c| c.local.clone()).collect();
    let lowered = listeners
        .iter()
        .zip(limits)
        .map(|(l, own)| backlog::lower(*l, own, &addresses));
    let lowered = lowered.fold(Ok(()), Result::and);
    done.and_then(|data| lowered.map(|()| data))
}

/// Raises the limit of each; how many connections have room in each at least.
fn raise(listeners: &[RawFd], limits: &[i32]) -> Result<usize, Fault> {
    let mut room = usize::MAX;
    for (l, own) in listeners.iter().zip(limits) {
        let now = backlog::raise(*l, *own).at("raise its backlog (listen)")?;
        // The kernel takes one more than the limit says.
        room = room.min(usize::try_from(now).unwrap_or(0) + 1);
    }
    Ok(room)
}

/// Takes those that wait out of the queues, `waiting` of each, and puts them back.
fn take_all(listeners: &[RawFd], waiting: &[usize], clients: &[Client]) -> Result<Vec<Vec<u8>>, Fault> {
    let (mut accepted, mut failed) = (Vec::new(), None);
    for (listener, waiting) in listeners.iter().zip(waiting) {
        let next = || accept(*listener).transpose();
        // What comes meanwhile from outside stays where it is.
        for came in std::iter::from_fn(next).take(*waiting) {
            match came {
                Ok((end, from)) => {
                    let same = |c: &Client| (c.local.ip(), c.local.port()) == (from.ip(), from.port());
                    accepted.extend(clients.iter().position(same).map(|at| (at, end)));
                }
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
    }
    let mut data = vec![Vec::new(); clients.len()];
    // Whatever happens, every connection goes back, unless its data is lost.
    for (at, end) in accepted {
        let c = &clients[at];
        match take_and_put_back(c, end) {
            Ok(sent) => data[at] = sent,
            Err(e) => failed = Some(e),
        }
    }
    failed.map_or(Ok(data), Err)
}

/// The next connection of the queue, and where it comes from.
fn accept(listener: RawFd) -> Result<Option<(OwnedFd, Addr)>, Fault> {
    if fd::poll(listener, libc::POLLIN).at("poll")? & libc::POLLIN == 0 {
        return Ok(None);
    }
    let end = sock::accept(listener).at("accept")?;
    // One that has been reset has no peer any more, and is nobody's.
    let from = sock::peer(end.as_raw_fd()).at("read an address")?;
    Ok(Some((end, from.unwrap_or_default())))
}

/// Reads what `c` has sent to `end`, connects it again, and sends that again.
fn take_and_put_back(c: &Client, end: OwnedFd) -> Result<Vec<u8>, Fault> {
    // The mark of urgent data is lost, but not the byte: nobody but this process has the descriptor.
    sock::set(end.as_raw_fd(), libc::SOL_SOCKET, libc::SO_OOBINLINE, &1i32).at("set SO_OOBINLINE")?;
    let d = Direction {
        sender: End {
            raw: c.raw,
            closing: c.closing,
        },
        receiver: End {
            raw: end.as_raw_fd(),
            closing: false,
        },
    };
    let sent = drain::take_all(d, &|| Ok(()))?;
    again(c, &sent).or_else(|e| drain::give_up(c.raw, &e.to_string()))?;
    Ok(sent)
}

/// Connects the same socket again from the same port and sends `data`.
fn again(c: &Client, data: &[u8]) -> Result<(), Fault> {
    sock::disconnect(c.raw).at("disconnect a connection that waits to be accepted")?;
    // The same port as before, without fixing it. Where the program had chosen it, it still has it and the range is not looked at.
    let port = u32::from(c.local.port());
    // (Kernels before 6.3 cannot do that; there the connection gets another port.)
    let own: u32 = sock::get(c.raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE).unwrap_or(0);
    let chosen = sock::set(c.raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &(port << 16 | port)).is_ok();
    let mut connected = connect(c);
    if chosen {
        sock::set(c.raw, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &own).at("set its range of ports back")?;
        if connected.is_err() {
            connected = connect(c);
        }
    }
    connected.at(format!("connect to {} again", c.peer))?;
    drain::put_back(c.raw, c.raw, data)?;
    for (is_shut, how) in [(c.closing, Shutdown::Write), (c.deaf, Shutdown::Read)] {
        if is_shut {
            sock::shutdown(c.raw, how).at("shut it down as before")?;
        }
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
    use std::io::{Read as _, Write as _};
    use std::net::{Shutdown, TcpListener, TcpStream};

    /// As much as fits is on its way, and its sender will send no more.
    #[test]
    fn what_a_closed_end_has_sent_comes_whole_however_often_it_is_put_back() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (few, raw) = (4096i32, listener.as_raw_fd());
        sock::set(raw, libc::SOL_SOCKET, libc::SO_RCVBUF, &few).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nonblocking(true).unwrap();
        let mut sent = Vec::new();
        loop {
            let piece: Vec<u8> = (sent.len()..sent.len() + 10_007).map(|n| ((n * 7919) >> 3) as u8).collect();
            match client.write(&piece) {
                Ok(n) => sent.extend_from_slice(&piece[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        client.shutdown(Shutdown::Both).unwrap();
        let seen = |client: &TcpStream| Client {
            raw: client.as_raw_fd(),
            local: sock::local(client.as_raw_fd()).unwrap(),
            peer: sock::peer(client.as_raw_fd()).unwrap().unwrap(),
            closing: true,
            deaf: true,
        };
        for _ in 0..3 {
            let data = requeue(&[raw], &[seen(&client)]).unwrap();
            assert!(data == [sent.clone()], "{} of {} bytes", data[0].len(), sent.len());
            assert_eq!(client.read(&mut [0]).unwrap(), 0, "it reads again");
        }
        let mut got = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut got).unwrap();
        assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
    }

    /// The program has made the limit smaller since, and has a range of ports of its own.
    #[test]
    fn more_than_the_backlog_allows_by_now_go_back() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let raw = listener.as_raw_fd();
        let range = 60_000u32 << 16 | 33_000;
        let mut ranged = true;
        let clients: Vec<TcpStream> = (0..6u8)
            .map(|n| {
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                // Kernels before 6.3 do not have it.
                ranged &= sock::set(client.as_raw_fd(), libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range).is_ok();
                client.write_all(&[n]).unwrap();
                client
            })
            .collect();
        sock::listen(raw, 1).unwrap();
        let seen = |client: &TcpStream| Client {
            raw: client.as_raw_fd(),
            local: sock::local(client.as_raw_fd()).unwrap(),
            peer: sock::peer(client.as_raw_fd()).unwrap().unwrap(),
            closing: false,
            deaf: false,
        };
        for _ in 0..2 {
            let all: Vec<Client> = clients.iter().map(seen).collect();
            let data = requeue(&[raw], &all).unwrap();
            assert_eq!(data, (0..6u8).map(|n| vec![n]).collect::<Vec<_>>());
            let info = Info::of(raw).unwrap();
            assert_eq!((info.backlog, info.waiting), (1, 6));
        }
        for (n, client) in clients.iter().enumerate() {
            let now: u32 = sock::get(client.as_raw_fd(), libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE).unwrap_or(0);
            assert!(!ranged || now == range);
            let mut byte = [0];
            listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
            assert_eq!(usize::from(byte[0]), n);
        }
    }
}
