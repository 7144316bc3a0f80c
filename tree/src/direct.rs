//! Connections of two nodes beside the tree, for much data: authenticated and encrypted with the job key like those of
//! the tree, but blocking, for threads that do nothing else.
//!
//! An answer may take as long as reading a generation does; meanwhile an end that is busy says from time to time that
//! it is there, by an empty message. A peer whose process has ended is noticed by the end of the connection, one whose
//! host is gone by the kernel's probes within some seconds, one that is stuck by its silence.

use crate::error::TreeError;
use crate::key::JobKey;
use crate::link::Link;
use crate::listening::Listeners;
use crate::noise::{Secure, DIRECT};
use crate::strangers::Strangers;
use belay_kernel::numbers;
use rustix::net::sockopt;
use std::collections::{HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long one attempt to connect may take, and the peer may take to prove that it knows the key.
const LIMIT: Duration = Duration::from_secs(10);
/// How often an end that is busy says that it is there.
const BEAT: Duration = Duration::from_secs(5);
/// Before the second attempt to connect; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// How long an open door is not looked after.
const IDLE: Duration = Duration::from_millis(500);
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

/// Lets the kernel notice that the other end's host is gone.
fn probed(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(3))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 5)?;
    Ok(sockopt::set_tcp_user_timeout(stream, 10_000)?)
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
        let mut pause = FIRST_PAUSE;
        loop {
            let mut answered = false;
            for to in addresses {
                let address: io::Result<SocketAddr> = to.parse().map_err(|e| io::Error::other(format!("{to}: {e}")));
                let stream = address.and_then(|a| TcpStream::connect_timeout(&a, LIMIT));
                answered |= stream.is_ok();
                match stream.and_then(|s| Self::initiated(key, s)) {
                    Ok(direct) => return Ok(direct),
                    Err(e) => failure = e,
                }
            }
            // Where many connect, one that has proved nothing yet may have to make room.
            if !answered || pause > LAST_PAUSE {
                return Err(failure);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
    }

    fn initiated(key: &JobKey, stream: TcpStream) -> io::Result<Self> {
        probed(&stream)?;
        Self::over(stream, Secure::initiator(key, DIRECT).map_err(io::Error::other)?, LIMIT)
    }

    /// The connection of a node that has proved to be one.
    fn of_link(link: Link) -> io::Result<Self> {
        let (stream, secure) = link.into_parts();
        probed(&stream)?;
        stream.set_nonblocking(false)?;
        Self::over(stream, secure, LIMIT)
    }

    /// The same over a stream that needs no options: waits until the peer has proved that it knows the key.
    pub(crate) fn over(stream: TcpStream, secure: Secure, limit: Duration) -> io::Result<Self> {
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
            direct.flush()?;
        }
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

    /// Waits for a message as long as nothing is heard for no longer than `limit`; without one, as long as there is a
    /// connection. What comes later than that is not taken for the answer to another question: the connection is
    /// closed.
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
pub struct Door {
    listeners: Listeners,
    strangers: Strangers,
    /// Connections of nodes that have proved to be such.
    nodes: VecDeque<Link>,
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Door at {}", self.addresses().join(" or "))
    }
}

impl Door {
    /// Opens one for those who know `key`, at these addresses of the host.
    pub fn open(key: JobKey, at: &[IpAddr]) -> Result<Self, TreeError> {
        Ok(Self {
            listeners: Listeners::open(at)?,
            strangers: Strangers::new(key, DIRECT),
            nodes: VecDeque::new(),
        })
    }

    /// The addresses under which it may be reached.
    pub fn addresses(&self) -> Vec<String> {
        self.listeners.addresses()
    }

    /// Waits for a node, `limit` at most where there is one; none when none came. Those who do not prove to be one are
    /// dealt with here.
    pub fn accept(&mut self, limit: Option<Duration>) -> io::Result<Option<Direct>> {
        let begin = Instant::now();
        loop {
            if let Some(node) = self.nodes.pop_front() {
                return Direct::of_link(node).map(Some);
            }
            let left = limit.map_or(IDLE, |l| l.saturating_sub(begin.elapsed()));
            if limit.is_some() && left.is_zero() {
                return Ok(None);
            }
            let ready = self.wait(left.min(IDLE))?;
            self.nodes.extend(self.strangers.hear(&ready));
            for listener in self.listeners.ready(|fd| ready.contains(&fd)) {
                self.strangers.accept(|| listener.accept());
            }
        }
    }

    fn wait(&mut self, limit: Duration) -> io::Result<HashSet<RawFd>> {
        let let_in = self.strangers.are_let_in();
        let listeners = self.listeners.raw().filter(|_| let_in).map(|fd| (fd, libc::POLLIN));
        let entries = listeners.chain(self.strangers.links().map(|l| (l.raw(), l.interest())));
        let mut polls: Vec<libc::pollfd> = entries.map(|(fd, events)| numbers::entry(fd, events)).collect();
        let ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        match numbers::poll_all(&mut polls, ms.saturating_add(1)) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(HashSet::new()),
            done => done?,
        };
        Ok(polls.iter().filter(|p| p.revents != 0).map(|p| p.fd).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Answered;
    use std::net::TcpListener;

    const LOCAL: [IpAddr; 1] = [IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)];

    fn pair(key: JobKey) -> (Direct, Direct) {
        let mut door = Door::open(key.clone(), &LOCAL).unwrap();
        let to = door.addresses();
        let client = std::thread::spawn(move || Direct::connect(&key, &to));
        let server = door.accept(None).unwrap().unwrap();
        (client.join().unwrap().unwrap(), server)
    }

    #[test]
    fn large_messages_go_both_ways_and_an_end_is_noticed() {
        let (mut client, mut server) = pair(JobKey::random().unwrap());
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
        let mut door = Door::open(JobKey::random().unwrap(), &LOCAL).unwrap();
        let to = door.addresses();
        let client = std::thread::spawn(move || Direct::connect(&JobKey::random().unwrap(), &to));
        while !client.is_finished() {
            assert!(door.accept(Some(Duration::from_millis(10))).unwrap().is_none());
        }
        assert!(client.join().unwrap().is_err());
    }

    #[test]
    fn who_proves_nothing_is_shown_out_however_slowly_he_talks() {
        let (key, listener) = (JobKey::random().unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let first = Secure::initiator(&key, DIRECT).unwrap().out;
        let total = first.len();
        let drips = std::thread::spawn(move || {
            let pause = || std::thread::sleep(Duration::from_millis(200));
            let sent = first
                .iter()
                .take_while(|b| stranger.write_all(&[**b]).map(|()| pause()).is_ok());
            sent.count()
        });
        let secure = Secure::responder(&key, DIRECT, Answered::default()).unwrap();
        let accepted = Direct::over(listener.accept().unwrap().0, secure, Duration::from_millis(500));
        assert!(accepted.is_err());
        drop(accepted);
        let sent = drips.join().unwrap();
        assert!(sent < total, "{sent} of {total} bytes");
    }

    #[test]
    fn who_is_busy_is_not_silent() {
        let (mut client, mut server) = pair(JobKey::random().unwrap());
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
        let (mut client, mut server) = pair(JobKey::random().unwrap());
        let silent = client.receive_within(Some(Duration::from_millis(10))).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(server.send(b"late".to_vec()));
        assert!(client.receive().is_err());
    }

    #[test]
    fn nobody_comes() {
        let mut door = Door::open(JobKey::random().unwrap(), &LOCAL).unwrap();
        assert!(door.accept(Some(Duration::from_millis(1))).unwrap().is_none());
    }
}
