//! Where a rebuild holds descriptors until the processes have theirs: the agent has some, and *keepers* the rest,
//! because a job has more in all than one process may.
//!
//! A keeper is a stopped fork of the agent that has closed all but what it is to keep, each at the number that it had
//! in the agent, which then closes its own. Whoever needs one takes a duplicate (`pidfd_getfd`). Each keeper has the
//! limit of one process to itself. They end with the agent at the latest.

use crate::fault::{At, Fault};
use crate::limit::NEEDED;
use crate::sys::fd;
use belay_kernel::{apart, numbers, pidfd};
use rustix::process::{
    getpid, kill_process, set_dumpable_behavior, set_parent_process_death_signal, set_ptracer, DumpableBehavior, PTracer, Pid,
    Signal,
};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::parent_id;

/// Forks the calling process; 0 in the new one, which raises no signal when it ends.
pub type Fork<'a> = dyn FnMut() -> io::Result<i32> + 'a;

/// Place of a descriptor in a [`Store`].
pub(crate) type HoldId = usize;

/// So many descriptors of one store the agent has itself, where one process may have `limit`.
fn most(limit: RawFd) -> usize {
    (usize::try_from(limit).unwrap_or(0) / 4).max(16)
}

/// So many keepers hold `count` descriptors at most.
pub(crate) fn keepers(count: usize, limit: RawFd) -> usize {
    count / most(limit) + 1
}

/// Descriptors by their place.
#[derive(Debug)]
pub(crate) struct Store {
    held: Vec<Option<Held>>,
    keepers: Vec<Keeper>,
    /// How many are the agent's own, and how many may be.
    own: usize,
    most: usize,
}

#[derive(Debug)]
enum Held {
    Own(OwnedFd),
    Kept { keeper: usize, number: RawFd },
}

/// A descriptor of the caller's for as long as it uses it.
#[derive(Debug)]
pub(crate) enum Lent {
    Own(RawFd),
    Taken(OwnedFd),
}

impl Lent {
    /// Its number.
    pub(crate) fn raw(&self) -> RawFd {
        match self {
            Lent::Own(raw) => *raw,
            Lent::Taken(fd) => fd.as_raw_fd(),
        }
    }

    /// The same at a number in `room`, where the agent has its own already.
    pub(crate) fn lifted(self, room: &Range<RawFd>) -> Result<Self, Fault> {
        match self {
            Lent::Taken(fd) => lift(fd, room).map(Lent::Taken),
            own @ Lent::Own(_) => Ok(own),
        }
    }

    /// Puts it at number `to`, as [`fd::dup_to`].
    pub(crate) fn put_at(self, to: RawFd, cloexec: bool) -> io::Result<()> {
        fd::dup_to(self.raw(), to, cloexec)?;
        match self {
            // It came to its number by itself, and stays.
            Lent::Taken(fd) if fd.as_raw_fd() == to => std::mem::forget(fd),
            Lent::Taken(_) | Lent::Own(_) => {}
        }
        Ok(())
    }
}

impl Store {
    /// A store with `places` empty places, where one process may have `limit` descriptors.
    pub(crate) fn new(places: usize, limit: RawFd) -> Self {
        Self {
            held: (0..places).map(|_| None).collect(),
            keepers: Vec::new(),
            own: 0,
            most: most(limit),
        }
    }

    /// Puts `fd` into an empty place.
    pub(crate) fn put(&mut self, id: HoldId, fd: OwnedFd, fork: &mut Fork<'_>) -> Result<(), Fault> {
        self.held[id] = Some(Held::Own(fd));
        self.own += 1;
        if self.own >= self.most {
            self.keep(fork)?;
        }
        Ok(())
    }

    /// Puts `fd` into a new place.
    pub(crate) fn add(&mut self, fd: OwnedFd, fork: &mut Fork<'_>) -> Result<HoldId, Fault> {
        self.held.push(None);
        let id = self.held.len() - 1;
        self.put(id, fd, fork).map(|()| id)
    }

    /// Whether there is one.
    pub(crate) fn has(&self, id: HoldId) -> bool {
        self.held.get(id).is_some_and(Option::is_some)
    }

    /// The one in this place; in the agent or a fork of it.
    pub(crate) fn lend(&self, id: HoldId) -> Result<Option<Lent>, Fault> {
        match self.held.get(id) {
            Some(Some(Held::Own(fd))) => Ok(Some(Lent::Own(fd.as_raw_fd()))),
            Some(Some(Held::Kept { keeper, number })) => self.keepers[*keeper].take(*number).map(Lent::Taken).map(Some),
            Some(None) | None => Ok(None),
        }
    }

    /// Makes the store ready for forks of the agent that lay out their tables: what the agent has is at numbers in
    /// `room`, which none of them overwrites; where there are not enough below `limit`, or there are keepers, all is
    /// theirs.
    pub(crate) fn settle(&mut self, room: &Range<RawFd>, limit: RawFd, fork: &mut Fork<'_>) -> Result<(), Fault> {
        let numbers = usize::try_from(room.end.min(limit) - room.start).unwrap_or(0);
        if !self.keepers.is_empty() || self.own + NEEDED > numbers {
            return self.keep(fork);
        }
        for held in &mut self.held {
            *held = match held.take() {
                Some(Held::Own(fd)) => Some(Held::Own(lift(fd, room)?)),
                other => other,
            };
        }
        Ok(())
    }

    /// Gives all that the agent has to a new keeper.
    fn keep(&mut self, fork: &mut Fork<'_>) -> Result<(), Fault> {
        if self.own == 0 {
            return Ok(());
        }
        let own = self.held.iter().flatten().filter_map(|h| match h {
            Held::Own(fd) => Some(fd.as_raw_fd()),
            Held::Kept { .. } => None,
        });
        let keeper = self.keepers.len();
        self.keepers
            .push(Keeper::make(own.collect(), fork).at("make a process that keeps descriptors (RLIMIT_NPROC?)")?);
        for held in self.held.iter_mut().flatten() {
            if let Held::Own(fd) = held {
                let number = fd.as_raw_fd();
                *held = Held::Kept { keeper, number };
            }
        }
        self.own = 0;
        Ok(())
    }
}

/// A process that keeps descriptors.
#[derive(Debug)]
struct Keeper {
    pid: i32,
    maker: u32,
}

impl Keeper {
    /// Makes one that keeps `numbers` of the caller's.
    fn make(mut numbers: Vec<RawFd>, fork: &mut Fork<'_>) -> io::Result<Self> {
        numbers.sort_unstable();
        let mut gaps = Vec::with_capacity(numbers.len() + 1);
        let mut next = 0;
        for n in numbers {
            if n > next {
                gaps.push((next, n - 1));
            }
            next = n + 1;
        }
        gaps.push((next, RawFd::MAX));
        let maker = std::process::id();
        let pid = fork()?;
        if pid == 0 {
            stand(&gaps, maker);
        }
        let this = Self { pid, maker };
        // It has closed the others when it stands: whoever looks at the other end of one must not see it as open.
        match this.wait(libc::WUNTRACED)? {
            status if libc::WIFSTOPPED(status) => Ok(this),
            status => Err(io::Error::other(format!("it ended with status {status:#x}"))),
        }
    }

    fn take(&self, number: RawFd) -> Result<OwnedFd, Fault> {
        let keeper = pidfd::open(self.pid).at("open a process that keeps descriptors")?;
        pidfd::getfd(keeper.as_fd(), number).at("take it from the process that keeps it (pidfd_getfd)")
    }

    fn wait(&self, options: i32) -> io::Result<i32> {
        loop {
            match apart::wait(self.pid, options | libc::__WALL) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Forks of the agent have this value too.
        if std::process::id() == self.maker {
            // The child is ours and has not been waited for.
            let _ = Pid::from_raw(self.pid).map(|pid| kill_process(pid, Signal::KILL));
            // What it has kept is closed when it can be waited for.
            let _ = self.wait(0);
        }
    }
}

/// The life of a keeper, in a fork of a process that may have threads: system calls only.
fn stand(gaps: &[(RawFd, RawFd)], maker: u32) -> ! {
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
    // Without Yama this is not known, and not needed.
    let _ = set_ptracer(PTracer::Any);
    // Who had ended before could not have ended this one too.
    let orphan = parent_id() != maker;
    for (first, last) in gaps {
        if orphan || numbers::close(*first, *last).is_err() {
            apart::end(1);
        }
    }
    loop {
        let _ = kill_process(getpid(), Signal::STOP);
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
