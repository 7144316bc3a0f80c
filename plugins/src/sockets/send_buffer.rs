//! A buffer of a socket that is larger than it was, while data in flight is put back or made to arrive.
//!
//! Afterwards the size must be what it was: a program that writes until it would block would else write more with every restart.

use crate::sys::sock;
use std::os::fd::RawFd;

/// `SO_BUF_LOCK`: which buffer sizes the program has chosen (bit 0: send, bit 1: receive).
pub(super) const SO_BUF_LOCK: i32 = 72;
/// The bit of the receive buffer.
const CHOSEN_RECEIVE: i32 = 2;
/// Size asked for, bytes.
const LARGE: i32 = 64 << 20;

/// Which buffer: what sets its size, within the system's limit and beyond.
#[derive(Debug, Clone, Copy)]
pub(super) enum Buffer {
    Send,
    Receive,
}

impl Buffer {
    /// (Option, option for the privileged, the limit of the others.)
    fn names(self) -> (i32, i32, &'static str) {
        match self {
            Self::Send => (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, "wmem_max"),
            Self::Receive => (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, "rmem_max"),
        }
    }

    /// Sets half of what the kernel is to report.
    fn set(self, raw: RawFd, half: i32) -> bool {
        let (option, force, _) = self.names();
        sock::set(raw, libc::SOL_SOCKET, force, &half).is_ok() || sock::set(raw, libc::SOL_SOCKET, option, &half).is_ok()
    }

    fn size(self, raw: RawFd) -> i32 {
        sock::get(raw, libc::SOL_SOCKET, self.names().0).unwrap_or(0)
    }

    /// Half of the most that the kernel can be made to report for whoever has no privilege.
    fn limit(self) -> i32 {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{}", self.names().2));
        text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
    }
}

/// An enlarged buffer; dropped, it gets its size back.
#[derive(Debug)]
pub(super) struct Enlarged {
    buffer: Buffer,
    raw: RawFd,
    /// Size before, as the kernel reports it.
    size: i32,
    /// `SO_BUF_LOCK` before.
    lock: i32,
    changed: bool,
}

impl Enlarged {
    /// Gives `raw` as large a send buffer as the system's limits allow, and not a smaller one than it has.
    pub(super) fn new(raw: RawFd) -> Self {
        Self::of(Buffer::Send, raw)
    }

    /// The same for either buffer; a receive buffer whose size the program has chosen can grow again.
    pub(super) fn of(buffer: Buffer, raw: RawFd) -> Self {
        let mut this = Self::unchanged(buffer, raw);
        if let (Buffer::Receive, true) = (buffer, this.lock & CHOSEN_RECEIVE != 0) {
            // The kernel makes it larger than a program may (net.ipv4.tcp_rmem) where the program has not chosen its size.
            this.changed = sock::set(raw, libc::SOL_SOCKET, SO_BUF_LOCK, &(this.lock & !CHOSEN_RECEIVE)).is_ok();
            return this;
        }
        this.enlarge();
        this
    }

    /// The receive buffer of a socket without connections, which does not grow by itself.
    pub(super) fn of_datagrams(raw: RawFd) -> Self {
        let mut this = Self::unchanged(Buffer::Receive, raw);
        this.enlarge();
        this
    }

    fn unchanged(buffer: Buffer, raw: RawFd) -> Self {
        Self {
            buffer,
            raw,
            size: buffer.size(raw),
            lock: sock::get(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0),
            changed: false,
        }
    }

    fn enlarge(&mut self) {
        let (buffer, raw) = (self.buffer, self.raw);
        let forced = sock::set(raw, libc::SOL_SOCKET, buffer.names().1, &LARGE.max(self.size / 2)).is_ok();
        // The kernel gives a program more than it may ask for.
        self.changed = forced || buffer.limit().min(LARGE) > self.size / 2 && buffer.set(raw, LARGE);
    }
}

impl Drop for Enlarged {
    fn drop(&mut self) {
        if !self.changed {
            return;
        }
        self.buffer.set(self.raw, self.size / 2);
        // Kernels before 5.14 do not have it: there the size stays fixed.
        let _ = sock::set(self.raw, libc::SOL_SOCKET, SO_BUF_LOCK, &self.lock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_buffer_is_never_smaller_meanwhile_and_has_its_size_afterwards() {
        let fd = sock::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let raw = fd.as_raw_fd();
        for buffer in [Buffer::Send, Buffer::Receive] {
            for half in [4 << 10, 1 << 20] {
                assert!(buffer.set(raw, half));
                let before = (
                    buffer.size(raw),
                    sock::get::<i32>(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap(),
                );
                let larger = Enlarged::of(buffer, raw);
                assert!(buffer.size(raw) >= before.0);
                assert!(
                    matches!(buffer, Buffer::Send)
                        || sock::get::<i32>(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap() & CHOSEN_RECEIVE == 0
                );
                drop(larger);
                assert_eq!(
                    (buffer.size(raw), sock::get(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap()),
                    before
                );
            }
        }
    }
}
