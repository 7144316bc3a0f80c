//! Tracers: the threads that stop and steer the tasks of a job.
//!
//! The kernel takes ptrace requests for a task only from the thread that seized it, and each costs microseconds. A job of many threads is therefore divided:
//! the calling thread traces the first task of every process, and helpers share the others with it.
//!
//! ```text
//! each([task 0, task 1, task 2, task 3]) ──► caller:   task 0, task 2 ──┐
//!                                        └─► helper 1: task 1, task 3 ──┴─► results, in the order of the tasks
//! ```
//! A helper that ends, by a panic or with the agent, lets go what it traces, which then finds its way back by itself as after the agent's death.

use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Jobs with fewer tasks are left to the calling thread: dividing them would take longer.
const WORTH_HELP: usize = 64;
/// Threads that trace, at most; more would wait for each other at the kernel's task list.
const MOST: usize = 4;
/// Stack of a helper, bytes: the largest buffer on it is one task's extended state.
const STACK: usize = 256 * 1024;

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
}

/// The calling thread and its helpers. On drop the helpers end, and with them what they still trace is let go.
#[derive(Debug, Default)]
pub(crate) struct Tracers(Vec<Helper>);

impl Tracers {
    /// As many as a job of `tasks` tasks is worth.
    pub(crate) fn for_job(tasks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let helpers = if tasks < WORTH_HELP { 0 } else { cores.min(MOST) - 1 };
        // Fewer are no failure.
        Self((0..helpers).map_while(|_| Helper::start().ok()).collect())
    }

    /// Number of threads, the caller counted.
    pub(crate) fn count(&self) -> usize {
        self.0.len() + 1
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
        let mut parts: Vec<Vec<(usize, T)>> = (0..self.count()).map(|_| Vec::new()).collect();
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
        let thread = std::thread::Builder::new()
            .name("belay-tracer".into())
            .stack_size(STACK)
            .spawn(move || queue.iter().for_each(|job| job()))?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.jobs = None;
        // The next checkpoint must find nothing traced any more.
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
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
        assert_eq!(Tracers::for_job(WORTH_HELP - 1).count(), 1);
        assert!(Tracers::for_job(WORTH_HELP).count() <= MOST);
    }
}
