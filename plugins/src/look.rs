//! The first look at a descriptor: all that is asked of the kernel whatever it turns out to be. Looks need nothing of
//! each other, so several threads take them.

use crate::fault::{At, Fault};
use crate::model::Owner;
use crate::sys::{fd, fdinfo::FdInfo};
use belay_kernel::numbers::lend;
use belay_kernel::{fcntl, pidfd, spread};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// So many descriptors of one table a thread takes at once.
const PIECE: usize = 256;

/// What the kernel says of a descriptor.
#[derive(Debug)]
pub(crate) struct Look {
    /// Target of its `/proc` link.
    pub(crate) link: PathBuf,
    /// `fstat`.
    pub(crate) stat: fd::Stat,
    /// `fdinfo`.
    pub(crate) info: FdInfo,
    /// Status flags and access mode.
    pub(crate) flags: i32,
    /// Close-on-exec.
    pub(crate) cloexec: bool,
    /// Who is signalled when I/O is possible.
    pub(crate) owner: Option<Owner>,
}

impl Look {
    /// The agent's own descriptor.
    pub(crate) fn of_own(raw: RawFd) -> Result<Self, Fault> {
        Self::new(raw, raw, &Directories::of("self").at("open /proc/self/fd")?)
    }

    /// Number `number` in the table of `directories`, which the agent has as `raw`.
    fn new(raw: RawFd, number: RawFd, directories: &Directories) -> Result<Self, Fault> {
        let stat = match fd::fstat(raw) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => fd::lost_directory(),
            stat => stat.at("stat")?,
        };
        let name = number.to_string();
        let link = fd::readlink_at(&directories.fd, &name).at("read its name")?;
        let info = FdInfo::read_at(&directories.fdinfo, &name).at("read fdinfo")?;
        let shown = info.flags().at("read fdinfo")?;
        Ok(Self {
            link,
            stat,
            flags: shown & !libc::O_CLOEXEC,
            cloexec: shown & libc::O_CLOEXEC != 0,
            owner: if shown & libc::O_PATH == 0 { owner(raw)? } else { None },
            info,
        })
    }
}

/// `F_GETOWN_EX` and `F_GETSIG`.
fn owner(raw: RawFd) -> Result<Option<Owner>, Fault> {
    let ex = lend(raw).and_then(fcntl::owner).at("read its owner")?;
    let signal = lend(raw).and_then(fcntl::signal).at("read its signal")?;
    Ok((ex[1] != 0 || signal != 0).then_some(Owner {
        kind: ex[0],
        id: ex[1],
        signal,
    }))
}

/// Where `/proc` shows a table.
struct Directories {
    fd: OwnedFd,
    fdinfo: OwnedFd,
}

impl Directories {
    fn of(task: &str) -> io::Result<Self> {
        let open = |name: &str| {
            fd::open(
                Path::new(&format!("/proc/{task}/{name}")),
                libc::O_PATH | libc::O_DIRECTORY,
                0,
            )
        };
        Ok(Self {
            fd: open("fd")?,
            fdinfo: open("fdinfo")?,
        })
    }
}

/// Some numbers of a table, which `task` has.
struct Piece<'a> {
    table: usize,
    task: i32,
    pidfd: BorrowedFd<'a>,
    numbers: &'a [RawFd],
}

/// A table to be looked at: a task that has it, a pidfd of that, its numbers.
pub(crate) type Sight<'a> = (i32, BorrowedFd<'a>, &'a [RawFd]);

/// Looks at all numbers of all tables, in their order.
pub(crate) fn look(tables: &[Sight<'_>]) -> Vec<Vec<Result<Look, Fault>>> {
    let pieces: Vec<Piece<'_>> = tables
        .iter()
        .enumerate()
        .flat_map(|(table, (task, pidfd, numbers))| {
            let piece = move |numbers| Piece {
                table,
                task: *task,
                pidfd: *pidfd,
                numbers,
            };
            numbers.chunks(PIECE).map(piece)
        })
        .collect();
    let mut out: Vec<Vec<_>> = tables.iter().map(|_| Vec::new()).collect();
    for (piece, looks) in pieces.iter().zip(spread::each(pieces.iter().collect(), Piece::look)) {
        out[piece.table].extend(looks);
    }
    out
}

impl Piece<'_> {
    fn look(&self) -> Vec<Result<Look, Fault>> {
        let directories = match Directories::of(&self.task.to_string()) {
            Ok(directories) => directories,
            Err(e) => {
                let failed = |_: &RawFd| Err(io::Error::from(e.kind())).at("open its directory of descriptors");
                return self.numbers.iter().map(failed).collect();
            }
        };
        let each = |number: &RawFd| {
            let own = pidfd::getfd(self.pidfd, *number).at("duplicate into the agent (pidfd_getfd)")?;
            Look::new(own.as_raw_fd(), *number, &directories)
        };
        self.numbers.iter().map(each).collect()
    }
}
