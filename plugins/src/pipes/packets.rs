//! What is in flight in a pipe, and which of it is packets (O_DIRECT).
//!
//! The mark lies on the data, whatever its writer is now. The kernel does not show it, but reading does: it ends behind
//! a packet, and what of a packet has no room in the buffer is gone. Copies made by `tee` keep the marks.

use crate::fault::{refuse, At, Fault};
use crate::sys::fd;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Most that one buffer of a pipe holds.
const PAGE: usize = 4096;

/// Some of what is in flight.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) data: Vec<u8>,
    pub(super) packet: bool,
}

/// A copy of what is in a pipe.
struct Copied {
    read: OwnedFd,
    write: OwnedFd,
    /// What has not been read.
    left: usize,
}

/// The data in a pipe, without consuming it.
pub(super) fn copy(reader: RawFd, capacity: i32) -> Result<Vec<Piece>, Fault> {
    let bytes = fd::readable_bytes(reader).at("ask how much it holds")?;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let copied = || Copied::of(reader, capacity, bytes);
    let data = copied()?.read(bytes)?;
    // Otherwise reading has ended behind a packet.
    if data.len() == bytes && !copied()?.ends_with_packet()? {
        return Ok(vec![Piece { data, packet: false }]);
    }
    let (mut contents, mut marks) = (copied()?, copied()?);
    let mut pieces = Vec::new();
    while contents.left > 0 {
        let data = contents.read(contents.left)?;
        let packet = marks.packet_behind(data.len())?;
        let (stream, packet) = data.split_at(data.len() - packet);
        for (data, packet) in [(stream, false), (packet, true)] {
            if !data.is_empty() {
                let data = data.to_vec();
                pieces.push(Piece { data, packet });
            }
        }
    }
    Ok(pieces)
}

/// Whether anybody has the empty pipe behind `reader` open for writing: else there is nothing to wait for.
pub(super) fn has_writer(reader: RawFd) -> Result<bool, Fault> {
    let (_read, write) = fd::pipe(libc::O_NONBLOCK).at("make a pipe")?;
    match fd::tee(reader, write.as_raw_fd(), 1) {
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(true),
        done => Ok(done.at("copy its data (tee)")? > 0),
    }
}

impl Copied {
    fn of(reader: RawFd, capacity: i32, bytes: usize) -> Result<Self, Fault> {
        let (read, write) = fd::pipe(libc::O_NONBLOCK).at("make a pipe")?;
        let raw = write.as_raw_fd();
        // A user who has many pipes gets only small ones. They are mostly large enough for what is in flight.
        let small = fd::pipe_size(raw).at("read a capacity")? < capacity;
        let widened = if small { fd::set_pipe_size(raw, capacity) } else { Ok(()) };
        let copied = fd::tee(reader, raw, bytes).at("copy its data (tee)")?;
        if copied != bytes {
            widened.at("make a pipe of the same capacity (see /proc/sys/fs/pipe-user-pages-soft)")?;
            return refuse(format!("holds {bytes} bytes, of which only {copied} could be copied"));
        }
        Ok(Self {
            read,
            write,
            left: bytes,
        })
    }

    /// Reads once, at most `most` bytes.
    fn read(&mut self, most: usize) -> Result<Vec<u8>, Fault> {
        let mut data = vec![0; most];
        let n = fd::read(self.read.as_raw_fd(), &mut data).at("read the copy")?;
        if n == 0 {
            return refuse("its copy ended early");
        }
        data.truncate(n);
        self.left = fd::readable_bytes(self.read.as_raw_fd()).at("ask how much is left")?;
        Ok(data)
    }

    /// Whether the last byte, which alone is left, is a packet: then reading ends behind it, though more follows.
    fn last_is_packet(&mut self) -> Result<bool, Fault> {
        fd::write(self.write.as_raw_fd(), &[0]).at("write behind the copy")?;
        let packet = self.read(2)?.len() == 1;
        self.left = 0;
        Ok(packet)
    }

    /// Whether the last of it is a packet, where one reading would bring all of it.
    fn ends_with_packet(mut self) -> Result<bool, Fault> {
        if self.left > 1 {
            self.read(self.left - 1)?;
        }
        // What of a packet has not been read is gone.
        Ok(self.left != 1 || self.last_is_packet()?)
    }

    /// How many of the next `len` bytes are a packet: the last ones, if any, as one reading has brought these bytes.
    fn packet_behind(&mut self, len: usize) -> Result<usize, Fault> {
        let end = self.left.saturating_sub(len);
        loop {
            let before = self.left - end;
            if before == 1 && end == 0 {
                return Ok(usize::from(self.last_is_packet()?));
            }
            self.read(1)?;
            if before == 1 || self.left + 1 < end + before {
                return Ok(before);
            }
        }
    }
}

/// Puts `data` into a pipe again. `before_packet`: what comes next is a packet, which must not be joined to it.
pub(super) fn put(to: RawFd, data: &[u8], packet: bool, before_packet: bool) -> Result<(), Fault> {
    let mode = if packet { libc::O_DIRECT } else { 0 };
    fd::set_flags(to, libc::O_WRONLY | libc::O_NONBLOCK | mode).at("set packet mode")?;
    let Some(last) = data.len().checked_sub(1) else {
        return Ok(());
    };
    let apart = if before_packet && !packet { last % PAGE + 1 } else { 0 };
    let (joined, apart) = data.split_at(data.len() - apart);
    let mut done = 0;
    if !joined.is_empty() {
        done = fd::write(to, joined).at("put its data back")?;
    }
    if !apart.is_empty() && done == joined.len() {
        // Nothing is joined to a copy.
        let (read, write) = fd::pipe(libc::O_NONBLOCK).at("make a pipe")?;
        let n = fd::write(write.as_raw_fd(), apart).at("write what is to be copied")?;
        done += fd::tee(read.as_raw_fd(), to, n).at("put its data back (tee)")?;
    }
    if done != data.len() {
        return refuse(format!("only {done} of {} bytes in flight fit into it", data.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(all: &[(&[u8], bool)]) -> Vec<Piece> {
        let piece = |(data, packet): &(&[u8], bool)| Piece {
            data: data.to_vec(),
            packet: *packet,
        };
        all.iter().map(piece).collect()
    }

    /// What is put in is what is found, twice.
    #[test]
    fn packets_are_told_from_other_bytes() {
        let page = [7; PAGE];
        let long = [8; 3 * PAGE + 5];
        for all in [
            &[(&b"x"[..], false)][..],
            &[(b"x", true)],
            &[(b"stream", false)],
            &[(b"abc", true), (b"d", true), (b"ef", true), (b"g", true)],
            &[(b"abc", true), (b"de", false)],
            &[(b"abc", true), (b"d", false)],
            &[(b"stream", false), (b"abc", true)],
            &[(b"s", false), (b"a", true), (b"tr", false), (b"b", true), (b"u", false)],
            &[(&page, true), (&page, false), (&page, true)],
            &[(&long, false), (b"p", true), (&long, false)],
        ] {
            let (read, write) = fd::pipe(libc::O_NONBLOCK).unwrap();
            let is_packet = |at: usize| all.get(at).is_some_and(|(_, packet)| *packet);
            for (at, (data, packet)) in all.iter().enumerate() {
                put(write.as_raw_fd(), data, *packet, is_packet(at + 1)).unwrap();
            }
            for _ in 0..2 {
                assert_eq!(copy(read.as_raw_fd(), 65536).unwrap(), pieces(all));
            }
        }
    }

    #[test]
    fn of_an_empty_pipe_nothing_is_copied() {
        let (read, _write) = fd::pipe(libc::O_NONBLOCK).unwrap();
        assert_eq!(copy(read.as_raw_fd(), 65536).unwrap(), []);
    }
}
