//! Descriptors by their numbers: what programs have, images name and `/proc` lists.

use crate::check;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

/// A number, as a descriptor for a system call: what is borrowed from it lives no longer than the value.
#[derive(Debug, Clone, Copy)]
pub struct Number(RawFd);

impl AsFd for Number {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is no -1. Nothing but system calls is done with it, which answer EBADF for a number that is not open;
        // it is never closed by the borrower.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

/// The descriptor with this number, to be handed to a system call. Nobody vouches for the number: one that is not open is
/// an error of that call.
pub fn lend(number: RawFd) -> io::Result<Number> {
    if number == -1 {
        // The type has no room for it.
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    Ok(Number(number))
}

/// Duplicates `from` to exactly the number `to`, whatever has it: where a table is laid out, and nobody else owns `to`.
pub fn duplicate_to(from: impl AsFd, to: RawFd, cloexec: bool) -> io::Result<()> {
    let flags = if cloexec { libc::O_CLOEXEC } else { 0 };
    // SAFETY: takes numbers only; that the old descriptor is closed is what callers want.
    check(unsafe { libc::dup3(from.as_fd().as_raw_fd(), to, flags) }.into()).map(drop)
}

/// Puts what `from` refers to in place of a standard descriptor (0 to 2), which no value owns.
pub fn replace_standard(number: RawFd, from: impl AsFd) -> io::Result<()> {
    match (0..3).contains(&number) {
        true => duplicate_to(from, number, false),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Closes all numbers from `first` to `last`, both included: where a table is laid out, and no owner outlives that.
pub fn close(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: takes numbers only; that the descriptors are closed is what callers want.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// Runs `f` in a thread whose descriptor table is a copy: numbers can be given other meanings there.
pub fn in_own_table<T: Send>(f: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let run = || {
        // SAFETY: takes a number; only this thread is affected, and it ends with the closure.
        check(unsafe { libc::unshare(libc::CLONE_FILES) }.into())?;
        f()
    };
    std::thread::scope(|s| match s.spawn(run).join() {
        Ok(done) => done,
        Err(_) => Err(io::Error::other("a thread ended early")),
    })
}

/// Waits at most `ms` milliseconds (-1: for ever) for one of `events` of `poll` on descriptor `number`; those that came.
pub fn poll(number: RawFd, events: i16, ms: i32) -> io::Result<i16> {
    let mut entry = entry(number, events);
    poll_all(std::slice::from_mut(&mut entry), ms)?;
    Ok(entry.revents)
}

/// An entry of a table for [`poll_all`].
pub fn entry(number: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd: number,
        events,
        revents: 0,
    }
}

/// Waits at most `ms` milliseconds (-1: for ever) for events at one of `entries`, in which those that came are set; at
/// how many.
pub fn poll_all(entries: &mut [libc::pollfd], ms: i32) -> io::Result<usize> {
    // SAFETY: a live array of that length.
    let n = check(unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, ms) }.into())?;
    usize::try_from(n).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{pipe, Write};

    #[test]
    fn numbers_have_another_meaning_in_a_table_of_its_own() {
        let (reader, mut writer) = pipe().unwrap();
        let number = reader.as_raw_fd();
        let seen = in_own_table(|| {
            duplicate_to(std::fs::File::open("/dev/null")?, number, true)?;
            let there = std::fs::read_link(format!("/proc/thread-self/fd/{number}"));
            close(number, number)?;
            Ok((there?, poll(number, libc::POLLIN, 0)?))
        });
        assert_eq!(seen.unwrap(), ("/dev/null".into(), libc::POLLNVAL));
        assert_eq!(poll(number, libc::POLLIN, 0).unwrap(), 0);
        writer.write_all(b"x").unwrap();
        assert_eq!(poll(number, libc::POLLIN, -1).unwrap(), libc::POLLIN);
    }

    #[test]
    fn what_is_not_open_is_an_error() {
        assert_eq!(lend(-1).unwrap_err().raw_os_error(), Some(libc::EBADF));
        let none = duplicate_to(lend(1 << 29).unwrap(), 1 << 28, true);
        assert_eq!(none.unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert!(replace_standard(3, lend(1 << 29).unwrap()).is_err_and(|e| e.kind() == io::ErrorKind::InvalidInput));
    }
}
