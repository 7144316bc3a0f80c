//! Which calls can be carried on, and how the rest of them is asked for.

use crate::pidfd;
use crate::proc::{self, Status};
use crate::ptrace::Regs;
use crate::vm;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::FileTypeExt;

const READ: u64 = 0;
const WRITE: u64 = 1;
const WRITEV: u64 = 20;
const SENDFILE: u64 = 40;
const SENDTO: u64 = 44;
const RECVFROM: u64 = 45;
const GETRANDOM: u64 = 318;
const COPY_FILE_RANGE: u64 = 326;
/// Most that one call does, bytes: MAX_RW_COUNT.
const MOST: u64 = 0x7fff_f000;
/// Most pieces of `writev` that are looked at.
const PIECES: u64 = 1024;
/// Devices of kind "mem" that give as much as they are asked for: `/dev/zero`, `/dev/random`, `/dev/urandom`.
const ENDLESS: [u32; 3] = [5, 8, 9];
const MEM: u32 = 1;

/// How many bytes a call asks for that can be carried on.
pub(super) fn asked(regs: &Regs) -> Option<u64> {
    let asked = match regs.orig_rax {
        READ | WRITE | SENDTO | RECVFROM => regs.rdx,
        SENDFILE => regs.r10,
        GETRANDOM => regs.rsi,
        COPY_FILE_RANGE => regs.r8,
        _ => return None,
    };
    Some(asked.min(MOST))
}

/// Whether it is a call whose length lies in memory, and has done something.
pub(super) fn in_pieces(regs: &Regs) -> bool {
    regs.orig_rax == WRITEV && (1..MOST).contains(&regs.rax)
}

/// The registers with which task `tid` asks for the rest of the call, of which it has done a part: number of the call
/// in `orig_rax`.
pub(super) fn of(tid: i32, regs: &Regs) -> Option<Regs> {
    let mut rest = *regs;
    if in_pieces(regs) {
        let (at, bytes) = last_piece(tid, regs)?;
        (rest.orig_rax, rest.rsi, rest.rdx) = (WRITE, at, bytes);
    } else {
        let left = asked(regs)?.checked_sub(regs.rax).filter(|left| *left > 0 && regs.rax > 0)?;
        let (memory, length) = match regs.orig_rax {
            READ | WRITE | SENDTO | RECVFROM => (Some(&mut rest.rsi), &mut rest.rdx),
            GETRANDOM => (Some(&mut rest.rdi), &mut rest.rsi),
            SENDFILE => (None, &mut rest.r10),
            _ => (None, &mut rest.r8),
        };
        *length = left;
        if let Some(memory) = memory {
            *memory = memory.checked_add(regs.rax)?;
        }
    }
    (goes_on(tid, regs)? && !is_to_handle_a_signal(tid)?).then_some(rest)
}

/// What is left of the last piece that `writev` was given, where all others have been written.
fn last_piece(tid: i32, regs: &Regs) -> Option<(u64, u64)> {
    let count = Some(regs.rdx).filter(|count| *count <= PIECES)?;
    let mut raw = vec![0; usize::try_from(count).ok()? * 16];
    vm::read(tid, regs.rsi, &mut raw).ok()?;
    let word = |b: &[u8]| b.try_into().ok().map(u64::from_le_bytes);
    let mut done = regs.rax;
    for (i, piece) in (1..).zip(raw.chunks_exact(16)) {
        let (at, bytes) = (word(&piece[..8])?, word(&piece[8..])?);
        if done < bytes {
            let whole = (bytes - done).checked_add(regs.rax).is_some_and(|all| all <= MOST);
            return (i == count && whole).then_some((at.checked_add(done)?, bytes - done));
        }
        done -= bytes;
    }
    None
}

/// Whether the call would not have ended by itself with a part of what was asked for.
fn goes_on(tid: i32, regs: &Regs) -> Option<bool> {
    let file = |number: u64| Descriptor::of(tid, number as u32 as i32);
    Some(match regs.orig_rax {
        READ => file(regs.rdi)?.is_endless(),
        WRITE | WRITEV => file(regs.rdi)?.takes_all(tid),
        SENDTO => regs.r10 & flags(libc::MSG_DONTWAIT | libc::MSG_ZEROCOPY) == 0 && file(regs.rdi)?.takes_all(tid),
        RECVFROM => {
            let odd = flags(libc::MSG_DONTWAIT | libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_TRUNC);
            regs.r10 & flags(libc::MSG_WAITALL) != 0 && regs.r10 & odd == 0 && file(regs.rdi)?.waits_for_all(tid)
        }
        SENDFILE => {
            let (to, from) = (file(regs.rdi)?, file(regs.rsi)?);
            from.is_stored() && (to.is_stored() || to.takes_all(tid))
        }
        COPY_FILE_RANGE => file(regs.rdi)?.is_stored() && file(regs.rdx)?.is_stored(),
        GETRANDOM => true,
        _ => false,
    })
}

fn flags(flags: i32) -> u64 {
    u64::from(flags.cast_unsigned())
}

/// Whether a handler is to run now, for the sake of which the call has ended.
fn is_to_handle_a_signal(tid: i32) -> Option<bool> {
    let status = Status::read(tid).ok()?;
    let pending = status.hex("SigPnd")? | status.hex("ShdPnd")?;
    Some(pending & status.hex("SigCgt")? & !status.hex("SigBlk")? != 0)
}

/// A descriptor of a stopped task.
struct Descriptor {
    number: i32,
    metadata: std::fs::Metadata,
    /// O_NONBLOCK.
    never_waits: bool,
}

impl Descriptor {
    fn of(tid: i32, number: i32) -> Option<Self> {
        let info = proc::text(format!("/proc/{tid}/fdinfo/{number}")).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        let flags = i32::from_str_radix(flags.trim(), 8).ok()?;
        Some(Self {
            number,
            metadata: std::fs::metadata(format!("/proc/{tid}/fd/{number}")).ok()?,
            never_waits: flags & libc::O_NONBLOCK != 0,
        })
    }

    /// Whether data lie there, and are not awaited.
    fn is_stored(&self) -> bool {
        self.metadata.is_file() || self.metadata.file_type().is_block_device()
    }

    fn is_endless(&self) -> bool {
        let device = self.metadata.st_rdev();
        let character = self.metadata.file_type().is_char_device();
        character && libc::major(device) == MEM && ENDLESS.contains(&libc::minor(device))
    }

    /// Whether a write waits until everything has been taken: to a pipe, or a socket that carries a stream.
    fn takes_all(&self, tid: i32) -> bool {
        let kind = self.metadata.file_type();
        !self.never_waits && (kind.is_fifo() || kind.is_socket() && self.carries_stream(tid))
    }

    /// Whether MSG_WAITALL waits here until there is as much as was asked for: a UNIX socket that is told who sends
    /// also ends where another sender begins.
    fn waits_for_all(&self, tid: i32) -> bool {
        let told = || self.option(tid, libc::SO_PASSCRED).is_ok_and(|on| on != 0);
        !self.never_waits && self.metadata.file_type().is_socket() && self.carries_stream(tid) && !told()
    }

    fn carries_stream(&self, tid: i32) -> bool {
        self.option(tid, libc::SO_TYPE).is_ok_and(|kind| kind == libc::SOCK_STREAM)
    }

    fn option(&self, tid: i32, name: i32) -> io::Result<i32> {
        let socket = taken(tid, self.number)?;
        let (mut value, mut bytes) = (0i32, 4u32);
        // SAFETY: `value` is an int that lives, `bytes` its length.
        let asked = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                (&raw mut value).cast(),
                &raw mut bytes,
            )
        };
        crate::check(asked.into()).map(|_| value)
    }
}

/// A duplicate of descriptor `number` of task `tid`. Kernels before 6.9 give those of processes only.
fn taken(tid: i32, number: i32) -> io::Result<OwnedFd> {
    let of_process = || {
        let process = Status::read(tid)?
            .list("Tgid")
            .first()
            .and_then(|pid| i32::try_from(*pid).ok());
        pidfd::open(process.ok_or(io::ErrorKind::NotFound)?)
    };
    let door = pidfd::open_thread(tid).or_else(|_| of_process())?;
    pidfd::getfd(door.as_fd(), number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: u64, done: u64) -> Regs {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut regs: Regs = unsafe { std::mem::zeroed() };
        (regs.orig_rax, regs.rax) = (number, done);
        regs
    }

    #[test]
    fn the_rest_is_what_was_not_done() {
        let me = std::process::id().cast_signed();
        let mut regs = call(GETRANDOM, 256);
        (regs.rdi, regs.rsi) = (0x1000, 1000);
        let rest = of(me, &regs).unwrap();
        assert_eq!((rest.rdi, rest.rsi, rest.orig_rax), (0x1100, 744, GETRANDOM));
        regs.rax = 1000;
        assert!(of(me, &regs).is_none());
        regs.rax = (-4i64).cast_unsigned();
        assert!(of(me, &regs).is_none());
    }

    #[test]
    fn only_what_waits_for_all_is_carried_on() {
        let me = std::process::id().cast_signed();
        let (reader, writer) = std::io::pipe().unwrap();
        let mut regs = call(WRITE, 10);
        (regs.rdi, regs.rsi, regs.rdx) = (writer.as_raw_fd() as u64, 0x1000, 100);
        assert_eq!(of(me, &regs).map(|rest| (rest.rsi, rest.rdx)), Some((0x100a, 90)));
        // SAFETY: a descriptor of our own.
        unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        assert!(of(me, &regs).is_none());
        // What is read from a pipe is what there is.
        let mut regs = call(READ, 10);
        (regs.rdi, regs.rdx) = (reader.as_raw_fd() as u64, 100);
        assert!(of(me, &regs).is_none());
        let datagrams = std::os::unix::net::UnixDatagram::pair().unwrap().0;
        let (stream, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut regs = call(RECVFROM, 10);
        (regs.rdx, regs.r10) = (100, flags(libc::MSG_WAITALL));
        regs.rdi = datagrams.as_raw_fd() as u64;
        assert!(of(me, &regs).is_none());
        regs.rdi = stream.as_raw_fd() as u64;
        assert!(of(me, &regs).is_some());
        regs.r10 = 0;
        assert!(of(me, &regs).is_none());
    }

    #[test]
    fn pieces_are_carried_on_in_the_last_one() {
        let me = std::process::id().cast_signed();
        let (_reader, writer) = std::io::pipe().unwrap();
        let pieces = [0x1000u64, 10, 0x2000, 100];
        let mut regs = call(WRITEV, 30);
        (regs.rdi, regs.rsi, regs.rdx) = (writer.as_raw_fd() as u64, pieces.as_ptr() as u64, 2);
        let rest = of(me, &regs).unwrap();
        assert_eq!((rest.orig_rax, rest.rsi, rest.rdx), (WRITE, 0x2014, 80));
        for done in [5, 110] {
            regs.rax = done;
            assert!(of(me, &regs).is_none());
        }
    }
}
