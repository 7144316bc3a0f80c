//! Where the files of bound sockets lie while sockets are made again.
//!
//! Several sockets of a job can have been bound to one path, one after the other, when the file of the one before had been removed or renamed. So a file that is in the way of another
//! socket's lies aside meanwhile, under a name of its own in the same directory, and its socket is reached there. At the end each has the name that it had, or none.

use super::BoundFile;
use crate::fault::{At, Fault};
use crate::files::{make_parents, owner};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

/// The files of all sockets that have been bound, by the inodes of these.
#[derive(Debug, Default)]
pub(super) struct Places(RefCell<HashMap<u64, Placed>>);

/// The file of one socket.
#[derive(Debug)]
struct Placed {
    kind: i32,
    /// Where it was bound.
    path: PathBuf,
    /// Where it lies.
    now: PathBuf,
    file: BoundFile,
    /// The socket is there no more; its file may stay.
    dead: bool,
}

impl Places {
    /// Gives a socket its name. A file that a dead socket has left under that name is replaced.
    pub(super) fn bind(&self, raw: RawFd, name: &Addr, file: Option<&BoundFile>) -> Result<(), Fault> {
        if name.is_unnamed() {
            return Ok(());
        }
        let Some(file) = file else {
            return sock::bind(raw, name).at(format!("bind {name}"));
        };
        make_parents(&file.parents)?;
        let bound = in_directory(file.cwd.as_ref().map(|d| d.as_path()), || self.bind_file(raw, name, file));
        bound.at(format!("bind {name}"))
    }

    fn bind_file(&self, raw: RawFd, name: &Addr, file: &BoundFile) -> io::Result<()> {
        let path = name.unix_path().ok_or(io::ErrorKind::InvalidInput)?;
        let full = file.cwd.as_ref().map_or_else(|| path.clone(), |d| d.as_path().join(&path));
        let kind = kind_of(raw)?;
        match sock::bind(raw, name) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                // Those of this rebuild are not tried: whoever listens would have one visitor more.
                if !self.move_aside(&full)? {
                    if !is_stale(kind, &path, name)? {
                        return Err(e);
                    }
                    std::fs::remove_file(&path)?;
                }
                sock::bind(raw, name)?;
            }
            bound => bound?,
        }
        if file.exists {
            owner::give_path(&path, libc::S_IFSOCK, file.owner, file.mode)?;
        }
        let placed = Placed {
            kind,
            path: full.clone(),
            now: full,
            file: file.clone(),
            dead: false,
        };
        self.0.borrow_mut().insert(fd::fstat(raw)?.st_ino, placed);
        Ok(())
    }

    /// Says that socket `raw`, which was made for the moment only, is about to be closed.
    pub(super) fn let_go(&self, raw: RawFd) -> io::Result<()> {
        if let Some(placed) = self.0.borrow_mut().get_mut(&fd::fstat(raw)?.st_ino) {
            placed.dead = true;
        }
        Ok(())
    }

    /// Makes room at `path`, where the file of a socket lies that has been made before; says whether one does.
    fn move_aside(&self, path: &Path) -> io::Result<bool> {
        let mut all = self.0.borrow_mut();
        let count = all.len();
        if let Some(dead) = all.iter().find(|(_, p)| p.now == path && p.dead).map(|(socket, _)| *socket) {
            all.remove(&dead);
            return std::fs::remove_file(path).map(|()| true);
        }
        let Some(placed) = all.values_mut().find(|p| p.now == path) else {
            return Ok(false);
        };
        let aside = path.with_file_name(format!(".belay-{}-{count}", std::process::id()));
        std::fs::rename(&placed.now, &aside)?;
        placed.now = aside;
        Ok(true)
    }

    /// Does `task` with the name by which socket `raw`, called `name`, is reached now.
    pub(super) fn reach<T>(&self, raw: RawFd, name: &Addr, task: impl FnOnce(&Addr) -> io::Result<T>) -> io::Result<T> {
        let socket = fd::fstat(raw)?.st_ino;
        let all = self.0.borrow();
        match all.get(&socket) {
            // By the last part of its name: the whole may be too long for an address.
            Some(placed) => {
                let last = placed.now.file_name().ok_or(io::ErrorKind::InvalidInput)?;
                in_directory(placed.now.parent(), || task(&Addr::unix(Path::new(last))))
            }
            None => task(name),
        }
    }

    /// Gives each file the name that it had at the checkpoint, and removes those that had none.
    pub(super) fn settle(&self) -> Result<(), Fault> {
        let all = self.0.borrow();
        for p in all.values().filter(|p| !p.file.exists && is_socket(&p.now)) {
            match &p.file.renamed {
                Some(to) => {
                    let to = p
                        .file
                        .cwd
                        .as_ref()
                        .map_or_else(|| to.0.clone(), |d| d.as_path().join(to.as_path()));
                    rename(p, &to).at(format!("rename {}", p.path.display()))?;
                }
                // Only a name too many.
                None => drop(std::fs::remove_file(&p.now)),
            }
        }
        for p in all.values().filter(|p| p.file.exists && p.now != p.path) {
            std::fs::rename(&p.now, &p.path).at(format!("rename {}", p.now.display()))?;
        }
        Ok(())
    }
}

fn rename(p: &Placed, to: &Path) -> io::Result<()> {
    if fd::stat(to, false).is_ok() {
        let last = to.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        if !in_directory(to.parent(), || {
            is_stale(p.kind, Path::new(last), &Addr::unix(Path::new(last)))
        })? {
            return Err(io::ErrorKind::AddrInUse.into());
        }
    }
    owner::give_path(&p.now, libc::S_IFSOCK, p.file.owner, p.file.mode)?;
    std::fs::rename(&p.now, to)
}

/// Runs `f` in the directory to which a relative socket name belongs.
pub(super) fn in_directory<T>(dir: Option<&Path>, f: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(dir) = dir.filter(|d| !d.as_os_str().is_empty()) else {
        return f();
    };
    let here = std::env::current_dir()?;
    std::env::set_current_dir(dir)?;
    let done = f();
    std::env::set_current_dir(here)?;
    done
}

fn kind_of(raw: RawFd) -> io::Result<i32> {
    sock::get(raw, libc::SOL_SOCKET, libc::SO_TYPE)
}

fn is_socket(path: &Path) -> bool {
    fd::stat(path, false).is_ok_and(|st| st.st_mode & libc::S_IFMT == libc::S_IFSOCK)
}

/// Whether the file at `path`, of address `name`, is a socket that nobody has bound any more.
fn is_stale(kind: i32, path: &Path, name: &Addr) -> io::Result<bool> {
    if !is_socket(path) {
        return Ok(false);
    }
    let probe = sock::socket(libc::AF_UNIX, kind | libc::SOCK_NONBLOCK, 0)?;
    Ok(sock::connect(probe.as_raw_fd(), name).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused))
}
