//! Terminals: pseudo-terminals whose master is in the job, and terminals of the outside world.

mod capture;
mod devpts;
mod drain;
mod names;
mod ptmx;
mod rebuild;

use crate::builder::{Builder, Built};
use crate::fault::{Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look};
use crate::model::{Description, Descriptors, FsPath};
use crate::session::Session;
use crate::state::Part;
use belay_image::blobs::BlobRef;
use belay_kernel::ioctl;
use belay_kernel::numbers::lend;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{OwnedFd, RawFd};

pub(crate) use rebuild::take_session;

/// Slaves of pseudo-terminals: their minor is the number in their name.
const PTS_MAJOR: u32 = 136;
/// The usual line discipline.
const N_TTY: i32 = 0;
/// The kernel's `struct termios`, of which every bit that is set is fixed.
type Fixed = [u32; 9];

/// Which side of which terminal a description is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Side {
    /// Master of [`Terminals::ptys`] entry.
    Master(usize),
    /// Slave of that entry.
    Slave(usize),
    /// A terminal outside the job, with the name it was opened by.
    Outside(FsPath),
    /// One that has hung up: nothing can be done with it but to close it.
    HungUp,
}

/// All pseudo-terminals of the job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Terminals {
    pub(crate) ptys: Vec<Pty>,
}

impl Part for Terminals {
    const KEY: &'static str = "terminals";
}

/// The kind.
pub(crate) struct Terminal;

impl Kind for Terminal {
    const NAME: &'static str = "Terminal";
    const VERSION: u32 = 1;
    type State = Side;
    type Part = Terminals;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Device(major, minor) if capture::is_terminal(*major, *minor))
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<Side, Fault> {
        capture::capture(s, seen.id, seen.raw())
    }

    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        refusals.extend(capture::finish(s, out).err());
    }

    fn check(side: &Side, d: &Descriptors) -> Result<(), String> {
        let ptys = d.parts.get::<Terminals>().map_or(&[][..], |t| &t.ptys);
        match side {
            Side::Master(at) | Side::Slave(at) => Descriptors::is_one_of(*at, ptys),
            Side::Outside(_) | Side::HungUp => Ok(()),
        }
    }

    fn prepare(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let Some(t) = b.descriptors.parts.get::<Terminals>() else {
            return Ok(());
        };
        let built = rebuild::prepare(t, b.blobs, &b.room, b.own_namespaces, b.tell).map_err(|e| e.of(0, "terminal"))?;
        b.sets.put(built);
        Ok(())
    }

    fn rebuild(b: &mut Builder<'_>, desc: &Description, side: &Side) -> Result<Option<OwnedFd>, Fault> {
        rebuild::open(desc, side, b.sets.of()).map(Some)
    }

    fn install_own(d: &Descriptors, _: &Built, pid: i32) -> Result<(), Refusal> {
        let all = d.parts.get().map_or(Ok(()), |t| rebuild::foreground(t, pid));
        all.map_err(|e| e.of(pid, "controlling terminal"))
    }

    fn complete(d: &Descriptors, built: &Built) -> Result<(), Refusal> {
        match (d.parts.get(), built.sets.get()) {
            (Some(t), Some(built)) => rebuild::finish(t, built).map_err(|e| e.of(0, "terminal")),
            _ => Ok(()),
        }
    }

    nothing!(
        survey,
        contents,
        check_part,
        numbers,
        ways,
        join,
        refill,
        install,
        install_late,
        settle
    );
}

/// A pseudo-terminal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pty {
    /// N in `/dev/pts/N`.
    index: u32,
    /// Other numbers by which it is found, those it had before restarts that could not give it these.
    #[serde(default)]
    names: Vec<u32>,
    /// Settings.
    termios: Termios,
    /// Rows, columns, width and height in pixels.
    winsize: [u16; 4],
    /// Packet mode of the master, lock of the slave, exclusive mode of the master, which says nothing but itself, and
    /// of the slave, which keeps others out.
    packet: bool,
    locked: bool,
    exclusive: bool,
    #[serde(default)]
    slave_exclusive: bool,
    /// Which of its settings only root may change (TIOCSLCKTRMIOS): none where this is empty.
    #[serde(default)]
    fixed: Vec<u32>,
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
    /// Where its lines end; images of before do not tell.
    #[serde(default)]
    lines: Option<Lines>,
    /// Written to the slave and not read from the master.
    output: Option<BlobRef>,
    /// Whether what is written to the slave, and what to the master, has been stopped.
    #[serde(default)]
    stopped: [Stopped; 2],
}

/// Whether and how output had been stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Stopped {
    #[default]
    No,
    /// `tcflow`.
    ByCall,
    /// The stop character.
    ByKey,
}

/// The kernel's `struct termios2`, as raw words and characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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
        ioctl::get(lend(raw)?, ioctl::TERMIOS).map(|bytes| Self::of(&bytes))
    }

    fn of(bytes: &[u8; 44]) -> Self {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self {
            iflag: word(0),
            oflag: word(4),
            cflag: word(8),
            lflag: word(12),
            line: bytes[16],
            cc: std::array::from_fn(|at| bytes[17 + at]),
            ispeed: word(36),
            ospeed: word(40),
        }
    }

    fn bytes(&self) -> [u8; 44] {
        let mut bytes = [0; 44];
        let words = [self.iflag, self.oflag, self.cflag, self.lflag];
        let places = [0, 4, 8, 12].into_iter().zip(words);
        for (at, word) in places.chain([(36, self.ispeed), (40, self.ospeed)]) {
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes[16] = self.line;
        bytes[17..36].copy_from_slice(&self.cc);
        bytes
    }

    fn set(&self, raw: RawFd) -> io::Result<()> {
        ioctl::set(lend(raw)?, ioctl::SET_TERMIOS, &self.bytes())
    }

    /// Whether lines are edited before they can be read.
    fn edits(&self) -> bool {
        self.lflag & (libc::ICANON | libc::EXTPROC) == libc::ICANON
    }

    /// The same terminal without any interpretation of what is written to either side: everything can be read at once.
    /// Output that has been stopped stays so.
    fn unedited(mut self) -> Self {
        self.iflag &= libc::IXON;
        self.oflag &= !libc::OPOST;
        self.lflag &= libc::EXTPROC;
        self.cc = [0; 19];
        self.cc[libc::VMIN] = 1;
        self
    }

    /// The same, but lines end where they ended, or with `end`, and `stop` stops the output.
    fn literal(self, stop: u8, end: u8) -> Self {
        let mut t = self.unedited();
        t.iflag |= libc::IXON;
        t.lflag |= self.lflag & (libc::ICANON | libc::IEXTEN);
        t.cc[libc::VSTOP] = stop;
        if self.edits() {
            t.cc[libc::VEOF] = end;
            t.cc[libc::VEOL] = self.cc[libc::VEOL];
            t.cc[libc::VEOL2] = self.cc[libc::VEOL2];
        }
        t
    }
}

/// Where lines end among the bytes that the line discipline of a slave has taken in.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Lines {
    /// So many bytes it has taken in; those behind are queued.
    taken_in: usize,
    /// So many of these belong to finished lines.
    finished: usize,
    /// A zero byte among these is an end of file that was typed.
    zero_ends: bool,
    /// The last of these lines ends without a byte that says so.
    pushed: bool,
}

impl Lines {
    /// Finds the ends, where `count` bytes of `taken_in` can be read, not counting ends of file. Those are zero bytes
    /// there; a zero that was typed looks alike, but then lines would end where no line can.
    fn find(&mut self, taken_in: &[u8], count: usize, termios: &Termios) {
        let ends = |at: usize| at == 0 || [b'\n', termios.cc[libc::VEOL], termios.cc[libc::VEOL2]].contains(&taken_in[at - 1]);
        let mut read = 0;
        let with_zeros = taken_in.iter().take_while(|b| {
            read += usize::from(**b != 0);
            **b == 0 || read <= count
        });
        let with_zeros = with_zeros.count();
        self.zero_ends = read >= count && with_zeros > count && (ends(with_zeros) || taken_in[with_zeros - 1] == 0);
        self.finished = if self.zero_ends {
            with_zeros
        } else {
            count.min(taken_in.len())
        };
        self.pushed = !self.zero_ends && !ends(self.finished);
    }

    /// Whether `byte` at `at` stands for the end of a line.
    fn is_end(&self, at: usize, byte: u8) -> bool {
        self.zero_ends && byte == 0 && at < self.finished
    }

    /// Whether a line ends behind `at` without a byte that says so.
    fn ends_behind(&self, at: usize) -> bool {
        self.pushed && at + 1 == self.finished
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(taken_in: &[u8], count: usize) -> (usize, bool, bool) {
        let mut lines = Lines {
            taken_in: taken_in.len(),
            ..Lines::default()
        };
        lines.find(taken_in, count, &Termios::default());
        (lines.finished, lines.zero_ends, lines.pushed)
    }

    #[test]
    fn a_line_ends_with_a_newline_an_end_of_file_or_where_editing_was_switched_on() {
        assert_eq!(found(b"one\ntw", 4), (4, false, false), "a line and the beginning of one");
        assert_eq!(found(b"one\0two\ntyped", 7), (8, true, false), "an end of file in it");
        assert_eq!(found(b"one\0", 3), (4, true, false), "an end of file behind it");
        assert_eq!(found(b"\0", 0), (1, true, false), "nothing but an end of file");
        assert_eq!(found(b"a\0\0b\nxyz", 5), (5, false, false), "zeros that were typed");
        assert_eq!(found(b"half", 4), (4, false, true), "typed before editing was switched on");
        assert_eq!(found(b"half", 0), (0, false, false), "not finished");
    }
}
