//! The capture flow: tables, then descriptions, then the objects behind several descriptions.
//!
//! A descriptor of a process is duplicated into the agent with `pidfd_getfd` while it is looked at, and no longer: a job may have more than one process
//! may. Numbers that refer to the same description are found with `kcmp`, which is told them as the processes have them, and whose order makes each look-up a binary search.
//! Descriptors in flight in sockets have no number in the job: the agent keeps those. They join the list as they are found, so the loop over descriptions ends when there are
//! no new ones.

use crate::content::Contents;
use crate::fault::{refuse, At, Fault};
use crate::look::Look;
use crate::model::{DescId, Description, Descriptors, FsPath, Holder, Kind, Owner, Table, IN_FLIGHT};
use crate::renamed::Renamed;
use crate::sys::{fd, fdinfo::FdInfo};
use crate::tables::{place, tables, task_of, Doors};
use crate::{epoll, eventfd, files, inotify, locks, mqueue, pidfd, pipes, shm, signalfd, sockets, terminals, timerfd};
use crate::{CaptureEnv, ProcessView, Refusal};
use belay_image::blobs::BlobWriter;
use belay_kernel::kcmp;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::io;
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
    owner: Option<Owner>,
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
    /// Save every open regular file.
    pub(crate) save_open_files: bool,
    /// When the job was launched.
    pub(crate) launched: SystemTime,
    /// The other nodes of the job.
    pub(crate) group: Option<&'a dyn crate::group::Group>,
    /// The descriptions found so far.
    pub(crate) found: Vec<Found>,
    /// The tables.
    pub(crate) tables: Vec<Table>,
    /// For people.
    pub(crate) notes: Vec<String>,
    /// Files, by inode.
    pub(crate) files: files::FileSet,
    /// Pipes, by inode.
    pub(crate) pipes: pipes::PipeSet,
    /// POSIX message queues, by inode.
    pub(crate) queues: mqueue::QueueSet,
    /// Terminals.
    pub(crate) terminals: terminals::TerminalSet,
    /// TCP connections, which are read when both ends are known.
    pub(crate) tcp: sockets::tcp::TcpSet,
    /// Shared memory that is this node's.
    pub(crate) claims: Vec<OwnedFd>,
    /// What files are called now.
    pub(crate) renamed: Renamed,
    /// Options of sockets that have been read already.
    pub(crate) options: HashMap<DescId, sockets::options::Options>,
    /// What is known of UDP sockets and multicast groups.
    pub(crate) udp: sockets::udp::UdpSet,
    /// Kernel's socket diagnosis, opened when first needed.
    pub(crate) diag: Option<crate::sys::diag::Diag>,
    /// Does what only the processes themselves can do.
    pub(crate) inside: Option<&'a mut dyn crate::Inside>,
    /// The ways to the tables.
    pub(crate) doors: Doors<'a>,
    /// Indices of the tables in the order of `kcmp`.
    pub(crate) ordered: Vec<usize>,
    /// The descriptions that have the same key, in the order of `kcmp`.
    buckets: HashMap<Key, Vec<DescId>>,
}

impl Session<'_> {
    /// Adds the description that `look` shows and `holder` has, or finds it among those already known. One that is in flight is `kept` by the agent.
    pub(crate) fn intern(&mut self, look: Look, kept: Option<OwnedFd>, holder: Holder) -> Result<DescId, Fault> {
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
        place.map(|at| bucket[at]).or_else(|at| {
            let id = self.found.len();
            bucket.insert(at, id);
            self.found.push(found);
            Ok(id)
        })
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
    pub(crate) fn diag(&mut self) -> Result<&mut crate::sys::diag::Diag, Fault> {
        if self.diag.is_none() {
            self.diag = Some(crate::sys::diag::Diag::open().at("open the socket diagnosis")?);
        }
        match &mut self.diag {
            Some(d) => Ok(d),
            None => refuse("no socket diagnosis"),
        }
    }
}

/// Captures all descriptors and shared objects.
pub(crate) fn capture(env: CaptureEnv<'_>) -> Result<Descriptors, Vec<Refusal>> {
    let _limit = RaisedLimit::raise();
    let mut session = Session {
        processes: env.processes,
        blobs: env.blobs,
        contents: Contents::new(env.pages),
        save_open_files: env.save_open_files,
        launched: env.launched,
        group: env.group,
        found: Vec::new(),
        tables: Vec::new(),
        notes: Vec::new(),
        files: files::FileSet::default(),
        pipes: pipes::PipeSet::default(),
        queues: mqueue::QueueSet::default(),
        terminals: terminals::TerminalSet::default(),
        tcp: sockets::tcp::TcpSet::default(),
        options: HashMap::new(),
        udp: sockets::udp::UdpSet::default(),
        claims: Vec::new(),
        renamed: Renamed::default(),
        diag: None,
        inside: env.inside,
        doors: Doors::new(),
        ordered: Vec::new(),
        buckets: HashMap::new(),
    };
    let names = env.names.with(&sockets::names::addresses());
    let names = names.with_programs(env.processes.iter().map(|p| p.stack));
    let mut refusals = Vec::new();
    tables(&mut session, &mut refusals);
    let stdio = launcher_stdio(&session);
    if !refusals.is_empty() {
        return Err(refusals);
    }
    session.options = sockets::options::read_ahead(&session);
    let mut out = Descriptors::default();
    let mut id = 0;
    while id < session.found.len() {
        match describe(&mut session, id, &stdio) {
            Ok(d) => out.descriptions.push(d),
            Err(e) if e.is_for_want_of_descriptors() => refusals.push(refusal(&session.found[id], &too_many())),
            Err(e) => refusals.push(refusal(&session.found[id], &e)),
        }
        id += 1;
    }
    if refusals.is_empty() {
        finish(&mut session, &mut out, &mut refusals);
    }
    if refusals.is_empty() {
        let stacks: HashMap<i32, u64> = env.processes.iter().map(|p| (p.pid, p.stack)).collect();
        for d in &mut out.descriptions {
            if let Kind::Tcp(t) = &mut d.kind {
                t.held_since(names.since(stacks.get(&d.holder.pid).copied().unwrap_or_default()));
            }
        }
        out.tables = session.tables;
        out.names = names;
        out.notes = session.notes;
        out.private = session.files.private(env.processes);
        let is_mapped = |f: &&files::Sought| !f.windows.is_empty() || f.object.ids.iter().any(|id| out.private.contains(id));
        let mapped = session.files.objects.iter().filter(is_mapped).count();
        match crate::rebuild::shortage(&out, mapped, RaisedLimit::highest()) {
            Some(refusal) => Err(vec![refusal]),
            None => Ok(out),
        }
    } else {
        Err(refusals)
    }
}

/// The steps that need all descriptions.
fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
    let mut step = |r: Result<(), (Holder, String, Fault)>| {
        if let Err((holder, object, fault)) = r {
            refusals.push(fault.of(holder.pid, object));
        }
    };
    step(timerfd::finish(s, &mut out.descriptions));
    step(pipes::finish(s, &mut out.pipes));
    step(terminals::finish(s, &mut out.terminals, &mut out.descriptions));
    step(shm::finish(s));
    step(shm::claims::claim(s));
    step(sockets::tcp::finish(s, &mut out.descriptions));
    step(locks::capture_posix(s, &mut out.posix_locks));
    step(mqueue::finish(s, &mut out.queues));
    refusals.extend(files::path::lost_working(s));
    if refusals.is_empty() {
        contents(s, out, refusals);
    }
    out.working = files::working(s.processes);
    out.entered = files::entered(s.processes);
    out.sessions = files::sessions(s.processes);
}

/// What takes its time, and is in vain where anything is refused.
fn contents(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
    let done = shm::sysv::capture(s, &mut out.sysv).and_then(|()| files::finish(s, &mut out.files));
    if let Err((holder, object, fault)) = done {
        refusals.push(fault.of(holder.pid, object));
    }
}

/// A refusal that names the descriptor.
fn refusal(found: &Found, fault: &Fault) -> Refusal {
    let object = match found.holder.fd {
        IN_FLIGHT => format!("descriptor in flight ({})", found.link.display()),
        fd => format!("fd {fd} ({})", found.link.display()),
    };
    fault.of(found.holder.pid, object)
}

/// The agent keeps what is in flight.
fn too_many() -> Fault {
    let limit = RaisedLimit::highest();
    Fault::Refused(format!(
        "more descriptors are in flight in sockets than the agent, which must hold them, may have ({limit}, the hard limit RLIMIT_NOFILE): raise it before `belay launch` (limits.conf, ulimit -Hn), or let the program receive them"
    ))
}

/// For each description that the agent has as descriptor 0, 1 or 2: those numbers.
fn launcher_stdio(s: &Session<'_>) -> HashMap<DescId, Vec<RawFd>> {
    let me = std::process::id().cast_signed();
    let mut out: HashMap<DescId, Vec<RawFd>> = HashMap::new();
    for number in 0..3 {
        let Ok(stat) = fd::fstat(number) else { continue };
        let same = |id: &DescId| {
            let found = &s.found[*id];
            let (task, held) = place(found, &s.doors);
            let alike = (found.stat.st_dev, found.stat.st_ino) == (stat.st_dev, stat.st_ino);
            alike && kcmp::compare_files(task, held, me, number).is_ok_and(Ordering::is_eq)
        };
        if let Some(id) = (0..s.found.len()).find(same) {
            out.entry(id).or_default().push(number);
        }
    }
    out
}

/// Captures one description.
fn describe(s: &mut Session<'_>, id: DescId, stdio: &HashMap<DescId, Vec<RawFd>>) -> Result<Description, Fault> {
    let kind = match stdio.get(&id) {
        Some(numbers) => Kind::LauncherStdio(numbers.clone()),
        None => classify(s, id)?,
    };
    let found = &s.found[id];
    Ok(Description {
        holder: found.holder,
        name: FsPath::from(found.link.as_path()),
        flags: found.flags,
        pos: found.info.pos().at("read fdinfo")?,
        owner: found.owner,
        locks: locks::of_description(found)?,
        kind,
    })
}

/// Decides what a description is and captures it.
fn classify(s: &mut Session<'_>, id: DescId) -> Result<Kind, Fault> {
    let found = &s.found[id];
    let link = found.link.to_string_lossy().into_owned();
    if found.flags & libc::O_PATH != 0 {
        return files::path::capture(s, id).map(Kind::Path);
    }
    if let Some(name) = link.strip_prefix("anon_inode:") {
        return match name.trim_matches(|c| c == '[' || c == ']') {
            "eventfd" => eventfd::capture(found).map(Kind::Eventfd),
            "signalfd" => signalfd::capture(found).map(Kind::Signalfd),
            "timerfd" => timerfd::capture(found).map(Kind::Timerfd),
            "eventpoll" => epoll::capture(s, id).map(Kind::Epoll),
            "inotify" => s
                .take(id)
                .and_then(|taken| inotify::capture(s, id, taken.raw()))
                .map(Kind::Inotify),
            "pidfd" => pidfd::capture(s, id).map(Kind::Pidfd),
            other => refuse(format!(
                "{other} descriptors cannot be checkpointed; close it or run without it"
            )),
        };
    }
    if link.starts_with("pidfd:") {
        return pidfd::capture(s, id).map(Kind::Pidfd);
    }
    match found.stat.st_mode & libc::S_IFMT {
        libc::S_IFREG => s.take(id).and_then(|taken| files::capture(s, id, taken.raw())),
        libc::S_IFDIR => files::path::capture(s, id).map(Kind::Path),
        libc::S_IFIFO => pipes::capture(s, id).map(Kind::Pipe),
        libc::S_IFSOCK => s.take(id).and_then(|taken| sockets::capture(s, id, taken.raw())),
        libc::S_IFCHR => s.take(id).and_then(|taken| files::path::capture_device(s, id, taken.raw())),
        libc::S_IFBLK => refuse("block devices cannot be checkpointed; open it for the time of access only"),
        other => refuse(format!("files of type {other:#o} cannot be checkpointed")),
    }
}

/// The soft limit on descriptors raised to the hard one.
#[derive(Debug)]
pub(crate) struct RaisedLimit(Option<libc::rlimit>);

impl RaisedLimit {
    /// The number of descriptors to which the limit can be raised.
    pub(crate) fn highest() -> RawFd {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `limit` is valid for writing.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
        RawFd::try_from(limit.rlim_max).unwrap_or(RawFd::MAX)
    }

    /// Raises it; a failure shows when a descriptor cannot be duplicated.
    pub(crate) fn raise() -> Self {
        let mut old = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: `old` is valid for writing.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut old) } == -1 {
            return Self(None);
        }
        // Root may go beyond: the job can have more descriptors in all than a single process may.
        let most = std::fs::read_to_string("/proc/sys/fs/nr_open")
            .ok()
            .and_then(|n| n.trim().parse().ok());
        let raised = [most.unwrap_or(old.rlim_max).max(old.rlim_max), old.rlim_max]
            .into_iter()
            .any(|n| {
                let new = libc::rlimit {
                    rlim_cur: n,
                    rlim_max: n,
                };
                // SAFETY: `new` is valid for reading.
                unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &new) == 0 }
            });
        Self(raised.then_some(old))
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        if let Some(old) = self.0 {
            // SAFETY: `old` is valid for reading.
            let back = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &old) };
            if back == -1 {
                tracing::warn!(error = %io::Error::last_os_error(), "could not lower the descriptor limit again");
            }
        }
    }
}
