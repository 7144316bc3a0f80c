//! The rebuild flow, in the agent of the restarted job: objects first, then descriptions on them, then data in flight.
//!
//! What is made is held by a [`Store`] until the processes have it: at numbers that no process of the job uses, so that laying out a process's table
//! (`install`) never overwrites what is still to be installed, or by processes of its own where that is too much for one.

use crate::capture::RaisedLimit;
use crate::content::PageSource;
use crate::fault::{refuse, At, Fault};
use crate::group::Group;
use crate::keep::{Fork, HoldId, Lent, Store};
use crate::model::{DescId, Description, Descriptors, Kind};
use crate::sockets::names::Book;
use crate::sys::fd;
use crate::{epoll, eventfd, files, keep, locks, mqueue, pipes, shm, signalfd, sockets, terminals, timerfd};
use crate::{inotify, pidfd, Refusal};
use belay_image::blobs::BlobReader;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// State of one rebuild.
pub(crate) struct Builder<'a> {
    /// What to rebuild.
    pub(crate) descriptors: &'a Descriptors,
    /// What was at the paths of its files before the restart began.
    pub(crate) sights: &'a files::Sights,
    /// Byte strings.
    pub(crate) blobs: &'a BlobReader,
    /// The other nodes of the job.
    pub(crate) group: Option<&'a dyn Group>,
    /// Where the addresses of the job are now; known when all listening sockets exist.
    pub(crate) book: Option<Book>,
    /// Tells the user what the restart waits for.
    pub(crate) tell: &'a dyn Fn(&str),
    /// Descriptions, and behind them what else is held until the end.
    made: Store,
    fork: &'a mut Fork<'a>,
    /// See [`Waits::spare`].
    spare: Cell<Duration>,
}

/// For so long in all, what another node that restarts on this host needs for the moment is waited for.
const SPARE: Duration = Duration::from_secs(2);

/// What a wait during the rebuild needs.
pub(crate) struct Waits<'a> {
    /// Tells the user what the restart waits for.
    pub(crate) tell: &'a dyn Fn(&str),
    /// The other nodes, which wait for this one.
    pub(crate) group: Option<&'a dyn Group>,
    /// How long may still be waited for what is not a rule of the kernel.
    pub(crate) spare: &'a Cell<Duration>,
}

impl Waits<'_> {
    /// Lets time pass, if there is any to spare; says whether there was.
    pub(crate) fn spend(&self, time: Duration) -> bool {
        let left = self.spare.get().checked_sub(time);
        if let Some(left) = left {
            self.spare.set(left);
            self.linger(time);
        }
        left.is_some()
    }

    /// Lets time pass.
    pub(crate) fn linger(&self, time: Duration) {
        match self.group {
            Some(group) => group.linger(time),
            None => std::thread::sleep(time),
        }
    }
}

impl Builder<'_> {
    /// For what waits.
    pub(crate) fn waits(&self) -> Waits<'_> {
        Waits {
            tell: self.tell,
            group: self.group,
            spare: &self.spare,
        }
    }

    /// Takes the descriptor of description `id`.
    pub(crate) fn put(&mut self, id: DescId, fd: OwnedFd) -> Result<(), Fault> {
        self.made.put(id, fd, self.fork)
    }

    /// Holds what is no description of the job.
    pub(crate) fn hold(&mut self, fd: OwnedFd) -> Result<HoldId, Fault> {
        self.made.add(fd, self.fork)
    }

    /// Puts `fd` into a store that ends earlier.
    pub(crate) fn hold_in(&mut self, store: &mut Store, fd: OwnedFd) -> Result<HoldId, Fault> {
        store.add(fd, self.fork)
    }

    /// Whether description `id` exists.
    pub(crate) fn has(&self, id: DescId) -> bool {
        self.made.has(id)
    }

    /// A descriptor of description `id`, or of what else is held, where that exists.
    pub(crate) fn lend(&self, id: HoldId) -> Result<Option<Lent>, Fault> {
        self.made.lend(id)
    }
}

/// Moves `fd` to a number in `room`.
pub(crate) fn lift(fd: OwnedFd, room: &Range<RawFd>) -> Result<OwnedFd, Fault> {
    if room.contains(&fd.as_raw_fd()) {
        return Ok(fd);
    }
    let what = || format!("move to a descriptor from {} (is RLIMIT_NOFILE large enough?)", room.start);
    let moved = fd::dup_from(fd.as_raw_fd(), room.start).at(what())?;
    if room.contains(&moved.as_raw_fd()) {
        return Ok(moved);
    }
    Err(io::Error::from_raw_os_error(libc::EMFILE)).at(what())
}

/// What has been made.
#[derive(Debug)]
pub(crate) struct Built {
    /// Descriptions, but for those that are made in the processes, and what files need.
    pub(crate) made: Store,
    /// Files and shared memory.
    pub(crate) files: Vec<files::BuiltFile>,
    /// Terminals.
    pub(crate) terminals: terminals::BuiltTerminals,
    /// Where the addresses of the job are now.
    pub(crate) book: Book,
    /// The agent's standard input, output and error.
    pub(crate) stdio: [Option<OwnedFd>; 3],
    /// Where all these descriptors are.
    pub(crate) room: Range<RawFd>,
    /// Directories that are there for the time of the rebuild only.
    pub(crate) scaffold: files::Scaffold,
    /// The raised descriptor limit.
    pub(crate) _limit: RaisedLimit,
}

/// The numbers at which the agent holds what it makes: the largest range that no process of the job uses. Mostly that is all above the highest; a
/// program can also use the last numbers that its limit allows (valgrind does).
pub(crate) fn room(d: &Descriptors, limit: RawFd) -> Range<RawFd> {
    const FIRST: RawFd = 64;
    let open = d.tables.iter().flat_map(|t| t.slots.iter().map(|s| s.fd));
    // Where a descriptor has been closed since, its number is needed for the moment too.
    let watched = d.descriptions.iter().filter_map(|d| match &d.kind {
        Kind::Epoll(e) => Some(e.numbers()),
        _ => None,
    });
    let used: BTreeSet<RawFd> = open.chain(watched.flatten()).collect();
    let mut from = FIRST;
    let mut best = FIRST..FIRST;
    for fd in used.iter().copied().filter(|fd| *fd >= FIRST) {
        if fd - from > best.len() as RawFd {
            best = from..fd;
        }
        from = fd + 1;
    }
    if limit - from >= best.len() as RawFd {
        best = from..RawFd::MAX;
    }
    best
}

/// Numbers in a row that a process needs beside its own while it is restarted: for the files that its memory lies in, and for what it is restarted with.
pub(crate) const NEEDED: usize = 64;

/// Why a restart under this limit of descriptors would fail for want of numbers, and the process that has most; `mapped` files are mapped shared.
pub(crate) fn shortage(d: &Descriptors, mapped: usize, limit: RawFd) -> Option<Refusal> {
    let room = room(d, limit);
    let there = usize::try_from(room.end.min(limit) - room.start).unwrap_or_default();
    // Each of them is opened at most twice, for reading and for writing.
    let needed = NEEDED + 2 * mapped;
    let fault = Fault::Refused(format!(
        "a restart needs {needed} numbers in a row that no process of the job uses, and there are {there} below {limit}, the hard limit RLIMIT_NOFILE: raise it (limits.conf, ulimit -Hn)"
    ));
    let largest = d.tables.iter().max_by_key(|t| t.slots.len());
    (there < needed).then(|| fault.of(largest.map_or(0, |t| t.pids[0]), "descriptor table"))
}

/// So many processes at most hold descriptors while a job is rebuilt.
pub(crate) fn keepers(d: &Descriptors) -> usize {
    let ends = d.descriptions.iter().filter(|d| matches!(d.kind, Kind::Unix(_))).count();
    let limit = RaisedLimit::highest();
    keep::keepers(d.descriptions.len() + d.files.len(), limit) + keep::keepers(ends, limit) + 1
}

/// Rebuilds everything that needs no process.
pub(crate) fn rebuild(
    (d, sights): (&Descriptors, &files::Sights),
    (blobs, pages, copies): (&BlobReader, &dyn PageSource, &files::Copies<'_>),
    group: Option<&dyn Group>,
    (tell, fork): (&dyn Fn(&str), &mut Fork<'_>),
) -> Result<Built, Refusal> {
    let limit = RaisedLimit::raise();
    let highest = RaisedLimit::highest();
    let room = room(d, highest);
    let mut b = Builder {
        descriptors: d,
        sights,
        blobs,
        group,
        book: None,
        tell,
        made: Store::new(d.descriptions.len(), highest),
        fork,
        spare: Cell::new(SPARE),
    };
    let stdio = [0, 1, 2].map(|n| fd::dup_from(n, room.start).ok());
    let scaffold = files::Scaffold::of(d);
    for directories in &d.working {
        files::make_parents(directories).map_err(|e| e.of(0, "working directory"))?;
    }
    for directories in &d.sessions {
        // What really needs one says so when it misses it.
        if let Err(error) = files::make_parents(directories) {
            tracing::warn!(%error, "a session directory could not be made");
        }
    }
    shm::sysv::rebuild(&d.sysv, (blobs, pages), tell).map_err(|e| e.of(0, "System V objects"))?;
    let mut files = Vec::with_capacity(d.files.len());
    for (at, o) in d.files.iter().enumerate() {
        let made = files::prepare(o, files::maker(d, at), sights.get(at), (pages, copies)).and_then(|f| f.held(&mut b));
        files.push(made.map_err(|e| e.of(0, format!("file {}", o.path)))?);
    }
    pipes::rebuild(&mut b).map_err(|(id, e)| id.map_or_else(|| e.of(0, "pipe"), |id| refusal(d, id, &e)))?;
    let queues = mqueue::prepare(&d.queues, blobs).map_err(|(name, e)| e.of(0, name))?;
    let terminals = terminals::prepare(&d.terminals, blobs, &room).map_err(|e| e.of(0, "terminal"))?;
    for (id, desc) in d.descriptions.iter().enumerate() {
        let made = match &desc.kind {
            Kind::File(at) => file(desc, entry(&files, *at), &b.made).map(Some),
            Kind::Path(p) if p.needs_process.is_some() => Ok(None),
            Kind::Path(p) => files::path::rebuild(desc, p, sights.at(p.path.as_path())).map(Some),
            Kind::Queue(at) => entry(&queues, *at).and_then(|q| q.open(desc)).map(Some),
            Kind::Terminal(side) => terminals::open(desc, side, &terminals).map(Some),
            Kind::Udp(u) => sockets::udp::rebuild(u).map(Some),
            Kind::Netlink(n) => sockets::netlink::rebuild(n).map(Some),
            Kind::Eventfd(e) => eventfd::rebuild(desc, e).map(Some),
            Kind::Signalfd(s) => signalfd::rebuild(desc, s).map(Some),
            Kind::Timerfd(t) => timerfd::rebuild(desc, t).map(Some),
            Kind::Epoll(e) => epoll::rebuild(e).map(Some),
            Kind::Inotify(i) => inotify::rebuild(desc, i).map(Some),
            Kind::Pidfd(p) => pidfd::rebuild(p),
            // Also for what refers to it from elsewhere: a message in flight, an epoll instance.
            Kind::LauncherStdio(numbers) => standard(&stdio, numbers),
            Kind::Pipe(_) | Kind::Unix(_) | Kind::Tcp(_) => Ok(None),
        };
        if let Some(fd) = made.map_err(|e| refusal(d, id, &e))? {
            b.put(id, fd).map_err(|e| refusal(d, id, &e))?;
        }
    }
    mqueue::finish_rebuild(&d.queues, &queues).map_err(|(name, e)| e.of(0, name))?;
    let build = sockets::unix::rebuild(&mut b).map_err(|(id, e)| refusal(d, id, &e))?;
    sockets::tcp::rebuild(&mut b).map_err(|(id, e)| refusal(d, id, &e))?;
    sockets::unix::refill(&b, build).map_err(|(id, e)| refusal(d, id, &e))?;
    sockets::udp::refill(&b).map_err(|(id, e)| refusal(d, id, &e))?;
    for (id, desc) in d.descriptions.iter().enumerate() {
        if !matches!(desc.kind, Kind::LauncherStdio(_)) {
            let lent = b.lend(id);
            let settled = lent.and_then(|lent| lent.map_or(Ok(()), |lent| settle(d, id, lent.raw())));
            settled.map_err(|e| refusal(d, id, &e))?;
        }
    }
    let settled = b.made.settle(&room, highest, b.fork);
    settled.map_err(|e| e.of(0, "descriptors"))?;
    let book = b
        .book
        .ok_or_else(|| Fault::Refused("the addresses are not known".into()).of(0, "network"))?;
    Ok(Built {
        book,
        made: b.made,
        files,
        terminals,
        stdio,
        room,
        scaffold,
        _limit: limit,
    })
}

/// The agent's standard input, output or error in place of the old launcher's.
fn standard(stdio: &[Option<OwnedFd>; 3], numbers: &[RawFd]) -> Result<Option<OwnedFd>, Fault> {
    let held = numbers.iter().find_map(|n| stdio.get(usize::try_from(*n).ok()?)?.as_ref());
    held.map(|fd| fd::dup_from(fd.as_raw_fd(), 0).at("duplicate")).transpose()
}

/// A rebuilt regular file at its offset.
fn file(d: &Description, built: Result<&files::BuiltFile, Fault>, made: &Store) -> Result<OwnedFd, Fault> {
    let fd = built?.open(d.flags, made)?;
    if d.pos != 0 {
        fd::seek(fd.as_raw_fd(), d.pos, libc::SEEK_SET).at("set the offset")?;
    }
    Ok(fd)
}

/// What all kinds have in common: status flags, locks of the description.
fn settle(d: &Descriptors, id: DescId, raw: RawFd) -> Result<(), Fault> {
    const SETTABLE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;
    let wanted = d.descriptions[id].flags;
    if wanted & libc::O_PATH != 0 {
        return Ok(());
    }
    let now = fd::flags(raw).at("read its flags")?;
    if (now ^ wanted) & SETTABLE != 0 {
        fd::set_flags(raw, (now & !SETTABLE) | (wanted & SETTABLE)).at("set its flags")?;
    }
    locks::restore_of_description(raw, id, d)
}

fn entry<T>(list: &[T], at: usize) -> Result<&T, Fault> {
    match list.get(at) {
        Some(v) => Ok(v),
        None => refuse("the image refers to an object that it does not have"),
    }
}

/// A refusal that names the descriptor.
pub(crate) fn refusal(d: &Descriptors, id: DescId, fault: &Fault) -> Refusal {
    let (pid, object) = match d.descriptions.get(id) {
        Some(d) if d.holder.fd >= 0 => (d.holder.pid, format!("fd {} ({})", d.holder.fd, d.name)),
        Some(d) => (d.holder.pid, format!("descriptor in flight ({})", d.name)),
        None => (0, "descriptor".into()),
    };
    fault.of(pid, object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Description, FsPath, Holder, Kind, Slot, Table};

    fn description(fd: RawFd) -> Description {
        Description {
            holder: Holder { pid: 1, fd },
            name: FsPath::default(),
            flags: 0,
            pos: 0,
            owner: None,
            locks: Vec::new(),
            kind: Kind::LauncherStdio(vec![fd]),
        }
    }

    #[test]
    fn a_limit_under_which_a_restart_would_fail_is_refused() {
        let job = |numbers: &[RawFd]| {
            let slot = |fd: &RawFd| Slot {
                fd: *fd,
                desc: 0,
                cloexec: false,
            };
            Descriptors {
                tables: vec![Table {
                    pids: vec![1],
                    slots: numbers.iter().map(slot).collect(),
                }],
                descriptions: numbers.iter().map(|fd| description(*fd)).collect(),
                ..Descriptors::default()
            }
        };
        let many: Vec<RawFd> = (0..120).collect();
        let told = |numbers: &[RawFd], limit| shortage(&job(numbers), 0, limit).map(|refusal| refusal.to_string());
        let least = 120 + i32::try_from(NEEDED).unwrap();
        assert_eq!(told(&many, least), None);
        let refusal = told(&many, least - 1).unwrap();
        assert!(refusal.contains("process 1") && refusal.contains("63 below 183"), "{refusal}");
        // They must lie together.
        let apart: Vec<RawFd> = many.iter().copied().chain([150]).collect();
        assert!(told(&apart, 200).is_some() && told(&apart, 220).is_none());
    }
}
