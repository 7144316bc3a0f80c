//! State of one capture: what has been found, and what kinds of resources note down while they are captured.

use crate::content::Contents;
use crate::doors::Doors;
use crate::env::{CaptureEnv, ProcessView};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::group::Group;
use crate::inside::Inside;
use crate::look::Look;
use crate::model::{DescId, Holder, Owner, Table};
use crate::renamed::Renamed;
use crate::sets::Sets;
use crate::sys::{diag::Diag, fd, fdinfo::FdInfo};
use belay_image::blobs::BlobWriter;
use belay_kernel::kcmp;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A description found in the job.
#[derive(Debug)]
pub(crate) struct Found {
    /// The agent's descriptor of one that is in flight in a socket.
    pub(crate) kept: Option<OwnedFd>,
    /// Where it was found first.
    pub(crate) holder: Holder,
    /// Target of its `/proc` link.
    pub(crate) link: PathBuf,
    /// `fstat`.
    pub(crate) stat: fd::Stat,
    /// `fdinfo`.
    pub(crate) info: FdInfo,
    /// Status flags and access mode.
    pub(crate) flags: i32,
    /// Who is signalled when I/O is possible.
    pub(crate) owner: Option<Owner>,
    /// What all with this description have in common, and few others.
    key: Key,
}

/// Device, inode, and what else is known to tell apart.
type Key = (u64, u64, u64);

impl Found {
    /// Access mode: O_RDONLY, O_WRONLY or O_RDWR.
    pub(crate) fn access(&self) -> i32 {
        self.flags & libc::O_ACCMODE
    }
}

/// A descriptor of the agent on a description, for as long as it looks at that.
#[derive(Debug)]
pub(crate) struct Taken {
    raw: RawFd,
    _own: Option<OwnedFd>,
}

impl Taken {
    /// Its number.
    pub(crate) fn raw(&self) -> RawFd {
        self.raw
    }
}

/// State of one capture.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    /// The processes.
    pub(crate) processes: &'a [ProcessView],
    /// Where byte strings go.
    pub(crate) blobs: &'a mut BlobWriter,
    /// Where contents of shared memory and files go.
    pub(crate) contents: Contents<'a>,
    /// See [`CaptureEnv`].
    pub(crate) saved_up_to: u64,
    /// When the job was launched.
    pub(crate) launched: SystemTime,
    /// The other nodes of the job.
    pub(crate) group: Option<&'a dyn Group>,
    /// The descriptions found so far.
    pub(crate) found: Vec<Found>,
    /// Those of them that are in flight in a socket, whether a process has them too or not.
    pub(crate) in_flight: HashSet<DescId>,
    /// The tables.
    pub(crate) tables: Vec<Table>,
    /// For people.
    pub(crate) notes: Vec<String>,
    /// What each kind has noted down.
    pub(crate) sets: Sets,
    /// What files are called now.
    pub(crate) renamed: Renamed,
    /// Kernel's socket diagnosis, opened when first needed.
    pub(crate) diag: Option<Diag>,
    /// Does what only the processes themselves can do.
    pub(crate) inside: Option<&'a mut dyn Inside>,
    /// The ways to the tables.
    pub(crate) doors: Doors<'a>,
    /// Indices of the tables in the order of `kcmp`.
    pub(crate) ordered: Vec<usize>,
    /// The descriptions that have the same key, in the order of `kcmp`.
    buckets: HashMap<Key, Vec<DescId>>,
}

impl<'a> Session<'a> {
    /// One in which nothing has been found yet.
    pub(crate) fn new(env: CaptureEnv<'a>) -> Self {
        Self {
            processes: env.processes,
            blobs: env.blobs,
            contents: Contents::new(env.pages),
            saved_up_to: env.saved_up_to,
            launched: env.launched,
            group: env.group,
            found: Vec::new(),
            in_flight: HashSet::new(),
            tables: Vec::new(),
            notes: Vec::new(),
            sets: Sets::default(),
            renamed: Renamed::default(),
            diag: None,
            inside: env.inside,
            doors: Doors::new(),
            ordered: Vec::new(),
            buckets: HashMap::new(),
        }
    }
}

impl Session<'_> {
    /// Whether the user has asked for the contents of all files of the job.
    pub(crate) fn saves_all(&self) -> bool {
        self.saved_up_to == u64::MAX
    }

    /// Adds the description that `look` shows and `holder` has, or finds it among those already known. One that is in
    /// flight is `kept` by the agent.
    pub(crate) fn intern(&mut self, look: Look, kept: Option<OwnedFd>, holder: Holder) -> Result<DescId, Fault> {
        let in_flight = kept.is_some();
        let found = Found {
            kept,
            holder,
            link: look.link,
            stat: look.stat,
            flags: look.flags,
            owner: look.owner,
            // An eventfd has one description only, and all of them one inode.
            key: (
                look.stat.st_dev,
                look.stat.st_ino,
                look.info.number("eventfd-id:", 10).unwrap_or(0),
            ),
            info: look.info,
        };
        let bucket = self.buckets.entry(found.key).or_default();
        let here = place(&found, &self.doors);
        let mut failed = None;
        let place = bucket.binary_search_by(|known| {
            let known = place(&self.found[*known], &self.doors);
            kcmp::compare_files(known.0, known.1, here.0, here.1).unwrap_or_else(|e| {
                failed = Some(e);
                Ordering::Less
            })
        });
        if let Some(e) = failed {
            return Err(e).at("compare descriptions (kcmp)");
        }
        let id = match place {
            Ok(at) => bucket[at],
            Err(at) => {
                let id = self.found.len();
                bucket.insert(at, id);
                self.found.push(found);
                id
            }
        };
        if in_flight {
            self.in_flight.insert(id);
        }
        Ok(id)
    }

    /// Why there is no checkpoint now: each of `late`, which a restart makes when processes or sockets are there, that is
    /// in flight, and so would have to be there before.
    pub(crate) fn too_late<'d>(&self, late: impl Iterator<Item = DescId> + 'd, why: &str) -> Vec<Refusal> {
        let sent = late.filter(|id| self.in_flight.contains(id));
        let of = |id| {
            let found: &Found = &self.found[id];
            let object = format!("descriptor in flight ({})", found.link.display());
            Fault::Passing(why.to_owned()).of(found.holder.pid, object)
        };
        sent.map(of).collect()
    }

    /// The descriptions of the same inode as description `id`.
    pub(crate) fn on_same_inode(&self, id: DescId) -> &[DescId] {
        self.buckets.get(&self.found[id].key).map_or(&[], Vec::as_slice)
    }

    /// The thread of process `pid` under whose number `/proc` shows what is the process's.
    pub(crate) fn task_of(&self, pid: i32) -> i32 {
        task_of(&self.doors, pid)
    }

    /// A descriptor of the agent on description `id`.
    pub(crate) fn take(&self, id: DescId) -> Result<Taken, Fault> {
        let found = &self.found[id];
        if let Some(kept) = &found.kept {
            let raw = kept.as_raw_fd();
            return Ok(Taken { raw, _own: None });
        }
        let own = self.duplicate(found.holder)?;
        Ok(Taken {
            raw: own.as_raw_fd(),
            _own: Some(own),
        })
    }

    /// Where a description is to be had, that is not in flight: a pidfd and the number.
    pub(crate) fn sight(&self, found: &Found) -> Option<(BorrowedFd<'_>, RawFd)> {
        let door = self.doors.get(&found.holder.pid).filter(|_| found.kept.is_none())?;
        Some((door.pidfd(), found.holder.fd))
    }

    /// A duplicate of a descriptor of the job.
    fn duplicate(&self, holder: Holder) -> Result<OwnedFd, Fault> {
        match self.doors.get(&holder.pid) {
            Some(door) => belay_kernel::pidfd::getfd(door.pidfd(), holder.fd).at("duplicate into the agent (pidfd_getfd)"),
            None => refuse("its process is not known"),
        }
    }

    /// What the kernel says about description `id` now.
    pub(crate) fn info(&self, id: DescId) -> Result<FdInfo, Fault> {
        let (task, number) = place(&self.found[id], &self.doors);
        FdInfo::read(task, number).at("read fdinfo")
    }

    /// Whether process or thread `pid` is there after a restart too.
    pub(crate) fn will_have(&self, pid: i32) -> bool {
        let thread = |of: i32| Path::new(&format!("/proc/{of}/task/{pid}")).exists();
        let zombie = |of: i32| belay_kernel::proc::stat(pid).is_ok_and(|st| st.state == 'Z' && st.ppid == of);
        let mut processes = self.processes.iter().map(|p| p.pid);
        pid == std::process::id().cast_signed() || processes.any(|of| of == pid || thread(of) || zombie(of))
    }

    /// The description behind number `fd` of task `pid`, a process or the first user of a table.
    pub(crate) fn lookup(&self, pid: i32, fd: RawFd) -> Option<DescId> {
        let table = self.tables.iter().find(|t| t.pids.contains(&pid))?;
        let at = table.slots.binary_search_by_key(&fd, |s| s.fd).ok()?;
        Some(table.slots[at].desc)
    }

    /// The kernel's socket diagnosis.
    pub(crate) fn diag(&mut self) -> Result<&mut Diag, Fault> {
        if self.diag.is_none() {
            self.diag = Some(Diag::open().at("open the socket diagnosis")?);
        }
        match &mut self.diag {
            Some(d) => Ok(d),
            None => refuse("no socket diagnosis"),
        }
    }
}

/// Where `kcmp` finds a description: task and number.
pub(crate) fn place(found: &Found, doors: &Doors<'_>) -> (i32, RawFd) {
    match &found.kept {
        Some(fd) => (std::process::id().cast_signed(), fd.as_raw_fd()),
        None => (task_of(doors, found.holder.pid), found.holder.fd),
    }
}

pub(crate) fn task_of(doors: &Doors<'_>, pid: i32) -> i32 {
    doors.get(&pid).map_or(pid, |d| d.task)
}
