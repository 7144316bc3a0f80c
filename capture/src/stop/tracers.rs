//! Tracers: the threads that stop and steer the tasks of a job.
//!
//! The kernel takes ptrace requests for a task only from the thread that seized it, and each costs microseconds. A job
//! of many threads is therefore divided: the calling thread traces the first task of every process, and helpers share
//! the others.
//!
//! ```text
//! each([task 0, task 1, task 2, task 3]) ──► caller:   task 0 ─────────┐
//!                                        ├─► helper 1: task 1, task 3 ─┤
//!                                        └─► helper 2: task 2 ─────────┴─► results, in the order of the tasks
//! ```
//! A helper that ends, by a panic or with the agent, lets go what it traces, which then finds its way back by itself as
//! after the agent's death. That is also the quickest way to let many tasks go on: see [`Tracers::end`].

use belay_kernel::{pidfd, proc, prompt, waking};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Jobs with fewer tasks are left to the calling thread: dividing them would take longer.
const WORTH_HELP: usize = 64;
/// Helpers, at most; more would wait for each other at the kernel's task list.
const MOST: usize = 4;
/// Stack of a helper, bytes: the largest buffer on it is one task's extended state.
const STACK: usize = 256 * 1024;

/// Where helpers wait for each other before they end: whoever ends later has to get a processor among all that the
/// first one has let go, which takes milliseconds.
#[derive(Debug)]
struct Meeting {
    missing: AtomicUsize,
}

impl Meeting {
    /// How long one waits for the others, at most.
    const PATIENCE: Duration = Duration::from_micros(200);

    fn of(count: usize) -> Self {
        Self {
            missing: AtomicUsize::new(count),
        }
    }

    /// Waits without sleeping: to wake up is what takes long.
    fn wait(&self) {
        let begin = Instant::now();
        self.missing.fetch_sub(1, Ordering::Relaxed);
        while self.missing.load(Ordering::Relaxed) > 0 && begin.elapsed() < Self::PATIENCE {
            std::hint::spin_loop();
        }
    }
}

/// Something that belongs to one tracer.
pub(crate) trait Traced: Send + 'static {
    /// The number of its tracer; 0 is the calling thread.
    fn tracer(&self) -> usize;
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Helper {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Tells the moment at which the thread was gone. What it traces it lets go after it could be joined. Linux tells
    /// this since 6.9.
    watch: Option<JoinHandle<Instant>>,
}

/// The calling thread and its helpers. On drop the helpers end, and with them what they still trace is let go.
#[derive(Debug, Default)]
pub(crate) struct Tracers(Vec<Helper>);

impl Tracers {
    /// As many as a job of `tasks` tasks is worth.
    pub(crate) fn for_job(tasks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Where more want processors than there are, helpers would wait for each other: the first that is done, or
        // ends, leaves its processor to what it is to stop, or has let go.
        let helpers = match tasks {
            0..WORTH_HELP => 0,
            _ if proc::runnable().is_some_and(|n| n > cores) => 1,
            _ => cores.min(MOST),
        };
        // Fewer are no failure.
        Self((0..helpers).map_while(|_| Helper::start().ok()).collect())
    }

    /// The tracer of the `n`-th task that is not the first one of its process.
    pub(crate) fn share(&self, n: usize) -> usize {
        n.checked_rem(self.0.len()).map_or(0, |helper| helper + 1)
    }

    /// Whether [`Self::end`] can tell when it has let go what the helpers trace.
    pub(crate) fn can_end(&self) -> bool {
        self.0.iter().all(|h| h.watch.is_some())
    }

    /// Ends the helpers, and so lets go all that they trace: the kernel does it in one go, and no task that has been
    /// let go takes the processor from a tracer that has yet to let go others. The tasks must stand in stops that have
    /// been waited for; then it is the same for them as PTRACE_DETACH without a signal. Returns when it has happened,
    /// and the moment at which it had: the caller itself gets a processor after many of those that have been let go.
    pub(crate) fn end(&mut self) -> Instant {
        let meeting = Arc::new(Meeting::of(self.0.len()));
        for helper in &mut self.0 {
            let meeting = meeting.clone();
            if let Some(jobs) = helper.jobs.take() {
                drop(jobs.send(Box::new(move || meeting.wait())));
            }
        }
        let watches = self.0.iter_mut().filter_map(|h| h.watch.take());
        let last = watches.filter_map(|watch| watch.join().ok()).max();
        self.0.clear();
        last.unwrap_or_else(Instant::now)
    }

    /// Does `f` to every item on the thread of its tracer; returns the items and what `f` said, in order.
    pub(crate) fn each<T: Traced, R: Send + 'static>(
        &self,
        items: Vec<T>,
        f: impl Fn(&mut T) -> R + Send + Sync + 'static,
    ) -> Vec<(T, R)> {
        self.begin(items, f).finish()
    }

    /// As [`Self::each`], but returns when the caller has done its own part. The helpers may still be busy.
    pub(crate) fn begin<T: Traced, R: Send + 'static>(
        &self,
        items: Vec<T>,
        f: impl Fn(&mut T) -> R + Send + Sync + 'static,
    ) -> Round<T, R> {
        let do_all = |items: Vec<(usize, T)>, f: &dyn Fn(&mut T) -> R| -> Vec<(usize, T, R)> {
            let done = items.into_iter().map(|(i, mut item)| {
                let r = f(&mut item);
                (i, item, r)
            });
            done.collect()
        };
        let mut parts: Vec<Vec<(usize, T)>> = (0..=self.0.len()).map(|_| Vec::new()).collect();
        for (i, item) in items.into_iter().enumerate() {
            parts[item.tracer().min(self.0.len())].push((i, item));
        }
        let f = Arc::new(f);
        let mut parts = parts.into_iter();
        let own = parts.next().unwrap_or_default();
        let (answers, done) = channel();
        let mut asked = 0;
        for (helper, part) in self.0.iter().zip(parts).filter(|(_, part)| !part.is_empty()) {
            let (f, answers) = (f.clone(), answers.clone());
            let job: Job = Box::new(move || drop(answers.send(do_all(part, &*f))));
            // A helper ends before its time only by a panic, which `join` passes on below.
            if let Some(jobs) = &helper.jobs {
                drop(jobs.send(job));
            }
            asked += 1;
        }
        // The last one is a helper's: without it nobody can answer any more.
        drop(answers);
        let own = do_all(own, &*f);
        Round { own, done, asked }
    }
}

/// What was said of one item: its place, the item, the answer.
type Done<T, R> = (usize, T, R);

/// A round that the helpers have not finished yet.
#[derive(Debug)]
pub(crate) struct Round<T, R> {
    own: Vec<Done<T, R>>,
    done: Receiver<Vec<Done<T, R>>>,
    asked: usize,
}

impl<T, R> Round<T, R> {
    /// Waits for the helpers; returns the items and what was said of them, in order.
    pub(crate) fn finish(self) -> Vec<(T, R)> {
        let mut out = self.own;
        let answers = self.done.iter().map(|part| out.extend(part)).count();
        assert!(answers == self.asked, "a tracer has panicked");
        out.sort_unstable_by_key(|(i, ..)| *i);
        out.into_iter().map(|(_, item, r)| (item, r)).collect()
    }
}

impl Helper {
    fn start() -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let (tell, told) = channel();
        let thread = prompt::spawn(Builder::new().name("belay-tracer".into()).stack_size(STACK), move || {
            let _ = tell.send(rustix::thread::gettid().as_raw_pid());
            queue.iter().for_each(|job| job());
        })?;
        let gone = told.recv().ok().and_then(|tid| pidfd::open_thread(tid).ok());
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            watch: gone.and_then(|gone| watch(gone).ok()),
        })
    }
}

/// Waits for the end of the thread behind `gone`, in a thread that sleeps by then: the moment at which that was woken is the one.
fn watch(gone: OwnedFd) -> std::io::Result<JoinHandle<Instant>> {
    prompt::spawn(Builder::new().name("belay-watch".into()).stack_size(STACK), move || {
        waking::moment_of(|| pidfd::wait_gone(gone.as_fd()))
    })
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.jobs = None;
        // The next checkpoint must find nothing traced any more.
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        if let Some(watch) = self.watch.take() {
            drop(watch.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Item(usize, usize);

    impl Traced for Item {
        fn tracer(&self) -> usize {
            self.0
        }
    }

    #[test]
    fn every_item_is_dealt_with_by_its_tracer_and_comes_back_in_order() {
        let tracers = Tracers(vec![Helper::start().unwrap(), Helper::start().unwrap()]);
        let items = (0..100).map(|i| Item(i % 3, i)).collect();
        let first = tracers.each(items, |item| {
            item.1 += 1;
            std::thread::current().id()
        });
        let threads: Vec<_> = first.iter().map(|(_, thread)| *thread).collect();
        assert_eq!(threads[0], std::thread::current().id());
        assert_ne!(threads[1], threads[2]);
        let again = tracers.each(first.into_iter().map(|(item, _)| item).collect(), |_| {
            std::thread::current().id()
        });
        for (i, (item, thread)) in again.iter().enumerate() {
            assert_eq!((item.1, *thread), (i + 1, threads[i % 3]));
        }
    }

    #[test]
    fn small_jobs_are_left_to_the_caller() {
        let small = Tracers::for_job(WORTH_HELP - 1);
        assert_eq!((small.0.len(), small.share(0), small.share(7)), (0, 0, 0));
        let large = Tracers::for_job(WORTH_HELP);
        let helpers = large.0.len();
        assert!((1..=MOST).contains(&helpers));
        assert_eq!(
            (large.share(0), large.share(helpers - 1), large.share(helpers)),
            (1, helpers, 1)
        );
    }
}
