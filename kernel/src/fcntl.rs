//! `fcntl` where the argument is no mere number, or where the C library's names are missing.

use crate::check;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;

/// Whom a lock belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The process (`F_SETLK`).
    Process,
    /// The open file description (`F_OFD_SETLK`).
    Description,
}

fn number(fd: impl AsFd, command: i32, argument: i32) -> io::Result<i32> {
    // SAFETY: the commands of this module that come here take a number, or nothing.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), command, argument) }.into()).map(|n| n as i32)
}

/// The signal by which the owner is told that I/O is possible; 0: SIGIO, without more.
pub fn signal(fd: impl AsFd) -> io::Result<i32> {
    number(fd, F_GETSIG, 0)
}

/// Sets what [`signal`] reads.
pub fn set_signal(fd: impl AsFd, signal: i32) -> io::Result<()> {
    number(fd, F_SETSIG, signal).map(drop)
}

/// Who is told that I/O is possible: kind (`F_OWNER_*`) and number.
pub fn owner(fd: impl AsFd) -> io::Result<[i32; 2]> {
    let mut owner = [0; 2];
    // SAFETY: F_GETOWN_EX writes two integers, for which there is room.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_GETOWN_EX, owner.as_mut_ptr()) }.into())?;
    Ok(owner)
}

/// Sets what [`owner`] reads.
pub fn set_owner(fd: impl AsFd, owner: [i32; 2]) -> io::Result<()> {
    // SAFETY: F_SETOWN_EX reads two integers.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), F_SETOWN_EX, owner.as_ptr()) }.into()).map(drop)
}

/// Takes a lease of this kind (`F_RDLCK` or `F_WRLCK`), or gives it back (`F_UNLCK`).
pub fn set_lease(fd: impl AsFd, kind: i32) -> io::Result<()> {
    number(fd, libc::F_SETLEASE, kind).map(drop)
}

/// Takes or gives back a record lock, without waiting.
pub fn set_lock(fd: impl AsFd, owner: Owner, lock: &libc::flock) -> io::Result<()> {
    let command = match owner {
        Owner::Process => libc::F_SETLK,
        Owner::Description => libc::F_OFD_SETLK,
    };
    // SAFETY: both commands read a `flock`.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), command, &raw const *lock) }.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_and_signal_are_read_as_they_were_set() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!((signal(&reader).unwrap(), owner(&reader).unwrap()[1]), (0, 0));
        let me = [1, std::process::id().cast_signed()];
        set_signal(&reader, libc::SIGUSR1).unwrap();
        set_owner(&reader, me).unwrap();
        assert_eq!((signal(&reader).unwrap(), owner(&reader).unwrap()), (libc::SIGUSR1, me));
    }

    #[test]
    fn a_lock_of_a_description_keeps_others_out() {
        let path = std::env::temp_dir().join(format!("belay-fcntl-{}", std::process::id()));
        let open = || {
            std::fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
        };
        let (one, other) = (open().unwrap(), open().unwrap());
        let lock = |kind: i32| libc::flock {
            l_type: kind as _,
            l_whence: libc::SEEK_SET as _,
            l_start: 1,
            l_len: 1,
            l_pid: 0,
        };
        set_lock(&one, Owner::Description, &lock(libc::F_WRLCK)).unwrap();
        let refused = set_lock(&other, Owner::Description, &lock(libc::F_RDLCK)).unwrap_err();
        assert!(matches!(refused.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)));
        set_lock(&one, Owner::Description, &lock(libc::F_UNLCK)).unwrap();
        set_lock(&other, Owner::Process, &lock(libc::F_RDLCK)).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
