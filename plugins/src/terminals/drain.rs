//! Data in flight in a pseudo-terminal. A terminal has no way to look at data without reading it, so it is read and written back at once,
//! with all interpretation switched off meanwhile; the settings are set back afterwards.

use super::{Termios, TIOCGPTPEER};
use crate::fault::{At, Fault};
use crate::sys::fd;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What was in flight.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) input: Vec<u8>,
    pub(super) output: Vec<u8>,
    /// Something could not be put back.
    pub(super) lost: bool,
}

/// A descriptor of the agent's own on the slave.
pub(super) fn slave_of(master: RawFd) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let raw = fd::ioctl_num(master, TIOCGPTPEER, libc::c_ulong::from(flags.unsigned_abs()))?;
    // SAFETY: the kernel has just returned this number.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Copies what is in flight in both directions. Packet mode is off meanwhile: reads would begin with a status byte, and the changes of settings
/// would be reported to the program.
pub(super) fn copy(master: RawFd, termios: &Termios, packet: bool) -> Result<InFlight, Fault> {
    if packet {
        fd::ioctl_set(master, libc::TIOCPKT, &0i32).at("leave packet mode")?;
    }
    let data = copy_plain(master, termios);
    if packet {
        fd::ioctl_set(master, libc::TIOCPKT, &1i32).at("enter packet mode")?;
    }
    data
}

fn copy_plain(master: RawFd, termios: &Termios) -> Result<InFlight, Fault> {
    let slave = slave_of(master).at("open the slave")?;
    let s = slave.as_raw_fd();
    let mut data = InFlight {
        output: read_all(master).at("read its output")?,
        ..InFlight::default()
    };
    if !data.output.is_empty() {
        termios.transparent().set(s).at("change its settings")?;
        data.lost |= !write_all(s, &data.output);
        termios.set(s).at("set its settings back")?;
    }
    let edited = termios.lflag & libc::ICANON != 0;
    if edited {
        termios.unedited().set(s).at("change its settings")?;
    }
    data.input = read_all(s).at("read its input")?;
    if !data.input.is_empty() {
        termios.transparent().set(s).at("change its settings")?;
        data.lost |= !write_all(master, &data.input);
        // Writing to the master is asynchronous; polling the slave makes the line discipline take it in before the settings change back.
        fd::poll(s, libc::POLLIN).at("poll")?;
    }
    if edited || !data.input.is_empty() {
        termios.set(s).at("set its settings back")?;
    }
    Ok(data)
}

/// Reads until nothing is left; polling makes the kernel deliver what it still has queued.
fn read_all(raw: RawFd) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut buf = [0u8; 4096];
    while fd::poll(raw, libc::POLLIN)? & libc::POLLIN != 0 {
        match fd::read(raw, &mut buf) {
            Ok(0) => break,
            Ok(n) => out.extend_from_slice(&buf[..n]),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EIO)) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(out)
}

/// Writes as long as there is room; whether all fitted.
pub(super) fn write_all(raw: RawFd, mut data: &[u8]) -> bool {
    while !data.is_empty() {
        if !fd::poll(raw, libc::POLLOUT).is_ok_and(|e| e & libc::POLLOUT != 0) {
            return false;
        }
        match fd::write(raw, &data[..data.len().min(1024)]) {
            Ok(n) if n > 0 => data = &data[n..],
            _ => return false,
        }
    }
    true
}
