//! A send buffer that is larger than it was, while data in flight is put back.
//!
//! Afterwards the size must be what it was: a program that writes until it would block would else write more with every restart.

use crate::sys::sock;
use std::os::fd::RawFd;

/// `SO_BUF_LOCK`: which buffer sizes the program has chosen (bit 0: send, bit 1: receive).
pub(super) const SO_BUF_LOCK: i32 = 72;
/// Size asked for, bytes.
const LARGE: i32 = 64 << 20;

/// An enlarged send buffer; dropped, it gets its size back.
#[derive(Debug)]
pub(super) struct Enlarged {
    raw: RawFd,
    /// Size before, as the kernel reports it.
    size: i32,
    /// `SO_BUF_LOCK` before.
    lock: i32,
}

impl Enlarged {
    /// Gives `raw` as large a send buffer as the system's limits allow, and not a smaller one than it has.
    pub(super) fn new(raw: RawFd) -> Self {
        let this = Self {
            raw,
            size: size(raw),
            lock: sock::get(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(0),
        };
        this.set(LARGE);
        if size(raw) < this.size {
            // The limit for programs is below what the kernel had given it.
            this.set(this.size / 2);
        }
        this
    }

    /// Sets half of what the kernel is to report.
    fn set(&self, half: i32) {
        if sock::set(self.raw, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &half).is_err() {
            // Only room is at stake: where it does not suffice, the sender reports how much it could not send.
            let _ = sock::set(self.raw, libc::SOL_SOCKET, libc::SO_SNDBUF, &half);
        }
    }
}

impl Drop for Enlarged {
    fn drop(&mut self) {
        self.set(self.size / 2);
        // Kernels before 5.14 do not have it: there the size stays fixed.
        let _ = sock::set(self.raw, libc::SOL_SOCKET, SO_BUF_LOCK, &self.lock);
    }
}

fn size(raw: RawFd) -> i32 {
    sock::get(raw, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0)
}
