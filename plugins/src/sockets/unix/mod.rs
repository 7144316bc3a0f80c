//! `AF_UNIX` sockets: stream, datagram and seqpacket, with descriptors in flight.
//!
//! Peers are found with the kernel's socket diagnosis, queues are read with MSG_PEEK at increasing SO_PEEK_OFF, so
//! nothing is consumed.

mod apart;
mod caller;
mod capture;
mod elsewhere;
mod gate;
mod places;
mod rebuild;
mod refill;

use super::options::Options;
use crate::builder::Builder;
use crate::fault::{refuse, Fault, Refusal};
use crate::files::path;
use crate::kind::{nothing, Candidate, Kind, Look, NoPart, Ways};
use crate::model::{DescId, Descriptors, Directory, FsPath};
use crate::session::Session;
use crate::sys::sock::Addr;
use belay_image::blobs::BlobRef;
use caller::Caller;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The kind.
pub(crate) struct Unix;

impl Kind for Unix {
    const NAME: &'static str = "Unix";
    const VERSION: u32 = 1;
    type State = UnixState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Socket(libc::AF_UNIX, ..))
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<UnixState, Fault> {
        let Look::Socket(_, kind, _) = seen.look else {
            return refuse("is no socket");
        };
        capture::capture(s, (seen.id, seen.raw()), kind)
    }

    fn check(u: &UnixState, d: &Descriptors) -> Result<(), String> {
        let carried = u.queue.iter().flat_map(|m| &m.fds);
        carried.into_iter().try_for_each(|id| d.is_description(*id))
    }

    fn ways(d: &Descriptors, out: &mut Ways) {
        for (_, u) in d.each::<UnixState>() {
            out.places.extend(u.places());
            out.parents.extend(u.file.iter().flat_map(|f| f.parents.iter().cloned()));
            out.peers.extend(u.peer_place());
        }
    }

    fn join(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let made = rebuild::rebuild(b).map_err(|(id, e)| b.descriptors.refusal(id, &e))?;
        b.sets.put(made);
        Ok(())
    }

    fn refill(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let Some(made) = b.sets.take() else { return Ok(()) };
        let files = refill::refill(b, made).map_err(|(id, e)| b.descriptors.refusal(id, &e))?;
        path::open_sockets(b, &files).map_err(|(id, e)| b.descriptors.refusal(id, &e))
    }

    nothing!(survey, finish, contents, check_part, numbers, prepare, rebuild);
    nothing!(install, install_late, settle, install_own, complete);
}

/// One socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UnixState {
    /// Its inode, by which sockets find each other.
    pub(crate) ino: u32,
    /// `SOCK_*`.
    pub(crate) kind: i32,
    /// Its name.
    pub(crate) name: Addr,
    /// The file it is bound to.
    pub(crate) file: Option<BoundFile>,
    /// Whether and to whom it is connected.
    pub(crate) peer: Peer,
    /// Its peer's name.
    pub(crate) peer_name: Addr,
    /// For a listening socket: backlog limit and inodes of the clients that wait, in order.
    pub(crate) listening: Option<(u32, Vec<u32>)>,
    /// Bit 0: no more reading, bit 1: no more writing.
    pub(crate) shutdown: u8,
    /// What it has received and not read, in order.
    pub(crate) queue: Vec<Message>,
    /// Options.
    pub(crate) options: Options,
    /// Its peer was closed with data unread, of which it has not been told yet.
    #[serde(default)]
    pub(crate) reset: bool,
    /// For a datagram socket: the file by which its peer was reached.
    #[serde(default)]
    pub(crate) peer_file: Option<PeerFile>,
    /// Who is told to be at the other end; for a listening socket, who listens.
    #[serde(default)]
    pub(crate) caller: Option<Caller>,
    /// For a listening socket: who each of the clients that wait is told to be.
    #[serde(default)]
    pub(crate) waiting: Vec<Option<Caller>>,
}

impl UnixState {
    /// Whether anybody who knows its name can send to it, as far as its peer lets them.
    fn can_be_sent_to(&self) -> bool {
        self.kind == libc::SOCK_DGRAM && !self.name.is_unnamed()
    }

    /// The paths that the file has to which it is bound, the last one at the end, and whose that is.
    fn places(&self) -> Vec<(PathBuf, u32)> {
        let (Some(file), Some(path)) = (&self.file, self.name.unix_path()) else {
            return Vec::new();
        };
        let path = file.at(&path);
        let to = file.to(&path);
        [path].into_iter().chain(to).map(|path| (path, file.owner.0)).collect()
    }

    /// Where its peer is looked for, and whose the file was there, if that is known. None: it has no file.
    fn peer_place(&self) -> Option<(PathBuf, Option<u32>)> {
        let path = self.peer_name.unix_path()?;
        Some(match (&self.peer_file, &self.file) {
            (Some(file), _) => (file.path.as_path().to_owned(), file.owner),
            (None, Some(own)) => (own.at(&path), None),
            (None, None) => (path, None),
        })
    }
}

/// The file by which a peer was reached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PeerFile {
    /// Where it was.
    path: FsPath,
    /// Whose it was, where it was the peer's.
    owner: Option<u32>,
}

/// Whether and to whom a socket is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Peer {
    /// Not connected.
    None,
    /// To the socket with this inode (in the job or not).
    Inode(u32),
    /// To one that has been closed, or has not been accepted yet.
    Gone,
}

/// The file of a bound socket.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct BoundFile {
    /// Directory to which a relative name belongs.
    pub(crate) cwd: Option<FsPath>,
    /// Whether the file still had that name.
    pub(crate) exists: bool,
    /// The name that it had instead, in the same directory: servers bind to a temporary name and rename.
    #[serde(default)]
    pub(crate) renamed: Option<FsPath>,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Owner and group.
    pub(crate) owner: (u32, u32),
    /// Directories above it.
    pub(crate) parents: Vec<Directory>,
}

impl BoundFile {
    /// Where `path`, the name to which it was bound, lies.
    fn at(&self, path: &Path) -> PathBuf {
        self.cwd
            .as_ref()
            .map_or_else(|| path.to_owned(), |cwd| cwd.as_path().join(path))
    }

    /// Where it lies in the end, when it was bound at `path` and has been renamed.
    fn to(&self, path: &Path) -> Option<PathBuf> {
        let to = self.renamed.as_ref()?.as_path().file_name()?;
        Some(path.with_file_name(to))
    }
}

/// A message in flight: a datagram, a packet, or a run of bytes of a stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Message {
    /// Data.
    pub(crate) data: BlobRef,
    /// Descriptions it carries.
    pub(crate) fds: Vec<DescId>,
    /// Name of its sender.
    pub(crate) from: Addr,
    /// User and group of its sender, where the receiver is told of them.
    #[serde(default)]
    pub(crate) whose: Option<(u32, u32)>,
}
