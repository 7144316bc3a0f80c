//! Connections of two nodes beside the tree, for much data: authenticated and encrypted with the job key like those of the tree, but blocking, for threads that do nothing else.
//!
//! An answer may take as long as reading a generation does; meanwhile an end that is busy says from time to time that it is there, by an empty message. A peer whose process
//! has ended is noticed by the end of the connection, one whose host is gone by the kernel's probes within some seconds, one that is stuck by its silence.

use crate::handle::{listen, TreeError};
use crate::key::JobKey;
use crate::noise::{Secure, DIRECT};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long one attempt to connect may take, and the peer may take to prove that it knows the key.
const LIMIT: Duration = Duration::from_secs(10);
/// How often an end that is busy says that it is there.
const BEAT: Duration = Duration::from_secs(5);
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

/// Does `work`, which may take long; every `BEAT` meanwhile, `beat` says to somebody that this process is there, until it cannot.
pub fn beating<T>(beat: impl FnMut() -> io::Result<()> + Send, work: impl FnOnce() -> T) -> T {
    every(BEAT, beat, work)
}

fn every<T>(period: Duration, mut beat: impl FnMut() -> io::Result<()> + Send, work: impl FnOnce() -> T) -> T {
    let (over, end) = mpsc::channel::<()>();
    let beats = move || while end.recv_timeout(period) == Err(mpsc::RecvTimeoutError::Timeout) && beat().is_ok() {};
    std::thread::scope(|scope| {
        let started = std::thread::Builder::new()
            .name("belay-beat".into())
            .spawn_scoped(scope, beats);
        if let Err(e) = started {
            tracing::warn!(error = %e, "nobody hears that this process is there");
        }
        let done = work();
        drop(over);
        done
    })
}

impl Direct {
    /// A peer that says nothing for so long counts as lost.
    pub const SILENCE: Duration = Duration::from_secs(60);
    /// Bytes of a message, at most.
    pub const MAX_MESSAGE: usize = crate::noise::MAX_MESSAGE;

    /// Connects to the first of `addresses` that answers.
    pub fn connect(key: &JobKey, addresses: &[String]) -> io::Result<Self> {
        let mut failure = io::Error::other("no address");
        for to in addresses {
            let address: io::Result<SocketAddr> = to.parse().map_err(|e| io::Error::other(format!("{to}: {e}")));
            match address
                .and_then(|a| TcpStream::connect_timeout(&a, LIMIT))
                .and_then(|s| Self::new(key, s, true, LIMIT))
            {
                Ok(direct) => return Ok(direct),
                Err(e) => failure = e,
            }
        }
        Err(failure)
    }

    /// Takes over a connection that a [`Door`] has accepted, once the peer has proved that it knows the key.
    pub fn accepted(key: &JobKey, stream: TcpStream) -> io::Result<Self> {
        Self::new(key, stream, false, LIMIT)
    }

    fn new(key: &JobKey, stream: TcpStream, initiator: bool, limit: Duration) -> io::Result<Self> {
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
        Self::over(key, stream, initiator, limit)
    }

    /// The same over a stream that needs no options.
    pub(crate) fn over(key: &JobKey, stream: TcpStream, initiator: bool, limit: Duration) -> io::Result<Self> {
        let secure = Secure::bound(key, initiator, DIRECT).map_err(io::Error::other)?;
        let mut direct = Self {
            stream,
            secure,
            buffer: vec![0; READ_BYTES],
        };
        let begin = Instant::now();
        direct.stream.set_write_timeout(Some(limit))?;
        direct.flush()?;
        while !direct.secure.is_authenticated() {
            // For all reads together, however little each brings.
            let left = limit.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "it has not proved that it knows the key",
                ));
            }
            direct.stream.set_read_timeout(Some(left))?;
            direct.fill()?;
        }
        direct.flush()?;
        direct.stream.set_read_timeout(None)?;
        direct.stream.set_write_timeout(None)?;
        Ok(direct)
    }

    fn flush(&mut self) -> io::Result<()> {
        let out = std::mem::take(&mut self.secure.out);
        self.stream.write_all(&out)
    }

    fn fill(&mut self) -> io::Result<()> {
        match self.stream.read(&mut self.buffer) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended")),
            Ok(n) => self.secure.feed(&self.buffer[..n]).map_err(io::Error::other),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Sends a message, which is not empty.
    pub fn send(&mut self, message: Vec<u8>) -> io::Result<()> {
        self.secure.send(message).map_err(io::Error::other)?;
        self.flush()
    }

    /// Does `work`, for which the peer waits; it hears meanwhile that this end is there.
    pub fn busy<T>(&mut self, work: impl FnOnce() -> T) -> T {
        beating(|| self.send(Vec::new()), work)
    }

    /// Waits for a message as long as the peer gives a sign of life.
    pub fn receive(&mut self) -> io::Result<Vec<u8>> {
        self.receive_within(Some(Self::SILENCE))
    }

    /// Waits for a message as long as nothing is heard for no longer than `limit`; without one, as long as there is a connection. What comes later than that is not
    /// taken for the answer to another question: the connection is closed.
    pub fn receive_within(&mut self, limit: Option<Duration>) -> io::Result<Vec<u8>> {
        self.stream.set_read_timeout(limit)?;
        loop {
            while let Some(message) = self.secure.next().map_err(io::Error::other)? {
                if !message.is_empty() {
                    return Ok(message);
                }
            }
            if let Err(e) = self.fill() {
                if e.kind() != io::ErrorKind::WouldBlock {
                    return Err(e);
                }
                self.stream.shutdown(Shutdown::Both)?;
                let seconds = limit.unwrap_or_default().as_secs();
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no sign of life for {seconds} s"),
                ));
            }
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
            for n in [1usize, 2, 3 << 20] {
                client.send(vec![7; n]).unwrap();
            }
            assert_eq!(client.receive().unwrap(), b"thanks");
        });
        for n in [1usize, 2, 3 << 20] {
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
    fn who_proves_nothing_is_shown_out_however_slowly_he_talks() {
        let (key, door) = (JobKey::random().unwrap(), Door::open().unwrap());
        let mut stranger = TcpStream::connect(("127.0.0.1", door.listener.local_addr().unwrap().port())).unwrap();
        let first = Secure::bound(&key, true, DIRECT).unwrap().out;
        let total = first.len();
        let drips = std::thread::spawn(move || {
            let pause = || std::thread::sleep(Duration::from_millis(200));
            let sent = first
                .iter()
                .take_while(|b| stranger.write_all(&[**b]).map(|()| pause()).is_ok());
            sent.count()
        });
        let accepted = Direct::new(&key, door.accept(None).unwrap().unwrap(), false, Duration::from_millis(500));
        assert!(accepted.is_err());
        drop(accepted);
        let sent = drips.join().unwrap();
        assert!(sent < total, "{sent} of {total} bytes");
    }

    #[test]
    fn who_is_busy_is_not_silent() {
        let key = JobKey::random().unwrap();
        let (client, server) = pair(key.clone(), key);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        let (heard, enough) = mpsc::channel();
        let busy = std::thread::spawn(move || {
            let work = || enough.recv_timeout(Duration::from_secs(120)).is_ok();
            assert!(
                every(Duration::from_millis(1), || server.send(Vec::new()), work),
                "nothing is heard"
            );
            server.send(b"done".to_vec()).unwrap();
        });
        let mut beats = 0;
        while beats < 3 {
            match client.secure.next().unwrap() {
                Some(message) => beats += usize::from(message.is_empty()),
                None => client.fill().unwrap(),
            }
        }
        heard.send(()).unwrap();
        assert_eq!(client.receive().unwrap(), b"done");
        busy.join().unwrap();
    }

    #[test]
    fn who_is_silent_is_lost_and_stays_so() {
        let key = JobKey::random().unwrap();
        let (client, server) = pair(key.clone(), key);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        let silent = client.receive_within(Some(Duration::from_millis(10))).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(server.send(b"late".to_vec()));
        assert!(client.receive().is_err());
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
