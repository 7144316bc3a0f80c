//! What the threads of a history share.

use crate::clock::Clock;
use crate::device::{Device, Host};
use crate::files::{CopyError, Files, Lack};
use crate::key::Key;
use crate::numbers::Numbers;
use crate::options::{Layout, Options};
use crate::shape::Shape;
use crate::{HistoryError, Level, Life, Stats};
use belay_history::plan::{Config, Copy, Job, Link, PlanError, Planner};
use belay_history::table::Room;
use belay_history::Version;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes per second that are expected before any have been copied: of memory, of a device's link, of a disk.
const COPY: f64 = 5e9;
const LINK: f64 = 10e9;
const DISK: f64 = 1e9;

/// Where bytes lie.
pub(crate) enum Tier {
    Device(Arc<dyn Device>),
    Host(Arc<Host>),
    Files,
}

/// One end of a copy.
pub(crate) enum Side {
    /// The parts of the caller.
    Program,
    Device(Arc<dyn Device>, Vec<Range<u64>>),
    Memory(Arc<Host>, Vec<Range<u64>>),
    File,
}

/// A copy to carry out.
pub(crate) struct Task {
    pub(crate) job: Job,
    pub(crate) from: Side,
    pub(crate) to: Side,
    pub(crate) key: Key,
    pub(crate) shape: Arc<Shape>,
    pub(crate) stop: Arc<AtomicBool>,
}

/// A direction of a link: copies of one follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    pub(crate) link: usize,
    pub(crate) up: bool,
}

#[derive(Clone)]
struct Entry {
    shape: Arc<Shape>,
    key: Key,
}

/// What is behind the lock.
pub(crate) struct Desk {
    pub(crate) planner: Planner,
    entries: BTreeMap<u64, Entry>,
    /// Numbers of versions that have been dropped.
    gone: Numbers,
    /// Files that were damaged, or could not be read, when the history was opened.
    damaged: BTreeMap<u64, (Key, Lack)>,
    serial: u64,
    /// Copies that have not begun.
    pub(crate) tasks: BTreeMap<Lane, Task>,
    /// The copy of the call that waits.
    pub(crate) call: Option<Task>,
    /// Copies of the lanes, begun or not: what ends them.
    under_way: BTreeMap<u64, (Version, Arc<AtomicBool>)>,
    /// Files to remove.
    pub(crate) rubbish: BTreeSet<Key>,
    /// Those that could not be removed, and why.
    stuck: BTreeMap<Key, io::Error>,
    /// Those that are being removed at this moment.
    removing: BTreeSet<Key>,
    /// How many have been.
    removed: u64,
    /// The last copy that has been handed out: numbers of copies only grow.
    pub(crate) handed: u64,
    /// Counts copies down that have failed.
    failed: u64,
    /// Of those the one handed out last: its number, what it was, and why.
    failure: Option<(u64, String, i32)>,
    /// Calls that wait for everything to be flushed.
    pub(crate) waiters: u32,
    pub(crate) ended: bool,
    fault: Option<String>,
    pub(crate) calls: Stats,
}

/// See the module.
pub(crate) struct Shared {
    tiers: Vec<Tier>,
    pub(crate) files: Files,
    clock: Clock,
    desk: Mutex<Desk>,
    wake: Condvar,
}

impl Shared {
    pub(crate) fn new(options: &Options) -> Result<Self, HistoryError> {
        let (files, found) = Files::open(&options.dir, &options.name, options.life)?;
        let host = Host::new(options.host_bytes).map_err(HistoryError::io("reserve memory"))?;
        let room = |bytes: u64| match options.layout {
            Layout::Paged => Room::Paged {
                bytes,
                extent: options.extent,
            },
            Layout::Contiguous => Room::Contiguous { bytes },
        };
        let link = |rate: f64, duplex| Link {
            down: rate,
            up: rate,
            duplex,
        };
        let mut config = Config {
            rules: options.rules,
            rooms: vec![room(options.host_bytes), Room::Endless],
            links: vec![link(DISK, false)],
            copy: COPY,
        };
        let mut tiers = vec![Tier::Host(Arc::new(host)), Tier::Files];
        if let Some(device) = &options.device {
            config.rooms.insert(0, room(device.bytes()));
            config.links.insert(0, link(LINK, true));
            tiers.insert(0, Tier::Device(device.clone()));
        }
        let mut desk = Desk {
            planner: Planner::new(&config),
            entries: BTreeMap::new(),
            gone: Numbers::default(),
            damaged: BTreeMap::new(),
            serial: found.iter().map(|f| f.key.serial).max().unwrap_or(0),
            tasks: BTreeMap::new(),
            call: None,
            under_way: BTreeMap::new(),
            rubbish: BTreeSet::new(),
            stuck: BTreeMap::new(),
            removing: BTreeSet::new(),
            removed: 0,
            handed: 0,
            failed: 0,
            failure: None,
            waiters: 0,
            ended: false,
            fault: None,
            calls: Stats::default(),
        };
        for found in found {
            let key = found.key;
            match found.shape {
                _ if options.life == Life::UntilRead => _ = desk.rubbish.insert(key),
                Ok(shape) => {
                    let size = shape.bytes().max(1);
                    desk.entries.insert(
                        key.version,
                        Entry {
                            shape: Arc::new(shape),
                            key,
                        },
                    );
                    let known = desk.planner.found(Version(key.version), size);
                    desk.check(known);
                }
                Err(lack) => {
                    desk.damaged.insert(key.version, (key, lack));
                }
            }
        }
        desk.planner.flush(options.life == Life::Lasting);
        Ok(Self {
            tiers,
            files,
            clock: Clock::new(),
            desk: Mutex::new(desk),
            wake: Condvar::new(),
        })
    }

    /// A lane for each direction of each link.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = Lane> {
        (0..self.tiers.len() - 1).flat_map(|link| [false, true].map(|up| Lane { link, up }))
    }

    /// It leads to the files: what is to be removed there is a matter of this lane.
    pub(crate) fn is_lowest(&self, lane: Lane) -> bool {
        !lane.up && lane.link + 2 == self.tiers.len()
    }

    /// The highest tier that `level` allows.
    pub(crate) fn tier(&self, level: Level) -> usize {
        match level {
            Level::Host => self.tiers.len() - 2,
            Level::Local | Level::Durable => self.tiers.len() - 1,
        }
    }

    /// Seconds since the history was opened.
    pub(crate) fn now(&self) -> f64 {
        self.clock.now()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until something has changed.
    pub(crate) fn pause<'a>(&self, desk: MutexGuard<'a, Desk>) -> MutexGuard<'a, Desk> {
        self.wake.wait(desk).unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, or until a time of [`Shared::now`].
    pub(crate) fn pause_until<'a>(&self, desk: MutexGuard<'a, Desk>, time: f64) -> MutexGuard<'a, Desk> {
        let rest = Duration::from_secs_f64((time - self.now()).clamp(0.0, 60.0));
        let woken = self.wake.wait_timeout(desk, rest);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Hands out what the planner wants to be copied now.
    pub(crate) fn poll(&self, desk: &mut Desk) {
        if desk.ended {
            return;
        }
        let jobs = desk.planner.poll(self.now());
        for job in desk.check(jobs).unwrap_or_default() {
            self.begin(desk, job);
        }
        // Those that run have been ended before; see `halt`.
        desk.planner.cancelled();
        self.wake.notify_all();
    }

    fn begin(&self, desk: &mut Desk, job: Job) {
        let Some(entry) = desk.entries.get(&job.version.0).cloned() else {
            desk.fault = Some(format!("a copy of version {}, which nobody has put", job.version.0));
            return;
        };
        desk.handed = desk.handed.max(job.id);
        let stop = Arc::new(AtomicBool::new(false));
        let (from, to, lane) = match job.copy {
            Copy::Put { to } => (Side::Program, self.side(desk, job.version, to), None),
            Copy::Read { from } => (self.side(desk, job.version, from), Side::Program, None),
            Copy::Down { from: link } => {
                let sides = (self.side(desk, job.version, link), self.side(desk, job.version, link + 1));
                (sides.0, sides.1, Some(Lane { link, up: false }))
            }
            Copy::Up { to: link } => {
                let sides = (self.side(desk, job.version, link + 1), self.side(desk, job.version, link));
                (sides.0, sides.1, Some(Lane { link, up: true }))
            }
        };
        let task = Task {
            job,
            from,
            to,
            key: entry.key,
            shape: entry.shape,
            stop: stop.clone(),
        };
        match lane {
            Some(lane) => {
                desk.under_way.insert(job.id, (job.version, stop));
                desk.tasks.insert(lane, task);
            }
            None => desk.call = Some(task),
        }
    }

    fn side(&self, desk: &Desk, version: Version, tier: usize) -> Side {
        let is_empty = desk.entries.get(&version.0).is_none_or(|e| e.shape.bytes() == 0);
        let place = match is_empty {
            true => Vec::new(),
            false => desk.planner.table().place(version, tier),
        };
        match &self.tiers[tier] {
            Tier::Device(device) => Side::Device(device.clone(), place),
            Tier::Host(host) => Side::Memory(host.clone(), place),
            Tier::Files => Side::File,
        }
    }

    /// A copy of a lane has ended.
    pub(crate) fn report(&self, desk: &mut Desk, task: &Task, end: Result<(), CopyError>) {
        let (now, id) = (self.now(), task.job.id);
        desk.under_way.remove(&id);
        match end {
            Ok(()) => {
                let done = desk.planner.done(now, id);
                desk.check(done);
            }
            // The planner is told by who has ended it.
            Err(CopyError::Stopped) => {}
            Err(e) => {
                let failed = desk.planner.failed(now, id);
                desk.check(failed);
                if let Copy::Down { .. } = task.job.copy {
                    desk.fail(&e, &task.job);
                }
            }
        }
        self.poll(desk);
        self.wake.notify_all();
    }

    /// No copy of `version` is under way in any lane when this returns, nor before the lock is given up.
    pub(crate) fn halt<'a>(&'a self, mut desk: MutexGuard<'a, Desk>, version: Version) -> MutexGuard<'a, Desk> {
        loop {
            let Desk { tasks, under_way, .. } = &mut *desk;
            tasks.retain(|_, t| {
                let is_other = t.job.version != version;
                if !is_other {
                    under_way.remove(&t.job.id);
                }
                is_other
            });
            let mut running = desk.under_way.values().filter(|(v, _)| *v == version).peekable();
            if running.peek().is_none() {
                drop(running);
                return desk;
            }
            running.for_each(|(_, stop)| stop.store(true, Ordering::Relaxed));
            desk = self.pause(desk);
        }
    }

    /// All written files are on the disk.
    pub(crate) fn sync(&self) -> Result<(), HistoryError> {
        self.files.sync().map_err(HistoryError::io("sync versions"))
    }

    /// After a restart by belay: the files are those of then.
    pub(crate) fn settle(&self) -> Result<(), HistoryError> {
        self.files.settle().map_err(HistoryError::io("bring versions back"))
    }

    /// Removes a file that nobody needs.
    pub(crate) fn remove<'a>(&'a self, mut desk: MutexGuard<'a, Desk>, key: Key) -> MutexGuard<'a, Desk> {
        desk.removing.insert(key);
        drop(desk);
        let removed = self.files.remove(key);
        let mut desk = self.lock();
        desk.removing.remove(&key);
        match removed {
            Ok(()) => desk.removed += 1,
            // Tried again by the next put, drop or wait, and said by a wait.
            Err(e) => _ = desk.stuck.insert(key, e),
        }
        self.wake.notify_all();
        desk
    }

    /// All is removed that is to be by now; an error where something cannot be.
    pub(crate) fn tidy(&self) -> Result<(), HistoryError> {
        let mut desk = self.lock();
        desk.try_again();
        // What is dropped from now on, perhaps without end, is not waited for.
        let mut due: BTreeSet<Key> = desk.rubbish.union(&desk.removing).copied().collect();
        while let Some(key) = due.first().copied() {
            desk = match desk.rubbish.remove(&key) {
                true => self.remove(desk, key),
                false if desk.removing.contains(&key) => self.pause(desk),
                false => {
                    due.remove(&key);
                    desk
                }
            };
        }
        match desk.stuck.first_key_value() {
            Some((key, e)) => Err(cannot_remove(*key, e)),
            None => Ok(()),
        }
    }

    /// Files that have been removed so far.
    pub(crate) fn removed(&self) -> u64 {
        self.lock().removed
    }

    /// Whether any have been since then; what is to be removed is so first.
    pub(crate) fn has_made_room(&self, since: u64) -> bool {
        let mut desk = self.lock();
        desk.try_again();
        loop {
            desk = match desk.rubbish.pop_first() {
                Some(key) => self.remove(desk, key),
                None if !desk.removing.is_empty() => self.pause(desk),
                None => return desk.removed > since,
            };
        }
    }

    /// The lanes end, with what they are at.
    pub(crate) fn end(&self) {
        let mut desk = self.lock();
        desk.ended = true;
        desk.under_way
            .values()
            .for_each(|(_, stop)| stop.store(true, Ordering::Relaxed));
        self.wake.notify_all();
    }

    /// Removes what is not to last, when the lanes have ended.
    pub(crate) fn clear(&self, life: Life) -> Result<(), HistoryError> {
        let settled = self.files.settle();
        let mut desk = self.lock();
        if life == Life::UntilRead {
            let keys: Vec<Key> = desk.entries.values().map(|e| e.key).collect();
            desk.rubbish.extend(keys);
        }
        drop(desk);
        // Each is tried.
        self.tidy()?;
        settled.map_err(HistoryError::io("bring versions back"))?;
        match life {
            Life::UntilRead => self.files.end_life().map_err(HistoryError::io("end the life of versions")),
            Life::Lasting => Ok(()),
        }
    }
}

fn cannot_remove(key: Key, e: &io::Error) -> HistoryError {
    let why = e.raw_os_error().map_or_else(|| e.kind().into(), io::Error::from_raw_os_error);
    HistoryError::io(format!("remove version {}, which is needed no more", key.version))(why)
}

/// A number below 2^24 that memory does not tell.
fn chance() -> u64 {
    let mut bytes = [0; 3];
    // Where the kernel gives nothing, the clock has to do.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
    u64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]))
}

impl Desk {
    /// The planner refuses only what contradicts its own orders: then nothing is certain any more.
    pub(crate) fn check<T>(&mut self, answer: Result<T, PlanError>) -> Option<T> {
        match answer {
            Ok(t) => Some(t),
            Err(e) => {
                self.fault.get_or_insert(e.to_string());
                None
            }
        }
    }

    pub(crate) fn fault(&self) -> Result<(), HistoryError> {
        match &self.fault {
            Some(why) => Err(HistoryError::Planner(why.clone())),
            None => Ok(()),
        }
    }

    fn fail(&mut self, e: &CopyError, job: &Job) {
        let number = match e {
            CopyError::Io(e) => e.raw_os_error().unwrap_or(libc::EIO),
            _ => libc::EIO,
        };
        self.failed += 1;
        // Lanes end in any order.
        if self.failure.as_ref().is_none_or(|(id, ..)| *id < job.id) {
            self.failure = Some((job.id, format!("flush version {}", job.version.0), number));
        }
    }

    /// Fails if a copy down has that was handed out after this one.
    pub(crate) fn failure(&self, after: u64) -> Result<(), HistoryError> {
        match &self.failure {
            Some((id, what, number)) if *id > after => Err(HistoryError::io(what)(io::Error::from_raw_os_error(*number))),
            _ => Ok(()),
        }
    }

    /// It is there, or its file, which could not be read; one whose file was damaged before is not, and can be put again.
    pub(crate) fn is_known(&self, version: u64) -> bool {
        let is_unread = |(_, lack): &(Key, Lack)| *lack == Lack::Unread;
        self.entries.contains_key(&version) || self.damaged.get(&version).is_some_and(is_unread)
    }

    /// What could not be removed is to be removed again.
    pub(crate) fn try_again(&mut self) {
        self.rubbish.extend(std::mem::take(&mut self.stuck).into_keys());
    }

    /// A new version.
    pub(crate) fn enter(&mut self, version: u64, shape: Arc<Shape>) {
        // What the process did before it was restarted has used other times; where the clock has been set back, other chances.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos() as u64);
        self.serial = now.max(self.serial.saturating_add(1)).saturating_add(chance());
        let key = Key {
            version,
            serial: self.serial,
        };
        self.entries.insert(version, Entry { shape, key });
    }

    /// A version could not be put.
    pub(crate) fn withdraw(&mut self, version: u64) {
        self.entries.remove(&version);
    }

    /// A version is there, in place of what was damaged.
    pub(crate) fn is_here(&mut self, version: u64) {
        self.rubbish.extend(self.damaged.remove(&version).map(|(key, _)| key));
        self.gone.remove(version);
    }

    /// The planner knows it no more.
    pub(crate) fn forgotten(&mut self, version: u64) {
        if let Some(entry) = self.entries.remove(&version) {
            self.rubbish.insert(entry.key);
            self.gone.insert(version);
        }
    }

    pub(crate) fn is_damaged(&self, version: u64) -> bool {
        self.damaged.contains_key(&version)
    }

    pub(crate) fn forget_damaged(&mut self, version: u64) {
        self.rubbish.extend(self.damaged.remove(&version).map(|(key, _)| key));
        self.gone.insert(version);
    }

    pub(crate) fn shape(&self, version: u64) -> Result<Arc<Shape>, HistoryError> {
        match self.entries.get(&version) {
            Some(entry) => Ok(entry.shape.clone()),
            None if self.is_damaged(version) => Err(HistoryError::Damaged(version)),
            None if self.gone.contains(version) => Err(HistoryError::Dropped(version)),
            None => Err(HistoryError::Unknown(version)),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let (planner, table) = (self.planner.stats(), self.planner.table());
        let lowest = planner.down.len() - 1;
        Stats {
            hits: planner.hits[0],
            from_files: planner.hits[lowest + 1],
            down: planner.down[lowest],
            up: planner.up[lowest],
            cancelled: planner.cancelled,
            failed: self.failed,
            versions: self.entries.len() as u64,
            held: table.room(0) - table.free(0),
            ..self.calls.clone()
        }
    }
}
