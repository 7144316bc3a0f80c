//! The program that becomes the process again.
//!
//! It runs in a fork of the agent, from an area that the restored process does not use, on a stack in that area. Once
//! it has unmapped the agent's memory there is no libc, no thread-local storage and no allocator. All signals are
//! blocked. It ends by parking every thread in [`park`]; the agent then sets their registers by ptrace and unmaps the
//! area.
#![no_std]
#![no_main]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod calls;
mod fill;
mod threads;

use belay_abi::affinity::Pinned;
use belay_abi::aio::{self, RingPlan};
use belay_abi::restore::{
    Control, Plan, Slot, Step, Table, ThreadPlan, PLAN_MAGIC, STAGE_ABORT, STATE_FAILED, STATE_PARKED, STATE_READY, STATE_RESTORER,
};
use belay_abi::syscall;
use core::sync::atomic::{AtomicU32, Ordering};

belay_abi::freestanding!();

/// System call numbers of x86-64.
pub(crate) mod nr {
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const PREAD64: usize = 17;
    pub(crate) const EXIT: usize = 60;
    pub(crate) const KILL: usize = 62;
    pub(crate) const FUTEX: usize = 202;
    pub(crate) const CLOCK_GETTIME: usize = 228;
    pub(crate) const EXIT_GROUP: usize = 231;
}

const SIG_UNBLOCK: usize = 1;
const SIGSTOP: i32 = 19;

/// Everything a part of the restorer needs; copied freely, holds only addresses in the area.
#[derive(Clone, Copy)]
pub(crate) struct Env {
    plan: *const Plan,
}

impl Env {
    pub(crate) fn plan(&self) -> &'static Plan {
        // SAFETY: the agent laid out the plan in the area, which stays mapped and unchanged while the restorer runs.
        unsafe { &*self.plan }
    }

    pub(crate) fn slot(&self) -> &'static Slot {
        // SAFETY: the plan's slot lies in the control memory mapped in the area; all shared fields are atomics.
        unsafe { &*(self.plan().slot as *const Slot) }
    }

    /// The slot of the process that makes the memory.
    pub(crate) fn first(&self) -> &'static Slot {
        // SAFETY: as for the slot.
        unsafe { &*(self.plan().first as *const Slot) }
    }

    fn control(&self) -> &'static Control {
        // SAFETY: as for the slot.
        unsafe { &*(self.plan().control as *const Control) }
    }

    /// Entries of a table.
    ///
    /// # Safety
    /// The table holds entries of type `T`.
    pub(crate) unsafe fn entries<T>(&self, table: Table) -> &'static [T] {
        if table.len == 0 {
            return &[];
        }
        // SAFETY: the agent laid out `len` aligned entries there; the caller names the right type.
        unsafe { core::slice::from_raw_parts(table.addr as *const T, table.len as usize) }
    }

    /// Tells the agent that the process has reached `state`.
    fn report(&self, state: u32) {
        self.slot().state.store(state, Ordering::Release);
        self.control().reports.fetch_add(1, Ordering::Release);
        futex_wake(&self.control().reports, false);
    }

    /// Reports a failure and ends the process.
    pub(crate) fn fail(&self, step: u32, index: u32, errno: isize) -> ! {
        let slot = self.slot();
        slot.step.store(step, Ordering::Relaxed);
        slot.index.store(index, Ordering::Relaxed);
        slot.errno.store(-errno as i32, Ordering::Relaxed);
        self.report(STATE_FAILED);
        loop {
            // SAFETY: ends the process.
            unsafe { syscall!(nr::EXIT_GROUP, 127) };
        }
    }

    /// Waits until the job has come to `wanted`; ends the process when the restart has failed.
    fn await_stage(&self, wanted: u32) {
        let stage = &self.control().stage;
        loop {
            match stage.load(Ordering::Acquire) {
                STAGE_ABORT => loop {
                    // SAFETY: ends the process.
                    unsafe { syscall!(nr::EXIT_GROUP, 127) };
                },
                now if now >= wanted => return,
                now => futex_wait(stage, now, false),
            }
        }
    }

    pub(crate) fn time(&self, which: usize) {
        let mut t = [0u64; 2];
        // SAFETY: `t` is a live timespec.
        unsafe { syscall!(nr::CLOCK_GETTIME, 1, t.as_mut_ptr()) };
        if let Some(slot) = self.slot().times.get(which) {
            slot.store(t[0] * 1_000_000_000 + t[1], Ordering::Relaxed);
        }
    }
}

/// Waits while `word` is `value`; `private` unless other processes use the word.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, private: bool) {
    // SAFETY: the word is live; the kernel only reads it.
    unsafe { syscall!(nr::FUTEX, word.as_ptr(), if private { 128 } else { 0 }, value, 0) };
}

/// Wakes all waiters of `word`.
pub(crate) fn futex_wake(word: &AtomicU32, private: bool) {
    // SAFETY: the word is live.
    unsafe { syscall!(nr::FUTEX, word.as_ptr(), if private { 129 } else { 1 }, i32::MAX) };
}

/// Where every thread ends: the agent takes it from here.
pub(crate) fn park() -> ! {
    let word = AtomicU32::new(0);
    loop {
        futex_wait(&word, 0, true);
    }
}

/// Entry: the agent's fork jumps here, with the stack pointer in the area, `rdi` = address of the plan, and `rsi` = 0
/// or, in a thread that exists already, the address of its plan.
#[no_mangle]
extern "C" fn _start(plan: *const Plan, thread: *const ThreadPlan) -> ! {
    let env = Env { plan };
    let p = env.plan();
    if p.magic != PLAN_MAGIC {
        // SAFETY: ends the process; with another layout nothing can be reported.
        unsafe { syscall!(nr::EXIT_GROUP, 126) };
    }
    if !thread.is_null() {
        threads::begin(&env, thread);
    }
    env.time(0);
    env.slot().state.store(STATE_RESTORER, Ordering::Release);
    if p.guest != 0 {
        threads::arrive(&env);
    }
    threads::await_arrivals(&env, p.arrivals);
    calls::run(&env, p.before);
    env.time(1);
    fill::run(&env);
    rings(&env);
    calls::run(&env, p.after);
    env.time(2);
    threads::release(&env);
    threads::run(&env);
    if p.hold != 0 {
        env.report(STATE_READY);
        env.await_stage(p.hold);
    }
    calls::run(&env, p.last);
    env.time(3);
    env.report(STATE_PARKED);
    if p.stop_signal != 0 {
        stop(p.pid, p.stop_signal);
    }
    park()
}

/// Makes the rings of native asynchronous I/O.
fn rings(env: &Env) {
    // SAFETY: the plan's table of rings holds plans of rings.
    let plans = unsafe { env.entries::<RingPlan>(env.plan().rings) };
    if plans.is_empty() {
        return;
    }
    // Each processor keeps some places of a ring for itself: all places can be had only on one.
    let pinned = Pinned::here();
    for (i, plan) in plans.iter().enumerate() {
        // SAFETY: the events lie in the area; the plan's mappings have reserved the place.
        if let Err(e) = unsafe { aio::restore(plan) } {
            env.fail(step(Step::Ring), i as u32, e);
        }
    }
    if let Some(pinned) = pinned {
        pinned.release();
    }
}

/// Stops the whole process; the agent traces it from here.
fn stop(pid: i32, signal: i32) {
    let mask = 1u64 << (signal - 1);
    // SAFETY: `mask` is a live word; the signal's disposition is the default one.
    unsafe { syscall!(nr::RT_SIGPROCMASK, SIG_UNBLOCK, &raw const mask, 0, 8) };
    // SAFETY: takes numbers only.
    unsafe { syscall!(nr::KILL, pid, signal) };
    // Only where it did not stop: the kernel heeds no signal of the terminal's in a process group that no shell looks
    // after, as that of a restart without a terminal.
    // SAFETY: as above.
    unsafe { syscall!(nr::KILL, pid, SIGSTOP) };
}

pub(crate) const fn step(s: Step) -> u32 {
    s as u32
}
