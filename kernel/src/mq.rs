//! POSIX message queues.

use crate::shared::Memory;
use crate::{check, length};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Makes the queue `name` (which begins with a slash), which must not be there, for so many messages of so many bytes.
pub fn create(name: &CStr, mode: u32, messages: i64, bytes: i64) -> io::Result<OwnedFd> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut a: libc::mq_attr = unsafe { std::mem::zeroed() };
    (a.mq_maxmsg, a.mq_msgsize) = (messages, bytes);
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR | libc::O_CLOEXEC;
    // SAFETY: the name and the attributes are live; the mode is a number.
    let made = check(unsafe { libc::mq_open(name.as_ptr(), flags, mode, &raw mut a) }.into())?;
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(made as RawFd) })
}

/// Removes the name of a queue.
pub fn unlink(name: &CStr) -> io::Result<()> {
    // SAFETY: the name is live.
    check(unsafe { libc::mq_unlink(name.as_ptr()) }.into()).map(drop)
}

/// What a queue may hold, and holds.
pub fn attributes(queue: impl AsFd) -> io::Result<libc::mq_attr> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut a: libc::mq_attr = unsafe { std::mem::zeroed() };
    // SAFETY: `a` is valid for writing.
    check(unsafe { libc::mq_getattr(queue.as_fd().as_raw_fd(), &raw mut a) }.into())?;
    Ok(a)
}

/// Sends a message; waits until there is room, where the description is not non-blocking.
pub fn send(queue: impl AsFd, text: &[u8], priority: u32) -> io::Result<()> {
    let at = text.as_ptr().cast();
    // SAFETY: the text is valid for reading its length.
    check(unsafe { libc::mq_send(queue.as_fd().as_raw_fd(), at, text.len(), priority) }.into()).map(drop)
}

/// A time-out that has passed: nothing is waited for.
const PAST: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };

/// Sends the `bytes` bytes from `at` on in `memory` as a message, without waiting and without allocating.
pub fn send_from(queue: impl AsFd, memory: &Memory, (at, bytes): (usize, usize), priority: u32) -> io::Result<()> {
    let (base, all) = memory.range();
    assert!(at.checked_add(bytes).is_some_and(|end| end <= all));
    // SAFETY: it is inside.
    let text = unsafe { base.add(at) };
    // SAFETY: the kernel reads that many bytes there.
    let sent = unsafe { libc::mq_timedsend(queue.as_fd().as_raw_fd(), text.cast(), bytes, priority, &PAST) };
    check(sent.into()).map(drop)
}

/// Receives a message into `memory` from `at` on, where there are `most` bytes of room, which must be writable; without
/// waiting and without allocating. Returns its length and priority.
pub fn receive_into(queue: impl AsFd, memory: &Memory, (at, most): (usize, usize)) -> io::Result<(usize, u32)> {
    let (base, all) = memory.range();
    assert!(at.checked_add(most).is_some_and(|end| end <= all));
    let mut priority = 0;
    // SAFETY: it is inside.
    let text = unsafe { base.add(at) };
    // SAFETY: the kernel writes at most that many bytes there.
    let n = unsafe { libc::mq_timedreceive(queue.as_fd().as_raw_fd(), text.cast(), most, &raw mut priority, &PAST) };
    Ok((length(n)?, priority))
}

/// What who waits to be notified about a queue is told (`struct sigevent`).
#[derive(Debug, Clone, Copy)]
pub enum Told {
    /// Nothing, or a signal with this value: `sigev_notify`, `sigev_signo`, `sigev_value`.
    Signal(i32, i32, u64),
    /// By a message on this netlink socket (SIGEV_THREAD): the thread of a C library reads it.
    Socket(i32, [u8; 32]),
}

/// Registers this process to be notified about a queue.
pub fn notify(queue: impl AsFd, told: Told) -> io::Result<()> {
    let mut cookie: [u8; 32];
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    match told {
        Told::Signal(how, signal, value) => {
            (event.sigev_notify, event.sigev_signo) = (how, signal);
            event.sigev_value.sival_ptr = std::ptr::without_provenance_mut(usize::try_from(value).unwrap_or(0));
        }
        Told::Socket(socket, saved) => {
            cookie = saved;
            (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_THREAD, socket);
            event.sigev_value.sival_ptr = cookie.as_mut_ptr().cast();
        }
    }
    let queue = queue.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the event, and the cookie where it points to that.
    check(unsafe { libc::syscall(libc::SYS_mq_notify, queue, &raw const event) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::Shared;
    use std::ffi::CString;

    #[test]
    fn messages_come_by_their_priority() {
        let name = CString::new(format!("/belay-mq-{}", std::process::id())).unwrap();
        let queue = match create(&name, 0o600, 2, 16) {
            // Where the kernel has none, and where the limits are used up.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EMFILE)) => return,
            made => made.unwrap(),
        };
        assert!(create(&name, 0o600, 2, 16).is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists));
        unlink(&name).unwrap();
        send(&queue, b"second", 1).unwrap();
        let memory = Shared::with_children(64).unwrap();
        memory.write(40, b"first");
        send_from(&queue, &memory, (40, 5), 7).unwrap();
        let full = send_from(&queue, &memory, (40, 5), 7).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ETIMEDOUT));
        assert_eq!(attributes(&queue).unwrap().mq_curmsgs, 2);
        assert_eq!(receive_into(&queue, &memory, (0, 16)).unwrap(), (5, 7));
        assert_eq!(receive_into(&queue, &memory, (5, 16)).unwrap(), (6, 1));
        let mut text = [0; 11];
        memory.read(0, &mut text);
        assert_eq!(&text, b"firstsecond");
        assert!(receive_into(&queue, &memory, (0, 16)).is_err());
        notify(&queue, Told::Signal(libc::SIGEV_NONE, 0, 0)).unwrap();
        let again = notify(&queue, Told::Signal(libc::SIGEV_NONE, 0, 0)).unwrap_err();
        assert_eq!(again.raw_os_error(), Some(libc::EBUSY));
    }
}
