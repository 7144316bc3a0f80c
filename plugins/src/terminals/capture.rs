//! Capture of terminals.

use super::{
    drain, Fixed, Pty, Side, Terminals, Termios, N_TTY, TIOCGDEV, TIOCGEXCL, TIOCGLCKTRMIOS, TIOCGPKT, TIOCGPTLCK, TIOCGPTN,
};
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::model::{DescId, Descriptors, FsPath};
use crate::session::Session;
use crate::sys::fd;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

const TTY_MAJOR: u32 = 4;
const TTYAUX_MAJOR: u32 = 5;
const PTMX_MINOR: u32 = 2;
/// Slaves of pseudo-terminals: majors 136 to 143, 2^20 minors in the first.
const PTS_MAJORS: std::ops::RangeInclusive<u32> = 136..=143;

/// Terminals found so far.
#[derive(Debug, Default)]
pub(super) struct TerminalSet {
    /// Masters: index of the pseudo-terminal, in order of their place in the list.
    masters: HashMap<u32, (usize, DescId)>,
    /// Slaves: description, index of the pseudo-terminal if it is one.
    slaves: Vec<(DescId, Option<u32>)>,
}

/// Whether a character device is a terminal.
pub(super) fn is_terminal(major: u32, minor: u32) -> bool {
    match major {
        TTY_MAJOR => true,
        TTYAUX_MAJOR => minor <= PTMX_MINOR,
        m => PTS_MAJORS.contains(&m),
    }
}

/// Captures a description; slaves find their masters in [`finish`].
pub(super) fn capture(s: &mut Session<'_>, id: DescId, raw: RawFd) -> Result<Side, Fault> {
    let found = &s.found[id];
    let rdev = found.stat.st_rdev;
    if (libc::major(rdev), libc::minor(rdev)) == (TTYAUX_MAJOR, PTMX_MINOR) {
        let index: u32 = fd::ioctl_get(raw, TIOCGPTN).at("ask for its number")?;
        let masters = &mut s.sets.of::<TerminalSet>().masters;
        let at = masters.len();
        masters.insert(index, (at, id));
        return Ok(Side::Master(at));
    }
    // Through /dev/tty the terminal itself answers.
    // One that has hung up does not answer: nobody can tell any more which it was, and nothing can be done with it.
    let real: u32 = fd::ioctl_get(raw, TIOCGDEV).unwrap_or_default();
    // The kernel's encoding of a device number in 32 bits.
    let (major, minor) = (real >> 8 & 0xfff, (real & 0xff) | (real >> 12 & 0xf_ff00));
    let index = PTS_MAJORS.contains(&major).then_some(minor);
    let link = FsPath::from(found.link.as_path());
    s.sets.of::<TerminalSet>().slaves.push((id, index));
    Ok(Side::Outside(link))
}

/// Pairs slaves with masters, reads settings and data.
pub(super) fn finish(s: &mut Session<'_>, out: &mut Descriptors) -> Result<(), Refusal> {
    let set: TerminalSet = s.sets.take().unwrap_or_default();
    for (id, index) in &set.slaves {
        let master = index.and_then(|i| set.masters.get(&i));
        let Some(side) = out.descriptions[*id].kind.get_mut::<Side>() else {
            continue;
        };
        match master {
            Some((at, _)) => *side = Side::Slave(*at),
            None => {
                let found = &s.found[*id];
                s.notes.push(format!(
                    "process {}: fd {}: terminal {} is outside the job; after a restart it is the terminal of `belay restart`",
                    found.holder.pid,
                    found.holder.fd,
                    found.link.display()
                ));
            }
        }
    }
    let mut masters: Vec<_> = set.masters.iter().map(|(i, (at, id))| (*at, *i, *id)).collect();
    masters.sort_unstable();
    let out: &mut Terminals = out.parts.of();
    for (_, index, id) in masters {
        let holder = s.found[id].holder;
        let captured = pty(s, &set, index, id);
        out.ptys
            .push(captured.map_err(|e| e.of(holder.pid, format!("terminal /dev/pts/{index}")))?);
    }
    Ok(())
}

fn pty(s: &mut Session<'_>, set: &TerminalSet, index: u32, master: DescId) -> Result<Pty, Fault> {
    let open = set.slaves.iter().find(|(_, i)| *i == Some(index)).map(|(id, _)| *id);
    if let Some(id) = open {
        let taken = s.take(id)?;
        if fd::ioctl_get::<i32>(taken.raw(), libc::TIOCGETD).at("read its line discipline")? != N_TTY {
            return refuse("has another line discipline than the usual one (TIOCSETD), which cannot be saved; close it");
        }
    }
    let taken = s.take(master)?;
    let raw = taken.raw();
    let slave_open = open.is_some();
    let slave_closed = fd::poll(raw, libc::POLLIN).at("poll")? & libc::POLLHUP != 0;
    let number = |request| fd::ioctl_get::<i32>(raw, request).at("read its state");
    let packet = number(TIOCGPKT)? != 0;
    let fixed: Fixed = fd::ioctl_get(raw, TIOCGLCKTRMIOS).at("read which of its settings are fixed")?;
    let mut pty = Pty {
        index,
        // The master answers for the slave.
        termios: Termios::get(raw).at("read its settings")?,
        winsize: fd::ioctl_get(raw, libc::TIOCGWINSZ).at("read its size")?,
        packet,
        locked: number(TIOCGPTLCK)? != 0,
        exclusive: number(TIOCGEXCL)? != 0,
        slave_exclusive: false,
        fixed: if fixed == Fixed::default() {
            Vec::new()
        } else {
            fixed.to_vec()
        },
        slave_open,
        slave_closed,
        mode: 0o620,
        owner: (0, 0),
        session: fd::ioctl_get(raw, libc::TIOCGSID).unwrap_or(0),
        foreground: fd::ioctl_get(raw, libc::TIOCGPGRP).unwrap_or(0),
        input: None,
        lines: None,
        output: None,
    };
    if let Ok(st) = fd::stat(Path::new(&format!("/dev/pts/{index}")), true) {
        pty.mode = st.st_mode & 0o7777;
        pty.owner = (st.st_uid, st.st_gid);
    }
    if pty.locked || !(slave_open || slave_closed) {
        // Nobody has opened the slave yet, so nothing can be in flight that somebody could read.
        return Ok(pty);
    }
    if packet && fd::poll(raw, libc::POLLPRI).at("poll")? & libc::POLLPRI != 0 {
        return not_now("its master has not read yet what has become of the terminal (packet mode)");
    }
    let slave = slave(s, open, raw)?;
    pty.slave_exclusive = exclusive(slave.as_raw_fd())?;
    let later = slave.try_clone().at("duplicate the slave")?;
    let data = drain::copy(&drain::Line::new(raw, slave, pty.termios, packet)?)?;
    if !data.is_back() {
        return put_back_later(raw, later, &data);
    }
    pty.lines = Some(data.lines);
    for (bytes, place) in [(&data.input, &mut pty.input), (&data.output, &mut pty.output)] {
        if !bytes.is_empty() {
            *place = Some(s.blobs.put(bytes)?);
        }
    }
    Ok(pty)
}

fn exclusive(raw: RawFd) -> Result<bool, Fault> {
    Ok(fd::ioctl_get::<i32>(raw, TIOCGEXCL).at("read its state")? != 0)
}

/// A descriptor of the agent's own on the slave. Exclusive mode keeps an ordinary user out: it is lifted for that moment, through a description that the job has open.
fn slave(s: &mut Session<'_>, open: Option<DescId>, master: RawFd) -> Result<OwnedFd, Fault> {
    match drain::slave_of(master) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
        opened => return opened.at("open the slave"),
    }
    let Some(id) = open else {
        return refuse("it is in exclusive mode (TIOCEXCL), and nobody has its slave open; run belay as root");
    };
    let held = s.take(id)?;
    fd::ioctl_num(held.raw(), libc::TIOCNXCL, 0).at("end its exclusive mode")?;
    let opened = drain::slave_of(master);
    fd::ioctl_num(held.raw(), libc::TIOCEXCL, 0).at("set its exclusive mode")?;
    opened.at("open the slave")
}

/// Not all of what was read went back at once: a thread of the agent writes the rest as soon as there is room.
fn put_back_later<T>(master: RawFd, slave: OwnedFd, data: &drain::InFlight) -> Result<T, Fault> {
    let (input, output) = data.left();
    for (to, rest) in [
        (fd::dup_from(master, 0).at("duplicate the master")?, input.to_vec()),
        (slave, output.to_vec()),
    ] {
        std::thread::spawn(move || {
            let mut rest = &rest[..];
            while !rest.is_empty() && fd::wait(to.as_raw_fd(), libc::POLLOUT, -1).is_ok() {
                match fd::write(to.as_raw_fd(), &rest[..rest.len().min(256)]) {
                    Ok(n) => rest = &rest[n..],
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return tracing::error!(%error, bytes = rest.len(), "data of a terminal is lost"),
                }
            }
        });
    }
    not_now(format!(
        "{} bytes in flight did not fit into it again at once; they follow as soon as there is room",
        input.len() + output.len()
    ))
}
