//! Capture of a `AF_UNIX` socket.

use super::caller::Caller;
use super::{elsewhere, BoundFile, Message, Peer, PeerFile, UnixState};
use crate::fault::{not_now, At, Fault};
use crate::files::{owner, parents, without_deleted};
use crate::look::Look;
use crate::model::{DescId, FsPath, Holder, IN_FLIGHT};
use crate::session::{Found, Session};
use crate::sockets::{options, queue};
use crate::sys::{fd, sock};
use belay_kernel::proc::Status;
use std::collections::hash_map::{Entry, HashMap};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

/// Captures it with its queue.
pub(super) fn capture(s: &mut Session<'_>, (id, raw): (DescId, RawFd), kind: i32) -> Result<UnixState, Fault> {
    let holder = s.found[id].holder;
    let ino = u32::try_from(s.found[id].stat.st_ino).map_err(|_| Fault::Refused("socket inode out of range".into()))?;
    let info = s.diag()?.unix(ino).at("ask the kernel for its peer (sock_diag)")?;
    let name = sock::local(raw).at("read its name")?;
    let peer_name = sock::peer(raw).at("read its peer's name")?.unwrap_or_default();
    let accepts = sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_ACCEPTCONN).at("read its state")? != 0;
    let options = options::of(s, (id, raw), false)?;
    let waiting = if accepts { pending(s, &info.pending)? } else { Vec::new() };
    let listening = accepts.then(|| (info.backlog, info.pending.clone()));
    let reset = queue::has_failed(raw)?;
    let queue = if accepts { Vec::new() } else { queue(s, raw, kind, holder)? };
    let task = s.task_of(holder.pid);
    let peer_file = match info.peer {
        Some(peer) if kind == libc::SOCK_DGRAM => peer_file(s, (peer, &peer_name), task)?,
        _ => None,
    };
    Ok(UnixState {
        ino,
        kind,
        file: bound_file(s, (raw, &name), info.file, task),
        name,
        peer: match info.peer {
            None => Peer::None,
            Some(0) => Peer::Gone,
            Some(p) => Peer::Inode(p),
        },
        peer_name,
        listening,
        shutdown: info.shutdown,
        queue,
        options,
        reset,
        peer_file,
        caller: Caller::told_by(raw)?,
        waiting,
    })
}

/// The file by which the socket with inode `peer` is reached under `name`, in the working directory of `task`.
fn peer_file(s: &mut Session<'_>, (peer, name): (u32, &sock::Addr), task: i32) -> Result<Option<PeerFile>, Fault> {
    let Some(name) = name.unix_path() else { return Ok(None) };
    let cwd = fd::readlink(Path::new(&format!("/proc/{task}/cwd"))).unwrap_or_default();
    let path = cwd.join(name);
    let owner = match fd::stat(&path, true) {
        Ok(stat) if [0, owner::me()].contains(&stat.st_uid) => Some(stat.st_uid),
        // Whoever it is may have put it there since.
        Ok(stat) => {
            let known = s
                .diag()?
                .unix(peer)
                .at("ask the kernel for the file of its peer (sock_diag)")?;
            (known.file == Some(stat.st_ino as u32)).then_some(stat.st_uid)
        }
        Err(_) => None,
    };
    Ok(Some(PeerFile {
        path: FsPath(path),
        owner,
    }))
}

/// Refuses connections that wait to be accepted and already carry data: it could be read only by accepting them, which
/// cannot be undone. Returns who has made each, where that is in the job.
fn pending(s: &mut Session<'_>, clients: &[u32]) -> Result<Vec<Option<Caller>>, Fault> {
    let (mut callers, mut seen) = (Vec::new(), Callers::new());
    for ino in clients {
        if *ino == 0 {
            return not_now("a connection waits to be accepted whose client has gone; what it sent cannot be read before that");
        }
        let found = socket(s, *ino);
        callers.push(found.map_or(Ok(None), |(_, _, id)| connector(s, id, &mut seen))?);
        if let Some((pid, number, id)) = found {
            let queued = fd::unsent_bytes(s.take(id)?.raw()).at("ask for unread data (SIOCOUTQ)")?;
            if queued > 0 {
                return not_now(format!(
                    "a connection waits to be accepted with data in it (from process {pid}, fd {number}), which cannot be read before that"
                ));
            }
        }
    }
    Ok(callers)
}

/// Who each process is, that has been looked at.
type Callers = HashMap<i32, Option<Caller>>;

/// Who has connected socket `id`: whoever has made it, and has it. That is told to who accepts the connection, so it must
/// not be guessed where a process has changed its user since.
fn connector(s: &Session<'_>, id: DescId, seen: &mut Callers) -> Result<Option<Caller>, Fault> {
    let tables = s.tables.iter().filter(|t| t.slots.iter().any(|slot| slot.desc == id));
    let mut first = None;
    for pid in tables.flat_map(|t| &t.pids) {
        let caller = match seen.entry(*pid) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Caller::of(&Status::read(s.task_of(*pid)).at("read its user")?)),
        };
        let is_maker = caller.as_ref().is_some_and(|c| c.user() == s.found[id].stat.st_uid);
        if owner::me() == 0 && !is_maker {
            return not_now(format!(
                "a connection waits to be accepted, and as which user process {pid} has made it cannot be told before that"
            ));
        }
        first = first.or_else(|| caller.clone());
    }
    Ok(first)
}

/// The socket with inode `ino`, and who has it under which number.
fn socket(s: &Session<'_>, ino: u32) -> Option<(i32, i32, DescId)> {
    let is_socket = |f: &Found| f.stat.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    let all = s
        .tables
        .iter()
        .flat_map(|t| t.slots.iter().map(|slot| (t.pids[0], slot.fd, slot.desc)));
    all.into_iter()
        .find(|(_, _, id)| is_socket(&s.found[*id]) && s.found[*id].stat.st_ino == u64::from(ino))
}

/// A working directory without the mark of a deleted one.
fn existing(shown: PathBuf) -> PathBuf {
    match fd::stat(&shown, false) {
        Ok(_) => shown,
        Err(_) => without_deleted(&shown).to_owned(),
    }
}

fn bound_file(s: &mut Session<'_>, (raw, name): (RawFd, &sock::Addr), ino: Option<u32>, task: i32) -> Option<BoundFile> {
    let path = name.unix_path()?;
    let mut cwd = match path.is_relative() {
        true => fd::readlink(Path::new(&format!("/proc/{task}/cwd"))).ok().map(existing),
        false => None,
    };
    let at = |cwd: &Option<PathBuf>| cwd.as_ref().map_or_else(|| path.clone(), |c| c.join(&path));
    let is_it = |path: &Path| fd::stat(path, false).ok().filter(|st| Some(st.st_ino as u32) == ino);
    let mut full = at(&cwd);
    let (mut stat, mut renamed) = (is_it(&full), None);
    let mut exists = stat.is_some();
    if let (None, Some(ino)) = (&stat, ino) {
        if let Some(now) = s.renamed.of_socket(&full, ino) {
            stat = is_it(&now);
            renamed = now.file_name().map(|name| FsPath(path.with_file_name(name)));
        } else if let Some(left) = cwd.as_ref().and_then(|_| elsewhere::directory(s, raw, &path, ino)) {
            cwd = Some(left);
            full = at(&cwd);
            stat = is_it(&full);
            exists = stat.is_some();
        }
    }
    Some(BoundFile {
        cwd: cwd.map(FsPath),
        exists,
        renamed,
        mode: stat.as_ref().map_or(0o755, |st| st.st_mode & 0o7777),
        owner: stat.as_ref().map_or((0, 0), |st| (st.st_uid, st.st_gid)),
        parents: parents(&full),
    })
}

/// The queue, with descriptors in flight added to the session.
fn queue(s: &mut Session<'_>, raw: i32, kind: i32, holder: Holder) -> Result<Vec<Message>, Fault> {
    let mut out = Vec::new();
    for m in queue::peek(raw, kind)? {
        let data = s.blobs.put(&m.data)?;
        let in_flight = Holder {
            pid: holder.pid,
            fd: IN_FLIGHT,
        };
        let fds = m
            .fds
            .into_iter()
            .map(|fd| s.intern(Look::of_own(fd.as_raw_fd())?, Some(fd), in_flight))
            .collect::<Result<Vec<_>, _>>()?;
        out.push(Message {
            data,
            fds,
            from: m.from,
            whose: m.creds.map(|c| (c.uid, c.gid)),
        });
    }
    Ok(out)
}
