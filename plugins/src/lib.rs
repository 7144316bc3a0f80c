//! One module per kind of descriptor or shared object: capture, drain, rebuild, refill.
//!
//! [`capture`] runs in the agent while every process of the job is stopped and leaves the kernel's state as it found it. In the restarted job the
//! agent calls [`Rebuilder::rebuild`], forks the processes, and each of them calls the rest in this order:
//!
//! ```text
//! agent       rebuild                     every description, shared object and System V object exists, data in flight is back
//! leader      install_session(pid)        right after setsid(): controlling terminals inside the job
//! process     install(pid, keep)          descriptors at their numbers, everything else closed (fork children first: they do the same)
//! thread      install(tid), install_late  as for a process, where the thread has another table than its process, and before that has laid out its own
//! process     install_late(pid)           when all processes exist: pidfds, /proc files, signal owners, foreground groups
//! agent       finish, gates               when all memory is mapped: write seals, removal of System V segments; control pages; then drop the Rebuilder
//! ```

mod capture;
mod content;
mod epoll;
mod eventfd;
mod fault;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod gate;
mod group;
mod inotify;
mod install;
mod keep;
mod locks;
mod look;
mod model;
pub mod mpi;
mod mqueue;
mod pidfd;
mod pipes;
mod plausible;
mod rebuild;
mod renamed;
mod shm;
mod signalfd;
mod sockets;
mod spread;
mod sys;
mod tables;
mod terminals;
#[doc(hidden)]
pub mod testing;
mod timerfd;

use belay_abi::control::NAME;
use belay_image::blobs::{BlobReader, BlobWriter};
use belay_image::model::ObjectId;
pub use content::{PageSink, PageSource};
use fault::At;
pub use files::way::{check_path, Copies, Key, Sights, Stored};
use files::{FileObject, Origin};
use gate::Gates;
pub use group::{Facts, Group};
pub use keep::Fork;
pub use model::Descriptors;
use serde::{Deserialize, Serialize};
pub use sockets::names::{lead, Book, Names};
use std::collections::HashMap;
use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

/// A shared mapping of one process, as the capture flow found it in `/proc/PID/maps`.
#[derive(Debug, Clone)]
pub struct SharedMapping {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Offset of `start` in the object, bytes.
    pub offset: u64,
    /// `PROT_*` bits.
    pub prot: u32,
    /// Identity of the object.
    pub object: ObjectId,
    /// Name as `/proc/PID/maps` shows it, with " (deleted)" where the kernel appended it.
    pub name: OsString,
    /// Set for attached System V segments.
    pub sysv_shmid: Option<i32>,
}

/// One stopped process, as the plugins see it.
#[derive(Debug)]
pub struct ProcessView {
    /// Process identifier.
    pub pid: i32,
    /// A thread that lives, under whose number `/proc` shows descriptors and directories: the main thread, unless that has exited.
    pub task: i32,
    /// pidfd of that thread (for pidfd_getfd).
    pub pidfd: OwnedFd,
    /// Threads that do not use its descriptor table (`unshare(CLONE_FILES)`).
    pub apart: Vec<i32>,
    /// Working directories of threads that have their own (`unshare(CLONE_FS)`).
    pub standing: Vec<PathBuf>,
    /// The program's file.
    pub exe: PathBuf,
    /// Where its stack begins.
    pub stack: u64,
    /// Its shared mappings.
    pub shared: Vec<SharedMapping>,
    /// Files of its private mappings to which no path leads.
    pub private: Vec<ObjectId>,
}

/// What capture may use.
#[derive(Debug)]
pub struct CaptureEnv<'a> {
    /// All live processes of the job, stopped (ptrace-stopped by the calling thread).
    pub processes: &'a [ProcessView],
    /// Where byte strings go.
    pub blobs: &'a mut BlobWriter,
    /// Where contents of shared memory and files go.
    pub pages: &'a mut dyn PageSink,
    /// Save the contents of every open regular file, not only of those that would otherwise be lost.
    pub save_open_files: bool,
    /// When the job was launched: what has been made since then is its own work.
    pub launched: SystemTime,
    /// The other nodes of the job, where it has any: they capture at the same time.
    pub group: Option<&'a dyn Group>,
    /// What this node has been called since the job was launched.
    pub names: &'a Names,
    /// Does what only the processes themselves can do.
    pub inside: Option<&'a mut dyn Inside>,
}

/// What a stopped process can be made to do, without a trace in it afterwards.
pub trait Inside: std::fmt::Debug {
    /// Finds out what a process has registered for with `mq_notify`, and reads the queue. The registration is there afterwards, as the messages are.
    fn renew(&mut self, registration: &Registration) -> Result<Renewed, Refusal>;

    /// What process `pid` has noted down, to be carried out when it ends (SEM_UNDO), for semaphores of `set`, whose values these are.
    fn undo(&mut self, pid: i32, set: i32, values: &[u16]) -> Result<Vec<(u16, i16)>, Unreadable>;

    /// For each page of the `bytes` bytes at `address` in the memory of `task`'s process, bit 0: whether the mapped object has that page (`mincore`), in memory.
    fn resident(&mut self, task: i32, address: u64, bytes: u64) -> std::io::Result<Vec<u8>>;
}

/// Why [`Inside::undo`] has found out nothing.
#[derive(Debug, Clone)]
pub enum Unreadable {
    /// The process may not do what tells it.
    Forbidden(String),
    /// A step failed.
    Failed(String),
}

/// A registration for notification about a POSIX message queue, as the kernel shows it.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The process to be notified.
    pub pid: i32,
    /// A descriptor of the queue in that process.
    pub queue: RawFd,
    /// `sigev_notify`.
    pub how: i32,
    /// `sigev_signo`.
    pub signal: i32,
    /// Most messages in the queue.
    pub capacity: u32,
    /// Largest message, bytes.
    pub message_bytes: u32,
    /// Netlink sockets of the process.
    pub sockets: Vec<RawFd>,
}

/// What [`Inside::renew`] has found out.
#[derive(Debug, Clone)]
pub struct Renewed {
    /// `sigev_notify` as it takes effect.
    pub how: i32,
    /// What the signal carries.
    pub value: u64,
    /// The socket that is told, and what it is sent.
    pub socket: RawFd,
    /// See `socket`.
    pub cookie: Vec<u8>,
    /// (priority, text), in the order in which they will be received.
    pub messages: Vec<(u32, Vec<u8>)>,
    /// How many of them, the last ones, are not in the queue again, because a program outside the job has filled it.
    pub unsent: usize,
}

/// Something that cannot be checkpointed or restarted, with the reason.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[error("process {pid}: {object}: {reason}")]
pub struct Refusal {
    /// Process, 0 where the object belongs to no particular one.
    pub pid: i32,
    /// The object, for example `fd 7 (anon_inode:[io_uring])`.
    pub object: String,
    /// Why not, and what to do.
    pub reason: String,
    /// Whether the reason passes by itself when the program runs on for a moment.
    #[serde(default)]
    pub passing: bool,
    /// Whether the reason is damage of the image.
    #[serde(default)]
    pub damage: bool,
}

/// Captures all descriptors and shared objects. On return, the kernel's state is what it was before: the processes may go on.
pub fn capture(env: CaptureEnv<'_>) -> Result<Descriptors, Vec<Refusal>> {
    capture::capture(env)
}

/// Looks, before a restart begins and before it enters any namespace, at the files that it is going to open, write or make by their paths: what another user may have put there since is refused.
/// A file that is only read need not be there where it is `stored`.
pub fn look(descriptors: &Descriptors, stored: &Stored<'_>) -> Result<Sights, Refusal> {
    files::way::look(descriptors, stored)
}

/// Rebuilds descriptors and shared objects in a restarted job.
///
/// A process forked from the agent inherits the value; it must end by `execve`, `_exit` or by replacing its memory, never by dropping
/// it, because the descriptors it owns have been closed by `install`.
#[derive(Debug)]
pub struct Rebuilder {
    descriptors: Descriptors,
    sights: Sights,
    built: rebuild::Built,
    /// Descriptors handed out by [`Rebuilder::shared_fd`], by file and whether they allow writing.
    shared: Mutex<HashMap<(usize, bool), OwnedFd>>,
}

impl Rebuilder {
    /// Called in the agent of the restarted job, before any process is forked: creates every open description, every shared object and
    /// System V segment, and refills data in flight. What the agent holds is at numbers in [`Rebuilder::room`]; where that would be more than one process may, further ones made by `fork`, at most
    /// [`Descriptors::keepers`], hold it until the value is dropped. `own_ipc`: the IPC namespace is the job's own. `tell` is given a line for the user where the restart must wait for something.
    /// `sights` are what [`look`] has found before, `copies` of what it has found stored.
    pub fn rebuild(
        (descriptors, sights): (Descriptors, &Sights),
        (blobs, pages, copies): (&BlobReader, &dyn PageSource, &Copies<'_>),
        own_ipc: bool,
        group: Option<&dyn Group>,
        (tell, fork): (&dyn Fn(&str), &mut Fork<'_>),
    ) -> Result<Self, Refusal> {
        if own_ipc {
            shm::sysv::owns_namespace(&descriptors.sysv);
        }
        let built = rebuild::rebuild((&descriptors, sights), (blobs, pages, copies), group, (tell, fork))?;
        Ok(Self {
            descriptors,
            sights: sights.clone(),
            built,
            shared: Mutex::new(HashMap::new()),
        })
    }

    /// Makes `path` the working directory, which must be the one that [`look`] has found.
    pub fn enter(&self, path: &Path) -> Result<(), Refusal> {
        let entered = || {
            std::env::set_current_dir(path).at("enter it")?;
            self.sights.at(path).is(&sys::fd::stat(Path::new("."), true).at("stat")?)
        };
        entered().map_err(|e: fault::Fault| e.of(0, format!("working directory {}", path.display())))
    }

    /// Numbers that no process of the job uses for a descriptor. Descriptors to be kept across [`Rebuilder::install`] must be among them.
    pub fn room(&self) -> Range<RawFd> {
        self.built.room.clone()
    }

    /// Descriptor through which a shared mapping of `object` is made, opened for writing where `may_write` is set. Call it in the agent; it stays
    /// open as long as the `Rebuilder`, at a number in [`Rebuilder::room`], and is inherited by processes forked later.
    pub fn shared_fd(&self, object: ObjectId, may_write: bool) -> Option<RawFd> {
        let at = self.descriptors.files.iter().position(|f| f.ids.contains(&object))?;
        let mut shared = self.shared.lock().ok()?;
        if let Some(fd) = shared.get(&(at, may_write)) {
            return Some(fd.as_raw_fd());
        }
        let flags = if may_write { libc::O_RDWR } else { libc::O_RDONLY };
        let opened = self.built.files.get(at)?.open(flags, &self.built.made);
        match opened.and_then(|fd| rebuild::lift(fd, &self.room())) {
            Ok(fd) => {
                let raw = fd.as_raw_fd();
                shared.insert((at, may_write), fd);
                Some(raw)
            }
            Err(error) => {
                tracing::error!(%error, ?object, "could not open a shared object");
                None
            }
        }
    }

    /// The gates of the processes that have these mappings, each of an object from its first byte on. Call it in the agent after [`Rebuilder::finish`].
    pub fn gates(&self, mappings: impl Iterator<Item = (i32, ObjectId)>) -> Result<Gates, Refusal> {
        let named =
            |f: &&FileObject| matches!(f.origin, Origin::Memfd { .. }) && f.path.0.as_os_str().as_bytes() == NAME.to_bytes();
        let may_be: Vec<ObjectId> = self
            .descriptors
            .files
            .iter()
            .filter(named)
            .flat_map(|f| f.ids.clone())
            .collect();
        let pages = mappings.filter(|(_, object)| may_be.contains(object));
        let files = pages.filter_map(|(pid, object)| {
            let fd = self.shared_fd(object, true)?;
            // SAFETY: it stays open as long as `self`.
            Some((pid, unsafe { BorrowedFd::borrow_raw(fd) }))
        });
        Gates::of_restart(files)
    }

    /// The process whose descriptor table `pid` shares (CLONE_FILES), `pid` itself where it has its own. The owner must be created first.
    pub fn table_owner(&self, pid: i32) -> i32 {
        self.descriptors.table(pid).map_or(pid, |t| t.pids[0])
    }

    /// Whether two processes have noted down together what is to be undone for semaphores (CLONE_SYSVSEM).
    pub fn share_undo(&self, pid: i32, other: i32) -> bool {
        self.descriptors.sysv.share_undo(pid, other)
    }

    /// The thread for which the table of thread `tid` of process `pid` is laid out; `None` where it uses that of its process. The others of its users are made by that thread.
    pub fn thread_table(&self, pid: i32, tid: i32) -> Option<i32> {
        let own = (tid != pid).then(|| self.descriptors.table(tid)).flatten();
        own.map(|t| t.pids[0])
    }

    /// Called in session leader `pid` right after `setsid` and before [`Rebuilder::install`]: makes the job's own pseudo-terminal that controlled
    /// the session its controlling terminal again. Returns whether there was one.
    pub fn install_session(&self, pid: i32) -> Result<bool, Refusal> {
        terminals::take_session(&self.built.terminals, pid).map_err(|e| e.of(pid, "controlling terminal"))
    }

    /// Called in process `pid`, or in the thread of that number for which a table of its own is laid out, after its fork from the agent (before its memory is replaced): puts every descriptor at its number and closes all
    /// others except `keep`. Does what needs numbers or process identity (epoll interest lists, POSIX locks). Closing a kept descriptor of a file
    /// later releases the process's POSIX locks on that file, as always.
    pub fn install(&self, pid: i32, keep: &[RawFd]) -> Result<(), Refusal> {
        install::install(&self.descriptors, &self.built, pid, keep)
    }

    /// The POSIX locks of process `pid`, as descriptor and argument of F_SETLK. `install` sets them, but they must be set once more after any
    /// descriptor of a locked file has been closed.
    pub fn posix_locks(&self, pid: i32) -> Vec<(RawFd, libc::flock)> {
        locks::posix(&self.descriptors.posix_locks, pid)
    }

    /// Called in task `pid` when all processes of the job exist: pidfds, files in `/proc/PID`, F_SETOWN, foreground groups.
    pub fn install_late(&self, pid: i32) -> Result<(), Refusal> {
        install::install_late(&self.descriptors, pid)?;
        terminals::foreground(&self.descriptors.terminals, pid).map_err(|e| e.of(pid, "controlling terminal"))
    }

    /// Called in the agent when every process has mapped its memory: adds seals against writing, and marks System V segments for removal that
    /// were so at the checkpoint. Removes directories that had been deleted at the checkpoint. Closes terminals for whom they were closed.
    pub fn finish(&self) -> Result<(), Refusal> {
        self.built.scaffold.remove();
        for (object, built) in self.descriptors.files.iter().zip(&self.built.files) {
            built
                .seal(object, &self.built.made)
                .map_err(|e| e.of(0, format!("memfd {}", object.path)))?;
        }
        terminals::finish_rebuild(&self.descriptors.terminals, &self.built.terminals).map_err(|e| e.of(0, "terminal"))?;
        shm::sysv::remove_pending(&self.descriptors.sysv).map_err(|e| e.of(0, "System V segment"))
    }

    /// Whether descriptor `fd` of thread `tid` of process `pid` is a TCP socket that is connected, or was before its peer ended it.
    pub fn is_connected(&self, pid: i32, tid: i32, fd: RawFd) -> bool {
        let d = &self.descriptors;
        let table = d.table(tid).or_else(|| d.table(pid));
        let slot = table.and_then(|t| t.slots.iter().find(|s| s.fd == fd));
        let Some(slot) = slot else { return false };
        match d.descriptions.get(slot.desc).map(|d| &d.kind) {
            Some(model::Kind::Tcp(t)) => matches!(self.built.made.lend(slot.desc), Ok(Some(made)) if t.is_connected(made.raw())),
            _ => false,
        }
    }

    /// Where the addresses of the job are now.
    pub fn book(&self) -> &Book {
        &self.built.book
    }

    /// Notes taken at the checkpoint: what is not exactly as it was.
    pub fn notes(&self) -> &[String] {
        &self.descriptors.notes
    }
}
