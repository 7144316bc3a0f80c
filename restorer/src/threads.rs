//! Makes the threads. Each carries out its own list of calls and parks.

use crate::{calls, futex_wait, futex_wake, park, step, Env};
use belay_abi::restore::{CloneArgs, Step, ThreadPlan};
use belay_abi::task::spawn;
use core::sync::atomic::Ordering;

const CLONE_THREAD_FLAGS: u64 = 0x100 | 0x200 | 0x400 | 0x800 | 0x1_0000 | 0x4_0000; // VM, FS, FILES, SIGHAND, THREAD, SYSVSEM

/// Makes the threads that have the caller's descriptor table.
fn make(env: &Env, maker: &ThreadPlan) {
    // SAFETY: the plan's thread table holds thread plans.
    let threads = unsafe { env.entries::<ThreadPlan>(env.plan().threads) };
    // SAFETY: a thread's table of threads to be made holds their numbers.
    for index in unsafe { env.entries::<u64>(maker.makes) } {
        let Some(t) = threads.get(*index as usize) else { continue };
        let tid = t.tid;
        let args = CloneArgs {
            flags: CLONE_THREAD_FLAGS,
            stack: t.stack,
            stack_size: t.stack_bytes,
            set_tid: (&raw const tid) as u64,
            set_tid_size: 1,
            ..CloneArgs::default()
        };
        // SAFETY: the stack is this thread's own, in the area; the entry never returns.
        let r = unsafe { spawn(&args, thread_main, t as *const _ as usize) };
        if r < 0 {
            env.fail(step(Step::Thread), t.index, r);
        }
    }
}

/// Makes all threads but the first and those that exist, lets those go on, gives the first (the caller) its state, and
/// waits until the others have parked.
pub(crate) fn run(env: &Env) {
    // SAFETY: the plan's thread table holds thread plans.
    let threads = unsafe { env.entries::<ThreadPlan>(env.plan().threads) };
    if let Some(main) = threads.first() {
        make(env, main);
        calls::run(env, main.calls);
    }
    let others = (threads.len() as u32).saturating_sub(1);
    loop {
        let parked = env.slot().parked.load(Ordering::Acquire);
        if parked >= others {
            return;
        }
        futex_wait(&env.slot().parked, parked, false);
    }
}

/// The first thing that is done in the restorer by a thread that existed before.
pub(crate) fn begin(env: &Env, thread: *const ThreadPlan) -> ! {
    arrive(env);
    thread_main(thread as usize)
}

/// Tells that the caller has left the program that was here before, and waits until the memory is there.
pub(crate) fn arrive(env: &Env) {
    let first = env.first();
    first.arrived.fetch_add(1, Ordering::AcqRel);
    futex_wake(&first.arrived, false);
    while first.filled.load(Ordering::Acquire) == 0 {
        futex_wait(&first.filled, 0, false);
    }
}

/// Lets those that have arrived go on.
pub(crate) fn release(env: &Env) {
    env.slot().filled.store(1, Ordering::Release);
    futex_wake(&env.slot().filled, false);
}

/// Waits until `count` tasks have arrived, so that nobody needs the program that has been here before.
pub(crate) fn await_arrivals(env: &Env, count: u32) {
    loop {
        let arrived = env.slot().arrived.load(Ordering::Acquire);
        if arrived >= count {
            return;
        }
        futex_wait(&env.slot().arrived, arrived, false);
    }
}

extern "C" fn thread_main(thread: usize) -> ! {
    // SAFETY: `run` passes the address of an entry of the plan's thread table.
    let thread = unsafe { &*(thread as *const ThreadPlan) };
    let env = Env {
        plan: thread.plan as *const _,
    };
    // Before it gives up what that takes.
    make(&env, thread);
    calls::run(&env, thread.calls);
    // SAFETY: the plan's thread table holds thread plans.
    let all = unsafe { env.entries::<ThreadPlan>(env.plan().threads) }.len() as u32;
    if env.slot().parked.fetch_add(1, Ordering::AcqRel) + 2 == all {
        futex_wake(&env.slot().parked, false);
    }
    park()
}
