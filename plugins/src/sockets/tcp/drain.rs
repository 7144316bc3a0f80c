//! Data in flight on a connection between two sockets of the job.
//!
//! What has arrived can be peeked at. What the sender still holds is made to arrive first: a small or corked segment is
//! pushed. Data that cannot arrive because the receiver's window is full is read from the sender's queue (TCP_REPAIR,
//! needs CAP_NET_ADMIN); without that privilege the receiver is read empty until the sender has got rid of everything,
//! and all of it is sent again through the sender's own socket, whose peer has more room by then than before.

use super::info::{undelivered, Counters, End};
use crate::fault::{not_now, refuse, At, Fault};
use crate::sockets::send_buffer::{Buffer, Enlarged, SO_BUF_LOCK};
use crate::sys::fd;
use crate::sys::sock;
use std::io;
use std::os::fd::RawFd;

const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const REPAIR_ON: i32 = 1;
/// Leaves repair mode without sending a probe.
const REPAIR_OFF: i32 = -1;
const NO_QUEUE: i32 = 0;
const SEND_QUEUE: i32 = 2;
/// Largest segment in a send queue.
const SEGMENT_MAX: usize = 1 << 20;
/// Longest wait for one step of the exchange, milliseconds.
const STEP_MS: i32 = 300;
/// Longest wait for what nothing keeps from arriving but a busy machine, milliseconds.
const ARRIVAL_MS: i32 = 30_000;

fn opt(raw: RawFd, option: i32) -> io::Result<i32> {
    sock::get(raw, libc::IPPROTO_TCP, option)
}

fn set(raw: RawFd, option: i32, value: i32) -> io::Result<()> {
    sock::set(raw, libc::IPPROTO_TCP, option, &value)
}

/// A direction of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Direction {
    /// The end that sends.
    pub(super) sender: End,
    /// The end that receives.
    pub(super) receiver: End,
}

impl Direction {
    /// Bytes the sender still holds.
    fn left(self) -> Result<usize, Fault> {
        undelivered(self.sender, self.receiver)
    }
}

/// All bytes that have been sent and not been read.
pub(super) fn in_flight(d: Direction) -> Result<Vec<u8>, Fault> {
    let left = push(d)?;
    if left == 0 {
        return peek(d.receiver.raw);
    }
    // More may arrive at any moment: what the sender no longer has when it is asked is there when the receiver is asked after it.
    match peek_sent(d.sender.raw, left) {
        Ok(held) => {
            let (mut data, there) = arrived(d.receiver)?;
            let left = Counters::of(d.sender).at("count what is on its way")?.undelivered(&there)?;
            let Some(at) = held.len().checked_sub(left) else {
                return not_now(format!("the send queue gave {} bytes instead of {left}", held.len()));
            };
            data.extend_from_slice(&held[at..]);
            Ok(data)
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && !d.sender.closing => exchange(d),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => arrive(d, left),
        Err(e) => Err(e).at("read the send queue (TCP_REPAIR)"),
    }
}

/// Pushes out what waits only for more to be sent with it (small or corked segments). Returns what remains with the sender.
fn push(d: Direction) -> Result<usize, Fault> {
    let left = d.left()?;
    if left == 0 {
        return Ok(0);
    }
    let nodelay = opt(d.sender.raw, libc::TCP_NODELAY).at("read TCP_NODELAY")?;
    set(d.sender.raw, libc::TCP_NODELAY, 1).at("set TCP_NODELAY")?;
    set(d.sender.raw, libc::TCP_NODELAY, nodelay).at("set TCP_NODELAY back")?;
    d.left()
}

/// What has arrived and has not been read.
pub(super) fn peek(receiver: RawFd) -> Result<Vec<u8>, Fault> {
    let bytes = fd::readable_bytes(receiver).at("ask how much it holds")?;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let offset: i32 = sock::get(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap_or(-1);
    if offset >= 0 {
        sock::set(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &-1i32).at("set SO_PEEK_OFF")?;
    }
    let mut data = vec![0u8; bytes];
    let got = sock::receive(receiver, &mut data, libc::MSG_PEEK);
    if offset >= 0 {
        sock::set(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &offset).at("set SO_PEEK_OFF back")?;
    }
    let got = got.at("read its queue")?.len;
    if got != bytes {
        return refuse(format!(
            "holds {bytes} bytes, of which only {got} could be read (urgent data?)"
        ));
    }
    Ok(data)
}

/// What a socket holds that has not been read, and its counters at that moment.
pub(super) fn arrived(receiver: End) -> Result<(Vec<u8>, Counters), Fault> {
    loop {
        let before = Counters::of(receiver).at("read its counters")?;
        let data = peek(receiver.raw)?;
        if Counters::of(receiver).at("read its counters")?.received == before.received {
            return Ok((data, before));
        }
    }
}

/// The end of the send queue: all of it where it holds `most` bytes at most.
pub(super) fn peek_sent(sender: RawFd, most: usize) -> io::Result<Vec<u8>> {
    let reuse: i32 = sock::get(sender, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    set(sender, TCP_REPAIR, REPAIR_ON)?;
    let read = || -> io::Result<Vec<u8>> {
        set(sender, TCP_REPAIR_QUEUE, SEND_QUEUE)?;
        // The first segment may have been acknowledged in part, but is still there as a whole.
        let mut data = vec![0u8; most + SEGMENT_MAX];
        let n = sock::receive(sender, &mut data, libc::MSG_PEEK)?.len;
        set(sender, TCP_REPAIR_QUEUE, NO_QUEUE)?;
        data.truncate(n);
        Ok(data)
    };
    let data = read();
    set(sender, TCP_REPAIR, REPAIR_OFF)?;
    // Repair mode changes this option.
    sock::set(sender, libc::SOL_SOCKET, libc::SO_REUSEADDR, &reuse)?;
    data
}

/// Makes all arrive that a sender has left behind which sends no more, and copies it. (It could not be sent again.)
fn arrive(d: Direction, left: usize) -> Result<Vec<u8>, Fault> {
    let receiver = d.receiver.raw;
    let _larger = larger(receiver);
    open_window(receiver);
    // The end of the data is the last to come.
    if !wait(receiver, libc::POLLRDHUP).at("poll")? {
        return not_now(format!(
            "{left} bytes wait for a reader on a connection that is being closed, and its buffer cannot be made large enough for them without privilege"
        ));
    }
    let left = d.left()?;
    if left > 0 {
        return not_now(format!("{left} bytes are still on their way"));
    }
    peek(receiver)
}

/// Reads everything at the receiver and sends it again.
fn exchange(d: Direction) -> Result<Vec<u8>, Fault> {
    let (sender, receiver) = (d.sender.raw, d.receiver.raw);
    grow_receiver(receiver);
    let mut data = Vec::new();
    let mut buf = vec![0u8; 256 * 1024];
    let mut all_there = false;
    loop {
        match sock::receive(receiver, &mut buf, 0) {
            Ok(r) if r.len > 0 => data.extend_from_slice(&buf[..r.len]),
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if all_there {
                    break;
                }
                // Reading has opened the window, so the rest arrives; it may have done so since the last look.
                all_there = d.left()? == 0;
                if all_there {
                    continue;
                }
                if !fd::wait(receiver, libc::POLLIN, ARRIVAL_MS).at("poll")? {
                    // What has been read could not be put in front of it again.
                    sock::shutdown(sender, libc::SHUT_RDWR).at("shut the connection down")?;
                    return refuse("the connection was shut down: data in flight did not arrive although there was room for it");
                }
            }
            Err(e) => return Err(e).at("read what has arrived"),
        }
    }
    let back = send_again(sender, receiver, &data).at("send data in flight again")?;
    if back < data.len() {
        // Silence would be worse than an error: both ends learn that the connection is broken.
        sock::shutdown(sender, libc::SHUT_RDWR).at("shut the connection down")?;
        return refuse(format!(
            "the connection was shut down: only {back} of {} bytes in flight could be put back",
            data.len()
        ));
    }
    Ok(data)
}

/// Gives the receiver as much room as the system allows (net.ipv4.tcp_rmem), without fixing its buffer's size.
pub(super) fn grow_receiver(receiver: RawFd) {
    let low: i32 = sock::get(receiver, libc::SOL_SOCKET, libc::SO_RCVLOWAT).unwrap_or(1);
    for value in [i32::MAX, low] {
        // Only room is at stake: what was there before fits into what there was before.
        let _ = sock::set(receiver, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &value);
    }
}

/// Where the program has chosen the size of the receiver's buffer, the kernel may choose while this lives.
fn larger(receiver: RawFd) -> Option<Enlarged> {
    let chosen = sock::get::<i32>(receiver, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0) & 2 != 0;
    chosen.then(|| Enlarged::of(Buffer::Receive, receiver))
}

/// Gives the receiver as much room, and lets its peer know.
fn open_window(receiver: RawFd) {
    grow_receiver(receiver);
    // Whoever looks at what has come tells the sender how much may follow.
    let _ = sock::receive(receiver, &mut [0], libc::MSG_PEEK);
}

/// Sends `data`, enlarging the sender's buffer for the moment where needed. Returns how much went.
pub(super) fn send_again(sender: RawFd, receiver: RawFd, data: &[u8]) -> io::Result<usize> {
    let mut done = 0;
    let mut grown = None;
    while done < data.len() {
        match sock::send(sender, &data[done..], &[], None) {
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                set(receiver, libc::TCP_QUICKACK, 1)?;
                open_window(receiver);
                if wait(sender, libc::POLLOUT)? {
                    continue;
                }
                if grown.is_some() {
                    break;
                }
                grown = Some((Enlarged::new(sender), larger(receiver)));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Waits for an event, at most one step long.
fn wait(raw: RawFd, events: i16) -> io::Result<bool> {
    fd::wait(raw, events, STEP_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;

    /// Bytes per second that the sender's end lets go.
    const PACE: u64 = 5_000_000;

    /// A connection with as much on its way as fits, which goes on arriving for a while, and that.
    fn flowing() -> (TcpStream, TcpStream, Vec<u8>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        sender.set_nonblocking(true).unwrap();
        receiver.set_nonblocking(true).unwrap();
        sock::set(sender.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &PACE).unwrap();
        grow_receiver(receiver.as_raw_fd());
        let mut sent: Vec<u8> = (0..2_000_000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let n = sender.write(&sent).unwrap();
        sent.truncate(n);
        (sender, receiver, sent)
    }

    #[test]
    fn what_arrives_while_it_is_read_is_read_once() {
        let (sender, receiver, sent) = flowing();
        let end = |raw| End { raw, closing: false };
        let d = Direction {
            sender: end(sender.as_raw_fd()),
            receiver: end(receiver.as_raw_fd()),
        };
        let first = d.left().unwrap();
        assert!(first > 0, "all has arrived");
        let begin = std::time::Instant::now();
        while begin.elapsed().as_millis() < 300 {
            let read = in_flight(d).unwrap();
            assert!(read == sent, "{} bytes of {}", read.len(), sent.len());
        }
    }
}
