//! `ioctl`, each request with the type of its argument.

use crate::check;
use crate::plain::Plain;
use libc::c_ulong;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A request by which the kernel writes a `T`.
#[derive(Debug)]
pub struct Reads<T>(c_ulong, PhantomData<fn() -> T>);

/// A request for which the kernel reads a `T`.
#[derive(Debug)]
pub struct Takes<T>(c_ulong, PhantomData<fn(T)>);

/// A request for which the kernel reads a `T`, which it then writes anew.
#[derive(Debug)]
pub struct Exchanges<T>(c_ulong, PhantomData<fn(T) -> T>);

/// A request whose argument is a number, or nothing.
#[derive(Debug)]
pub struct Number(c_ulong);

/// A request whose argument is a number, and whose answer is a new descriptor.
#[derive(Debug)]
pub struct Opens(c_ulong);

// Derived, they would ask the same of `T`.
impl<T> Clone for Reads<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Reads<T> {}

const fn reads<T>(request: c_ulong) -> Reads<T> {
    Reads(request, PhantomData)
}

const fn takes<T>(request: c_ulong) -> Takes<T> {
    Takes(request, PhantomData)
}

/// Bytes that can be read.
pub const READABLE: Reads<i32> = reads(libc::FIONREAD);
/// Bytes that are written and still on their way (of sockets: SIOCOUTQ).
pub const UNSENT: Reads<i32> = reads(libc::TIOCOUTQ);
/// `struct termios2`, 44 bytes.
pub const TERMIOS: Reads<[u8; 44]> = reads(0x802c_542a);
/// Sets what [`TERMIOS`] reads.
pub const SET_TERMIOS: Takes<[u8; 44]> = takes(0x402c_542b);
/// Which settings of a terminal are fixed (TIOCGLCKTRMIOS): `struct termios`, as words.
pub const FIXED: Reads<[u32; 9]> = reads(0x5456);
/// Sets what [`FIXED`] reads.
pub const SET_FIXED: Takes<[u32; 9]> = takes(0x5457);
/// Number of the pseudo-terminal of a master (TIOCGPTN).
pub const TERMINAL_NUMBER: Reads<u32> = reads(0x8004_5430);
/// Device number of a terminal that is another's face (TIOCGDEV).
pub const TERMINAL_DEVICE: Reads<u32> = reads(0x8004_5432);
/// Locks the other side of a master, or unlocks it (TIOCSPTLCK).
pub const SET_LOCKED: Takes<i32> = takes(0x4004_5431);
/// Whether the other side of a master is locked (TIOCGPTLCK).
pub const LOCKED: Reads<i32> = reads(0x8004_5439);
/// Whether a master is in packet mode (TIOCGPKT).
pub const PACKET: Reads<i32> = reads(0x8004_5438);
/// Sets what [`PACKET`] reads.
pub const SET_PACKET: Takes<i32> = takes(libc::TIOCPKT);
/// Whether a terminal can be opened by nobody else (TIOCGEXCL).
pub const EXCLUSIVE: Reads<i32> = reads(0x8004_5440);
/// From now on a terminal can be opened by nobody else.
pub const SET_EXCLUSIVE: Number = Number(libc::TIOCEXCL);
/// It can be again.
pub const SET_SHARED: Number = Number(libc::TIOCNXCL);
/// Opens the other side of a master, with flags of `open` (TIOCGPTPEER).
pub const OTHER_SIDE: Opens = Opens(0x5441);
/// Session of a terminal.
pub const SESSION: Reads<i32> = reads(libc::TIOCGSID);
/// Process group in the foreground of a terminal.
pub const FOREGROUND: Reads<i32> = reads(libc::TIOCGPGRP);
/// Sets what [`FOREGROUND`] reads.
pub const SET_FOREGROUND: Takes<i32> = takes(libc::TIOCSPGRP);
/// Makes a terminal that of the caller's session.
pub const SET_CONTROLLING: Number = Number(libc::TIOCSCTTY);
/// Line discipline of a terminal.
pub const DISCIPLINE: Reads<i32> = reads(libc::TIOCGETD);
/// Size of a terminal.
pub const SIZE: Reads<[u16; 4]> = reads(libc::TIOCGWINSZ);
/// Sets what [`SIZE`] reads.
pub const SET_SIZE: Takes<[u16; 4]> = takes(libc::TIOCSWINSZ);
/// Stops the flow of a terminal or lets it go on (`TCOOFF` and its like).
pub const FLOW: Number = Number(libc::TCXONC);
/// The file that a `AF_UNIX` socket is bound to, as if opened with O_PATH (SIOCUNIXFILE).
pub const BOUND_FILE: Opens = Opens(0x89e0);
/// First address of the interface that a `struct ifreq` names.
pub const INTERFACE_ADDRESS: Exchanges<[u8; 40]> = Exchanges(libc::SIOCGIFADDR, PhantomData);
/// The number that the next watch of an inotify instance gets (INOTIFY_IOC_SETNEXTWD).
pub const SET_NEXT_WATCH: Number = Number(0x4004_4900);
/// How an epoll instance polls network devices: `struct epoll_params`, 8 bytes (EPIOCGPARAMS).
pub const BUSY: Reads<[u8; 8]> = reads(0x8008_8a02);
/// Sets what [`BUSY`] reads.
pub const SET_BUSY: Takes<[u8; 8]> = takes(0x4008_8a01);
/// How often a timerfd has expired since it was read (TFD_IOC_SET_TICKS).
pub const SET_TICKS: Takes<u64> = takes(0x4008_5400);
/// What the kernel knows of the process of a pidfd: as much of `struct pidfd_info` as its first version has
/// (PIDFD_GET_INFO, which says the length too).
pub const PIDFD_INFO: Exchanges<[u64; 8]> = Exchanges(0xc040_ff0b, PhantomData);

/// Asks for a value.
pub fn get<T: Plain>(fd: impl AsFd, request: Reads<T>) -> io::Result<T> {
    let mut value = T::zero();
    // SAFETY: each request of this type is beside the one that the kernel writes for it.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request.0, &raw mut value) }.into())?;
    Ok(value)
}

/// Sets a value.
pub fn set<T: Plain>(fd: impl AsFd, request: Takes<T>, value: &T) -> io::Result<()> {
    // SAFETY: each request of this type is beside the one that the kernel reads for it.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request.0, &raw const *value) }.into()).map(drop)
}

/// Hands a value over and gets it back as it is then.
pub fn exchange<T: Plain>(fd: impl AsFd, request: Exchanges<T>, mut value: T) -> io::Result<T> {
    // SAFETY: each request of this type is beside the one that the kernel reads and writes for it.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request.0, &raw mut value) }.into())?;
    Ok(value)
}

/// Does what the request says, with a number (0, where it takes none).
pub fn tell(fd: impl AsFd, request: Number, argument: c_ulong) -> io::Result<()> {
    number(fd.as_fd().as_raw_fd(), request.0, argument).map(drop)
}

/// Opens what the request says.
pub fn open(fd: impl AsFd, request: Opens, argument: c_ulong) -> io::Result<OwnedFd> {
    let made = number(fd.as_fd().as_raw_fd(), request.0, argument)?;
    // SAFETY: the kernel has just made this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

fn number(fd: RawFd, request: c_ulong, argument: c_ulong) -> io::Result<RawFd> {
    // SAFETY: the requests that come here take a number.
    check(unsafe { libc::ioctl(fd, request, argument) }.into()).map(|n| n as RawFd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{pipe, Write};

    #[test]
    fn what_has_been_set_is_read() {
        let (reader, mut writer) = pipe().unwrap();
        writer.write_all(b"seven..").unwrap();
        assert_eq!(get(&reader, READABLE).unwrap(), 7);
        let refused = set(&reader, SET_SIZE, &[1, 2, 0, 0]).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTTY));
        let master = std::fs::File::options().read(true).write(true).open("/dev/ptmx").unwrap();
        set(&master, SET_SIZE, &[24, 80, 1, 2]).unwrap();
        set(&master, SET_LOCKED, &0).unwrap();
        let slave = open(
            &master,
            OTHER_SIDE,
            (libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) as c_ulong,
        )
        .unwrap();
        assert_eq!(get(&slave, SIZE).unwrap(), [24, 80, 1, 2]);
        assert_eq!((get(&slave, EXCLUSIVE).unwrap(), get(&master, LOCKED).unwrap()), (0, 0));
        tell(&slave, SET_EXCLUSIVE, 0).unwrap();
        assert_eq!(get(&slave, EXCLUSIVE).unwrap(), 1);
        let before = get(&slave, TERMIOS).unwrap();
        let mut after = before;
        // The end-of-file character, behind four words and the line discipline.
        after[17 + libc::VEOF] ^= 1;
        set(&slave, SET_TERMIOS, &after).unwrap();
        assert_eq!(get(&master, TERMIOS).unwrap(), after);
        assert_ne!(before, after);
    }

    #[test]
    fn the_loopback_interface_has_its_address() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut request = [0u8; 40];
        request[..2].copy_from_slice(b"lo");
        let told = exchange(&socket, INTERFACE_ADDRESS, request).unwrap();
        assert_eq!(told[20..24], [127, 0, 0, 1]);
    }
}
