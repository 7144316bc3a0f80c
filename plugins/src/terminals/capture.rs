//! Capture of terminals.

use super::{devpts, drain, ptmx, Fixed, Pty, Side, Terminals, Termios, N_TTY, PTS_MAJOR};
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::model::{DescId, Descriptors, FsPath};
use crate::session::Session;
use crate::sys::fd;
use belay_kernel::numbers::lend;
use belay_kernel::plain::Plain;
use belay_kernel::{ioctl, proc};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const TTY_MAJOR: u32 = 4;
const TTYAUX_MAJOR: u32 = 5;
const PTMX_MINOR: u32 = 2;

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
        m => m == PTS_MAJOR,
    }
}

/// Captures a description; slaves find their masters in [`finish`].
pub(super) fn capture(s: &mut Session<'_>, id: DescId, raw: RawFd) -> Result<Side, Fault> {
    let found = &s.found[id];
    let rdev = found.stat.st_rdev;
    if (libc::major(rdev), libc::minor(rdev)) == (TTYAUX_MAJOR, PTMX_MINOR) {
        let index = ask(raw, ioctl::TERMINAL_NUMBER).at("ask for its number")?;
        let masters = &mut s.sets.of::<TerminalSet>().masters;
        let at = masters.len();
        if masters.insert(index, (at, id)).is_some() {
            return refuse("two terminals of the job have this number, in different devpts: close one");
        }
        return Ok(Side::Master(at));
    }
    // Through /dev/tty the terminal itself answers.
    let real = match ask(raw, ioctl::TERMINAL_DEVICE) {
        // Nobody can tell any more which it was.
        Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(Side::HungUp),
        answer => answer.unwrap_or_default(),
    };
    // The kernel's encoding of a device number in 32 bits.
    let (major, minor) = (real >> 8 & 0xfff, (real & 0xff) | (real >> 12 & 0xf_ff00));
    let index = (major == PTS_MAJOR).then_some(minor);
    let link = FsPath::from(found.link.as_path());
    s.sets.of::<TerminalSet>().slaves.push((id, index));
    Ok(Side::Outside(link))
}

/// Pairs slaves with masters, reads settings and data.
pub(super) fn finish(s: &mut Session<'_>, out: &mut Descriptors) -> Result<(), Refusal> {
    let mut set: TerminalSet = s.sets.take().unwrap_or_default();
    for (id, index) in &mut set.slaves {
        let master = index.and_then(|i| Some((i, *set.masters.get(&i)?)));
        let own = match master {
            Some((number, (at, master))) => {
                let is_of = is_of(s, *id, number, master);
                let holder = s.found[*id].holder;
                let is_of = is_of.map_err(|e| e.of(holder.pid, format!("terminal {}", ptmx::path(number).display())))?;
                is_of.then_some(at)
            }
            None => None,
        };
        if let (Some(at), Some(side)) = (own, out.descriptions[*id].kind.get_mut::<Side>()) {
            *side = Side::Slave(at);
            continue;
        }
        *index = None;
        let found = &s.found[*id];
        s.notes.push(format!(
            "process {}: fd {}: terminal {} is outside the job; after a restart it is the terminal of `belay restart`",
            found.holder.pid,
            found.holder.fd,
            found.link.display()
        ));
    }
    let mut masters: Vec<_> = set.masters.iter().map(|(i, (at, id))| (*at, *i, *id)).collect();
    masters.sort_unstable();
    let names = if masters.is_empty() { BTreeMap::new() } else { devpts::led() };
    let out: &mut Terminals = out.parts.of();
    for (_, index, id) in masters {
        let holder = s.found[id].holder;
        let captured = pty(s, &set, &names, (index, id));
        out.ptys
            .push(captured.map_err(|e| e.of(holder.pid, format!("terminal /dev/pts/{index}")))?);
    }
    Ok(())
}

/// Whether slave `id`, which has the number of `master`'s, is that: in a devpts of its own a restarted job can have a
/// terminal with the number of one outside.
fn is_of(s: &Session<'_>, id: DescId, number: u32, master: DescId) -> Result<bool, Fault> {
    let found = &s.found[id];
    let st = &found.stat;
    if libc::major(st.st_rdev) == PTS_MAJOR {
        let named = fd::stat(&ptmx::path(number), true);
        return Ok(named.map_or(true, |named| (named.st_dev, named.st_ino) == (st.st_dev, st.st_ino)));
    }
    // Opened as /dev/tty, which says no more than the number: the terminal of a session is one.
    let stat = proc::stat(found.holder.pid).at("read whose it is")?;
    if stat.tty_nr != libc::makedev(PTS_MAJOR, number) {
        return Ok(true);
    }
    let session = ask(s.take(master)?.raw(), ioctl::SESSION).unwrap_or(0);
    Ok(session != 0 && session == stat.session)
}

/// Refuses what may have been written to the master of a pseudo-terminal whose slave nobody has opened yet. It waits
/// for who opens that; to look at it the slave must be opened, and to close that again is to hang up. What has been
/// written is echoed, unless echo is off.
fn unseen(master: RawFd) -> Result<(), Fault> {
    let echoed = ask(master, ioctl::READABLE).at("ask how much waits")?;
    let echoes = Termios::get(master).at("read its settings")?.lflag & libc::ECHO != 0;
    if echoed > 0 || !echoes {
        return not_now("what has been written to it cannot be read, because nobody has opened its other side yet");
    }
    Ok(())
}

fn pty(
    s: &mut Session<'_>,
    set: &TerminalSet,
    names: &BTreeMap<u32, Vec<u32>>,
    (index, master): (u32, DescId),
) -> Result<Pty, Fault> {
    let open = set.slaves.iter().find(|(_, i)| *i == Some(index)).map(|(id, _)| *id);
    if let Some(id) = open {
        let taken = s.take(id)?;
        if ask(taken.raw(), ioctl::DISCIPLINE).at("read its line discipline")? != N_TTY {
            return refuse("has another line discipline than the usual one (TIOCSETD), which cannot be saved; close it");
        }
    }
    let taken = s.take(master)?;
    let raw = taken.raw();
    let slave_open = open.is_some();
    let slave_closed = fd::poll(raw, libc::POLLIN).at("poll")? & libc::POLLHUP != 0;
    let number = |request| ask(raw, request).at("read its state");
    let packet = number(ioctl::PACKET)? != 0;
    let fixed: Fixed = ask(raw, ioctl::FIXED).at("read which of its settings are fixed")?;
    if !slave_open && !slave_closed {
        unseen(raw)?;
    }
    let mut pty = Pty {
        index,
        names: names.get(&index).cloned().unwrap_or_default(),
        // The master answers for the slave.
        termios: Termios::get(raw).at("read its settings")?,
        winsize: ask(raw, ioctl::SIZE).at("read its size")?,
        packet,
        locked: number(ioctl::LOCKED)? != 0,
        exclusive: number(ioctl::EXCLUSIVE)? != 0,
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
        session: ask(raw, ioctl::SESSION).unwrap_or(0),
        foreground: ask(raw, ioctl::FOREGROUND).unwrap_or(0),
        input: None,
        lines: None,
        output: None,
        stopped: Default::default(),
    };
    if let Ok(st) = fd::stat(&ptmx::path(index), true) {
        pty.mode = st.st_mode & 0o7777;
        pty.owner = (st.st_uid, st.st_gid);
    }
    if pty.locked || !(slave_open || slave_closed) {
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
    pty.stopped = data.stopped();
    for (bytes, place) in [(&data.input, &mut pty.input), (&data.output, &mut pty.output)] {
        if !bytes.is_empty() {
            *place = Some(s.blobs.put(bytes)?);
        }
    }
    Ok(pty)
}

fn ask<T: Plain>(raw: RawFd, request: ioctl::Reads<T>) -> io::Result<T> {
    ioctl::get(lend(raw)?, request)
}

fn exclusive(raw: RawFd) -> Result<bool, Fault> {
    Ok(ask(raw, ioctl::EXCLUSIVE).at("read its state")? != 0)
}

/// A descriptor of the agent's own on the slave. Exclusive mode keeps an ordinary user out: it is lifted for that
/// moment, through a description that the job has open.
fn slave(s: &mut Session<'_>, open: Option<DescId>, master: RawFd) -> Result<OwnedFd, Fault> {
    match drain::slave_of(master) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
        opened => return opened.at("open the slave"),
    }
    let Some(id) = open else {
        return refuse("it is in exclusive mode (TIOCEXCL), and nobody has its slave open; run belay as root");
    };
    let held = s.take(id)?;
    lend(held.raw())
        .and_then(|fd| ioctl::tell(fd, ioctl::SET_SHARED, 0))
        .at("end its exclusive mode")?;
    let opened = drain::slave_of(master);
    lend(held.raw())
        .and_then(|fd| ioctl::tell(fd, ioctl::SET_EXCLUSIVE, 0))
        .at("set its exclusive mode")?;
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
