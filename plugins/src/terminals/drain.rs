//! Data in flight in a pseudo-terminal. It has no way to look at data without reading it, so all is read and written
//! back at once, by a process that outlives the agent ([`apart`]); what is held, and how much of it is back, stands in
//! memory of both, so whoever is left carries on.
//!
//! In each direction the reader's line discipline holds up to [`HELD`] bytes, and the kernel queues what does not fit
//! there ("flip buffer"). Towards the slave, what is queued has not been looked at yet: erased characters, signals,
//! echo. So what was taken in goes back with all that switched off, and what was queued afterwards under the program's
//! own settings. A worker of the kernel takes in, in its own time; a stop character behind the bytes tells when it has:
//! the master's packet mode reports it.

use super::{Lines, Stopped, Termios};
use crate::fault::{At, Fault};
use crate::sys::fd;
use belay_kernel::numbers::lend;
use belay_kernel::{apart, ioctl};
use rustix::event::epoll;
use rustix::time::Timespec;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Most that a line discipline takes in before it is read.
const HELD: usize = 4095;
/// Most of it that goes back with interpretation off: the stop character behind it must find room. The one byte more is
/// looked at twice.
pub(super) const TAKEN_IN: usize = HELD - 1;
/// More than both directions can hold, with echo that waits.
const ROOM: usize = 64 << 10;
/// Longest wait for the kernel's worker, milliseconds.
const WORKER: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
const TIOCPKT_STOP: u8 = 4;
/// Sizes of pieces that fill the kernel's queue as far as it can be: it takes one more piece while it holds 8,192 bytes or fewer.
const PIECES: [usize; 17] = [
    255, 512, 512, 512, 512, 512, 512, 512, 512, 512, 512, 512, 512, 512, 512, 512, 1792,
];
const SMALL_PIECE: usize = 256;

/// A descriptor of the agent's own on the slave.
pub(super) fn slave_of(master: RawFd) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_CLOEXEC;
    ioctl::open(lend(master)?, ioctl::OTHER_SIDE, flags.unsigned_abs().into())
}

/// What is in flight, and how much of it is (again) in the terminal.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) input: Vec<u8>,
    pub(super) output: Vec<u8>,
    pub(super) lines: Lines,
    /// What had been stopped, once that is known.
    stopped: Option<[Stopped; 2]>,
    output_back: usize,
    input_back: usize,
    widening: bool,
}

impl InFlight {
    /// Of an image.
    pub(super) fn of(input: Vec<u8>, output: Vec<u8>, lines: Lines) -> Self {
        let lines = Lines {
            taken_in: lines.taken_in.min(input.len()).min(TAKEN_IN),
            ..lines
        };
        Self {
            input,
            output,
            lines,
            stopped: None,
            output_back: 0,
            input_back: 0,
            widening: false,
        }
    }

    /// Whether all is in the terminal.
    pub(super) fn is_back(&self) -> bool {
        self.input_back == self.input.len() && self.output_back == self.output.len()
    }

    /// What had been stopped: what is written to the slave, and to the master.
    pub(super) fn stopped(&self) -> [Stopped; 2] {
        self.stopped.unwrap_or_default()
    }

    /// Takes out what [`widen`] may have left.
    fn clear(&self, line: &Line) -> io::Result<()> {
        if self.widening {
            discard(line.master)?;
            discard(line.slave())?;
        }
        Ok(())
    }

    /// What did not fit: from the master to the slave, and the other way round.
    pub(super) fn left(&self) -> (&[u8], &[u8]) {
        (&self.input[self.input_back..], &self.output[self.output_back..])
    }
}

/// A pseudo-terminal, and the settings it has outside of this module.
#[derive(Debug)]
pub(super) struct Line {
    master: RawFd,
    slave: OwnedFd,
    termios: Termios,
    packet: bool,
    flags: i32,
    /// Tells when something arrives at the master: an epoll instance, since what is there already must not count.
    news: OwnedFd,
}

impl Line {
    pub(super) fn new(master: RawFd, slave: OwnedFd, termios: Termios, packet: bool) -> Result<Self, Fault> {
        let news = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            .at("make an epoll instance")?;
        let events = epoll::EventFlags::IN | epoll::EventFlags::PRI | epoll::EventFlags::ET;
        let watched = lend(master).and_then(|fd| Ok(epoll::add(&news, fd, epoll::EventData::new_u64(0), events)?));
        watched.at("watch the master")?;
        let flags = fd::flags(master).at("read its flags")?;
        Ok(Self {
            master,
            slave,
            termios,
            packet,
            flags,
            news,
        })
    }

    fn slave(&self) -> RawFd {
        self.slave.as_raw_fd()
    }

    /// Neither direction can hold anything, as far as that can be told without touching it (of an unfinished line it
    /// cannot), and none has been stopped.
    fn is_empty(&self) -> io::Result<bool> {
        let (master, slave) = (self.master, self.slave());
        let waits = |raw| fd::poll(raw, libc::POLLIN).map(|e| e & libc::POLLIN != 0);
        let goes = takes(master)? && takes(slave)?;
        Ok(goes && !self.termios.edits() && !waits(master)? && !waits(slave)? && fd::readable_bytes(slave)? == 0)
    }

    /// Reads all that is in flight into `held`, without allocating.
    fn take(&self, held: &mut InFlight) -> io::Result<()> {
        self.hold()?;
        read_all(self.master, &mut held.output)?;
        loop {
            // A write, though of nothing, brings out echo that has waited for room.
            fd::write(self.slave(), &[])?;
            if read_all(self.master, &mut held.output)? == 0 {
                break;
            }
        }
        fd::poll(self.slave(), libc::POLLIN)?;
        let seen = fd::readable_bytes(self.slave())?;
        self.termios.unedited().set(self.slave())?;
        // With editing off all of it counts, an unfinished line too.
        let taken_in = if self.termios.edits() {
            fd::readable_bytes(self.slave())?
        } else {
            seen
        };
        read_all(self.slave(), &mut held.input)?;
        let taken_in = taken_in.min(held.input.len()).min(HELD);
        held.lines = Lines {
            taken_in: taken_in.min(TAKEN_IN),
            ..Lines::default()
        };
        if self.termios.edits() {
            held.lines.find(&held.input[..taken_in], seen, &self.termios);
            if taken_in > TAKEN_IN && held.lines.is_end(TAKEN_IN, held.input[TAKEN_IN]) {
                held.input[TAKEN_IN] = self.termios.cc[libc::VEOF];
            }
        }
        Ok(())
    }

    /// The master does not block, and shows no status bytes and no changes of settings.
    fn hold(&self) -> io::Result<()> {
        fd::set_flags(self.master, self.flags | libc::O_NONBLOCK)?;
        self.packet(false)
    }

    fn packet(&self, on: bool) -> io::Result<()> {
        ioctl::set(lend(self.master)?, ioctl::SET_PACKET, &on.into())
    }

    /// Puts back what is not there yet, without allocating. Settings are set back in any case.
    pub(super) fn put(&self, held: &mut InFlight) -> io::Result<()> {
        self.hold()?;
        let done = self.put_taken_in(held);
        let set = self.termios.set(self.slave());
        // What was queued goes back under the program's settings, as it came.
        if done.is_ok() && set.is_ok() {
            pour(self.master, &held.input, &mut held.input_back);
        }
        let stopped = self.stop_master(held.stopped());
        self.packet(self.packet)?;
        fd::set_flags(self.master, self.flags)?;
        done.and(set).and(stopped)
    }

    /// What goes to the line discipline's own memory, and all output.
    fn put_taken_in(&self, held: &mut InFlight) -> io::Result<()> {
        self.termios.unedited().set(self.slave())?;
        // One who has come so far, and no further, has let it go.
        let found = self.start()?;
        let stopped = *held.stopped.get_or_insert(found);
        for (from, to, data, back) in [
            (self.slave(), self.master, &held.output, held.output_back),
            (self.master, self.slave(), &held.input, held.input_back),
        ] {
            if back == 0 && data.len() > HELD {
                held.widening = true;
                widen(from, to)?;
                held.widening = false;
            }
        }
        let head = held.output.len().min(HELD);
        while held.output_back < head {
            let piece = (head - held.output_back).min(SMALL_PIECE);
            held.output_back += fd::write(self.slave(), &held.output[held.output_back..][..piece])?;
        }
        self.wait(|| Ok(fd::readable_bytes(self.master)? >= head))?;
        pour(self.slave(), &held.output, &mut held.output_back);
        while held.input_back < held.lines.taken_in {
            self.segment(held)?;
            self.start()?;
        }
        self.stop_slave(held, stopped)
    }

    /// Lets go what has been stopped on either side: nothing could be put back. With nothing in flight there is always room.
    fn start(&self) -> io::Result<[Stopped; 2]> {
        let start = |raw| -> io::Result<Stopped> {
            if takes(raw)? {
                return Ok(Stopped::No);
            }
            flow(raw, libc::TCOON)?;
            if takes(raw)? {
                return Ok(Stopped::ByCall);
            }
            flow(raw, libc::TCOOFF)?;
            flow(raw, libc::TCOON)?;
            Ok(Stopped::ByKey)
        };
        Ok([start(self.slave())?, start(self.master)?])
    }

    /// Stops the slave again, when all of `held` that goes to the line discipline's own memory is there.
    fn stop_slave(&self, held: &mut InFlight, [slave, _]: [Stopped; 2]) -> io::Result<()> {
        match slave {
            Stopped::No => Ok(()),
            Stopped::ByCall => flow(self.slave(), libc::TCOOFF),
            Stopped::ByKey => self.segment(held),
        }
    }

    /// Stops the master again, when all is there.
    fn stop_master(&self, [_, master]: [Stopped; 2]) -> io::Result<()> {
        match master {
            Stopped::No => Ok(()),
            Stopped::ByCall | Stopped::ByKey => flow(self.master, libc::TCOOFF),
        }
    }

    /// Stops a terminal that has been made again, and has all its data.
    pub(super) fn stop(&self, stopped: [Stopped; 2]) -> io::Result<()> {
        self.hold()?;
        let done = self.stop_slave(&mut InFlight::default(), stopped);
        let set = self.termios.set(self.slave());
        fd::set_flags(self.master, self.flags)?;
        done.and(set)?;
        self.stop_master(stopped)
    }

    /// Writes bytes that had been taken in, up to where all values but two have occurred: these two stand for the end
    /// of a line without a newline, and, behind the bytes, for the stop that tells that they have been taken in.
    fn segment(&self, held: &mut InFlight) -> io::Result<()> {
        let all = &held.input[held.input_back..held.lines.taken_in];
        let (len, stop, end) = free_values(all, &self.termios);
        self.packet(false)?;
        self.termios.literal(stop, end).set(self.slave())?;
        self.packet(true)?;
        let mut piece = [0; SMALL_PIECE];
        let mut filled = 0;
        let mut push = |byte: u8, flush: bool| -> io::Result<()> {
            piece[filled] = byte;
            filled += 1;
            if filled == SMALL_PIECE || flush {
                let n = fd::write(self.master, &piece[..filled])?;
                piece.copy_within(n..filled, 0);
                filled -= n;
            }
            Ok(())
        };
        for at in held.input_back..held.input_back + len {
            let byte = if held.lines.is_end(at, held.input[at]) {
                end
            } else {
                held.input[at]
            };
            push(byte, false)?;
            if held.lines.ends_behind(at) {
                push(end, false)?;
            }
        }
        push(stop, true)?;
        held.input_back += len;
        self.wait(|| {
            let mut status = [0];
            let news = fd::poll(self.master, libc::POLLPRI)? & libc::POLLPRI != 0;
            Ok(news && fd::read(self.master, &mut status)? == 1 && status[0] & TIOCPKT_STOP != 0)
        })?;
        self.packet(false)
    }

    /// Waits until `there` says so, which the kernel's worker brings about.
    fn wait(&self, there: impl Fn() -> io::Result<bool>) -> io::Result<()> {
        while !there()? {
            let mut event = [MaybeUninit::uninit()];
            let (come, _) = epoll::wait(&self.news, &mut event, Some(&WORKER))?;
            if come.is_empty() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }
}

/// Whether a side takes what is written to it: with nothing in flight, one that has been stopped does not.
fn takes(raw: RawFd) -> io::Result<bool> {
    fd::poll(raw, libc::POLLOUT).map(|e| e & libc::POLLOUT != 0)
}

fn flow(raw: RawFd, action: i32) -> io::Result<()> {
    ioctl::tell(lend(raw)?, ioctl::FLOW, action as libc::c_ulong)
}

/// Copies what is in flight in both directions; it is there again afterwards, or in what is returned as `left`.
pub(super) fn copy(line: &Line) -> Result<InFlight, Fault> {
    if line.is_empty().at("look for data in flight")? {
        return Ok(InFlight::default());
    }
    let mut held = InFlight::of(Vec::with_capacity(ROOM), Vec::with_capacity(ROOM), Lines::default());
    let mut done = Err(io::ErrorKind::Interrupted.into());
    let ran = apart::run(&mut || {
        let taken = line.take(&mut held);
        done = taken.and(line.put(&mut held));
    });
    // Somebody has killed that process, or it came to a step that failed: what is held goes back from here.
    if done.is_err() || !held.is_back() {
        done = done.and(held.clear(line)).and(line.put(&mut held));
    }
    ran.at("start a process that reads it")?;
    if held.is_back() {
        done.at("read it and write it back")?;
    }
    Ok(held)
}

/// Reads until nothing is left or the room is; polling makes the kernel deliver what it still has queued.
fn read_all(raw: RawFd, out: &mut Vec<u8>) -> io::Result<usize> {
    let before = out.len();
    let mut buf = [0u8; 4096];
    while out.capacity() - out.len() >= buf.len() && fd::poll(raw, libc::POLLIN)? & libc::POLLIN != 0 {
        match fd::read(raw, &mut buf) {
            Ok(0) => break,
            Ok(n) => out.extend_from_slice(&buf[..n]),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EIO)) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(out.len() - before)
}

/// Fills the queue from `from` to `to` with small pieces and empties it. The kernel keeps their memory, and takes more
/// than its limit into it: so it had come about where the queue held more than that.
fn widen(from: RawFd, to: RawFd) -> io::Result<()> {
    while fd::write(from, &[0; SMALL_PIECE]).is_ok_and(|n| n > 0) {}
    discard(to)
}

fn discard(raw: RawFd) -> io::Result<()> {
    let mut buf = [0; 4096];
    while fd::poll(raw, libc::POLLIN)? & libc::POLLIN != 0 && fd::read(raw, &mut buf)? > 0 {}
    Ok(())
}

/// Writes `data` from `done` on, as far as there is room.
fn pour(raw: RawFd, data: &[u8], done: &mut usize) {
    let write = |done: &mut usize, piece: usize| {
        let rest = &data[*done..];
        let n = fd::write(raw, &rest[..rest.len().min(piece)]).unwrap_or(0);
        *done += n;
        n > 0
    };
    for piece in PIECES {
        if *done == data.len() || !write(done, piece) {
            break;
        }
    }
    while *done < data.len() && write(done, SMALL_PIECE) {}
}

/// How many of `bytes` leave two values free, and these: neither zero, which stands for none, nor one that ends a line.
fn free_values(bytes: &[u8], termios: &Termios) -> (usize, u8, u8) {
    let mut taken = [false; 256];
    for end in [0, b'\n', termios.cc[libc::VEOL], termios.cc[libc::VEOL2]] {
        taken[usize::from(end)] = true;
    }
    let mut free = taken.iter().filter(|t| !**t).count();
    let mut len = 0;
    for byte in bytes {
        let new = !taken[usize::from(*byte)];
        if new && free == 2 {
            break;
        }
        free -= usize::from(new);
        taken[usize::from(*byte)] = true;
        len += 1;
    }
    let mut values = (1..=u8::MAX).filter(|v| !taken[usize::from(*v)]);
    (len, values.next().unwrap_or(0), values.next().unwrap_or(0))
}
