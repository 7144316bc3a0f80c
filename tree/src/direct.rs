//! Connections of two nodes beside the tree, for much data: authenticated and encrypted with the job key like those of the tree, but blocking, for threads that do nothing else.
//!
//! There is no deadline for an answer, which may take as long as reading a generation does. A peer whose process has ended is noticed by the end of the connection, one
//! whose host is gone by the kernel's probes within some seconds.

use crate::handle::{listen, TreeError};
use crate::key::JobKey;
use crate::noise::{Secure, DIRECT};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// How long one attempt to connect may take, and the peer may take to prove that it knows the key.
const LIMIT: Duration = Duration::from_secs(10);
/// What is read at once.
const READ_BYTES: usize = 256 << 10;

/// A connection.
pub struct Direct {
    stream: TcpStream,
    secure: Secure,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Direct to {:?}", self.stream.peer_addr())
    }
}

fn option(stream: &TcpStream, level: i32, name: i32, value: libc::c_int) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(0);
    // SAFETY: the value is valid for reading its length.
    match unsafe { libc::setsockopt(stream.as_raw_fd(), level, name, (&raw const value).cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Direct {
    /// Bytes of a message, at most.
    pub const MAX_MESSAGE: usize = crate::noise::MAX_MESSAGE;

    /// Connects to the first of `addresses` that answers.
    pub fn connect(key: &JobKey, addresses: &[String]) -> io::Result<Self> {
        let mut failure = io::Error::other("no address");
        for to in addresses {
            let address: io::Result<SocketAddr> = to.parse().map_err(|e| io::Error::other(format!("{to}: {e}")));
            match address
                .and_then(|a| TcpStream::connect_timeout(&a, LIMIT))
                .and_then(|s| Self::new(key, s, true))
            {
                Ok(direct) => return Ok(direct),
                Err(e) => failure = e,
            }
        }
        Err(failure)
    }

    /// Takes over a connection that a [`Door`] has accepted, once the peer has proved that it knows the key.
    pub fn accepted(key: &JobKey, stream: TcpStream) -> io::Result<Self> {
        Self::new(key, stream, false)
    }

    fn new(key: &JobKey, stream: TcpStream, initiator: bool) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        for (level, name, value) in [
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 3),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 5),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 10_000),
        ] {
            option(&stream, level, name, value)?;
        }
        let secure = Secure::bound(key, initiator, DIRECT).map_err(io::Error::other)?;
        let mut direct = Self {
            stream,
            secure,
            buffer: vec![0; READ_BYTES],
        };
        direct.stream.set_read_timeout(Some(LIMIT))?;
        direct.flush()?;
        while !direct.secure.is_authenticated() {
            direct.fill()?;
        }
        direct.flush()?;
        direct.stream.set_read_timeout(None)?;
        Ok(direct)
    }

    fn flush(&mut self) -> io::Result<()> {
        let out = std::mem::take(&mut self.secure.out);
        self.stream.write_all(&out)
    }

    fn fill(&mut self) -> io::Result<()> {
        match self.stream.read(&mut self.buffer)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended")),
            n => self.secure.feed(&self.buffer[..n]).map_err(io::Error::other),
        }
    }

    /// Sends a message.
    pub fn send(&mut self, message: Vec<u8>) -> io::Result<()> {
        self.secure.send(message).map_err(io::Error::other)?;
        self.flush()
    }

    /// Waits for a message.
    pub fn receive(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if let Some(message) = self.secure.next().map_err(io::Error::other)? {
                return Ok(message);
            }
            self.fill()?;
        }
    }
}

/// Where other nodes connect to.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    addresses: Vec<String>,
}

impl Door {
    /// Opens one, at a port that the kernel chooses.
    pub fn open() -> Result<Self, TreeError> {
        let (listener, addresses) = listen()?;
        listener
            .set_nonblocking(false)
            .map_err(|e| TreeError::System("listen for other nodes", e))?;
        Ok(Self { listener, addresses })
    }

    /// The addresses under which it may be reached.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Waits for somebody, `limit` at most where there is one; none when nobody came.
    pub fn accept(&self, limit: Option<Duration>) -> io::Result<Option<TcpStream>> {
        let mut poll = libc::pollfd {
            fd: self.listener.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let ms = limit.map_or(-1, |l| i32::try_from(l.as_millis()).unwrap_or(i32::MAX));
        // SAFETY: one live pollfd.
        match unsafe { libc::poll(&raw mut poll, 1, ms) } {
            0 => Ok(None),
            1 => self.listener.accept().map(|(stream, _)| Some(stream)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(theirs: JobKey, ours: JobKey) -> (io::Result<Direct>, io::Result<Direct>) {
        let door = Door::open().unwrap();
        let port = door.listener.local_addr().unwrap().port();
        let client = std::thread::spawn(move || Direct::connect(&theirs, &[format!("127.0.0.1:{port}")]));
        let server = door.accept(None).and_then(|s| Direct::accepted(&ours, s.unwrap()));
        (client.join().unwrap(), server)
    }

    #[test]
    fn large_messages_go_both_ways_and_an_end_is_noticed() {
        let key = JobKey::random().unwrap();
        let (client, server) = pair(key.clone(), key);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        let sender = std::thread::spawn(move || {
            for n in [0usize, 1, 3 << 20] {
                client.send(vec![7; n]).unwrap();
            }
            assert_eq!(client.receive().unwrap(), b"thanks");
        });
        for n in [0usize, 1, 3 << 20] {
            assert_eq!(server.receive().unwrap(), vec![7; n]);
        }
        server.send(b"thanks".to_vec()).unwrap();
        sender.join().unwrap();
        assert!(server.receive().is_err(), "the peer has gone");
    }

    #[test]
    fn another_key_is_refused() {
        let (client, server) = pair(JobKey::random().unwrap(), JobKey::random().unwrap());
        assert!(client.is_err() && server.is_err());
    }

    #[test]
    fn nobody_comes() {
        assert!(Door::open()
            .unwrap()
            .accept(Some(Duration::from_millis(1)))
            .unwrap()
            .is_none());
    }
}
