//! Rebuild of terminals.

use super::{drain, names, ptmx, Fixed, Lines, Pty, Side, Stopped, Terminals};
use crate::fault::{refuse, At, Fault};
use crate::keep::lift;
use crate::model::Description;
use crate::sys::fd;
use belay_image::blobs::{BlobReader, BlobRef};
use belay_kernel::ioctl;
use belay_kernel::numbers::lend;
use std::io;
use std::io::IsTerminal;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;

/// Pseudo-terminals made again.
#[derive(Debug, Default)]
pub(crate) struct BuiltTerminals {
    ptys: Vec<BuiltPty>,
}

#[derive(Debug)]
struct BuiltPty {
    master: OwnedFd,
    slave: Option<OwnedFd>,
    index: u32,
    session: i32,
}

/// Makes all pseudo-terminals again.
pub(super) fn prepare(
    t: &Terminals,
    blobs: &BlobReader,
    room: &Range<RawFd>,
    own_mounts: bool,
    tell: &dyn Fn(&str),
) -> Result<BuiltTerminals, Fault> {
    let mut ptys = Vec::new();
    let mut masters = names::masters(t, own_mounts, tell)?;
    for p in &t.ptys {
        let found = masters.remove(&p.index).map(|master| (master, p.index));
        let (master, index) = found.map_or_else(ptmx::new_master, Ok)?;
        let raw = master.as_raw_fd();
        lend(raw)
            .and_then(|fd| ioctl::set(fd, ioctl::SET_LOCKED, &0))
            .at("unlock the slave")?;
        let slave = if p.slave_open || p.slave_closed || p.session != 0 {
            Some(drain::slave_of(raw).at("open the slave")?)
        } else {
            None
        };
        // The settings are the slave's; without one they are set through the master, which stands for it.
        let side = slave.as_ref().map_or(raw, AsRawFd::as_raw_fd);
        p.termios.set(side).at("set its settings")?;
        fill(raw, p, blobs)?;
        p.termios.set(side).at("set its settings")?;
        if p.stopped != <[Stopped; 2]>::default() {
            let line = drain::Line::new(raw, drain::slave_of(raw).at("open the slave")?, p.termios, false)?;
            line.stop(p.stopped).at("stop its output")?;
        }
        lend(raw)
            .and_then(|fd| ioctl::set(fd, ioctl::SET_SIZE, &p.winsize))
            .at("set its size")?;
        access(p, index)?;
        lend(raw)
            .and_then(|fd| ioctl::set(fd, ioctl::SET_PACKET, &p.packet.into()))
            .at("set packet mode")?;
        ptys.push(BuiltPty {
            master: lift(master, room)?,
            slave: slave.map(|s| lift(s, room)).transpose()?,
            index,
            session: p.session,
        });
    }
    Ok(BuiltTerminals { ptys })
}

/// What keeps others from opening or changing a terminal, when nobody has to do so any more.
pub(super) fn finish(t: &Terminals, built: &BuiltTerminals) -> Result<(), Fault> {
    for (p, made) in t.ptys.iter().zip(&built.ptys) {
        let master = made.master.as_raw_fd();
        lend(master)
            .and_then(|fd| ioctl::set(fd, ioctl::SET_LOCKED, &p.locked.into()))
            .at("lock the slave")?;
        let slave = made.slave.as_ref().filter(|_| p.slave_exclusive);
        for side in slave.into_iter().chain(p.exclusive.then_some(&made.master)) {
            ioctl::tell(side, ioctl::SET_EXCLUSIVE, 0).at("set its exclusive mode")?;
        }
        if let Ok(fixed) = Fixed::try_from(p.fixed.as_slice()) {
            lend(master)
                .and_then(|fd| ioctl::set(fd, ioctl::SET_FIXED, &fixed))
                .at("fix its settings")?;
        }
    }
    Ok(())
}

/// Mode and owner of the slave's file; only its owner (or root) may set them, and a failure changes nothing for the job itself.
fn access(p: &Pty, index: u32) -> Result<(), Fault> {
    let path = &*ptmx::path(index);
    if fd::stat(path, true).is_ok_and(|st| (st.st_uid, st.st_gid) != p.owner) {
        // (An ordinary user's are that user's.)
        if let Err(error) = std::os::unix::fs::chown(path, Some(p.owner.0), Some(p.owner.1)) {
            tracing::debug!(%error, index, "a terminal has another owner than before");
        }
    }
    if fd::stat(path, true).is_ok_and(|st| st.st_mode & 0o7777 != p.mode) {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(p.mode);
        std::fs::set_permissions(path, mode).at(format!("set mode of {}", path.display()))?;
    }
    Ok(())
}

/// Puts data in flight back.
fn fill(master: RawFd, p: &Pty, blobs: &BlobReader) -> Result<(), Fault> {
    if p.input.is_none() && p.output.is_none() {
        return Ok(());
    }
    let get = |data: &Option<BlobRef>| data.as_ref().map_or(Ok(Vec::new()), |d| blobs.get(d));
    let lines = p.lines.unwrap_or(Lines {
        taken_in: drain::TAKEN_IN,
        ..Lines::default()
    });
    let mut data = drain::InFlight::of(get(&p.input)?, get(&p.output)?, lines);
    let slave = drain::slave_of(master).at("open the slave")?;
    let line = drain::Line::new(master, slave, p.termios, false)?;
    line.put(&mut data).at("put its data in flight back")?;
    if !data.is_back() {
        return refuse("its data in flight does not fit into it any more");
    }
    Ok(())
}

fn is_same(a: &OwnedFd, b: &OwnedFd) -> io::Result<bool> {
    let (a, b) = (fd::fstat(a.as_raw_fd())?, fd::fstat(b.as_raw_fd())?);
    Ok((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// A description on a terminal.
pub(super) fn open(d: &Description, side: &Side, t: &BuiltTerminals) -> Result<OwnedFd, Fault> {
    let flags = (d.flags & (libc::O_ACCMODE | libc::O_NONBLOCK)) | libc::O_NOCTTY;
    let pty = |at: usize| match t.ptys.get(at) {
        Some(p) => Ok(p),
        None => refuse("the image refers to a terminal that it does not have"),
    };
    match side {
        // Opening a master anew would make another terminal: there is exactly one description.
        Side::Master(at) => fd::dup_from(pty(*at)?.master.as_raw_fd(), 0).at("duplicate"),
        Side::Slave(at) => match &pty(*at)?.slave {
            // By its name, so that the kernel shows that; where the name leads elsewhere, by a link of the kernel's.
            Some(s) => match fd::open(&ptmx::path(pty(*at)?.index), flags, 0) {
                Ok(opened) if is_same(&opened, s).at("look at the slave")? => Ok(opened),
                _ => fd::reopen(s.as_raw_fd(), flags).at("open the slave"),
            },
            None => refuse("the slave was not open"),
        },
        Side::Outside(_) => outside(flags),
        Side::HungUp => hung_up(),
    }
}

/// The terminal of the restart in place of one outside the job; without any, one that has hung up.
fn outside(flags: i32) -> Result<OwnedFd, Fault> {
    for n in 0..3 {
        if is_terminal(n) {
            return match fd::reopen(n, flags) {
                // It belongs to another user (su): share the description itself.
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => fd::dup_from(n, 0).at("duplicate the terminal"),
                opened => opened.at("open the terminal"),
            };
        }
    }
    hung_up()
}

fn hung_up() -> Result<OwnedFd, Fault> {
    let (master, _) = ptmx::new_master()?;
    ioctl::set(&master, ioctl::SET_LOCKED, &0).at("unlock the slave")?;
    drain::slave_of(master.as_raw_fd()).at("open a slave")
}

fn is_terminal(n: RawFd) -> bool {
    lend(n).is_ok_and(|fd| fd.as_fd().is_terminal())
}

/// Makes the terminal of session `pid` its controlling terminal; called in the session's leader.
pub(crate) fn take_session(t: &BuiltTerminals, pid: i32) -> Result<bool, Fault> {
    for p in t.ptys.iter().filter(|p| p.session == pid && pid != 0) {
        if let Some(slave) = &p.slave {
            ioctl::tell(slave, ioctl::SET_CONTROLLING, 0).at("make it the controlling terminal")?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sets the foreground process group of the terminal of session `pid`; called in the session's leader when all groups exist.
pub(super) fn foreground(t: &Terminals, pid: i32) -> Result<(), Fault> {
    for p in t.ptys.iter().filter(|p| p.session == pid && pid != 0 && p.foreground != 0) {
        let tty = fd::open(Path::new("/dev/tty"), libc::O_RDWR | libc::O_NOCTTY, 0).at("open /dev/tty")?;
        // A group that has ended since cannot be in the foreground; then the leader's own stays.
        let set = ioctl::set(&tty, ioctl::SET_FOREGROUND, &p.foreground);
        match set {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ESRCH | libc::EPERM)) => {}
            set => drop(set.at("set its foreground process group")?),
        }
    }
    Ok(())
}
