//! The lock with the gate shut at any moment. In every order of its steps: `models`.

use super::*;
use crate::gate::tests::ALONE;
use crate::path::tests::{end, End, NUMBER};
use crate::shadow::World;
use belay_ibv::*;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Who is in the provider, by kind of call; what it has not completed; the gate is shut.
static POSTING: AtomicU32 = AtomicU32::new(0);
static POLLING: AtomicU32 = AtomicU32::new(0);
static PENDING: AtomicU64 = AtomicU64::new(0);
static AT_REST: AtomicBool = AtomicBool::new(false);

/// Does something, in which nobody else may come.
fn alone(who: &AtomicU32, what: impl FnOnce() -> Int) -> Int {
    assert_eq!(who.fetch_add(1, SeqCst), 0, "two threads are in the provider");
    assert!(
        !AT_REST.load(SeqCst) || gate::is_keeper(),
        "somebody comes through a gate that is shut"
    );
    let done = what();
    assert_eq!(who.fetch_sub(1, SeqCst), 1);
    done
}

unsafe extern "C" fn post(_: *mut Qp, _: *mut SendWr, _: *mut *mut SendWr) -> Int {
    alone(&POSTING, || {
        PENDING.fetch_add(1, SeqCst);
        0
    })
}

unsafe extern "C" fn poll(_: *mut Cq, _: Int, wc: *mut Wc) -> Int {
    alone(&POLLING, || {
        if PENDING.load(SeqCst) == 0 {
            return 0;
        }
        PENDING.fetch_sub(1, SeqCst);
        *wc = Wc {
            qp_num: NUMBER,
            opcode: WC_SEND,
            ..Wc::default()
        };
        1
    })
}

/// Posts and polls as often as there is time: what was posted, less what was polled.
fn work(e: &End, go_on: impl Fn() -> bool) -> i64 {
    let mut balance = 0;
    while go_on() {
        balance += i64::from(e.send(1, SEND_SIGNALED, |_| {}) == 0);
        balance -= i64::from(e.next().is_some());
    }
    balance
}

/// Two threads on one queue pair, while the gate is shut and opened at random moments: a thousand times, each fourth
/// time with a new queue pair, whose locks nobody has had.
#[test]
fn two_threads_and_the_gate_take_turns() {
    const PAIRS: u32 = 250;
    const SHUT: u32 = 4;
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    gate::prepare();
    let mut random = 0x2545_f491u32;
    let mut moment = move || {
        for bit in [13, 17, 5] {
            random ^= if bit == 17 { random >> bit } else { random << bit };
        }
        (0..random % 20_000).for_each(|_| std::hint::spin_loop());
    };
    for pair in 0..PAIRS {
        let e = end(QPT_RC, null_mut());
        e.provide(post, poll);
        let stop = AtomicBool::new(false);
        let go_on = || !stop.load(SeqCst);
        let left = std::thread::scope(|s| {
            let first = s.spawn(|| work(&e, go_on));
            moment();
            let second = s.spawn(|| work(&e, go_on));
            let keeper = s.spawn(|| {
                gate::always_nested();
                for n in 0..SHUT {
                    moment();
                    let order = 0x100 * (1 + pair * SHUT + n);
                    shut(&e, order);
                    gate::open(order, || ());
                }
            });
            keeper.join().unwrap();
            stop.store(true, SeqCst);
            first.join().unwrap() + second.join().unwrap()
        });
        while e.next().is_some() {}
        assert_eq!((e.pending().0, PENDING.load(SeqCst)), (0, 0), "{left} are left");
    }
}

/// Shuts the gate, does what is done before a checkpoint, and finds nobody inside.
fn shut(e: &End, order: u32) {
    gate::shut(order);
    assert!(gate::await_empty(|| true));
    let mut world = World::default();
    e.list(&mut world);
    // SAFETY: what is on the list lives.
    assert!(unsafe { strike_all(|| world.locks(), || true) });
    AT_REST.store(true, SeqCst);
    for _ in 0..3 {
        assert_eq!((POSTING.load(SeqCst), POLLING.load(SeqCst)), (0, 0));
        e.collect();
    }
    AT_REST.store(false, SeqCst);
}

/// Two threads on many locks, one after the other, whose owner another takes away: a processor that keeps a store back
/// for some nanoseconds is met a few times.
#[test]
fn owners_are_waited_for() {
    const LOCKS: usize = 10_000;
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    gate::prepare();
    let locks: Vec<Biased<u64>> = (0..LOCKS).map(|_| Biased::new(0)).collect();
    let now = AtomicUsize::new(0);
    let add = |at: usize| {
        let mut value = locks[at].lock();
        // SAFETY: it lives, and nobody else is to change it.
        unsafe {
            let before = (&raw const *value).read_volatile();
            (&raw mut *value).write_volatile(before + 1);
        }
    };
    let counted = std::thread::scope(|s| {
        let owner = s.spawn(|| {
            let mut counts = vec![0; LOCKS];
            while let at @ ..LOCKS = now.load(Ordering::Relaxed) {
                add(at);
                counts[at] += 1;
            }
            counts
        });
        for (at, lock) in locks.iter().enumerate() {
            now.store(at, Ordering::Relaxed);
            spin(|| lock.owner.load(Ordering::Relaxed) & STRUCK == 0);
            (0..at % 64).for_each(|_| std::hint::spin_loop());
            add(at);
        }
        now.store(LOCKS, Ordering::Relaxed);
        owner.join().unwrap()
    });
    let wrong = locks.iter().zip(&counted).filter(|(l, n)| *l.lock() != **n + 1).count();
    assert_eq!(wrong, 0, "of {LOCKS} counts");
}

/// Who is inside already when the gate is shut takes a lock, and is not its owner: it would not see that the gate is
/// shut when it has left.
#[test]
fn nobody_becomes_an_owner_behind_a_gate_that_is_shut() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    gate::prepare();
    let lock = Biased::new(0);
    drop(lock.lock());
    let polling = Inside::enter();
    gate::shut(7);
    lock.strike();
    *lock.lock() += 1;
    assert_eq!(lock.strike(), Some(false));
    drop(polling);
    gate::open(7, || ());
    *lock.lock() += 1;
    assert_eq!(lock.strike(), Some(true));
}

/// A lock that two threads take in turn is an ordinary one in the end; one thread alone keeps it.
#[test]
fn owners_change_a_few_times() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    gate::prepare();
    let lock = Biased::new(0);
    let owner = || lock.owner.load(SeqCst);
    for _ in 0..3 {
        *lock.lock() += 1;
        assert_eq!(owner(), own_name());
    }
    assert_eq!(lock.strike(), Some(true));
    assert!(lock.as_owner().is_none());
    *lock.lock() += 1;
    assert_eq!(owner(), own_name());
    let turn = |_| std::thread::scope(|s| s.spawn(|| *lock.lock() += 1).join().unwrap());
    (0..OWNERS).for_each(|n| {
        turn(n);
        *lock.lock() += 1;
    });
    assert_eq!((owner(), *lock.lock()), (STRUCK | OWNERS, 4 + 2 * OWNERS));
    assert!(lock.is_free());
}
