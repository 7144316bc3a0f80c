//! Terminals: pseudo-terminals whose master is in the job, and terminals of the outside world.

mod capture;
mod drain;
mod rebuild;

use crate::model::FsPath;
use belay_image::blobs::BlobRef;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::RawFd;

pub(crate) use capture::{capture, finish, is_terminal, TerminalSet};
pub(crate) use rebuild::{foreground, open, prepare, take_session, BuiltTerminals};

const TCGETS2: libc::c_ulong = 0x802c_542a;
const TCSETS2: libc::c_ulong = 0x402c_542b;
const TIOCGPTN: libc::c_ulong = 0x8004_5430;
const TIOCSPTLCK: libc::c_ulong = 0x4004_5431;
const TIOCGDEV: libc::c_ulong = 0x8004_5432;
const TIOCGPKT: libc::c_ulong = 0x8004_5438;
const TIOCGPTLCK: libc::c_ulong = 0x8004_5439;
const TIOCGEXCL: libc::c_ulong = 0x8004_5440;
const TIOCGPTPEER: libc::c_ulong = 0x5441;

/// Which side of which terminal a description is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Side {
    /// Master of [`Terminals::ptys`] entry.
    Master(usize),
    /// Slave of that entry.
    Slave(usize),
    /// A terminal outside the job, with the name it was opened by.
    Outside(FsPath),
}

/// All pseudo-terminals of the job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Terminals {
    pub(crate) ptys: Vec<Pty>,
}

/// A pseudo-terminal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pty {
    /// N in `/dev/pts/N`.
    index: u32,
    /// Settings.
    termios: Termios,
    /// Rows, columns, width and height in pixels.
    winsize: [u16; 4],
    /// Packet mode of the master, lock of the slave, exclusive mode.
    packet: bool,
    locked: bool,
    exclusive: bool,
    /// Whether the slave was open, and whether it had ever been.
    slave_open: bool,
    slave_closed: bool,
    /// Permission bits and owner of the slave's file.
    mode: u32,
    owner: (u32, u32),
    /// Session whose controlling terminal it is, 0 when none, and its foreground process group.
    session: i32,
    foreground: i32,
    /// Written to the master and not read from the slave.
    input: Option<BlobRef>,
    /// Written to the slave and not read from the master.
    output: Option<BlobRef>,
}

/// The kernel's `struct termios2`, as raw words and characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(C)]
pub(crate) struct Termios {
    iflag: u32,
    oflag: u32,
    cflag: u32,
    lflag: u32,
    line: u8,
    cc: [u8; 19],
    ispeed: u32,
    ospeed: u32,
}

impl Termios {
    fn get(raw: RawFd) -> io::Result<Self> {
        crate::sys::fd::ioctl_get(raw, TCGETS2)
    }

    fn set(&self, raw: RawFd) -> io::Result<()> {
        crate::sys::fd::ioctl_set(raw, TCSETS2, self).map(drop)
    }

    /// The same terminal with line editing off: everything written can be read at once.
    fn unedited(self) -> Self {
        Self {
            lflag: self.lflag & !libc::ICANON,
            ..self
        }
    }

    /// The same terminal without any interpretation of what is written to either side; lines still end with a newline.
    fn transparent(mut self) -> Self {
        self.iflag = 0;
        self.oflag &= !libc::OPOST;
        self.lflag &= libc::ICANON;
        self.cc = [0; 19];
        self.cc[libc::VMIN] = 1;
        self
    }
}
