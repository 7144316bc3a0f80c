//! userfaultfd for memory that another process fills while its owner runs: who touches a page that is not there waits
//! until it is put there, the kernel included. What the owner does to the memory meanwhile is told as well, and waits
//! until it has been read.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `ioctl` by which a process registers memory of its own, with the four words of [`registration`].
pub const REGISTER: u64 = 0xc020_aa00;
const API: libc::c_ulong = 0xc018_aa3f;
const WAKE: libc::c_ulong = 0x8010_aa02;
const COPY: libc::c_ulong = 0xc028_aa03;
const ZERO: libc::c_ulong = 0xc020_aa04;
const VERSION: u64 = 0xaa;
const MODE_MISSING: u64 = 1;
/// EVENT_FORK, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP.
const EVENTS: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;
const PAGE: u64 = 4096;

/// What happens to the memory.
#[derive(Debug)]
pub enum Event {
    /// Somebody waits for the page at this address.
    Fault(u64),
    /// The process has forked: the child's memory, in the same state, has this descriptor.
    Fork(OwnedFd),
    /// Memory has been moved.
    Moved {
        /// From here
        from: u64,
        /// to here,
        to: u64,
        /// so many bytes.
        bytes: u64,
    },
    /// Pages are being given back: they are zero from now on.
    Given(u64, u64),
    /// Nothing is mapped there any more.
    Unmapped(u64, u64),
}

/// What came of an attempt to put pages into place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// So many bytes are there now, and who waited for them goes on. Nobody was changing what is mapped when it began, as
    /// with [`Put::There`] and [`Put::Absent`]: all of that has been read.
    Done(u64),
    /// The first page has been there.
    There,
    /// Nothing registered is mapped at the first page, or not at all of them in one mapping.
    Absent,
    /// What is mapped is being changed: what is to be read tells how.
    Changing,
    /// The memory is nobody's any more.
    Gone,
}

/// A userfaultfd of the calling process. Takes CAP_SYS_PTRACE in the machine's own user namespace: it stops the kernel
/// too, and follows forks.
pub fn make() -> io::Result<OwnedFd> {
    // SAFETY: takes a number; a descriptor returned is ours.
    let fd = unsafe {
        let fd = crate::check(libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK))?;
        OwnedFd::from_raw_fd(fd as i32)
    };
    let mut api = [VERSION, EVENTS, 0];
    // SAFETY: `api` has the layout of `struct uffdio_api`.
    crate::check(unsafe { libc::ioctl(fd.as_raw_fd(), API, api.as_mut_ptr()) }.into())?;
    Ok(fd)
}

/// The argument of [`REGISTER`]: missing pages of `start..end`, which has no holes, are waited for.
pub fn registration(start: u64, end: u64) -> [u64; 4] {
    [start, end - start, MODE_MISSING, 0]
}

/// Reads the next event, if there is one.
pub fn read(uffd: BorrowedFd<'_>) -> io::Result<Option<Event>> {
    let mut message = [0u64; 4];
    // SAFETY: `message` has the layout of `struct uffd_msg`, 32 bytes.
    let n = unsafe { libc::read(uffd.as_raw_fd(), message.as_mut_ptr().cast(), size_of_val(&message)) };
    match crate::check(n as libc::c_long) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => return Ok(None),
        Err(e) => return Err(e),
        Ok(n) if n as usize != size_of_val(&message) => return Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => {}
    }
    let [kind, a, b, c] = message;
    Ok(Some(match kind & 0xff {
        // Its flags come first.
        0x12 => Event::Fault(b & !(PAGE - 1)),
        // SAFETY: the kernel has just made the descriptor for us.
        0x13 => Event::Fork(unsafe { OwnedFd::from_raw_fd(a as u32 as i32) }),
        0x14 => Event::Moved {
            from: a,
            to: b,
            bytes: c,
        },
        0x15 => Event::Given(a, b),
        0x16 => Event::Unmapped(a, b),
        other => return Err(io::Error::other(format!("userfaultfd: unknown event {other:#x}"))),
    }))
}

/// Puts `pages`, whole ones, to address `at` on.
pub fn copy(uffd: BorrowedFd<'_>, at: u64, pages: &[u8]) -> io::Result<Put> {
    let mut arg = [at, pages.as_ptr() as u64, pages.len() as u64, 0, 0];
    // SAFETY: `arg` has the layout of `struct uffdio_copy`; the kernel reads `pages` only.
    let r = unsafe { libc::ioctl(uffd.as_raw_fd(), COPY, arg.as_mut_ptr()) };
    put(r, arg[4])
}

/// Puts a page of zeros to address `at`.
pub fn zero(uffd: BorrowedFd<'_>, at: u64) -> io::Result<Put> {
    let mut arg = [at, PAGE, 0, 0];
    // SAFETY: `arg` has the layout of `struct uffdio_zeropage`.
    let r = unsafe { libc::ioctl(uffd.as_raw_fd(), ZERO, arg.as_mut_ptr()) };
    put(r, arg[3])
}

/// What the result of a call and the bytes it says it has put there mean.
fn put(r: libc::c_int, bytes: u64) -> io::Result<Put> {
    if r >= 0 || bytes.cast_signed() > 0 {
        return Ok(Put::Done(bytes));
    }
    let e = io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::EEXIST) => Ok(Put::There),
        Some(libc::ENOENT) => Ok(Put::Absent),
        Some(libc::EAGAIN) => Ok(Put::Changing),
        Some(libc::ESRCH) => Ok(Put::Gone),
        _ => Err(e),
    }
}

/// Has threads that wait for the page at `at` look again.
pub fn wake(uffd: impl AsFd, at: u64) -> io::Result<()> {
    let mut arg = [at, PAGE];
    // SAFETY: `arg` has the layout of `struct uffdio_range`.
    crate::check(unsafe { libc::ioctl(uffd.as_fd().as_raw_fd(), WAKE, arg.as_mut_ptr()) }.into()).map(drop)
}
