//! The capture flow: tables, then descriptions, then the objects behind several descriptions.
//!
//! Every descriptor of every process is duplicated into the agent with `pidfd_getfd`; numbers that refer to the same description are found with
//! `kcmp`, whose order makes each look-up a binary search. Descriptors in flight in sockets join the list as they are found, so the loop over
//! descriptions ends when there are no new ones. The agent's duplicates are closed when the flow returns, which changes nothing for the processes.

use crate::content::Contents;
use crate::fault::{refuse, At, Fault};
use crate::model::{DescId, Description, Descriptors, FsPath, Holder, Kind, Owner, Slot, Table};
use crate::renamed::Renamed;
use crate::sys::{fd, fdinfo::FdInfo};
use crate::{epoll, eventfd, files, inotify, locks, mqueue, pidfd, pipes, shm, signalfd, sockets, terminals, timerfd};
use crate::{CaptureEnv, ProcessView, Refusal};
use belay_image::blobs::BlobWriter;
use belay_kernel::kcmp;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A description found in the job, held by a descriptor of the agent.
#[derive(Debug)]
pub(crate) struct Found {
    /// The agent's descriptor.
    pub(crate) fd: OwnedFd,
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
}

impl Found {
    /// Number of the agent's descriptor.
    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Access mode: O_RDONLY, O_WRONLY or O_RDWR.
    pub(crate) fn access(&self) -> i32 {
        self.flags & libc::O_ACCMODE
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
    /// Kernel's socket diagnosis, opened when first needed.
    pub(crate) diag: Option<crate::sys::diag::Diag>,
    /// Does what only the processes themselves can do.
    pub(crate) inside: Option<&'a mut dyn crate::Inside>,
    /// For each inode the descriptions on it, in the order of `kcmp`.
    buckets: HashMap<(u64, u64), Vec<DescId>>,
}

impl Session<'_> {
    /// Adds the description behind `fd`, or finds it among those already known.
    pub(crate) fn intern(&mut self, fd: OwnedFd, holder: Holder) -> Result<DescId, Fault> {
        let stat = match fd::fstat(fd.as_raw_fd()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => fd::lost_directory(),
            stat => stat.at("stat")?,
        };
        let bucket = self.buckets.entry((stat.st_dev, stat.st_ino)).or_default();
        let me = std::process::id().cast_signed();
        let mut failed = None;
        let place = bucket.binary_search_by(|known| {
            kcmp::compare_files(me, self.found[*known].raw(), me, fd.as_raw_fd()).unwrap_or_else(|e| {
                failed = Some(e);
                Ordering::Less
            })
        });
        if let Some(e) = failed {
            return Err(e).at("compare descriptions (kcmp)");
        }
        match place {
            Ok(at) => Ok(bucket[at]),
            Err(at) => {
                let id = self.found.len();
                bucket.insert(at, id);
                let link = fd::readlink(&fd::self_path(fd.as_raw_fd())).at("read its name")?;
                let info = FdInfo::read(0, fd.as_raw_fd()).at("read fdinfo")?;
                let flags = fd::flags(fd.as_raw_fd()).at("read its flags")?;
                self.found.push(Found {
                    fd,
                    holder,
                    link,
                    stat,
                    info,
                    flags,
                });
                Ok(id)
            }
        }
    }

    /// The thread of process `pid` under whose number `/proc` shows what is the process's.
    pub(crate) fn task_of(&self, pid: i32) -> i32 {
        self.processes.iter().find(|p| p.pid == pid).map_or(pid, |p| p.task)
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
        claims: Vec::new(),
        renamed: Renamed::default(),
        diag: None,
        inside: env.inside,
        buckets: HashMap::new(),
    };
    let names = env.names.with(&sockets::names::addresses());
    let names = names.with_programs(env.processes.iter().map(|p| p.stack));
    let mut refusals = Vec::new();
    tables(&mut session, &mut refusals);
    let stdio = launcher_stdio(&mut session);
    if !refusals.is_empty() {
        // There may be too many descriptors: to look at each would keep the job waiting for nothing.
        return Err(refusals);
    }
    let mut out = Descriptors::default();
    let mut id = 0;
    while id < session.found.len() {
        match describe(&mut session, id, &stdio) {
            Ok(d) => out.descriptions.push(d),
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
        out.notes.extend(crate::rebuild::shortage(&out, RaisedLimit::highest()));
        Ok(out)
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
    if refusals.is_empty() {
        contents(s, out, refusals);
    }
    out.working = files::working(s.processes);
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
        -1 => format!("descriptor in flight ({})", found.link.display()),
        fd => format!("fd {fd} ({})", found.link.display()),
    };
    fault.of(found.holder.pid, object)
}

/// Reads the tables of all processes, then those of threads that have another one.
fn tables(s: &mut Session<'_>, refusals: &mut Vec<Refusal>) {
    for p in s.processes {
        match known_table(s, p.task) {
            Ok(Some(at)) => s.tables[at].pids.push(p.pid),
            Ok(None) => table(s, (p.pid, p.task), p.pidfd.as_fd(), refusals),
            Err(e) => refusals.push(e.of(p.pid, "descriptor table")),
        }
    }
    for p in s.processes {
        let apart = p.apart.iter().try_for_each(|tid| thread_table(s, p, *tid, refusals));
        if let Err(e) = apart {
            refusals.push(e.of(p.pid, "descriptor table"));
        }
    }
}

/// Index of a known table that `task` uses too.
fn known_table(s: &Session<'_>, task: i32) -> Result<Option<usize>, Fault> {
    for (at, t) in s.tables.iter().enumerate() {
        if kcmp::compare(task, s.task_of(t.pids[0]), kcmp::Object::Files).at("compare descriptor tables")? == Ordering::Equal {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Reads the table of thread `tid`, which is not that of its process.
fn thread_table(s: &mut Session<'_>, p: &ProcessView, tid: i32, refusals: &mut Vec<Refusal>) -> Result<(), Fault> {
    let Some(at) = known_table(s, tid)? else {
        let pidfd = belay_kernel::pidfd::open_thread(tid).at(format!("open thread {tid} (needs Linux 6.9)"))?;
        table(s, (tid, tid), pidfd.as_fd(), refusals);
        return Ok(());
    };
    let first = s.tables[at].pids[0];
    let of_process = s.processes.iter().any(|p| p.pid == first);
    if of_process || !belay_kernel::proc::tasks(p.pid).at("list threads")?.contains(&first) {
        return refuse(format!(
            "thread {tid} shares the descriptor table of task {first} of another process, and not that of its own (CLONE_FILES), which cannot be restored"
        ));
    }
    s.tables[at].pids.push(tid);
    Ok(())
}

/// Reads a table as task `task` has it; `user` is what its first user is called.
fn table(s: &mut Session<'_>, (user, task): (i32, i32), pidfd: BorrowedFd<'_>, refusals: &mut Vec<Refusal>) {
    let mut slots = Vec::new();
    match belay_kernel::proc::fds(task).at("list descriptors") {
        Ok(mut numbers) => {
            numbers.sort_unstable();
            for number in numbers {
                match slot(s, (user, task), pidfd, number) {
                    Ok(slot) => slots.push(slot),
                    Err(e) if e.is_for_want_of_descriptors() => {
                        refusals.push(too_many().of(user, format!("fd {number}")));
                        break;
                    }
                    Err(e) => refusals.push(e.of(user, format!("fd {number}"))),
                }
            }
        }
        Err(e) => refusals.push(e.of(user, "descriptor table")),
    }
    let pids = vec![user];
    s.tables.push(Table { pids, slots });
}

/// The agent holds a duplicate of each description.
fn too_many() -> Fault {
    let limit = RaisedLimit::highest();
    Fault::Refused(format!(
        "the job has more open files in all than a process of this user may ({limit}, the hard limit RLIMIT_NOFILE), and the agent must hold each: raise it before `belay launch` (limits.conf, ulimit -Hn)"
    ))
}

fn slot(s: &mut Session<'_>, (user, task): (i32, i32), pidfd: BorrowedFd<'_>, number: RawFd) -> Result<Slot, Fault> {
    let local = belay_kernel::pidfd::getfd(pidfd, number).at("duplicate into the agent (pidfd_getfd)")?;
    let info = FdInfo::read(task, number).at("read fdinfo")?;
    let cloexec = info.flags().at("read fdinfo")? & libc::O_CLOEXEC != 0;
    let desc = s.intern(local, Holder { pid: user, fd: number })?;
    Ok(Slot {
        fd: number,
        desc,
        cloexec,
    })
}

/// For each description that the agent has as descriptor 0, 1 or 2: those numbers.
fn launcher_stdio(s: &mut Session<'_>) -> HashMap<DescId, Vec<RawFd>> {
    let me = std::process::id().cast_signed();
    let mut out: HashMap<DescId, Vec<RawFd>> = HashMap::new();
    for number in 0..3 {
        let Ok(stat) = fd::fstat(number) else { continue };
        let Some(bucket) = s.buckets.get(&(stat.st_dev, stat.st_ino)) else {
            continue;
        };
        let same = |id: &&DescId| kcmp::compare_files(me, s.found[**id].raw(), me, number).is_ok_and(Ordering::is_eq);
        if let Some(id) = bucket.iter().find(same) {
            out.entry(*id).or_default().push(number);
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
    let path_only = found.flags & libc::O_PATH != 0;
    Ok(Description {
        holder: found.holder,
        name: FsPath::from(found.link.as_path()),
        flags: found.flags,
        pos: found.info.pos().at("read fdinfo")?,
        owner: if path_only { None } else { owner(found.raw())? },
        locks: locks::of_description(found)?,
        kind,
    })
}

/// `F_GETOWN_EX` and `F_GETSIG`.
fn owner(raw: RawFd) -> Result<Option<Owner>, Fault> {
    let mut ex = [0i32; 2];
    // SAFETY: F_GETOWN_EX writes two integers.
    let got = unsafe { libc::fcntl(raw, fd::F_GETOWN_EX, ex.as_mut_ptr()) };
    crate::sys::check(got).at("read its owner")?;
    let signal = fd::fcntl(raw, fd::F_GETSIG, 0).at("read its signal")?;
    Ok((ex[1] != 0 || signal != 0).then_some(Owner {
        kind: ex[0],
        id: ex[1],
        signal,
    }))
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
            "inotify" => inotify::capture(s, id).map(Kind::Inotify),
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
        libc::S_IFREG => files::capture(s, id),
        libc::S_IFDIR => files::path::capture(s, id).map(Kind::Path),
        libc::S_IFIFO => pipes::capture(s, id).map(Kind::Pipe),
        libc::S_IFSOCK => sockets::capture(s, id),
        libc::S_IFCHR => files::path::capture_device(s, id),
        libc::S_IFBLK => refuse("block devices cannot be checkpointed; open it for the time of access only"),
        other => refuse(format!("files of type {other:#o} cannot be checkpointed")),
    }
}

/// The soft limit on descriptors raised to the hard one while the agent holds a duplicate of every description.
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
