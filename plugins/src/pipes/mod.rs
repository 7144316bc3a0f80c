//! Pipes and FIFOs: data in flight, capacity, packet mode.
//!
//! Data is copied with `tee(2)` into a pipe of the agent's own, so the job's pipe is never read.

mod packets;

use crate::builder::Builder;
use crate::fault::{refuse, At, Fault, Refusal};
use crate::files::owner::{self, Belongs};
use crate::files::{make_beside, parents, without_deleted, Sights};
use crate::kind::{nothing, Candidate, Kind, Look, Ways};
use crate::model::{DescId, Description, Descriptors, Directory, FsPath};
use crate::session::Session;
use crate::state::Part;
use crate::sys::fd;
use belay_image::blobs::{BlobReader, BlobRef};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// As the kernel knows it; the C library of 64-bit programs calls it 0.
const O_LARGEFILE: i32 = 0o100_000;

/// One pipe.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PipeObject {
    /// File of a FIFO.
    fifo: Option<Fifo>,
    /// Capacity in bytes.
    capacity: i32,
    /// Data in flight, each packet a piece of its own.
    data: Vec<BlobRef>,
    /// Whether pieces are packets.
    packets: bool,
    /// Those pieces that are none even so.
    #[serde(default)]
    streams: Vec<usize>,
    /// Of a FIFO: nobody has opened it for writing since its readers have opened it, so they see no hang-up.
    #[serde(default)]
    unwritten: bool,
    /// Of a FIFO without writers: those readers who see no hang-up, as they have opened it since, where others see one.
    #[serde(default)]
    since: Vec<DescId>,
    /// Of one without a name: whose it is.
    #[serde(default)]
    belongs: Option<Belongs>,
}

impl Part for Vec<PipeObject> {
    const KEY: &'static str = "pipes";
}

/// A description of an end: which of the pipes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct End(pub(crate) usize);

/// Name of a FIFO.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Fifo {
    path: FsPath,
    mode: u32,
    owner: (u32, u32),
    deleted: bool,
    parents: Vec<Directory>,
}

/// The pipes found so far.
#[derive(Debug, Default)]
pub(crate) struct PipeSet {
    by_id: HashMap<(u64, u64), usize>,
    ends: Vec<Vec<DescId>>,
}

/// The kind.
pub(crate) struct Pipes;

impl Kind for Pipes {
    const NAME: &'static str = "Pipe";
    const VERSION: u32 = 2;
    type State = End;
    type Part = Vec<PipeObject>;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Fifo)
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<End, Fault> {
        let stat = &s.found[seen.id].stat;
        let set: &mut PipeSet = s.sets.of();
        let at = *set.by_id.entry((stat.st_dev, stat.st_ino)).or_insert_with(|| {
            set.ends.push(Vec::new());
            set.ends.len() - 1
        });
        set.ends[at].push(seen.id);
        Ok(End(at))
    }

    /// Reads the data in flight, when all ends are known.
    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        let set: PipeSet = s.sets.take().unwrap_or_default();
        let out: &mut Vec<PipeObject> = out.parts.of();
        for ends in &set.ends {
            match object(s, ends) {
                Ok(o) => out.push(o),
                Err(e) => {
                    let first = &s.found[ends[0]];
                    return refusals.push(e.of(first.holder.pid, first.link.display().to_string()));
                }
            }
        }
    }

    fn check(End(at): &End, d: &Descriptors) -> Result<(), String> {
        Descriptors::is_one_of(*at, d.list::<PipeObject>())
    }

    fn ways(d: &Descriptors, out: &mut Ways) {
        for f in d.list::<PipeObject>().iter().filter_map(|p| p.fifo.as_ref()) {
            out.places.push((f.path.0.clone(), f.owner.0));
            out.parents.extend(f.parents.iter().cloned());
        }
    }

    /// Makes all pipes with their descriptions, the large ones first: while a user has few pages in pipes, what a new
    /// one may have is not less than it had.
    fn prepare(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let d = b.descriptors;
        let objects = d.list::<PipeObject>();
        let mut ends: Vec<Vec<DescId>> = objects.iter().map(|_| Vec::new()).collect();
        for (id, End(at)) in d.each() {
            if let Some(ends) = ends.get_mut(*at) {
                ends.push(id);
            }
        }
        let mut all: Vec<(&PipeObject, Vec<DescId>)> = objects.iter().zip(ends).collect();
        all.sort_by_key(|(object, _)| std::cmp::Reverse(object.capacity));
        for (object, mut ends) in all {
            // Opened behind the last writer, they see no hang-up.
            ends.sort_by_key(|id| object.since.contains(id));
            let mut built = prepare(object, b.sights, b.blobs).map_err(|e| match ends.first() {
                Some(id) => d.refusal(*id, &e),
                None => e.of(0, "pipe"),
            })?;
            let first = ends.first().copied();
            for id in ends {
                if object.since.contains(&id) {
                    built.write = None;
                }
                let opened = built.open(&d.descriptions[id]).and_then(|fd| b.put(id, fd));
                opened.map_err(|e| d.refusal(id, &e))?;
            }
            // When all ends are open: the mode may forbid it.
            if let (Some(belongs), Some(id)) = (object.belongs, first) {
                let given = belongs.give(built.read.as_raw_fd()).at("set its owner and mode");
                given.map_err(|e| d.refusal(id, &e))?;
            }
        }
        Ok(())
    }

    nothing!(survey, contents, check_part, numbers, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

fn object(s: &mut Session<'_>, ids: &[DescId]) -> Result<PipeObject, Fault> {
    let ends: Vec<_> = ids.iter().map(|id| &s.found[*id]).collect();
    let first = ends[0];
    let taken = s.take(ids[0])?;
    let raw = taken.raw();
    let has = |access: i32| ends.iter().any(|f| f.access() == access || f.access() == libc::O_RDWR);
    let (reads, writes) = (has(libc::O_RDONLY), has(libc::O_WRONLY));
    let fifo = fifo(first.link.as_path(), &first.stat);
    let what = match (&fifo, reads, writes) {
        (None, false, true) if fd::poll(raw, libc::POLLOUT).at("poll")? & libc::POLLERR == 0 => Some("read"),
        (None, true, false) if fd::poll(raw, libc::POLLIN).at("poll")? & libc::POLLHUP == 0 => Some("write"),
        _ => None,
    };
    let capacity = fd::pipe_size(raw).at("read its capacity")?;
    let reads = |id: &&DescId| s.found[**id].access() != libc::O_WRONLY;
    let pieces = match (ids.iter().find(reads), &fifo) {
        (Some(id), _) => packets::copy(s.take(*id)?.raw(), capacity)?,
        // Another program may yet open the FIFO for reading. To open it here wakes those that wait for a reader, so that
        // is done only where it must be.
        (None, Some(_)) if fd::readable_bytes(raw).at("ask how much it holds (FIONREAD)")? > 0 => {
            let reader = fd::reopen(raw, libc::O_RDONLY | libc::O_NONBLOCK).at("open it for reading")?;
            packets::copy(reader.as_raw_fd(), capacity)?
        }
        // What is in a pipe belongs to a reader outside the job, or to nobody.
        (None, _) => Vec::new(),
    };
    let quiet = match &fifo {
        Some(_) if !has(libc::O_WRONLY) => without_hangup(s, ids, pieces.is_empty())?,
        _ => Vec::new(),
    };
    let unwritten = quiet.len() == ids.len();
    let note = what.map(|what| {
        format!(
            "process {}: fd {}: the program outside the job that could {what} {} will be gone after a restart",
            first.holder.pid,
            first.holder.fd,
            first.link.display()
        )
    });
    let data = pieces.iter().map(|p| s.blobs.put(&p.data)).collect::<Result<Vec<_>, _>>()?;
    s.notes.extend(note);
    let streams = pieces.iter().enumerate().filter(|(_, p)| !p.packet).map(|(at, _)| at);
    let packets = pieces.iter().any(|p| p.packet);
    Ok(PipeObject {
        belongs: fifo.is_none().then(|| Belongs::from(&first.stat)),
        fifo,
        capacity,
        data,
        packets,
        streams: if packets { streams.collect() } else { Vec::new() },
        unwritten,
        since: if unwritten { Vec::new() } else { quiet },
    })
}

/// Those of these ends, which read a FIFO and of which none writes, that have seen no writer since they were opened.
fn without_hangup(s: &Session<'_>, ids: &[DescId], empty: bool) -> Result<Vec<DescId>, Fault> {
    let (mut quiet, mut writer) = (Vec::new(), false);
    for id in ids {
        let taken = s.take(*id)?;
        if fd::poll(taken.raw(), libc::POLLIN).at("poll")? & libc::POLLHUP == 0 {
            quiet.push(*id);
            // A program outside the job may write to it, which keeps the hang-up away.
            writer = writer || !empty || packets::has_writer(taken.raw())?;
        }
    }
    // Whoever sees a hang-up shows that there is none.
    Ok(if writer && quiet.len() == ids.len() {
        Vec::new()
    } else {
        quiet
    })
}

/// Name of the FIFO behind the link `shown`; `None` for a pipe.
fn fifo(shown: &Path, stat: &fd::Stat) -> Option<Fifo> {
    if shown.as_os_str().as_bytes().starts_with(b"pipe:[") {
        return None;
    }
    let here = fd::stat(shown, false).is_ok_and(|st| st.st_dev == stat.st_dev && st.st_ino == stat.st_ino);
    let path = if here { shown } else { without_deleted(shown) };
    Some(Fifo {
        path: FsPath::from(path),
        mode: stat.st_mode & 0o7777,
        owner: (stat.st_uid, stat.st_gid),
        deleted: !here,
        parents: parents(path),
    })
}

/// A pipe made again: descriptors of both directions, until every description has been opened.
struct BuiltPipe {
    read: OwnedFd,
    /// None where (further) readers are to see no writer: the kernel tells them of a hang-up when one has been there since.
    write: Option<OwnedFd>,
    /// Whether the ends themselves, as `pipe` makes them, are descriptions of the job already: (that for reading, that
    /// for writing).
    given: (Cell<bool>, Cell<bool>),
}

/// Makes the pipe and puts its data back.
fn prepare(object: &PipeObject, sights: &Sights, blobs: &BlobReader) -> Result<BuiltPipe, Fault> {
    let (read, write) = match &object.fifo {
        None => fd::pipe(libc::O_NONBLOCK).at("make a pipe")?,
        Some(f) => open_fifo(f, sights)?,
    };
    if fd::pipe_size(write.as_raw_fd()).at("read its capacity")? != object.capacity {
        match fd::set_pipe_size(write.as_raw_fd(), object.capacity) {
            // The user has too many pipes. It stays as small as the system makes a new one; what is in flight must fit.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                tracing::warn!(
                    capacity = object.capacity,
                    "a pipe is smaller than it was (pipe-user-pages-soft)"
                );
            }
            set => set.at("set its capacity")?,
        }
    }
    let is_packet = |at: usize| object.packets && at < object.data.len() && !object.streams.contains(&at);
    for (at, piece) in object.data.iter().enumerate() {
        let data = blobs.get(piece)?;
        packets::put(write.as_raw_fd(), &data, is_packet(at), is_packet(at + 1))?;
    }
    let opened = object.fifo.is_some();
    Ok(BuiltPipe {
        read,
        write: (!object.unwritten).then_some(write),
        given: (Cell::new(opened), Cell::new(opened)),
    })
}

fn open_fifo(f: &Fifo, sights: &Sights) -> Result<(OwnedFd, OwnedFd), Fault> {
    let path = f.path.as_path();
    let above = sights.make(&f.parents, sights.at(path))?.above(path)?;
    let make = |name: &Path| fd::mkfifo_at(&above, name);
    let (fresh, path) = match make(path) {
        Ok(()) => (true, path.to_owned()),
        // Its name belongs to something else now, for which it must not be taken.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && f.deleted => (true, make_beside(&above, path, make)?.1),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => (false, path.to_owned()),
        Err(e) => return Err(e).at("make the FIFO again"),
    };
    let fifo = if fresh {
        let fifo = fd::find_at(&above, &path).at("look for it")?;
        owner::give_made(&fifo, libc::S_IFIFO, Some(f.owner), f.mode, false).at("set its owner and mode")?;
        fifo
    } else {
        fd::find_at(&above, &path).at("look for it")?
    };
    let stat = fd::fstat(fifo.as_raw_fd()).at("stat")?;
    if stat.st_mode & libc::S_IFMT != libc::S_IFIFO {
        return refuse("is not a FIFO any more; move it away");
    }
    if ![f.owner.0, owner::me()].contains(&stat.st_uid) {
        return refuse(format!("is a FIFO of user {} now; move it away", stat.st_uid));
    }
    let read = fd::reopen(fifo.as_raw_fd(), libc::O_RDONLY | libc::O_NONBLOCK).at("open it for reading")?;
    let write = fd::reopen(fifo.as_raw_fd(), libc::O_WRONLY | libc::O_NONBLOCK).at("open it for writing")?;
    if f.deleted {
        fd::unlink_at(&above, &path).at("delete it again")?;
    }
    Ok((read, write))
}

impl BuiltPipe {
    /// A new description on it.
    fn open(&self, d: &Description) -> Result<OwnedFd, Fault> {
        let access = d.flags & libc::O_ACCMODE;
        let (end, given) = match (access, &self.write) {
            (libc::O_RDONLY, _) => (&self.read, &self.given.0),
            (_, None) => return refuse("the image has a writer of a FIFO that nobody has opened for writing"),
            (libc::O_WRONLY, Some(write)) => (write, &self.given.1),
            _ => (&self.read, &self.given.0),
        };
        // What has been opened by name has this flag, an end from `pipe` has not, and it cannot be changed.
        let itself = d.flags & O_LARGEFILE == 0 && access != libc::O_RDWR && !given.replace(true);
        let fd = if itself {
            fd::dup_from(end.as_raw_fd(), 0).at("duplicate")?
        } else {
            fd::reopen(end.as_raw_fd(), access | libc::O_NONBLOCK).at("open")?
        };
        fd::set_flags(fd.as_raw_fd(), d.flags & !libc::O_ASYNC).at("set its flags")?;
        Ok(fd)
    }
}
