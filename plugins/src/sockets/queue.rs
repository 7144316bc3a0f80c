//! Reads a receive queue without consuming it.
//!
//! MSG_PEEK with SO_PEEK_OFF walks through the whole queue. The option is set back afterwards. A pending socket error
//! would be consumed by a read that finds no data, so a stream is never read behind the bytes that FIONREAD announces;
//! of datagrams and packets by any read, so those are left alone meanwhile.

use crate::fault::{not_now, refuse, At, Fault};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use belay_kernel::sockets::Received;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// How long a queue of datagrams is read at most, while the program stands still. The kernel goes through all of it for
/// each of them: 10,000 take less than a second.
const LONGEST: Duration = Duration::from_secs(1);

/// A message in the queue.
#[derive(Debug)]
pub(crate) struct Peeked {
    pub(crate) data: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) from: Addr,
    pub(crate) creds: Option<libc::ucred>,
}

/// All messages in the queue of `raw`.
pub(crate) fn peek(raw: RawFd, kind: i32) -> Result<Vec<Peeked>, Fault> {
    if kind == libc::SOCK_DGRAM {
        return peek_datagrams(raw, message);
    }
    let bytes = fd::readable_bytes(raw).at("ask how much it holds")?;
    if bytes == 0 && !(kind == libc::SOCK_SEQPACKET && holds_something(raw)?) {
        return Ok(Vec::new());
    }
    if kind == libc::SOCK_SEQPACKET {
        without_error(raw)?;
    }
    if kind == libc::SOCK_STREAM && sock::receive(raw, &mut [0], libc::MSG_PEEK | libc::MSG_OOB).is_ok() {
        return not_now("urgent data (MSG_OOB) has not been read");
    }
    with_offset(raw, || bytes_or_packets(raw, kind, bytes))
}

/// What `of` makes of each datagram in the queue of `raw`.
pub(crate) fn peek_datagrams<T>(raw: RawFd, of: impl Fn(Received, &[u8]) -> io::Result<T>) -> Result<Vec<T>, Fault> {
    without_error(raw)?;
    with_offset(raw, || datagrams(raw, of))
}

/// What `look`, which sets SO_PEEK_OFF, finds; then that is as before.
fn with_offset<T>(raw: RawFd, look: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    let before: i32 = sock::get(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF).at("read SO_PEEK_OFF")?;
    let out = look();
    sock::set(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &before).at("set SO_PEEK_OFF back")?;
    out
}

/// Whether an error waits to be told to whoever uses the socket next.
pub(crate) fn has_failed(raw: RawFd) -> Result<bool, Fault> {
    Ok(fd::poll(raw, 0).at("poll")? & libc::POLLERR != 0)
}

/// Refuses to read where an error would be taken away.
fn without_error(raw: RawFd) -> Result<(), Fault> {
    if has_failed(raw)? {
        return not_now("an error has not been read, without which what it has received cannot be read");
    }
    Ok(())
}

fn at_offset(raw: RawFd, offset: usize, buf: &mut [u8]) -> io::Result<Received> {
    let offset = i32::try_from(offset).map_err(io::Error::other)?;
    sock::set(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &offset)?;
    sock::receive(raw, buf, libc::MSG_PEEK)
}

/// A whole datagram or packet at `offset`, however long.
fn whole(raw: RawFd, offset: usize, buf: &mut Vec<u8>) -> io::Result<Received> {
    loop {
        let r = at_offset(raw, offset, buf)?;
        if r.flags & libc::MSG_TRUNC == 0 {
            return Ok(r);
        }
        buf.resize(buf.len() * 2, 0);
    }
}

fn datagrams<T>(raw: RawFd, of: impl Fn(Received, &[u8]) -> io::Result<T>) -> Result<Vec<T>, Fault> {
    let (mut out, begin) = (Vec::new(), Instant::now());
    let mut buf = vec![0u8; 64 * 1024];
    let (mut offset, mut begins_empty) = (0, false);
    loop {
        if begin.elapsed() > LONGEST {
            return not_now(format!(
                "more than {} datagrams wait to be read, and the program would have to stand still for too long until they are",
                out.len()
            ));
        }
        match whole(raw, offset, &mut buf) {
            Ok(r) => {
                begins_empty |= out.is_empty() && r.len == 0;
                offset += r.len;
                out.push(of(r, &buf).at("read its queue")?);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) => return Err(e).at("read its queue"),
        }
    }
    if !begins_empty {
        out.splice(0..0, empty_head(raw, of)?);
    }
    Ok(out)
}

/// The first datagram or packet, where it is empty: the kernel shows each empty one to one walk through the queue only
/// (`__skb_try_recv_from_queue`), but the first of all to whoever asks without an offset.
fn empty_head<T>(raw: RawFd, of: impl FnOnce(Received, &[u8]) -> io::Result<T>) -> Result<Option<T>, Fault> {
    sock::set(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &-1i32).at("set SO_PEEK_OFF")?;
    match sock::receive(raw, &mut [0], libc::MSG_PEEK) {
        Ok(r) if r.len == 0 => of(r, &[]).map(Some).at("read its queue"),
        Ok(_) => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(e).at("read its queue"),
    }
}

fn bytes_or_packets(raw: RawFd, kind: i32, bytes: usize) -> Result<Vec<Peeked>, Fault> {
    let mut out = Vec::new();
    let mut buf = vec![0u8; bytes.max(1)];
    let mut offset = 0;
    while offset < bytes {
        let r = whole(raw, offset, &mut buf).at("read its queue")?;
        if r.len == 0 && kind == libc::SOCK_SEQPACKET {
            // An empty packet, which is passed over from now on.
            out.push(message(r, &[]).at("read its queue")?);
            continue;
        }
        if r.len == 0 {
            return refuse(format!("holds {bytes} bytes, of which only {offset} could be read"));
        }
        let plain = if kind == libc::SOCK_STREAM && !r.fds.is_empty() {
            before_descriptors(raw, offset, r.len).at("read its queue")?
        } else {
            0
        };
        offset += r.len;
        let mut m = message(r, &buf).at("read its queue")?;
        if plain > 0 {
            out.push(Peeked {
                data: m.data[..plain].to_vec(),
                fds: Vec::new(),
                from: m.from.clone(),
                creds: m.creds,
            });
            m.data.drain(..plain);
        }
        out.push(m);
    }
    if kind == libc::SOCK_SEQPACKET && out.first().is_none_or(|m| !m.data.is_empty()) {
        out.splice(0..0, empty_head(raw, message)?);
    }
    Ok(out)
}

/// Whether packets that are all empty wait: who asks for the end of a connection would be answered like that too.
fn holds_something(raw: RawFd) -> Result<bool, Fault> {
    let events = fd::poll(raw, libc::POLLIN | libc::POLLRDHUP).at("poll")?;
    Ok(events & libc::POLLIN != 0 && events & libc::POLLRDHUP == 0)
}

/// A stream delivers descriptors with the first byte of the write that carried them, but one read may return the bytes
/// of earlier writes too, and a peek shows descriptors even when it ends before their bytes. How many of the `len`
/// bytes at `offset` belong to earlier writes.
///
/// The read ends with the write that carried the descriptors. The kernel copies write by write, so a peek into a buffer
/// whose last byte cannot be written returns all writes but that one.
fn before_descriptors(raw: RawFd, offset: usize, len: usize) -> io::Result<usize> {
    let offset = i32::try_from(offset).map_err(io::Error::other)?;
    sock::set(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &offset)?;
    match sock::peek_all_but_last_byte(raw, len) {
        Err(e) if e.raw_os_error() == Some(libc::EFAULT) => Ok(0),
        done => done,
    }
}

/// One with all its descriptors: the kernel leaves out those that the agent has no room for.
fn message(r: Received, buf: &[u8]) -> io::Result<Peeked> {
    if r.flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(Peeked {
        data: buf[..r.len].to_vec(),
        fds: r.fds,
        from: Addr(r.from),
        creds: r.creds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    #[test]
    fn an_empty_datagram_is_seen_each_time() {
        let to = UdpSocket::bind("127.0.0.1:0").unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        let send = |data: &[u8]| assert_eq!(from.send_to(data, to.local_addr().unwrap()).unwrap(), data.len());
        let lengths = || -> Vec<usize> {
            let all = peek(to.as_raw_fd(), libc::SOCK_DGRAM).unwrap();
            all.iter().map(|m| m.data.len()).collect()
        };
        assert!(lengths().is_empty());
        send(b"");
        for _ in 0..3 {
            assert_eq!(lengths(), [0]);
        }
        send(b"abc");
        assert_eq!(lengths(), [0, 3]);
        assert_eq!(to.recv(&mut [0; 8]).unwrap(), 0);
        assert_eq!(lengths(), [3]);
    }
}
