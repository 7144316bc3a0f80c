//! Threads that are to get a processor soon, among others that want all of them.
//!
//! Both ways concern the calling thread alone. Neither is handed on: threads and processes that it starts are as if it
//! had taken none (`SCHED_FLAG_RESET_ON_FORK`), but for a place behind others (a nice value above 0), which is lost
//! with it. A thread could ask for them only when it has had its first turn, for which it waits behind all others; so
//! one that is to go before others from its birth is started by a thread that has them to hand on ([`spawn`]).

use crate::sched::{self, Attributes, RESET_ON_FORK};
use std::io;
use std::sync::mpsc::{channel, Sender};
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle};

/// The shortest turn that the kernel gives. A thread that asks for short turns gets the next one early; what a thread gets of
/// the processor in all does not change.
const SHORT_NS: u64 = 100_000;
/// The lowest.
const FIRST: i32 = -20;

/// The calling thread gets its turns early, and short ones, from now on. Before Linux 6.12, and for a thread that has
/// another policy than the usual one or goes before others already, nothing changes.
pub fn short_turns() {
    change(|a| a.runtime = SHORT_NS);
}

/// The calling thread goes before others as long as this lives, where it may (CAP_SYS_NICE, RLIMIT_NICE). Start nothing
/// meanwhile that is to outlive it.
#[derive(Debug)]
pub struct First(Option<i32>);

impl First {
    /// From now on.
    pub fn now() -> Self {
        let mut before = None;
        change(|a| {
            before = Some(a.nice);
            (a.nice, a.runtime) = (FIRST, SHORT_NS);
        })
        .then_some(())
        .map_or(Self(None), |()| Self(before))
    }
}

impl Drop for First {
    fn drop(&mut self) {
        if let Some(nice) = self.0 {
            // To go behind others is allowed to everybody.
            change(|a| a.nice = nice);
        }
    }
}

type Start = Box<dyn FnOnce() + Send>;

/// A thread that starts others, and hands on what it has.
static STARTER: OnceLock<Option<Sender<Start>>> = OnceLock::new();

/// Has the starter wait for what is to be started: it, too, waits for its first turn.
pub fn prepare() {
    STARTER.get_or_init(|| {
        let (send, queue) = channel::<Start>();
        let serve = move || {
            if !set(0, |a| (a.nice, a.runtime) = (FIRST, SHORT_NS)) {
                set(0, |a| a.runtime = SHORT_NS);
            }
            queue.iter().for_each(|start| start());
        };
        let started = Builder::new().name("belay-starter".into()).stack_size(64 * 1024).spawn(serve);
        started.ok().map(|_| send)
    });
}

/// Starts a thread that goes before others where it may, as [`First`], and gets short turns, for as long as it lives:
/// from its birth.
pub fn spawn<T: Send + 'static>(thread: Builder, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    prepare();
    let work = move || {
        // It has been given all, and hands nothing on.
        set(RESET_ON_FORK, |_| ());
        work()
    };
    let Some(starter) = STARTER.get().and_then(Option::as_ref) else {
        return thread.spawn(work);
    };
    let (answer, started) = channel();
    let start = Box::new(move || drop(answer.send(thread.spawn(work))));
    let gone = || io::Error::other("the starter of threads is gone");
    starter.send(start).map_err(|_| gone())?;
    started.recv().map_err(|_| gone())?
}

/// The attributes of the calling thread, where they are those of the usual policy.
fn own() -> Option<Attributes> {
    let own = sched::get(0).ok()?;
    (own.policy == libc::SCHED_OTHER as u32).then_some(own)
}

/// Changes attributes of the calling thread; whether that was allowed.
fn change(f: impl FnOnce(&mut Attributes)) -> bool {
    // What it starts would lose a place before others that it has been given.
    own().is_some_and(|a| a.nice >= 0 || a.flags & RESET_ON_FORK != 0) && set(RESET_ON_FORK, f)
}

/// The same, whatever it has been given, with these `flags`.
fn set(flags: u64, f: impl FnOnce(&mut Attributes)) -> bool {
    let Some(mut a) = own() else { return false };
    a.flags = flags;
    f(&mut a);
    sched::set(0, &a).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Attributes {
        own().unwrap()
    }

    #[test]
    fn who_is_started_for_it_goes_before_others_from_its_birth() {
        let usual = std::thread::spawn(now).join().unwrap();
        let (started, after) = spawn(Builder::new(), move || (now(), std::thread::spawn(now).join().unwrap()))
            .unwrap()
            .join()
            .unwrap();
        let allowed = std::thread::spawn(|| First::now().0.is_some()).join().unwrap();
        assert_eq!(started.nice, if allowed { FIRST } else { usual.nice });
        assert!([usual.runtime, SHORT_NS].contains(&started.runtime));
        // A thread that gives its place before others back has none behind them either.
        let nice = if allowed { 0 } else { usual.nice };
        assert_eq!((after.nice, after.runtime), (nice, usual.runtime));
    }

    #[test]
    fn what_a_thread_asks_for_ends_with_it_and_is_not_handed_on() {
        std::thread::spawn(|| {
            let before = now();
            short_turns();
            // Older kernels have no turns of a chosen length.
            let short = [0, SHORT_NS].contains(&now().runtime);
            assert!(short && now().nice == before.nice);
            let first = First::now();
            let allowed = first.0.is_some();
            assert_eq!(now().nice, if allowed { FIRST } else { before.nice });
            let started = std::thread::spawn(now).join().unwrap();
            assert_eq!(started.nice, if allowed { 0 } else { before.nice });
            assert_ne!(started.runtime, SHORT_NS);
            drop(first);
            assert_eq!(now().nice, before.nice);
        })
        .join()
        .unwrap();
    }
}
