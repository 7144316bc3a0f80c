//! What loom does not know of processor and kernel.
//!
//! All threads of a model are run by one thread of the system, which goes from one to another at loom's own accesses only:
//! what is here besides is changed without being interrupted, and is no way on which threads see each other.

use crate::statics::of_threads;
use loom::sync::atomic::{fence, AtomicUsize};
use loom::thread::{self, JoinHandle, Thread};
use std::cell::{Cell, RefCell};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};

/// What is broken, so that a model can be seen finding it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Broken {
    /// All is as it is.
    #[default]
    Nothing,
    /// Threads do not pass the barrier that the kernel makes for them.
    Barrier,
}

/// Threads of a model, at most.
const THREADS: usize = 5;
/// The thread that begins.
const FIRST: usize = 0;

/// A thread, as the kernel sees it.
#[derive(Default)]
struct Task {
    /// On a processor: the barrier for all has to reach it.
    runs: bool,
    /// How many barriers it has passed for others: as many as it was asked to (in [`ASKED`]).
    passed: usize,
    /// How often it has looked in vain, and what had been stored then.
    looks: u32,
    stores: usize,
    /// The child of a fork does not have it.
    gone: bool,
    /// It is in the function that is called at its end, out of which nothing may unwind; and behind all.
    ends: bool,
    ended: bool,
}

/// Who sleeps on a word, by its address; or, without one, until anything is stored.
struct Sleeper {
    word: usize,
    thread: Thread,
    task: usize,
}

#[derive(Default)]
struct Machine {
    /// Whether the kernel can make the barrier.
    has_barrier: bool,
    broken: Broken,
    tasks: Vec<Task>,
    forked: bool,
    /// How often anything was stored.
    stores: usize,
    sleepers: Vec<Sleeper>,
}

std::thread_local! {
    static MACHINE: RefCell<Machine> = RefCell::default();
}

fn machine<R>(what: impl FnOnce(&mut Machine) -> R) -> R {
    MACHINE.with(|m| what(&mut m.borrow_mut()))
}

type Destructor = unsafe extern "C" fn(*mut libc::c_void);

of_threads! {
    static OWN: Cell<usize> = Cell::new(0);
}
of_threads! {
    static TASK: Cell<Option<usize>> = Cell::new(None);
}
of_threads! {
    static AT_END: Cell<Option<(Destructor, usize)>> = Cell::new(None);
}
loom::lazy_static! {
    /// The kernel's lock of those who sleep.
    static ref BUCKET: AtomicUsize = AtomicUsize::new(0);
    /// Of each thread: how many barriers it was asked to pass. loom goes through all places of its where that may be seen,
    /// because both sides change the word: who only reads might be told of an earlier value.
    static ref ASKED: [AtomicUsize; THREADS] = Default::default();
}

/// Begins anew: the calling thread is the only one.
pub(crate) fn begin(has_barrier: bool, broken: Broken) {
    machine(|m| {
        *m = Machine {
            has_barrier,
            broken,
            ..Machine::default()
        }
    });
    // Words that are there from the beginning: who makes them later would be seen by all.
    BUCKET.load(SeqCst);
    ASKED[0].load(SeqCst);
    enlist();
}

/// The calling thread is on a processor from now on.
fn enlist() -> usize {
    let task = machine(|m| {
        m.tasks.push(Task {
            runs: !m.forked,
            gone: m.forked,
            ..Task::default()
        });
        m.tasks.len() - 1
    });
    TASK.with(|t| t.set(Some(task)));
    fence(SeqCst);
    task
}

pub(crate) fn has_barrier() -> bool {
    machine(|m| m.has_barrier)
}

pub(crate) fn own_task() -> Option<usize> {
    TASK.with(Cell::get)
}

/// The thread was there before a fork, and its last steps are only those of its way out of here; or the model has failed.
pub(crate) fn is_gone() -> bool {
    std::thread::panicking() || own_task().is_some_and(|own| machine(|m| m.tasks[own].gone))
}

/// Where a thread that is gone ends.
struct Gone;

/// Between two instructions: the kernel may come in.
#[track_caller]
pub(crate) fn pass() {
    let Some(own) = own_task() else { return };
    if is_gone() {
        if !std::thread::panicking() && !machine(|m| m.tasks[own].ends) {
            resume_unwind(Box::new(Gone));
        }
    } else if has_barrier() {
        let asked = ASKED[own].fetch_add(0, Relaxed);
        let passed = machine(|m| std::mem::replace(&mut m.tasks[own].passed, asked));
        if asked != passed {
            if machine(|m| m.broken != Broken::Barrier) {
                fence(SeqCst);
            }
            stored();
        }
    }
}

/// Lets the others go on. Who has looked a few times, and nobody has stored anything meanwhile, sleeps until somebody does:
/// else there would be orders in which two that wait in turns keep a third from going on for ever.
pub(crate) fn yield_now() {
    /// Looks: one may be told as many earlier values before it is told the last one.
    const LOOKS: u32 = 4;
    pass();
    let Some(own) = own_task() else { return };
    let idle = machine(|m| {
        let (stores, t) = (m.stores, &mut m.tasks[own]);
        let same = std::mem::replace(&mut t.stores, stores) == stores;
        t.looks = if same { t.looks + 1 } else { 0 };
        t.looks > LOOKS
    });
    if idle {
        go_to_sleep(own, 0);
        await_waking(own);
    } else {
        thread::yield_now();
    }
}

/// Somebody has stored something, or has passed a barrier.
pub(crate) fn stored() {
    machine(|m| m.stores += 1);
    wake_sleepers(0, usize::MAX);
}

/// Leaves the processor, or comes back: both are barriers.
fn switch(own: usize, runs: bool) {
    pass();
    fence(SeqCst);
    machine(|m| m.tasks[own].runs = runs);
    fence(SeqCst);
}

/// A thread of a model. What it has stored is seen by who waits for its end.
pub(crate) fn spawn(what: impl FnOnce() + 'static) -> JoinHandle<()> {
    thread::spawn(move || {
        let own = enlist();
        let done = catch_unwind(AssertUnwindSafe(|| {
            what();
            machine(|m| m.tasks[own].ends = true);
            if let Some((then, what)) = AT_END.with(Cell::take) {
                // SAFETY: as promised to `at_end_of_thread`.
                unsafe { then(what as *mut libc::c_void) };
            }
            switch(own, false);
        }));
        if let Err(why) = done {
            if !why.is::<Gone>() {
                resume_unwind(why);
            }
        }
        knock();
        machine(|m| m.tasks[own].ended = true);
        stored();
    })
}

/// Waits for the end of a thread, on no processor.
pub(crate) fn join(thread: JoinHandle<()>) {
    let own = own_task();
    own.into_iter().for_each(|own| switch(own, false));
    let ended = thread.join();
    own.into_iter().for_each(|own| switch(own, true));
    assert!(ended.is_ok());
}

/// Goes on as the child of a fork: none of the other threads does anything more, but for the model's first, which waits for
/// their ends.
pub(crate) fn fork() {
    let own = own_task();
    let sleepers = machine(|m| {
        m.forked = true;
        let sleepers = std::mem::take(&mut m.sleepers);
        for (at, task) in m.tasks.iter_mut().enumerate() {
            task.gone = Some(at) != own && at != FIRST;
            task.runs &= !task.gone;
        }
        sleepers
    });
    sleepers.iter().for_each(|s| s.thread.unpark());
    // Some were in the middle of an access, which was done before the fork then. The child sees all that was stored.
    while machine(|m| m.tasks.iter().any(|t| t.gone && !t.ended)) {
        yield_now();
    }
    knock();
    fence(SeqCst);
}

/// As `membarrier` does: reaches every thread that is on a processor, between any two of its instructions.
pub(crate) fn everybody_passes() {
    let own = own_task();
    fence(SeqCst);
    if !has_barrier() {
        // The library waits for a moment, which is no barrier for others here.
        return;
    }
    let all = machine(|m| m.tasks.len());
    let others = (0..all).filter(|at| Some(*at) != own);
    let reached: Vec<(usize, usize)> = others.map(|at| (at, ASKED[at].fetch_add(1, Relaxed) + 1)).collect();
    let passed = |(at, asked): &(usize, usize)| machine(|m| !m.tasks[*at].runs || m.tasks[*at].passed >= *asked);
    while !reached.iter().all(passed) {
        yield_now();
    }
    fence(SeqCst);
}

/// Joins those who sleep on this word.
pub(crate) fn go_to_sleep(own: usize, word: usize) {
    let sleeper = Sleeper {
        word,
        thread: thread::current(),
        task: own,
    };
    machine(|m| m.sleepers.push(sleeper));
}

/// Takes the lock of those who sleep, for a moment.
pub(crate) fn knock() {
    BUCKET.fetch_add(1, AcqRel);
}

/// Does not sleep after all.
pub(crate) fn leave(own: usize) {
    machine(|m| m.sleepers.retain(|s| s.task != own));
}

/// Sleeps until it is woken.
pub(crate) fn await_waking(own: usize) {
    switch(own, false);
    while machine(|m| m.sleepers.iter().any(|s| s.task == own)) {
        thread::park();
    }
    switch(own, true);
}

/// Wakes so many of those who sleep there.
pub(crate) fn wake_sleepers(address: usize, most: usize) {
    let woken: Vec<Sleeper> = machine(|m| {
        let (woken, left) = m.sleepers.drain(..).partition(|s| s.word == address);
        m.sleepers = left;
        woken
    });
    for (at, sleeper) in woken.into_iter().enumerate() {
        if at < most {
            sleeper.thread.unpark();
        } else {
            machine(|m| m.sleepers.push(sleeper));
        }
    }
}

pub(crate) fn own_slot<T>() -> *const T {
    OWN.with(Cell::get) as *const T
}

pub(crate) fn set_own_slot<T>(own: *const T) {
    OWN.with(|o| o.set(own as usize));
}

/// Calls this with this when the calling thread ends.
///
/// # Safety
/// `then` may be called with `what` at any later time.
pub(crate) unsafe fn at_end_of_thread(then: Destructor, what: *const libc::c_void) {
    AT_END.with(|end| end.set(Some((then, what as usize))));
}
