//! Makes `AF_UNIX` sockets again: listening ones, connected pairs, then connections that wait to be accepted.
//!
//! A socket that was accepted has its listener's name, and two sockets cannot be bound to one name; so such a pair is made as it was made
//! first: by connecting to a listener of that name, the job's own or one made for the moment. Pairs without names come from `socketpair`.

use super::{BoundFile, Peer, UnixState};
use crate::capture::RaisedLimit;
use crate::fault::{refuse, At, Fault};
use crate::files::{make_parents, owner};
use crate::keep::{HoldId, Store};
use crate::model::{DescId, Kind};
use crate::rebuild::Builder;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

/// A socket of the job.
type Socket = (DescId, UnixState);

/// What the refill needs beside the sockets themselves.
#[derive(Debug)]
pub(crate) struct UnixBuild {
    /// For a socket whose peer is not in the job: the other end, closed after the refill.
    pub(super) other_ends: HashMap<DescId, HoldId>,
    /// These.
    pub(super) ends: Store,
    /// For a connected socket: the description at the other end, where messages for it can be sent from without address.
    pub(super) peers: HashMap<DescId, DescId>,
}

/// Makes all `AF_UNIX` sockets of the job.
pub(crate) fn rebuild(b: &mut Builder<'_>) -> Result<UnixBuild, (DescId, Fault)> {
    let mut all: Vec<Socket> = Vec::new();
    for (id, d) in b.descriptors.descriptions.iter().enumerate() {
        if let Kind::Unix(u) = &d.kind {
            all.push((id, u.clone()));
        }
    }
    let by_ino: HashMap<u32, usize> = all.iter().enumerate().map(|(at, (_, u))| (u.ino, at)).collect();
    let mut waiting: HashMap<u32, usize> = HashMap::new();
    let mut build = UnixBuild {
        other_ends: HashMap::new(),
        ends: Store::new(0, RaisedLimit::highest()),
        peers: HashMap::new(),
    };
    let listening: Vec<&Socket> = all.iter().filter(|(_, l)| l.listening.is_some()).collect();
    for (at, (id, u)) in all.iter().enumerate() {
        if let Some((backlog, clients)) = &u.listening {
            let fd = listener(u, *backlog).map_err(|e| (*id, e))?;
            b.put(*id, fd).map_err(|e| (*id, e))?;
            waiting.extend(clients.iter().map(|c| (*c, at)));
        }
    }
    for (id, u) in &all {
        if b.has(*id) || waiting.contains_key(&u.ino) {
            continue;
        }
        connected(b, &mut build, (&all, &listening), &by_ino, *id, u).map_err(|e| (*id, e))?;
    }
    for (listener_id, l) in &all {
        for client in l.listening.iter().flat_map(|(_, clients)| clients) {
            let Some((id, u)) = by_ino.get(client).map(|at| &all[*at]) else {
                continue; // A client outside the job: gone.
            };
            let fd = waiting_client(u, &l.name).map_err(|e| (*listener_id, e))?;
            b.put(*id, fd).map_err(|e| (*id, e))?;
        }
    }
    rename(&all)?;
    Ok(build)
}

/// Renames the files that had other names than their sockets, and removes those that were gone, now that nobody needs to connect through them.
fn rename(all: &[Socket]) -> Result<(), (DescId, Fault)> {
    let shown: HashSet<_> = all
        .iter()
        .filter_map(|(_, o)| Some((&o.name.0, &o.file.as_ref().filter(|f| f.exists)?.cwd)))
        .collect();
    for (id, u) in all {
        let (Some(file), Some(path)) = (&u.file, u.name.unix_path()) else {
            continue;
        };
        if shown.contains(&(&u.name.0, &file.cwd)) {
            continue;
        }
        let moved = in_directory(Some(file), || match &file.renamed {
            // Gone already where several sockets share the name.
            _ if !is_socket(&path) => Ok(()),
            Some(to) => rename_file(&path, to.as_path(), u.kind, file),
            None => {
                let _ = std::fs::remove_file(&path); // only a name too many
                Ok(())
            }
        });
        moved.at(format!("rename {}", u.name)).map_err(|e| (*id, e))?;
    }
    Ok(())
}

fn rename_file(from: &Path, to: &Path, kind: i32, file: &BoundFile) -> io::Result<()> {
    if fd::stat(to, false).is_ok() && !is_stale(kind, to, &Addr::unix(to))? {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    owner::give_path(from, libc::S_IFSOCK, file.owner, file.mode)?;
    std::fs::rename(from, to)
}

/// A listening socket.
fn listener(u: &UnixState, backlog: u32) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(libc::AF_UNIX, u.kind, 0).at("socket")?;
    bind(fd.as_raw_fd(), &u.name, u.file.as_ref())?;
    sock::listen(fd.as_raw_fd(), i32::try_from(backlog).unwrap_or(i32::MAX)).at("listen")?;
    Ok(fd)
}

/// A client whose connection waits to be accepted.
fn waiting_client(u: &UnixState, to: &Addr) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(libc::AF_UNIX, u.kind | libc::SOCK_NONBLOCK, 0).at("socket")?;
    bind(fd.as_raw_fd(), &u.name, u.file.as_ref())?;
    connect(fd.as_raw_fd(), to, None).at(format!("connect to {to}"))?;
    Ok(fd)
}

/// A socket that is neither listening nor waiting: with its peer where that is in the job.
fn connected(
    b: &mut Builder<'_>,
    build: &mut UnixBuild,
    (all, listening): (&[Socket], &[&Socket]),
    by_ino: &HashMap<u32, usize>,
    id: DescId,
    u: &UnixState,
) -> Result<(), Fault> {
    let peer = match u.peer {
        Peer::Inode(ino) => by_ino.get(&ino).map(|at| &all[*at]),
        Peer::None | Peer::Gone => None,
    };
    let mutual = peer.filter(|(_, p)| p.peer == Peer::Inode(u.ino));
    let pairs = u.kind != libc::SOCK_DGRAM;
    match (mutual, u.peer) {
        (Some((other, p)), _) if pairs || u.name.is_unnamed() || p.name.is_unnamed() => {
            let (a, c) = if pairs {
                pair(b, listening, u, Some(p))?
            } else {
                bound_pair(u, Some(p))?
            };
            b.put(id, a)?;
            b.put(*other, c)?;
            build.peers.insert(id, *other);
            build.peers.insert(*other, id);
        }
        (None, Peer::Gone | Peer::Inode(_)) if pairs => {
            let (a, c) = pair(b, listening, u, None)?;
            b.put(id, a)?;
            build.other_ends.insert(id, b.hold_in(&mut build.ends, c)?);
        }
        (None, Peer::Gone) => {
            let (a, c) = bound_pair(u, None)?;
            b.put(id, a)?;
            build.other_ends.insert(id, b.hold_in(&mut build.ends, c)?);
        }
        _ => {
            let fd = sock::socket(libc::AF_UNIX, u.kind, 0).at("socket")?;
            bind(fd.as_raw_fd(), &u.name, u.file.as_ref())?;
            b.put(id, fd)?;
        }
    }
    Ok(())
}

/// A pair from `socketpair`, then bound: datagram sockets may each have a name of their own.
fn bound_pair(u: &UnixState, p: Option<&UnixState>) -> Result<(OwnedFd, OwnedFd), Fault> {
    let (a, c) = sock::pair(u.kind).at("socketpair")?;
    bind(a.as_raw_fd(), &u.name, u.file.as_ref())?;
    if let Some(p) = p {
        bind(c.as_raw_fd(), &p.name, p.file.as_ref())?;
    }
    Ok((a, c))
}

/// A connected pair of stream or seqpacket sockets: (`u`, its peer).
fn pair(b: &Builder<'_>, listening: &[&Socket], u: &UnixState, p: Option<&UnixState>) -> Result<(OwnedFd, OwnedFd), Fault> {
    let of_listener = |name: &Addr| {
        listening
            .iter()
            .find(|(id, l)| l.kind == u.kind && l.name == *name && !name.is_unnamed() && b.has(*id))
            .map(|(id, _)| *id)
    };
    let peer_named = p.is_some_and(|p| !p.name.is_unnamed());
    let serves = |s: &UnixState| of_listener(&s.name).is_some();
    if u.name.is_unnamed() && !peer_named {
        return sock::pair(u.kind).at("socketpair");
    }
    // The accepted side is the one whose name belongs to a listener; without one, the side that has a name.
    let u_serves = serves(u) || (!u.name.is_unnamed() && !p.is_some_and(|p| serves(p) || (peer_named && u.name.is_unnamed())));
    let (server, client) = if u_serves { (u, p) } else { (p.unwrap_or(u), Some(u)) };
    let own = of_listener(&server.name);
    let temporary = match own {
        Some(_) => None,
        None => Some(listener(server, 1)?),
    };
    let own = own.map_or(Ok(None), |id| b.lend(id))?;
    let at = match (&own, &temporary) {
        (Some(own), _) => own.raw(),
        (None, Some(t)) => t.as_raw_fd(),
        (None, None) => return refuse("no listener to connect to"),
    };
    let c = sock::socket(libc::AF_UNIX, server.kind, 0).at("socket")?;
    if let Some(client) = client {
        bind(c.as_raw_fd(), &client.name, client.file.as_ref())?;
    }
    let name = sock::local(at).at("read a name")?;
    connect(c.as_raw_fd(), &name, server.file.as_ref()).at(format!("connect to {name}"))?;
    let s = sock::accept(at).at("accept")?;
    Ok(if u_serves { (s, c) } else { (c, s) })
}

/// `connect`, in the directory to which a relative name belongs.
pub(super) fn connect(raw: RawFd, to: &Addr, file: Option<&BoundFile>) -> io::Result<()> {
    in_directory(file, || sock::connect(raw, to))
}

/// Runs `f` in the directory to which a relative socket name belongs.
fn in_directory<T>(file: Option<&BoundFile>, f: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(dir) = file.and_then(|f| f.cwd.as_ref()) else {
        return f();
    };
    let here = std::env::current_dir()?;
    std::env::set_current_dir(dir.as_path())?;
    let done = f();
    std::env::set_current_dir(here)?;
    done
}

/// Gives a socket its name. A file that a dead socket has left under that name is replaced.
pub(super) fn bind(raw: RawFd, name: &Addr, file: Option<&BoundFile>) -> Result<(), Fault> {
    if name.is_unnamed() {
        return Ok(());
    }
    let Some(file) = file else {
        return sock::bind(raw, name).at(format!("bind {name}"));
    };
    make_parents(&file.parents)?;
    let bound = in_directory(Some(file), || bind_file(raw, name, file));
    bound.at(format!("bind {name}"))
}

fn bind_file(raw: RawFd, name: &Addr, file: &BoundFile) -> io::Result<()> {
    let path = name.unix_path().ok_or(io::ErrorKind::InvalidInput)?;
    match sock::bind(raw, name) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_stale(kind_of(raw)?, &path, name)? => {
            std::fs::remove_file(&path)?;
            sock::bind(raw, name)?;
        }
        bound => bound?,
    }
    if file.exists {
        owner::give_path(&path, libc::S_IFSOCK, file.owner, file.mode)?;
    }
    Ok(())
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
