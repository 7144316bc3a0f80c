//! What the flow of a restart does with descriptors and shared objects, step by step.

use crate::builder::Built;
use crate::content::PageSource;
use crate::cuda::OffGpu;
use crate::fault::{At, Fault, Refusal};
use crate::files::path::PathState;
use crate::files::sight::{Copies, Sights};
use crate::files::{BuiltFile, FileObject, Origin};
use crate::gate::Gates;
use crate::group::Group;
use crate::keep::{lift, Fork};
use crate::kinds::KINDS;
use crate::limit::RaisedLimit;
use crate::model::Descriptors;
use crate::mqueue::QueueObject;
use crate::pidfd::PidfdState;
use crate::shm::sysv::{self, SysV};
use crate::sockets::names::Book;
use crate::sockets::tcp::TcpState;
use crate::sys::fd;
use crate::terminals::take_session;
use crate::{install, locks, rebuild};
use belay_abi::control::NAME;
use belay_image::blobs::BlobReader;
use belay_image::model::ObjectId;
use belay_kernel::numbers::lend;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;

impl Descriptors {
    /// What lives in an IPC namespace and not in processes, where the job has such objects.
    pub fn of_ipc_namespace(&self) -> Option<&'static str> {
        if self.parts.get::<SysV>().is_none_or(SysV::is_empty) {
            (!self.list::<QueueObject>().is_empty()).then_some("POSIX message queues")
        } else {
            Some("System V shared memory, semaphores or message queues")
        }
    }

    /// Whether the job writes the file at `path`, or the checkpoint holds its contents: then it need not look now as it did then.
    pub fn restores(&self, path: &Path) -> bool {
        let ours = |f: &FileObject| f.origin == Origin::Named && (f.written || f.content.is_some());
        self.list::<FileObject>().iter().any(|f| f.path.as_path() == path && ours(f))
    }

    /// Numbers that no process of the job uses for a descriptor, in an agent that may have as many as its hard limit allows.
    pub fn room(&self) -> Range<RawFd> {
        rebuild::room(self, RaisedLimit::highest())
    }

    /// How many processes [`Rebuilder::rebuild`] makes at most.
    pub fn keepers(&self) -> usize {
        rebuild::keepers(self)
    }
}

/// Rebuilds descriptors and shared objects in a restarted job.
///
/// A process forked from the agent inherits the value; it must end by `execve`, `_exit` or by replacing its memory,
/// never by dropping it, because the descriptors it owns have been closed by `install`.
#[derive(Debug)]
pub struct Rebuilder {
    descriptors: Descriptors,
    sights: Sights,
    built: Built,
    /// Descriptors handed out by [`Rebuilder::shared_fd`], by file and whether they allow writing.
    shared: Mutex<HashMap<(usize, bool), OwnedFd>>,
}

impl Rebuilder {
    /// Called in the agent of the restarted job, before any process is forked: creates every open description, every
    /// shared object and System V segment, and refills data in flight. What the agent holds is at numbers in
    /// [`Rebuilder::room`]; where that would be more than one process may, further ones made by `fork`, at most
    /// [`Descriptors::keepers`], hold it until the value is dropped. `own_namespaces`: the IPC and mount namespaces are
    /// the job's own. `tell` is given a line for the user where the restart must wait for something. `sights` are what
    /// [`look`] has found before, `copies` of what it has found stored.
    pub fn rebuild(
        (descriptors, sights): (Descriptors, &Sights),
        (blobs, pages, copies): (&BlobReader, &dyn PageSource, &Copies<'_>),
        own_namespaces: bool,
        group: Option<&dyn Group>,
        (tell, fork): (&dyn Fn(&str), &mut Fork<'_>),
    ) -> Result<Self, Refusal> {
        if own_namespaces {
            if let Some(v) = descriptors.parts.get() {
                sysv::owns_namespace(v);
            }
        }
        let built = rebuild::rebuild(
            (&descriptors, sights),
            (blobs, pages, copies),
            own_namespaces,
            group,
            (tell, fork),
        )?;
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
            self.sights.at(path).is(&fd::stat(Path::new("."), true).at("stat")?)
        };
        entered().map_err(|e: Fault| e.of(0, format!("working directory {}", path.display())))
    }

    /// Numbers that no process of the job uses for a descriptor. Descriptors to be kept across [`Rebuilder::install`]
    /// must be among them.
    pub fn room(&self) -> Range<RawFd> {
        self.built.room.clone()
    }

    /// Descriptor through which a shared mapping of `object` is made, opened for writing where `may_write` is set. Call
    /// it in the agent; it stays open as long as the `Rebuilder`, at a number in [`Rebuilder::room`], and is inherited
    /// by processes forked later.
    pub fn shared_fd(&self, object: ObjectId, may_write: bool) -> Option<RawFd> {
        let at = self
            .descriptors
            .list::<FileObject>()
            .iter()
            .position(|f| f.ids.contains(&object))?;
        let mut shared = self.shared.lock().ok()?;
        if let Some(fd) = shared.get(&(at, may_write)) {
            return Some(fd.as_raw_fd());
        }
        let file = self.built.sets.get::<Vec<BuiltFile>>()?.get(at)?;
        let opened = file.open_to_map(self.descriptors.list::<FileObject>().get(at)?, may_write, &self.built.made);
        match opened.and_then(|fd| lift(fd, &self.room())) {
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

    /// The gates of the processes that have these mappings, each of an object from its first byte on. Call it in the
    /// agent after [`Rebuilder::finish`].
    pub fn gates(&self, mappings: impl Iterator<Item = (i32, ObjectId)>) -> Result<Gates, Refusal> {
        let named =
            |f: &&FileObject| matches!(f.origin, Origin::Memfd { .. }) && f.path.0.as_os_str().as_bytes() == NAME.to_bytes();
        let files = self.descriptors.list::<FileObject>().iter();
        let may_be: Vec<ObjectId> = files.filter(named).flat_map(|f| f.ids.clone()).collect();
        let pages = mappings.filter(|(_, object)| may_be.contains(object));
        let files = pages.filter_map(|(pid, object)| {
            let fd = self.shared_fd(object, true)?;
            // It stays open as long as `self`.
            Some((pid, lend(fd).ok()?))
        });
        Gates::of_restart(files, self.descriptors.parts.get::<OffGpu>())
    }

    /// Whether the process has left its GPU for the checkpoint, and is to be put back.
    pub fn uses_gpu(&self, pid: i32) -> bool {
        let off = self.descriptors.parts.get::<OffGpu>();
        off.is_some_and(|off| off.pids.contains(&pid))
    }

    /// The process whose descriptor table `pid` shares (CLONE_FILES), `pid` itself where it has its own. The owner must
    /// be created first.
    pub fn table_owner(&self, pid: i32) -> i32 {
        self.descriptors.table(pid).map_or(pid, |t| t.pids[0])
    }

    /// Whether two processes have noted down together what is to be undone for semaphores (CLONE_SYSVSEM).
    pub fn share_undo(&self, pid: i32, other: i32) -> bool {
        self.descriptors.parts.get::<SysV>().is_some_and(|v| v.share_undo(pid, other))
    }

    /// The thread for which the table of thread `tid` of process `pid` is laid out; `None` where it uses that of its
    /// process. The others of its users are made by that thread.
    pub fn thread_table(&self, pid: i32, tid: i32) -> Option<i32> {
        let own = (tid != pid).then(|| self.descriptors.table(tid)).flatten();
        own.map(|t| t.pids[0])
    }

    /// The tasks that must exist when [`Rebuilder::install_late`] is called, because a descriptor leads to them or
    /// signals them: processes, and some of their threads.
    pub fn tasks(&self) -> HashSet<i32> {
        let d = &self.descriptors;
        let paths = d.each::<PathState>().flat_map(|(_, path)| path.tasks());
        let pidfds = d.each::<PidfdState>().filter_map(|(_, pidfd)| pidfd.task());
        let owners = d.descriptions.iter().filter_map(|desc| desc.owner);
        paths.chain(pidfds).chain(owners.map(|owner| owner.id)).collect()
    }

    /// Called in session leader `pid` right after `setsid` and before [`Rebuilder::install`]: makes the job's own
    /// pseudo-terminal that controlled the session its controlling terminal again. Returns whether there was one.
    pub fn install_session(&self, pid: i32) -> Result<bool, Refusal> {
        let taken = self.built.sets.get().map_or(Ok(false), |t| take_session(t, pid));
        taken.map_err(|e| e.of(pid, "controlling terminal"))
    }

    /// Called in process `pid`, or in the thread of that number for which a table of its own is laid out, after its
    /// fork from the agent (before its memory is replaced): puts every descriptor at its number and closes all others
    /// except `keep`. Does what needs numbers or process identity (epoll interest lists, locks of `flock`).
    pub fn install(&self, pid: i32, keep: &[RawFd]) -> Result<(), Refusal> {
        install::install(&self.descriptors, &self.built, pid, keep)
    }

    /// The POSIX locks of process `pid`, as descriptor, argument of F_SETLK, and whether nothing depends on it.
    /// `install_late` sets them, but they must be set once more after any descriptor of a locked file has been closed.
    pub fn posix_locks(&self, pid: i32) -> Vec<(RawFd, libc::flock, bool)> {
        locks::posix(&self.descriptors, pid)
    }

    /// Called in task `pid` when all processes of the job exist: pidfds, files in `/proc/PID`, F_SETOWN, POSIX locks,
    /// foreground groups.
    pub fn install_late(&self, pid: i32) -> Result<(), Refusal> {
        install::install_late(&self.descriptors, &self.built, pid)
    }

    /// Called in the agent when every process has mapped its memory: adds seals against writing, and marks System V
    /// segments for removal that were so at the checkpoint. Removes directories that had been deleted at the
    /// checkpoint. Closes terminals for whom they were closed. Sets who is signalled for descriptions in flight.
    pub fn finish(&self) -> Result<(), Refusal> {
        self.built.scaffold.remove();
        install::in_flight(&self.descriptors, &self.built)?;
        KINDS
            .iter()
            .rev()
            .try_for_each(|kind| (kind.complete)(&self.descriptors, &self.built))
    }

    /// Whether descriptor `fd` of thread `tid` of process `pid` is a TCP socket that is connected, or was before its peer ended it.
    pub fn is_connected(&self, pid: i32, tid: i32, fd: RawFd) -> bool {
        let d = &self.descriptors;
        let table = d.table(tid).or_else(|| d.table(pid));
        let slot = table.and_then(|t| t.slots.iter().find(|s| s.fd == fd));
        let Some(slot) = slot else { return false };
        let tcp = d.descriptions.get(slot.desc).and_then(|d| d.kind.get::<TcpState>());
        tcp.is_some_and(|t| matches!(self.built.made.lend(slot.desc), Ok(Some(made)) if t.is_connected(made.raw())))
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
