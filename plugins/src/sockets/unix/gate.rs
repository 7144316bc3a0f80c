//! Keeps what others send out of a datagram socket whose queue is being put back.
//!
//! A datagram socket can be reached from when it has its name. What others send then would stand in front of what it
//! had received before, and, as its queue is short, in the way of it. The kernel asks the filter of a socket (cBPF,
//! `socket(7)`) before a datagram is queued; the sender is not told when it falls through.

use crate::fault::{At, Fault};
use crate::sockets::options::filter;
use crate::sys::sock;
use std::io;
use std::os::fd::RawFd;

/// `BPF_LD | BPF_W | BPF_LEN`: the length of the datagram.
const LENGTH: u16 = 0x80;
/// `BPF_LD | BPF_W | BPF_ABS`: four bytes of it.
const WORD: u16 = 0x20;
/// `BPF_JMP | BPF_JEQ | BPF_K`
const IS: u16 = 0x15;
/// `BPF_RET | BPF_K`: so many bytes are let through.
const LET: u16 = 0x06;

/// The filter of one socket.
pub(super) struct Gate;

impl Gate {
    /// Nothing comes through to `raw`.
    pub(super) fn close(raw: RawFd) -> Result<(), Fault> {
        set(raw, &[(LET, 0, 0)]).at("set a filter")
    }

    /// What looks like `data` comes through.
    pub(super) fn open_for(raw: RawFd, data: &[u8]) -> Result<(), Fault> {
        let words = match data.len() {
            0..4 => Vec::new(),
            length => vec![0, length - 4],
        };
        let mut wanted = vec![(LENGTH, 0, data.len())];
        for at in words {
            let word = data[at..at + 4].iter().fold(0, |word, byte| word << 8 | usize::from(*byte));
            wanted.push((WORD, at, word));
        }
        let mut program = Vec::new();
        let tests = wanted.len();
        for (n, (load, at, value)) in wanted.into_iter().enumerate() {
            // Past what is left of the tests, and what lets it through.
            let past = u8::try_from(2 * (tests - n) - 1).unwrap_or(u8::MAX);
            program.push((load, 0, at));
            program.push((IS, past, value));
        }
        program.push((LET, 0, u32::MAX as usize));
        program.push((LET, 0, 0));
        set(raw, &program).at("set a filter")
    }

    /// Everything comes through again.
    pub(super) fn remove(raw: RawFd) -> Result<(), Fault> {
        match sock::set(raw, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0i32) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done.at("remove a filter"),
        }
    }
}

/// Attaches instructions (code, how many are passed over where a test fails, operand).
fn set(raw: RawFd, program: &[(u16, u8, usize)]) -> io::Result<()> {
    let one = |(code, past, operand): &(u16, u8, usize)| {
        let operand = u32::try_from(*operand).unwrap_or(u32::MAX);
        [&code.to_ne_bytes()[..], &[0, *past], &operand.to_ne_bytes()].concat()
    };
    filter::attach(raw, &program.iter().flat_map(one).collect::<Vec<u8>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn only_what_is_awaited_comes_through() {
        let (to, from) = UnixDatagram::pair().unwrap();
        to.set_nonblocking(true).unwrap();
        let raw = to.as_raw_fd();
        let all: [&[u8]; 7] = [b"", b"abc", b"abx", b"abcd", b"abcdefgh", b"abcdxfgh", &[9; 70_000]];
        let through = |sent: &[u8]| {
            assert_eq!(from.send(sent).unwrap(), sent.len());
            let mut buf = vec![0; 100_000];
            to.recv(&mut buf).is_ok_and(|n| buf[..n] == *sent)
        };
        Gate::close(raw).unwrap();
        assert!(all.iter().all(|data| !through(data)));
        for data in all {
            Gate::open_for(raw, data).unwrap();
            let same = |other: &[u8]| other.len() == data.len() && (data.len() < 4 || other == data);
            assert!(all.iter().all(|other| through(other) == same(other)), "{}", data.len());
        }
        for _ in 0..2 {
            Gate::remove(raw).unwrap();
            assert!(through(b"anything"));
        }
    }
}
