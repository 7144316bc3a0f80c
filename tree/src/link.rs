//! One authenticated connection that never blocks.

use crate::key::JobKey;
use crate::noise::{NoiseError, Secure, TREE};
use belay_kernel::{numbers, sockets};
use serde::{de::DeserializeOwned, Serialize};
use std::io::{self, Read, Write};
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// A peer that has sent nothing for this long is gone. On a node whose processors are all busy, agents have waited for one for 6 s.
pub(crate) const SILENCE: Duration = Duration::from_secs(10);
/// Something is sent at least this often.
pub(crate) const BEAT: Duration = Duration::from_secs(1);
/// What has been sent again so often was not acknowledged for at least three seconds: this process was not the one that slept.
const UNANSWERED: u8 = 4;
/// A peer that lets this much pile up is gone.
const MAX_QUEUED: usize = 128 << 20;
const READ_BYTES: usize = 64 << 10;
/// What is read at once from a peer that is not known yet.
const PROOF_BYTES: usize = 4 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the connection ended")]
    Ended,
    #[error("silent for {0} s")]
    Silent(u64),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Noise(#[from] NoiseError),
    #[error("a message could not be understood: {0}")]
    Message(#[from] serde_json::Error),
    #[error("it does not read what it is sent")]
    Stuck,
}

impl LinkError {
    /// Nobody listens there, as the other host says.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, LinkError::Io(e) if e.kind() == io::ErrorKind::ConnectionRefused)
    }
}

/// A connection.
pub(crate) struct Link {
    stream: TcpStream,
    secure: Secure,
    heard: Instant,
    sent: Instant,
}

impl Link {
    /// Connects, waiting `limit` at most.
    pub(crate) fn connect(key: &JobKey, to: SocketAddr, limit: Duration) -> Result<Self, LinkError> {
        let stream = TcpStream::connect_timeout(&to, limit)?;
        Self::over(stream, Secure::initiator(key, TREE)?)
    }

    /// Takes a connection over.
    pub(crate) fn over(stream: TcpStream, secure: Secure) -> Result<Self, LinkError> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let now = Instant::now();
        let mut link = Self {
            stream,
            secure,
            heard: now,
            sent: now,
        };
        link.flush()?;
        Ok(link)
    }

    /// What it is made of.
    pub(crate) fn into_parts(self) -> (TcpStream, Secure) {
        (self.stream, self.secure)
    }

    /// This end's address.
    pub(crate) fn local(&self) -> Option<IpAddr> {
        self.stream.local_addr().ok().map(|a| a.ip())
    }

    /// The other end, while there is a connection.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// What to poll for.
    pub(crate) fn interest(&self) -> i16 {
        libc::POLLIN | if self.secure.out.is_empty() { 0 } else { libc::POLLOUT }
    }

    pub(crate) fn is_authenticated(&self) -> bool {
        self.secure.is_authenticated()
    }

    /// Queues a message and sends what can be sent now.
    pub(crate) fn send<T: Serialize>(&mut self, message: &T) -> Result<(), LinkError> {
        self.secure.send(serde_json::to_vec(message)?)?;
        self.sent = Instant::now();
        if self.secure.out.len() > MAX_QUEUED {
            return Err(LinkError::Stuck);
        }
        self.flush()
    }

    /// Sends what can be sent now.
    pub(crate) fn flush(&mut self) -> Result<(), LinkError> {
        while !self.secure.out.is_empty() {
            match self.stream.write(&self.secure.out) {
                Ok(0) => return Err(LinkError::Ended),
                Ok(n) => drop(self.secure.out.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Reads from a peer that has not proved yet that it knows the key; whether it has by now. Little is read: what
    /// follows stays in the kernel.
    pub(crate) fn prove(&mut self) -> Result<bool, LinkError> {
        let mut buffer = [0u8; PROOF_BYTES];
        self.read(&mut buffer)?;
        self.flush()?;
        Ok(self.is_authenticated())
    }

    /// Reads into `buffer` what has arrived, once; whether there was something.
    fn read(&mut self, buffer: &mut [u8]) -> Result<bool, LinkError> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(LinkError::Ended),
                Ok(n) => {
                    self.heard = Instant::now();
                    self.secure.feed(&buffer[..n])?;
                    return Ok(true);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Reads what has arrived: whole messages. Those that came before the end of a connection are returned before the error.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, into: &mut Vec<T>) -> Result<(), LinkError> {
        let mut buffer = vec![0u8; READ_BYTES];
        loop {
            // The first may have come together with the proof.
            while let Some(message) = self.secure.next()? {
                into.push(serde_json::from_slice(&message)?);
            }
            if !self.read(&mut buffer)? {
                return self.flush();
            }
        }
    }

    /// Sends `beat` when nothing else was sent for a while; an error when the peer was silent for longer than `limit`,
    /// or its host too for longer than `SILENCE`. A peer whose message has not been read yet does not count as silent: it
    /// was this process that did not run.
    pub(crate) fn keep_alive<T: Serialize>(&mut self, beat: &T, limit: Duration) -> Result<(), LinkError> {
        let silent = self.heard.elapsed();
        if silent > SILENCE && !self.polled(libc::POLLIN, Duration::ZERO)? && (silent > limit || !self.host_answers()?) {
            return Err(LinkError::Silent(silent.as_secs()));
        }
        self.beat(beat)
    }

    /// This process has stood still for `time`, in which it heard nobody.
    pub(crate) fn stood_still(&mut self, time: Duration) {
        self.heard += time;
    }

    /// The clock is another one from `now` on.
    pub(crate) fn begin_at(&mut self, now: Instant) {
        (self.heard, self.sent) = (now, now);
    }

    /// Sends `beat` when nothing else was sent for a while.
    pub(crate) fn beat<T: Serialize>(&mut self, beat: &T) -> Result<(), LinkError> {
        if self.sent.elapsed() >= BEAT {
            self.send(beat)?;
        }
        Ok(())
    }

    /// Whether the kernel at the other end acknowledges what it is sent, which it does for a process that gets no processor too.
    fn host_answers(&self) -> io::Result<bool> {
        const LAST: usize = offset_of!(libc::tcp_info, tcpi_last_ack_recv);
        let info: [u8; size_of::<libc::tcp_info>()] = sockets::option(&self.stream, libc::IPPROTO_TCP, libc::TCP_INFO)?;
        let last = u32::from_ne_bytes([info[LAST], info[LAST + 1], info[LAST + 2], info[LAST + 3]]);
        let retransmits = info[offset_of!(libc::tcp_info, tcpi_retransmits)];
        Ok(retransmits < UNANSWERED || Duration::from_millis(last.into()) <= SILENCE)
    }

    /// Waits for readiness, `limit` at most.
    pub(crate) fn wait(&self, limit: Duration) -> io::Result<bool> {
        self.polled(self.interest(), limit)
    }

    fn polled(&self, events: i16, limit: Duration) -> io::Result<bool> {
        let ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        match numbers::poll(self.raw(), events, ms) {
            Ok(came) => Ok(came != 0),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::Answered;
    use std::net::TcpListener;

    #[test]
    fn who_has_not_been_listened_to_is_not_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let key = JobKey::random().unwrap();
        let secure = Secure::responder(&key, TREE, Answered::default()).unwrap();
        let mut link = Link::over(listener.accept().unwrap().0, secure).unwrap();
        link.heard = Instant::now().checked_sub(SILENCE * 2).unwrap();
        assert!(matches!(link.keep_alive(&(), SILENCE), Err(LinkError::Silent(20))));
        // Unless it was another clock that said so.
        let heard = link.heard;
        link.begin_at(Instant::now());
        assert!(link.keep_alive(&(), SILENCE).is_ok());
        link.heard = heard;
        peer.write_all(b"x").unwrap();
        assert!(link.wait(SILENCE).unwrap());
        link.sent = Instant::now();
        assert!(link.keep_alive(&(), SILENCE).is_ok());
    }
}
