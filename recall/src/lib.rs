//! Histories of checkpoints for programs: many versions, written quickly and read back in an order that the program
//! knows, in memory and in files. The planner of `belay-history` decides; here threads copy.
//!
//! ```text
//!             put / get: the caller's own thread copies
//! program ◀─────────────────────────────────────────────▶ device ◀─▶ host memory ◀─▶ files
//!                                                          a thread for each arrow and direction
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `device` | memory that versions lie in: the trait, memory of the host, and a slow one for tests |
//! | `files` | the last tier: a directory with a checksummed file for each version |
//! | `key` | the names of versions and of their files |
//! | `dir`, `keep` | that directory, and what checkpoints by belay need of it |
//! | `record` | what stands at the end of such a file |
//! | `desk` | all that the threads share, behind one lock |
//! | `lane` | the threads |
//! | `shape`, `span` | the parts of a version, and lists of memory |
//! | `calls` | put and get |
//! | `background` | puts that go on when their call has returned |
//! | `clock` | time that goes forward only |
//!
//! A copy is carried out without the lock. Room of a version that is dropped while a copy of it is under way would be
//! given to another at once; so such copies are ended first, and the planner is told afterwards (`desk::halt`).

mod background;
mod calls;
mod clock;
mod desk;
pub mod device;
mod dir;
mod error;
mod files;
mod keep;
mod key;
mod lane;
mod lock;
mod numbers;
mod options;
mod record;
mod shape;
mod span;

pub use background::Background;
pub use belay_history::life::After;
pub use error::HistoryError;
pub use options::{Layout, Life, Options};
pub use shape::Shape;

use belay_history::Version;
use desk::{Desk, Shared};
use lock::Process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How far down versions are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// In the memory of the host: the device can be lost.
    Host,
    /// In files: the process can be lost.
    Local,
    /// The same, and synced: the node can be lost, and its disks not.
    Durable,
}

/// Figures of a history.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls that have returned well, and for how many nanoseconds they have blocked the program.
    pub puts: u64,
    /// See `puts`.
    pub gets: u64,
    /// See `puts`.
    pub put_ns: u64,
    /// See `puts`.
    pub get_ns: u64,
    /// Bytes that the program has put and got.
    pub put_bytes: u64,
    /// See `put_bytes`.
    pub get_bytes: u64,
    /// Gets of versions that lay in the fastest tier,
    pub hits: u64,
    /// and in files.
    pub from_files: u64,
    /// Bytes written to files,
    pub down: u64,
    /// and read from them.
    pub up: u64,
    /// Copies that were ended because nobody needed them any more.
    pub cancelled: u64,
    /// Copies to files that have failed and are tried again.
    pub failed: u64,
    /// Versions there are.
    pub versions: u64,
    /// Bytes of the fastest tier that versions take.
    pub held: u64,
}

/// A history. Calls may come from several threads; puts and gets are carried out one after the other.
pub struct History {
    shared: Arc<Shared>,
    /// Held during a put or get.
    turn: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
    life: Life,
    process: Process,
}

impl History {
    /// Opens a history. Versions that an earlier process has left in its files are there again, if they are to last.
    pub fn open(options: Options) -> Result<Self, HistoryError> {
        options.check()?;
        let life = options.life;
        let shared = Arc::new(Shared::new(&options)?);
        let mut history = Self {
            shared: shared.clone(),
            turn: Mutex::new(()),
            threads: Vec::new(),
            life,
            process: Process::now(),
        };
        for lane in shared.lanes() {
            // What has been started ends when `history` is dropped.
            history.threads.push(lane::start(&shared, lane)?);
        }
        Ok(history)
    }

    /// Appends to the order in which versions will be read. They need not have been put yet.
    pub fn hint(&self, order: impl IntoIterator<Item = u64>) -> Result<(), HistoryError> {
        self.hint_sized(order.into_iter().map(|v| (v, None)))
    }

    /// The same, with the bytes that versions will have, where the program knows them.
    pub fn hint_sized(&self, order: impl IntoIterator<Item = (u64, Option<u64>)>) -> Result<(), HistoryError> {
        let mut desk = self.desk()?;
        desk.planner.hint_sized(order.into_iter().map(|(v, s)| (Version(v), s)));
        self.shared.poll(&mut desk);
        desk.fault()
    }

    /// Replaces the order from position `from` of all hints that there were, on.
    pub fn hint_replace(&self, from: usize, order: impl IntoIterator<Item = u64>) -> Result<(), HistoryError> {
        let mut desk = self.desk()?;
        desk.planner.hint_replace(from, order.into_iter().map(Version));
        self.shared.poll(&mut desk);
        desk.fault()
    }

    /// Whether versions are fetched ahead of their gets. Otherwise this begins when all that is hinted has been put, or
    /// at the first get.
    pub fn prefetch(&self, on: bool) -> Result<(), HistoryError> {
        let mut desk = self.desk()?;
        desk.planner.prefetch(on);
        self.shared.poll(&mut desk);
        desk.fault()
    }

    /// What a version was put with.
    pub fn shape(&self, version: u64) -> Result<Arc<Shape>, HistoryError> {
        self.desk()?.shape(version)
    }

    /// All versions, in the order of their numbers.
    pub fn versions(&self) -> Result<Vec<u64>, HistoryError> {
        Ok(self.desk()?.planner.table().versions().map(|v| v.0).collect())
    }

    /// Nobody needs it any more.
    pub fn drop_version(&self, version: u64) -> Result<(), HistoryError> {
        let _turn = self.turn()?;
        let mut desk = self.desk()?;
        desk.try_again();
        if desk.is_damaged(version) {
            desk.forget_damaged(version);
            self.shared.poll(&mut desk);
            return desk.fault();
        }
        desk.shape(version)?;
        desk = self.shared.halt(desk, Version(version));
        let dropped = desk.planner.drop(Version(version));
        desk.check(dropped);
        desk.forgotten(version);
        self.shared.poll(&mut desk);
        desk.fault()
    }

    /// Waits until all that has been put is so far down. An error is that of a copy that has begun and failed meanwhile;
    /// nothing is lost with it. One that was under way before and fails is tried again first. Where the process can be
    /// lost, what has been dropped does not come back: a file that cannot be removed is an error too.
    pub fn wait(&self, level: Level) -> Result<(), HistoryError> {
        self.flush(level)?;
        if level == Level::Host {
            return Ok(());
        }
        self.shared.settle()?;
        // What is there no more does not come back either.
        self.shared.tidy()?;
        match level {
            Level::Durable => self.shared.sync(),
            _ => Ok(()),
        }
    }

    /// Whether all that has been put is so far down, without waiting. Only [`History::wait`] makes anything durable.
    pub fn is_at(&self, level: Level) -> Result<bool, HistoryError> {
        let is_there = self.desk()?.planner.is_flushed(self.shared.tier(level));
        if is_there && level > Level::Host {
            // After a restart memory says how the files were.
            self.shared.settle()?;
        }
        Ok(is_there && (level < Level::Durable || self.shared.files.is_synced()))
    }

    fn flush(&self, level: Level) -> Result<(), HistoryError> {
        let mut desk = self.desk()?;
        let tier = self.shared.tier(level);
        // What fails of before says nothing of now, and `close` has no other call to try again.
        let before = desk.handed;
        desk.waiters += 1;
        desk.planner.flush(true);
        // What is put from now on, perhaps without end, is not waited for.
        let mut up = desk.planner.unflushed(tier);
        self.shared.poll(&mut desk);
        let end = loop {
            if let Err(e) = desk.fault() {
                break Err(e);
            }
            up.retain(|version| !desk.planner.is_down(*version, tier));
            if up.is_empty() {
                break Ok(());
            }
            if let Err(e) = desk.failure(before) {
                break Err(e);
            }
            desk = self.shared.pause(desk);
        };
        desk.waiters -= 1;
        let goes_on = self.life == Life::Lasting || desk.waiters > 0;
        desk.planner.flush(goes_on);
        end
    }

    /// Figures so far.
    pub fn stats(&self) -> Result<Stats, HistoryError> {
        Ok(self.desk()?.stats())
    }

    /// Ends the history: what is to last is flushed first, the rest is removed.
    pub fn close(mut self) -> Result<(), HistoryError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), HistoryError> {
        if let Err(forked) = self.is_own() {
            // A child has neither the threads nor a right to the files.
            self.threads.drain(..).for_each(std::mem::forget);
            return Err(forked);
        }
        let flushed = match self.life {
            _ if self.threads.is_empty() => return Ok(()),
            Life::Lasting => self.wait(Level::Local),
            Life::UntilRead => Ok(()),
        };
        self.shared.end();
        for thread in self.threads.drain(..) {
            // They do not panic: a panic ends the process.
            let _ = thread.join();
        }
        flushed.and(self.shared.clear(self.life))
    }

    /// Takes the turn for a put, get or drop.
    fn turn(&self) -> Result<MutexGuard<'_, ()>, HistoryError> {
        self.is_own()?;
        Ok(self.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// An error in a child of the process that has opened it: to be called before any lock, which a thread of the parent
    /// may have held.
    pub fn is_own(&self) -> Result<(), HistoryError> {
        match self.process == Process::now() {
            true => Ok(()),
            false => Err(HistoryError::Forked),
        }
    }

    fn desk(&self) -> Result<MutexGuard<'_, Desk>, HistoryError> {
        self.is_own()?;
        let desk = self.shared.lock();
        desk.fault()?;
        Ok(desk)
    }
}

impl Drop for History {
    fn drop(&mut self) {
        // Who wants to know calls `close`.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_restart_nothing_is_said_of_the_files_before_they_are_those_of_then() {
        let dir = std::env::temp_dir().join(format!("belay-recall-then-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let history = History::open(Options::new(&dir, "h", 1 << 20)).unwrap();
        history.put(1, &[(0, &[7])]).unwrap();
        history.wait(Level::Durable).unwrap();
        let names = || std::fs::read_dir(dir.join("h")).unwrap().map(|e| e.unwrap().path());
        let file = names().find(|p| p.extension().is_some_and(|e| e == "version")).unwrap();
        // What was done after the checkpoint has dropped it.
        std::fs::write(file.with_extension("gone"), "").unwrap();
        let is_at = |level| history.is_at(level).unwrap();
        assert!(is_at(Level::Local) && is_at(Level::Durable));
        history.shared.files.restarted();
        assert!(!is_at(Level::Durable) && is_at(Level::Local));
        assert!(names().all(|p| p.extension().is_none_or(|e| e != "gone")));
        history.wait(Level::Durable).unwrap();
        assert!(is_at(Level::Durable));
        history.close().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
