//! The models. Each goes through every order in which a few threads may do a few things, and panics where one is wrong.

use crate::bias::{strike_all, Biased, Struck};
use crate::lock::Lock;
use crate::machine::{begin, fork, join, spawn, Broken};
use crate::shadow::Queue;
use crate::sync::{AtomicU64, Ordering};
use crate::thing::{touch_all, Thing, THINGS};
use crate::{control, gate};
use belay_abi::control::CLOSE;
use std::sync::Arc;

/// The order by which the gate is shut.
const ORDER: u32 = belay_abi::control::order(12, CLOSE);

/// How a model goes.
#[derive(Debug, Clone, Copy, Default)]
pub struct How {
    /// Without: threads that go in make a barrier of their own.
    pub kernel_barrier: bool,
    /// What does not work.
    pub broken: Broken,
    /// How often a thread is interrupted at any place, at most: more take longer, and few faults need more.
    pub interruptions: usize,
}

fn model(how: How, things: usize, what: impl Fn(&[Arc<Thing>]) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(how.interruptions);
    builder.max_branches = 5000;
    let turns = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = turns.clone();
    builder.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        begin(how.kernel_barrier, how.broken);
        let things: Vec<Arc<Thing>> = (0..things).map(|_| Arc::new(Thing::new())).collect();
        THINGS.with(|t| *t.borrow_mut() = things.clone());
        gate::prepare();
        // All words of the gate are there from the beginning.
        gate::after_fork();
        what(&things);
        THINGS.with(|t| t.borrow_mut().clear());
    });
    println!("{how:?}: {} orders", turns.load(std::sync::atomic::Ordering::Relaxed));
}

/// How it becomes open again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The agent lets go.
    LetGo,
    /// The agent dies.
    Dies,
}

/// What the library's thread does: shuts the gate, acts while nobody is inside, and waits until the gate is open again.
fn keeper(locks: &[&dyn Struck], end: End) {
    gate::always_nested();
    gate::shut(ORDER);
    assert!(gate::await_empty(|| true));
    assert!(strike_all(|| locks.iter().copied(), || true));
    touch_all();
    match end {
        End::LetGo => control::let_go(ORDER),
        End::Dies => control::die(ORDER),
    }
    while gate::shut_by() != 0 {
        control::wait_under(ORDER, ORDER);
    }
}

/// Threads go in and out while the gate is shut and opened: none is in meanwhile, none is left at the gate.
pub fn gate_is_shut_and_opened(how: How, threads: usize, end: End) {
    model(how, threads, move |things| {
        control::give(ORDER);
        let workers = things.iter().cloned().map(|thing| {
            spawn(move || {
                for _ in 0..2 {
                    let _inside = gate::Inside::enter();
                    thing.change();
                }
            })
        });
        let workers: Vec<_> = workers.collect();
        let keeper = spawn(move || keeper(&[], end));
        workers.into_iter().for_each(join);
        join(keeper);
        assert_eq!(gate::shut_by(), 0);
        // Its own, that of the library's thread, and that of who has opened the gate.
        things.iter().for_each(|thing| assert_eq!(thing.times(), 4));
    });
}

/// Threads that end give their places to others.
pub fn places_are_given_on(how: How) {
    model(how, 1, |things| {
        control::give(ORDER);
        let thing = things[0].clone();
        let worker = spawn(move || {
            let next = thing.clone();
            let first = spawn(move || {
                let _inside = gate::Inside::enter();
                thing.change();
            });
            join(first);
            let _inside = gate::Inside::enter();
            next.change();
        });
        let keeper = spawn(|| keeper(&[], End::LetGo));
        join(worker);
        join(keeper);
        assert_eq!(things[0].times(), 4);
    });
}

/// Threads take an ordinary lock in turn.
pub fn lock_is_taken(how: How) {
    model(how, 1, |things| {
        let lock = Arc::new(Lock::new(things[0].clone()));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let lock = lock.clone();
                spawn(move || (0..2).for_each(|_| lock.lock().change()))
            })
            .collect();
        threads.into_iter().for_each(join);
        assert_eq!(things[0].times(), 4);
    });
}

/// Threads take a lock in turn, each so often, whose owner changes.
pub fn lock_changes_hands(how: How, turns: &'static [usize]) {
    model(how, 1, move |things| {
        let lock = Arc::new(Biased::new(things[0].clone()));
        let threads = turns.iter().map(|turns| {
            let lock = lock.clone();
            spawn(move || (0..*turns).for_each(|_| lock.lock().change()))
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().for_each(join);
        assert_eq!(things[0].times() as usize, turns.iter().sum::<usize>());
    });
}

/// A thread ends that has a lock, as its owner or (without the kernel's barrier) as anybody, and is inside the gate. Meanwhile
/// another takes the lock; or the gate is shut and opened.
pub fn holder_ends(how: How, is_shut: bool) {
    model(how, 1, move |things| {
        control::give(ORDER);
        let lock = Arc::new(Biased::new(things[0].clone()));
        let (ending, other) = (lock.clone(), lock.clone());
        let ending = spawn(move || {
            ending.enter(|thing| thing.change());
            let thing = ending.as_owner().unwrap_or_else(|| {
                std::mem::forget(gate::Inside::enter());
                ending.lock()
            });
            thing.change();
            std::mem::forget(thing);
        });
        let other = spawn(move || match is_shut {
            true => keeper(&[&*other], End::LetGo),
            false => other.lock().change(),
        });
        join(ending);
        lock.enter(|thing| thing.change());
        join(other);
        assert_eq!(things[0].times(), if is_shut { 5 } else { 4 });
    });
}

/// Threads go in with a lock, while the gate is shut and opened.
pub fn owners_and_gate(how: How, turns: &'static [usize]) {
    model(how, 1, move |things| {
        control::give(ORDER);
        let lock = Arc::new(Biased::new(things[0].clone()));
        // It has an owner already, where several are to take it from one another.
        let first = usize::from(turns.len() > 1);
        (0..first).for_each(|_| lock.enter(|thing| thing.change()));
        let threads = turns.iter().map(|turns| {
            let lock = lock.clone();
            spawn(move || (0..*turns).for_each(|_| lock.enter(|thing| thing.change())))
        });
        let threads: Vec<_> = threads.collect();
        let struck = lock.clone();
        let keeper = spawn(move || keeper(&[&*struck], End::LetGo));
        threads.into_iter().for_each(join);
        join(keeper);
        // The keeper has touched it, and who has opened the gate.
        assert_eq!(things[0].times() as usize, 2 + first + turns.iter().sum::<usize>());
    });
}

/// The child of a fork, whose other threads were anywhere: it goes in, and its gate can be shut.
pub fn child_of_a_fork(how: How) {
    model(how, 1, |things| {
        control::give(ORDER);
        let thing = things[0].clone();
        let worker = spawn(move || {
            let _inside = gate::Inside::enter();
            thing.change();
        });
        let keeper = spawn(|| keeper(&[], End::LetGo));
        let child = spawn(|| {
            fork();
            gate::after_fork();
            THINGS.with(|t| t.borrow_mut().clear());
            drop(gate::Inside::enter());
            let polling = gate::Inside::enter();
            gate::shut(ORDER + 0x100);
            assert!(
                !gate::await_empty(|| false),
                "the gate is shut behind a thread of the child's"
            );
            drop(polling);
            assert!(gate::await_empty(|| true));
        });
        join(child);
        join(worker);
        join(keeper);
    });
}

/// Places of a log, each written by who posts and read by who polls.
struct Places(Vec<Thing>);

impl Places {
    fn at(&self, index: u64) -> &Thing {
        &self.0[index as usize % self.0.len()]
    }
}

/// One posts, into a queue with room for `size`, as soon as there is a place; the other polls. With a marker in it from
/// before, which takes no place of the program's.
pub fn posted_and_polled(how: How, size: u32, posts: u64, marked: bool) {
    model(how, 0, move |_| {
        let queue = Arc::new(Queue::new(
            Places((0..size + u32::from(marked)).map(|_| Thing::new()).collect()),
            size,
        ));
        if marked {
            queue.log.lock().at(0).change();
            queue.publish(1);
            queue.set_markers(1);
        }
        let (own, end) = (u64::from(marked), posts + u64::from(marked));
        let (posting, polling) = (queue.clone(), queue.clone());
        // How much of its own the program was told to be done.
        let told = Arc::new(AtomicU64::new(0));
        let heard = told.clone();
        let post = spawn(move || {
            let mut posted = queue.next();
            while posted < end {
                let entitled = posted - own - heard.load(Ordering::Acquire) < size.into();
                let done = posting.log.enter(|log| {
                    let at = posting.next();
                    let free = at < posting.limit();
                    if free {
                        log.at(at).change();
                        posting.publish(at + 1);
                    }
                    free
                });
                assert!(done || !entitled, "there is no place for what the program may post");
                match done {
                    true => posted += 1,
                    false => crate::sync::yield_now(),
                }
            }
        });
        let poll = spawn(move || {
            let mut polled = 0;
            while polled < end {
                let pending = polling.pending();
                if pending.is_empty() {
                    crate::sync::yield_now();
                    continue;
                }
                // SAFETY: what is posted is complete, and not overwritten before it is retired.
                let log = unsafe { polling.log.peek() };
                for at in pending.clone() {
                    let times = 1 + at / log.0.len() as u64;
                    assert_eq!(u64::from(log.at(at).times()), times, "the entry in place {at} is another's");
                }
                polled = pending.end;
                polling.retire(polled, marked && pending.start == 0);
                told.store(polled - own, Ordering::Release);
            }
        });
        join(post);
        join(poll);
    });
}
