//! Data in flight on a connection between two sockets of the job.
//!
//! What has arrived can be peeked at. What the sender still holds is made to arrive first: a small or corked segment is
//! pushed. Data that cannot arrive because the receiver's window is full is read from the sender's queue (TCP_REPAIR,
//! needs CAP_NET_ADMIN). Without that privilege the receiver gets more room, so that it arrives. Where even that is not
//! enough, the receiver is read empty until the sender has got rid of everything, and all of it is sent again through
//! the sender's own socket.

use super::info::{undelivered, Counters, End, Info};
use super::said::apart;
use super::seen::closed_by_peer;
use super::TCP_CLOSE;
use crate::fault::{not_now, refuse, At, Fault};
use crate::sockets::send_buffer::{Buffer, Enlarged, SO_BUF_LOCK};
use crate::sys::{fd, sock};
use belay_kernel::apart;
use rustix::net::Shutdown;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

const TCP_REPAIR: i32 = 19;
const TCP_REPAIR_QUEUE: i32 = 20;
const REPAIR_ON: i32 = 1;
/// Leaves repair mode without sending a probe.
const REPAIR_OFF: i32 = -1;
const NO_QUEUE: i32 = 0;
const SEND_QUEUE: i32 = 2;
/// Largest segment in a send queue.
const SEGMENT_MAX: usize = 1 << 20;
/// Numbers of SO_MEMINFO: memory held and allowed at the receiving side, and more.
const MEMINFO: usize = 9;
/// How long nothing may arrive before a receiver that has got more room counts as full again.
const STALL: Duration = Duration::from_millis(20);
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
    match peek_sent(d.sender.raw) {
        Ok(held) => {
            let (mut data, there) = arrived(d.receiver)?;
            let left = Counters::of(d.sender).at("count what is on its way")?.undelivered(&there)?;
            let Some(at) = held.len().checked_sub(left) else {
                return not_now(format!("the send queue gave {} bytes instead of {left}", held.len()));
            };
            data.extend_from_slice(&held[at..]);
            Ok(data)
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && !d.sender.closing => match make_room(d)? {
            Some(data) => Ok(data),
            None => exchange(d),
        },
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
    no_urgent(receiver)?;
    let bytes = fd::readable_bytes(receiver).at("ask how much it holds")?;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let mut data = vec![0u8; bytes];
    let got = peek_at_head(receiver, &mut data).at("read its queue")?;
    if got != bytes {
        return refuse(format!("holds {bytes} bytes, of which only {got} could be read"));
    }
    Ok(data)
}

/// Peeks from the first byte on, whatever a program has peeked at (SO_PEEK_OFF), which stays so.
fn peek_at_head(receiver: RawFd, into: &mut [u8]) -> io::Result<usize> {
    let offset: i32 = sock::get(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap_or(-1);
    let set = |to: i32| match offset {
        ..0 => Ok(()),
        _ => sock::set(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &to),
    };
    set(-1)?;
    let got = sock::peek(receiver, into);
    set(offset)?;
    got
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

/// The send queue, at whose end is what has not arrived. (Whatever has arrived and not been acknowledged is there, too.)
pub(super) fn peek_sent(sender: RawFd) -> io::Result<Vec<u8>> {
    let reuse: i32 = sock::get(sender, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    let queued: i32 = fd::unsent_bytes(sender)?;
    // The first segment may have been acknowledged in part, but is still there as a whole.
    let mut room = usize::try_from(queued).unwrap_or(0) + SEGMENT_MAX;
    loop {
        let (mut data, mut there) = (vec![0; room], Ok(0));
        // A socket that is being repaired would be of no use to the program if the agent was killed now.
        apart::run(&mut || there = read_send_queue(sender, reuse, &mut data))?;
        let there = there?;
        if there <= room {
            data.truncate(there);
            return Ok(data);
        }
        room = there;
    }
}

/// Reads the front of the send queue without allocating; how much there is.
fn read_send_queue(sender: RawFd, reuse: i32, into: &mut [u8]) -> io::Result<usize> {
    set(sender, TCP_REPAIR, REPAIR_ON)?;
    let there = set(sender, TCP_REPAIR_QUEUE, SEND_QUEUE)
        .and_then(|()| sock::peek(sender, into))
        .and_then(|n| set(sender, TCP_REPAIR_QUEUE, NO_QUEUE).map(|()| n));
    set(sender, TCP_REPAIR, REPAIR_OFF)?;
    // Repair mode changes this option.
    sock::set(sender, libc::SOL_SOCKET, libc::SO_REUSEADDR, &reuse)?;
    there
}

/// Makes all arrive that a sender has left behind which sends no more, and copies it. (It could not be sent again.)
fn arrive(d: Direction, mut left: usize) -> Result<Vec<u8>, Fault> {
    let receiver = d.receiver.raw;
    let _larger = larger(receiver);
    open_window(receiver);
    // The end of the data is the last to come.
    while !wait(receiver, libc::POLLRDHUP).at("poll")? {
        let before = std::mem::replace(&mut left, d.left()?);
        if left >= before {
            return stalled(receiver, left, ", or run belay with CAP_NET_ADMIN");
        }
        open_window(receiver);
    }
    let left = d.left()?;
    if left > 0 {
        return not_now(format!("{left} bytes are still on their way"));
    }
    peek(receiver)
}

/// Makes all arrive that an end has left behind which nobody has any more; `left` bytes when it was looked at.
pub(super) fn let_in(receiver: RawFd, left: usize) -> Result<(), Fault> {
    let _larger = larger(receiver);
    let readable = || fd::readable_bytes(receiver).at("ask how much it holds");
    let mut there = readable()?;
    open_window(receiver);
    loop {
        if wait(receiver, libc::POLLRDHUP).at("poll")? {
            let state = Info::of(receiver).at("read its state")?.state;
            if closed_by_peer(state) || state == TCP_CLOSE {
                return Ok(());
            }
            // A program that has shut down its own side of reading is told of an end that has not come.
            drop(fd::wait(receiver, 0, STEP_MS));
        }
        let before = std::mem::replace(&mut there, readable()?);
        if there <= before {
            return stalled(receiver, left, "");
        }
        open_window(receiver);
    }
}

/// Of what a closed end has left behind nothing arrives any more. Where the receiver, as large as it can be, is full, that
/// lasts until the program reads: to try again and again would only hold it up.
fn stalled<T>(receiver: RawFd, left: usize, otherwise: &str) -> Result<T, Fault> {
    let [held, room, ..]: [u32; MEMINFO] =
        sock::get(receiver, libc::SOL_SOCKET, libc::SO_MEMINFO).at("ask how much room it has")?;
    // The kernel calls one full in which less than a sixteenth is free.
    if held < room - room / 8 {
        return not_now(format!("{left} bytes of an end that has been closed are still on their way"));
    }
    refuse(format!(
        "{left} bytes that were sent before the other end was closed find no room here until the program reads, not even in the largest buffer of the system: let it read them, or raise net.ipv4.tcp_rmem{otherwise}"
    ))
}

/// What is under way, where it arrives once the receiver has as much room as the system allows.
fn make_room(d: Direction) -> Result<Option<Vec<u8>>, Fault> {
    let _larger = larger(d.receiver.raw);
    let (mut least, mut since) = (usize::MAX, Instant::now());
    loop {
        open_window(d.receiver.raw);
        match d.left()? {
            0 => return peek(d.receiver.raw).map(Some),
            left if left < least => (least, since) = (left, Instant::now()),
            _ if since.elapsed() > STALL => return Ok(None),
            _ => drop(fd::wait(d.receiver.raw, 0, 1)),
        }
    }
}

/// Reads everything at the receiver and sends it again, in a process of its own.
fn exchange(d: Direction) -> Result<Vec<u8>, Fault> {
    let receiver = d.receiver.raw;
    no_urgent(receiver)?;
    let peeks = sock::get(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap_or(-1);
    let mut data = apart("take data in flight out and put it back", |agent_is_there| {
        let there = || match agent_is_there() {
            true => Ok(()),
            // The program goes on: it may read and send something itself.
            false => give_up(d.sender.raw, "the agent was killed while data in flight was out of it"),
        };
        let data = take_all(d, &there)?;
        there()?;
        put_back(d.sender.raw, receiver, &data).or_else(|e| give_up(d.sender.raw, &e.to_string()))?;
        there()?;
        Ok(vec![data])
    })?;
    if peeks >= 0 {
        // Whoever reads moves it back.
        sock::set(receiver, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &peeks).at("set SO_PEEK_OFF back")?;
    }
    Ok(data.pop().unwrap_or_default())
}

/// Takes everything out of a connection that is under way or has arrived, as long as nobody else `may` read there. Who
/// calls this puts it back.
pub(super) fn take_all(d: Direction, may: &dyn Fn() -> Result<(), Fault>) -> Result<Vec<u8>, Fault> {
    let receiver = d.receiver.raw;
    grow_receiver(receiver);
    let mut data = Vec::new();
    let mut buf = vec![0u8; 256 * 1024];
    let mut all_there = false;
    loop {
        may()?;
        match sock::receive(receiver, &mut buf, 0) {
            Ok(r) if r.len > 0 => data.extend_from_slice(&buf[..r.len]),
            Ok(_) => return Ok(data),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && all_there => return Ok(data),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // Reading has opened the window, so the rest arrives; it may have done so since the last look. Behind
                // the last data of one that sends no more comes its end.
                all_there = !d.sender.closing && d.left().is_ok_and(|left| left == 0);
                if !all_there && !fd::wait(receiver, libc::POLLIN, ARRIVAL_MS).is_ok_and(|came| came) {
                    return give_up(d.sender.raw, "data in flight did not arrive although there was room for it");
                }
            }
            Err(e) => return give_up(d.sender.raw, &format!("what has arrived could not be read: {e}")),
        }
    }
}

/// Sends what had been sent and not been read.
pub(super) fn put_back(sender: RawFd, receiver: RawFd, data: &[u8]) -> Result<(), Fault> {
    match send_again(sender, receiver, data).at("put data in flight back")? {
        n if n == data.len() => Ok(()),
        n => refuse(format!(
            "only {n} of {} bytes in flight could be put back (are net.ipv4.tcp_rmem and tcp_wmem smaller than they were?)",
            data.len()
        )),
    }
}

/// What has been read could not be put in front of what follows. Silence would be worse than an error: both ends learn
/// that the connection is broken.
pub(super) fn give_up<T>(sender: RawFd, why: &str) -> Result<T, Fault> {
    sock::shutdown(sender, Shutdown::Both).at("shut the connection down")?;
    refuse(format!("the connection was shut down: {why}"))
}

/// Refuses for the moment what was sent as urgent (MSG_OOB) and waits to be read, or whatever lies around it: it could
/// not be put back, and what is behind it does not count as readable before it has been passed.
fn no_urgent(receiver: RawFd) -> Result<(), Fault> {
    let inline = |on: i32| sock::set(receiver, libc::SOL_SOCKET, libc::SO_OOBINLINE, &on).at("set SO_OOBINLINE");
    if sock::get::<i32>(receiver, libc::SOL_SOCKET, libc::SO_OOBINLINE).at("read SO_OOBINLINE")? != 0 {
        return Ok(());
    }
    let readable = || fd::readable_bytes(receiver).at("ask how much it holds");
    // In this order: what arrives in between is behind no mark.
    inline(1)?;
    let all = readable();
    inline(0)?;
    let behind = all?.saturating_sub(readable()?);
    // One that has been read already is nothing any more, where nothing is behind it.
    let has_been_read =
        || sock::receive(receiver, &mut [0], libc::MSG_OOB | libc::MSG_PEEK).is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL));
    if behind == 0 || behind == 1 && has_been_read() {
        return Ok(());
    }
    not_now("urgent data (MSG_OOB) waits to be read, or something behind it")
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
    let _ = peek_at_head(receiver, &mut [0]);
}

/// Sends `data`, enlarging the sender's buffer for the moment where needed. Returns how much went.
fn send_again(sender: RawFd, receiver: RawFd, data: &[u8]) -> io::Result<usize> {
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
    use rustix::net::SendFlags;
    use std::io::{Read as _, Write as _};
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

    fn direction(sender: &TcpStream, receiver: &TcpStream) -> Direction {
        let end = |raw| End { raw, closing: false };
        Direction {
            sender: end(sender.as_raw_fd()),
            receiver: end(receiver.as_raw_fd()),
        }
    }

    /// The receiver has been fast, and stops: much of what it has received has not been acknowledged yet.
    #[test]
    fn what_has_arrived_and_is_not_acknowledged_is_read_once() {
        const PERIOD: usize = 251;
        const ROOM: i32 = 3 << 19;
        let data: Vec<u8> = (0..(1 << 20) + PERIOD).map(|n| (n % PERIOD) as u8).collect();
        let from = |at: usize, n: usize| &data[at % PERIOD..][..n];
        for _ in 0..3 {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            sock::set(listener.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &ROOM).unwrap();
            let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut receiver, _) = listener.accept().unwrap();
            sender.set_nonblocking(true).unwrap();
            receiver.set_nonblocking(true).unwrap();
            let (mut sent, mut read, mut some) = (0, 0, vec![0; 1 << 20]);
            while sent < 64 << 20 {
                sent += sender.write(from(sent, 256 << 10)).unwrap_or(0);
                read += receiver.read(&mut some).unwrap_or(0);
            }
            while let Ok(n) = sender.write(from(sent, 256 << 10)) {
                sent += n;
            }
            let held = in_flight(direction(&sender, &receiver)).unwrap();
            assert_eq!(held.len(), sent - read);
            let wrong = held
                .chunks(1 << 20)
                .enumerate()
                .find(|(k, c)| *c != from(read + (k << 20), c.len()));
            assert!(wrong.is_none(), "MiB {:?} of {}", wrong.map(|w| w.0), held.len() >> 20);
        }
    }

    #[test]
    fn what_a_program_has_peeked_at_stays_so() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        let raw = receiver.as_raw_fd();
        sender.write_all(b"abcdef").unwrap();
        assert!(fd::wait(raw, libc::POLLIN, 1000).unwrap());
        // Kernels before 6.9 do not have it for TCP.
        if sock::set(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF, &3i32).is_err() {
            return;
        }
        let d = direction(&sender, &receiver);
        for read in [make_room(d).unwrap().unwrap(), peek(raw).unwrap(), exchange(d).unwrap()] {
            assert_eq!(read, b"abcdef");
            assert_eq!(sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_PEEK_OFF).unwrap(), 3);
        }
    }

    #[test]
    fn urgent_data_and_what_is_behind_it_is_not_left_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        let raw = receiver.as_raw_fd();
        let urgent = |byte: u8| {
            assert_eq!(rustix::net::send(&sender, &[byte], SendFlags::OOB), Ok(1));
        };
        let is_refused = || matches!(in_flight(direction(&sender, &receiver)), Err(Fault::Passing(why)) if why.contains("urgent"));
        (&sender).write_all(b"abc").unwrap();
        urgent(b'!');
        assert!(fd::wait(raw, libc::POLLPRI, 1000).unwrap());
        assert!(is_refused());
        let mut byte = [0];
        assert_eq!(sock::receive(raw, &mut byte, libc::MSG_OOB).unwrap().len, 1);
        assert_eq!(
            (byte, in_flight(direction(&sender, &receiver)).unwrap()),
            (*b"!", b"abc".to_vec())
        );
        (&sender).write_all(b"def").unwrap();
        while direction(&sender, &receiver).left().unwrap() > 0 {
            std::thread::yield_now();
        }
        // Behind a mark that the program has not passed.
        assert!(is_refused());
        assert_eq!(sock::receive(raw, &mut [0; 8], 0).unwrap().len, 3);
        assert!(is_refused());
        assert_eq!(sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_OOBINLINE).unwrap(), 0);
        assert_eq!(sock::receive(raw, &mut [0; 8], 0).unwrap().len, 3);
        sender.write_all(b"ghi").unwrap();
        assert_eq!(in_flight(direction(&sender, &receiver)).unwrap(), b"ghi");
    }

    #[test]
    fn what_arrives_while_it_is_read_is_read_once() {
        let (sender, receiver, sent) = flowing();
        let d = direction(&sender, &receiver);
        let first = d.left().unwrap();
        assert!(first > 0, "all has arrived");
        let begin = std::time::Instant::now();
        while begin.elapsed().as_millis() < 300 {
            let read = in_flight(d).unwrap();
            assert!(read == sent, "{} bytes of {}", read.len(), sent.len());
        }
    }
}
