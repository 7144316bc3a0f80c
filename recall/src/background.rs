//! Puts that go on when their call has returned: one at a time, on a thread of their own.

use crate::lane::start_thread;
use crate::HistoryError;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// What is to be done for a put.
type Job = Box<dyn FnOnce() -> Result<(), HistoryError> + Send>;

/// The puts of one history. A forked child may use none of this: it has not got the thread.
#[derive(Default)]
pub struct Background {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    now: Mutex<Now>,
    /// A put has been begun or has ended, or no more will come.
    changed: Condvar,
}

#[derive(Default)]
struct Now {
    /// What is being put, until that has ended.
    version: Option<u64>,
    /// The same, until the thread takes it.
    job: Option<Job>,
    /// Why puts have failed, until somebody is told.
    failures: BTreeMap<u64, HistoryError>,
    /// Started by the first put.
    thread: Option<JoinHandle<()>>,
    ended: bool,
}

impl Background {
    /// Begins the put of a version, when the one before has ended.
    pub fn begin(&self, version: u64, job: impl FnOnce() -> Result<(), HistoryError> + Send + 'static) -> Result<(), HistoryError> {
        let mut now = self.shared.wait(|now| now.version.is_some());
        if now.thread.is_none() {
            let shared = self.shared.clone();
            now.thread = Some(start_thread("belay-put".into(), move || shared.run())?);
        }
        now.version = Some(version);
        now.job = Some(Box::new(job));
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Whether a put goes on.
    pub fn is_busy(&self) -> bool {
        self.shared.lock().version.is_some()
    }

    /// Waits until none does.
    pub fn settle(&self) {
        drop(self.shared.wait(|now| now.version.is_some()));
    }

    /// Waits for the put of a version, and says once how it has failed, if it has.
    pub fn end_of(&self, version: u64) -> Result<(), HistoryError> {
        let mut now = self.shared.wait(|now| now.version == Some(version));
        now.failures.remove(&version).map_or(Ok(()), Err)
    }

    /// Says how a put has failed that nobody has asked for, once for each.
    pub fn failure(&self) -> Result<(), HistoryError> {
        let failure = self.shared.lock().failures.pop_first();
        failure.map_or(Ok(()), |(_, e)| Err(e))
    }

    /// Waits until all has ended, the thread too.
    pub fn end(self) -> Result<(), HistoryError> {
        let mut now = self.shared.wait(|now| now.version.is_some());
        now.ended = true;
        let thread = now.thread.take();
        drop(now);
        self.shared.changed.notify_all();
        if let Some(thread) = thread {
            // It does not panic: a panic ends the process.
            let _ = thread.join();
        }
        self.failure()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as long as this is so.
    fn wait(&self, is_so: impl Fn(&Now) -> bool) -> MutexGuard<'_, Now> {
        let now = self.changed.wait_while(self.lock(), |now| is_so(now));
        now.unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let mut now = self.wait(|now| now.job.is_none() && !now.ended);
            let Some(job) = now.job.take() else { return };
            drop(now);
            let end = job();
            let mut now = self.lock();
            if let (Err(e), Some(version)) = (end, now.version) {
                now.failures.insert(version, e);
            }
            now.version = None;
            drop(now);
            self.changed.notify_all();
        }
    }
}
