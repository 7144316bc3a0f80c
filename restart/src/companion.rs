//! Tasks that share the memory of a process while that still runs ordinary code: threads whose descriptor table is not
//! that of their process, threads that descriptors and working directories are about ([`early`]), and processes that
//! share their memory with it. Laying out a table takes ordinary code, and the descriptors it is laid out from are
//! there before the process has laid out its own.
//!
//! ```text
//! process     make ───────────────► work ─────────► own descriptors ... ───► leave (names the place) ─► restorer
//! companion   waits                 lays out        waits                    jumps to the restorer, as a thread
//! ```
//! libc knows nothing of such a task: it runs with the thread-local storage of the process's own thread. So only one of
//! those that share memory runs ordinary code at a time; the others wait in [`wait_while`], which touches nothing of
//! libc's. A process takes its *turn* for all that it does but wait for others ([`let_others`]); a companion works in
//! its process's turn.

use crate::arch::Place;
use crate::sys;
use belay_abi::restore::CloneArgs;
use belay_image::model::{Process, Thread};
use belay_kernel::futex::bare;
use belay_kernel::task::{self, Task};
use belay_plugins::{tasks_of, Rebuilder};
use std::cell::UnsafeCell;
use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;

/// A thread that shares all with its process but the descriptor table.
const THREAD: u64 = (libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM) as u64;
pub(crate) const STACK_BYTES: usize = 4 << 20;
/// For one that has nothing to do here.
const SMALL_STACK_BYTES: usize = 64 << 10;

const WAITS: u32 = 0;
const WORKS: u32 = 1;
const LEAVES: u32 = 2;

/// Whether it is somebody's turn, in this address space: a copy of it begins with the turn of the one that made it.
static TURN: AtomicU32 = AtomicU32::new(TAKEN);
const FREE: u32 = 0;
const TAKEN: u32 = 1;

/// Waits, by `wait`, while others that share the memory have their turns. `wait` must touch nothing of libc's.
pub(crate) fn let_others(wait: impl FnOnce()) {
    give_turn();
    wait();
    take_turn();
}

/// Ends the caller's turn.
pub(crate) fn give_turn() {
    TURN.store(FREE, Ordering::Release);
    bare::wake_private(&TURN);
}

/// Waits for a turn.
pub(crate) fn take_turn() {
    while TURN
        .compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Acquire)
        .is_err()
    {
        wait_while(&TURN, TAKEN);
    }
}

/// The threads of `processes` that exist before the restorer runs: those that lay out a descriptor table, and those to
/// which a descriptor or a working directory leads.
pub(crate) fn early(processes: &[Process], rebuilder: &Rebuilder) -> HashSet<i32> {
    let mut led_to = rebuilder.tasks();
    let own = |t: &Thread| t.directories.as_ref().map(|(cwd, _)| cwd.as_path().to_owned());
    let of_threads = processes.iter().flat_map(|p| p.threads.iter().filter_map(own));
    for path in processes.iter().map(|p| p.cwd.as_path().to_owned()).chain(of_threads) {
        led_to.extend(tasks_of(&path));
    }
    let threads = |p: &Process| p.threads.iter().skip(1).map(|t| (p.pid, t.tid)).collect::<Vec<_>>();
    let all = processes.iter().flat_map(threads);
    let early = all.filter(|(pid, tid)| led_to.contains(tid) || rebuilder.thread_table(*pid, *tid) == Some(*tid));
    early.map(|(_, tid)| tid).collect()
}

/// A task that waits to be told what to do.
#[derive(Debug)]
pub(crate) struct Companion {
    pub(crate) tid: i32,
    /// It has a descriptor table of its own, and lays it out.
    pub(crate) lays_out: bool,
    state: AtomicU32,
    work: UnsafeCell<Option<*const dyn Fn()>>,
    place: OnceLock<Place>,
}

impl Companion {
    /// Makes thread `tid` of the calling process, with a copy of the caller's descriptor table where it `lays_out` one,
    /// else with that table itself.
    pub(crate) fn make(tid: i32, lays_out: bool) -> io::Result<&'static Self> {
        // Never freed: the restorer unmaps all this.
        let own: &'static Self = Box::leak(Box::new(Self {
            tid,
            lays_out,
            state: AtomicU32::new(WAITS),
            work: UnsafeCell::new(None),
            place: OnceLock::new(),
        }));
        let (flags, stack) = if lays_out {
            (THREAD, STACK_BYTES)
        } else {
            (THREAD | libc::CLONE_FILES as u64, SMALL_STACK_BYTES)
        };
        // SAFETY: it lives for ever, waits without libc, and works while its process waits for it.
        unsafe { spawn((flags, stack), 0, tid, own) }?;
        Ok(own)
    }

    /// Lets it do `work`; returns when that is done.
    pub(crate) fn work(&self, work: &dyn Fn()) {
        // SAFETY: it waits, and so does not look; the pointer is not used after this call, which waits for the end of the work.
        unsafe { *self.work.get() = Some(std::mem::transmute::<&dyn Fn(), &'static dyn Fn()>(work)) };
        self.enter(WORKS);
        wait_while(&self.state, WORKS);
    }

    /// Sends it into the restorer, which must not unmap this program before it has arrived there.
    pub(crate) fn leave(&self, place: Place) {
        // Once only: it is there afterwards.
        let _ = self.place.set(place);
        self.enter(LEAVES);
    }

    fn enter(&self, state: u32) {
        self.state.store(state, Ordering::Release);
        bare::wake_private(&self.state);
    }
}

/// Makes task `tid`, which shares the caller's memory and whatever else `flags` say, and does what `task` does on a stack
/// of `stack` bytes.
///
/// # Safety
/// `task` stays as long as the new one has this memory, and neither uses what the other uses meanwhile, libc included.
pub(crate) unsafe fn spawn<T: Task>((flags, stack): (u64, usize), exit_signal: i32, tid: i32, task: &T) -> io::Result<i32> {
    let args = CloneArgs {
        flags: flags | libc::CLONE_VM as u64,
        exit_signal: exit_signal as u64,
        stack: sys::stack(stack)?,
        stack_size: stack as u64,
        set_tid: (&raw const tid) as u64,
        set_tid_size: 1,
        ..CloneArgs::default()
    };
    // SAFETY: the stack is new; the caller vouches for the rest.
    unsafe { task::spawn(&args, task) }
}

impl Task for Companion {
    fn live(&self) -> ! {
        loop {
            wait_while(&self.state, WAITS);
            if let Some(place) = self.place.get() {
                place.go();
            }
            // SAFETY: set before the state was, by one who waits until the state is set back; what it leads to lives until then.
            if let Some(work) = unsafe { (*self.work.get()).map(|work| &*work) } {
                work();
            }
            self.enter(WAITS);
        }
    }
}

/// Waits while `word`, which belongs to this process alone, is `value`. Nothing of libc's is touched.
fn wait_while(word: &AtomicU32, value: u32) {
    while word.load(Ordering::Acquire) == value {
        bare::wait_private(word, value);
    }
}
