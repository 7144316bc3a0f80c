//! Which threads are inside the verbs, and how they are kept out.
//!
//! Each thread has a slot in which it says that it is inside. Who shuts the gate stores [`SHUT`], makes every thread
//! pass a barrier (`membarrier`), and waits for each slot. So a thread that goes in does two plain stores and a load;
//! no instruction of it is locked. Those that post and poll alone need not even that (`bias`). Who is inside already is
//! let in once more, also when the gate is shut: a program may post between `ibv_start_poll` and `ibv_end_poll`, and a
//! signal handler of its may do so anywhere.
//!
//! A thread that is told to end (`pthread_cancel`) may do so in the provider, wherever that writes to the kernel: nothing of
//! this library comes to its end then, but its slot is given back. So each thread has a name, which nobody has after it, and
//! who waits for a thread looks whether it is gone ([`is_gone`]).
//!
//! libibverbs and its providers call exported functions of libibverbs, which lead here: such a call has no shadows in
//! its arguments, and goes on to the real function ([`nested`]). One with shadows is the program's, which the provider
//! has called back: its allocator may register the memory that it gives.

use crate::sync::{
    at_end_of_thread, compiler_fence, constant, everybody_passes, fence, of_threads, own_slot, register, set_own_slot, sleep,
    sleep_shortly, statics, wake, AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering,
};
use belay_abi::control::{is_held, DIED};
use libc::c_int;
use std::cell::Cell;
use std::ptr::{null, null_mut};

/// One thread. Two are never in one line of a processor's cache.
#[repr(align(64))]
pub(crate) struct Slot {
    /// How often it is inside. Written by its own thread.
    inside: AtomicU32,
    /// By a thread that lives.
    used: AtomicBool,
    /// Threads that have had it and are gone, in units of [`THREAD`].
    gone: AtomicUsize,
    next: AtomicPtr<Slot>,
}

/// A thread's name is the address of its slot, which has fewer bits than this, and how many threads had that before.
const THREAD: usize = 1 << 48;
const ADDRESS: usize = THREAD - 1;
/// So many have had a slot that nobody gets it any more.
const ALL: usize = !ADDRESS;

impl Slot {
    constant! {
        fn new() -> Self {
            Slot {
                inside: AtomicU32::new(0),
                used: AtomicBool::new(true),
                gone: AtomicUsize::new(0),
                next: AtomicPtr::new(null_mut()),
            }
        }
    }

    /// The name of its thread.
    fn named(&self) -> *const Slot {
        std::ptr::from_ref(self).map_addr(|a| a | self.gone.load(Ordering::Relaxed))
    }

    /// Its thread is gone, and in nothing any more: what it has done is seen by who finds that out.
    fn leave(&self) {
        let gone = self.gone.load(Ordering::Relaxed);
        if gone == ALL {
            return;
        }
        self.gone.store(gone + THREAD, Ordering::Release);
        if self.inside.load(Ordering::Relaxed) != 0 {
            self.inside.store(0, Ordering::Release);
            wake(&self.inside);
        }
        if gone + THREAD != ALL {
            self.used.store(false, Ordering::Release);
        }
    }
}

statics! {
    /// Of the library's own thread, which never goes in: it acts while nobody is inside.
    static KEEPER: Slot = Slot::new();
    /// All slots there ever were; those of threads that have ended are used again.
    static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(null_mut());
    /// While the gate is shut, the order that has shut it, perhaps with [`LOOKING`].
    static SHUT: AtomicU32 = AtomicU32::new(0);
    /// The kernel makes the barrier for the others.
    static ASYMMETRIC: AtomicBool = AtomicBool::new(false);
}

of_threads! {
    /// How deep this thread is in real functions that may call exported ones.
    static DEPTH: Cell<u32> = Cell::new(0);
}

/// In [`SHUT`]: somebody is about to open the gate.
pub(crate) const LOOKING: u32 = 0x80;

/// Does a real function call, and not the program?
pub(crate) fn nested() -> bool {
    DEPTH.with(Cell::get) != 0
}

/// A thread that is inside, until this is dropped.
pub(crate) struct Inside {
    slot: &'static Slot,
}

impl Inside {
    /// Goes in, when the gate is open. For the hot path, from which nothing calls exported functions.
    #[inline]
    pub(crate) fn enter() -> Self {
        let slot = slot();
        let times = slot.inside.load(Ordering::Relaxed);
        if times != 0 {
            slot.inside.store(times + 1, Ordering::Relaxed);
            return Inside { slot };
        }
        loop {
            slot.inside.store(1, Ordering::Relaxed);
            barrier();
            if SHUT.load(Ordering::Acquire) == 0 {
                return Inside { slot };
            }
            wait_outside(slot);
        }
    }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        let times = self.slot.inside.load(Ordering::Relaxed).saturating_sub(1);
        self.slot.inside.store(times, Ordering::Release);
        barrier();
        if times == 0 && SHUT.load(Ordering::Relaxed) != 0 {
            wake(&self.slot.inside);
        }
    }
}

extern "C" {
    fn pthread_setcancelstate(new: c_int, old: *mut c_int) -> c_int;
}
const CANCEL_DISABLE: c_int = 1;

/// A thread that does not end here although it was told to (`pthread_cancel`): not in the middle of something, with locks of
/// this library.
pub(crate) struct Whole(c_int);

impl Whole {
    pub(crate) fn begin() -> Self {
        let mut cancelled = 0;
        // SAFETY: of the calling thread.
        unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut cancelled) };
        Whole(cancelled)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        // SAFETY: as it was. It acts when the thread next comes where it may end.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}

/// A thread that is inside and may be called back by the real functions. Many of these are where a thread that was told to
/// ends: not in the middle of it, and inside for ever.
pub(crate) struct Call {
    _calling: Calling,
    _inside: Inside,
    _whole: Whole,
}

impl Call {
    pub(crate) fn enter() -> Self {
        let whole = Whole::begin();
        Call {
            _inside: Inside::enter(),
            _calling: Calling::begin(),
            _whole: whole,
        }
    }
}

/// A thread that calls a real function which may call exported ones.
pub(crate) struct Calling(());

impl Calling {
    pub(crate) fn begin() -> Self {
        DEPTH.with(|d| d.set(d.get() + 1));
        Calling(())
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        DEPTH.with(|d| d.set(d.get() - 1));
    }
}

#[inline]
fn barrier() {
    if ASYMMETRIC.load(Ordering::Relaxed) {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The calling thread's.
#[inline]
pub(crate) fn slot() -> &'static Slot {
    let slot = own_slot::<Slot>();
    if slot.is_null() {
        return first_time();
    }
    // SAFETY: slots are never freed.
    unsafe { &*slot.map_addr(|a| a & ADDRESS) }
}

/// The calling thread's name.
pub(crate) fn own_name() -> usize {
    slot();
    own_slot::<Slot>().addr()
}

/// Whether the thread of this name is gone.
pub(crate) fn is_gone(name: usize) -> bool {
    let slot = std::ptr::with_exposed_provenance::<Slot>(name & ADDRESS);
    // SAFETY: of a thread that has had a slot, and slots are never freed.
    unsafe { (*slot).gone.load(Ordering::Acquire) != name & !ADDRESS }
}

/// Gives the calling thread a slot, which it gives back when it ends.
#[cold]
fn first_time() -> &'static Slot {
    let slot = free_slot().unwrap_or_else(new_slot);
    set_own_slot(slot.named());
    // SAFETY: a slot is never freed.
    unsafe { at_end_of_thread(give_back, std::ptr::from_ref(slot).cast()) };
    slot
}

pub(crate) unsafe extern "C" fn give_back(slot: *mut libc::c_void) {
    set_own_slot::<Slot>(null());
    // SAFETY: what first_time has stored.
    unsafe { &*slot.cast::<Slot>() }.leave();
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: slots are never freed.
    let each = |s: *mut Slot| unsafe { s.as_ref::<'static>() };
    std::iter::successors(each(SLOTS.load(Ordering::Acquire)), move |s| {
        each(s.next.load(Ordering::Acquire))
    })
}

fn free_slot() -> Option<&'static Slot> {
    slots().find(|s| !s.used.swap(true, Ordering::AcqRel))
}

fn new_slot() -> &'static Slot {
    let slot: &'static Slot = Box::leak(Box::new(Slot::new()));
    std::ptr::from_ref(slot).expose_provenance();
    let mut first = SLOTS.load(Ordering::Acquire);
    loop {
        slot.next.store(first, Ordering::Relaxed);
        match SLOTS.compare_exchange(
            first,
            std::ptr::from_ref(slot).cast_mut(),
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => return slot,
            Err(now) => first = now,
        }
    }
}

#[cold]
fn wait_outside(slot: &Slot) {
    slot.inside.store(0, Ordering::Release);
    wake(&slot.inside);
    let by = SHUT.load(Ordering::SeqCst);
    if by != 0 {
        crate::control::wait_at_gate(by);
    }
}

/// From now on the calling thread's calls of exported functions are the provider's: the library's own thread.
pub(crate) fn always_nested() {
    DEPTH.with(|d| d.set(1));
    set_own_slot(keeper());
    std::ptr::from_ref(keeper()).expose_provenance();
}

fn keeper() -> &'static Slot {
    &KEEPER
}

/// Does the library's own thread ask?
pub(crate) fn is_keeper() -> bool {
    std::ptr::eq(own_slot::<Slot>(), keeper())
}

/// Lets the kernel make the barriers for the others, where it can.
pub(crate) fn prepare() {
    ASYMMETRIC.store(register(), Ordering::SeqCst);
}

/// May a thread go in from now on without looking at the gate, because who shuts it tells it?
pub(crate) fn may_be_fast() -> bool {
    ASYMMETRIC.load(Ordering::Relaxed) && SHUT.load(Ordering::Relaxed) == 0
}

/// Nobody comes in any more, or whoever does has been seen inside.
pub(crate) fn shut(order: u32) {
    SHUT.store(order, Ordering::SeqCst);
    everybody_passes();
}

/// The order that has shut the gate; 0 while it is open.
pub(crate) fn shut_by() -> u32 {
    SHUT.load(Ordering::SeqCst)
}

/// Opens the gate that `by` has shut, unless another order has shut it since. `first` is done before anybody comes in.
pub(crate) fn open(by: u32, first: impl FnOnce()) {
    if by & LOOKING != 0 {
        sleep(&SHUT, by);
        return;
    }
    let looking = by | LOOKING;
    if SHUT
        .compare_exchange(by, looking, Ordering::SeqCst, Ordering::SeqCst)
        .is_err()
    {
        return;
    }
    first();
    let _ = SHUT.compare_exchange(looking, 0, Ordering::SeqCst, Ordering::SeqCst);
    wake(&SHUT);
}

/// Waits until no thread is inside. False when it takes longer than `go_on` allows.
pub(crate) fn await_empty(go_on: impl Fn() -> bool) -> bool {
    for slot in slots() {
        loop {
            let times = slot.inside.load(Ordering::SeqCst);
            if times == 0 {
                break;
            }
            if !go_on() {
                return false;
            }
            sleep_shortly(&slot.inside, times);
        }
    }
    true
}

/// In the child of a fork, whose only thread this is: all others are gone, and no order has shut the gate.
pub(crate) fn after_fork() {
    let own = own_slot::<Slot>().map_addr(|a| a & ADDRESS);
    slots().filter(|slot| !std::ptr::eq(*slot, own)).for_each(Slot::leave);
    SHUT.store(0, Ordering::SeqCst);
}

/// Waits at the gate that `by` has shut for a change of `hold`, by which `order` is held; opens the gate when that is not
/// held any more and no order has been given since. `first` is done before anybody comes in.
pub(crate) fn wait_under(last: &AtomicU32, hold: &AtomicU32, order: u32, by: u32, first: impl FnOnce()) {
    let value = hold.load(Ordering::SeqCst);
    if value & DIED != 0 {
        // The kernel has woken one of those that wait.
        if order == last.load(Ordering::SeqCst) {
            let _ = hold.compare_exchange(value, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
        wake(hold);
    }
    if is_held(value) {
        sleep(hold, value);
        if hold.load(Ordering::SeqCst) != value {
            // Perhaps the kernel has woken this thread alone.
            wake(hold);
        }
    } else if order == last.load(Ordering::SeqCst) {
        open(by, first);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Held by whoever shuts the gate.
    pub(crate) static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn who_posts_while_polling_stays_inside() {
        let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        let polling = Inside::enter();
        drop(Inside::enter());
        shut(7);
        assert!(!await_empty(|| false), "the gate is shut behind a thread that polls");
        // It goes in once more, and does not wait for a gate that waits for it.
        drop(Inside::enter());
        assert!(!await_empty(|| false));
        drop(polling);
        assert!(await_empty(|| true));
        SHUT.store(0, Ordering::SeqCst);
    }
}
