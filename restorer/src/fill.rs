//! Reads the stored pages into place and checks each while it is still in the cache, with several threads.

use crate::{futex_wait, nr, step, Env};
use belay_abi::hash::PageHash;
use belay_abi::restore::{CloneArgs, Fill, Helper, Step, FILL_STACK_BYTES, PIECE_BYTES};
use belay_abi::task::spawn;
use belay_abi::{syscall, PAGE};
use core::sync::atomic::Ordering;

const EINTR: isize = -4;
const CLONE_VM: u64 = 0x100;
/// FS, FILES, SIGHAND, THREAD. Not SYSVSEM: that would give the process a list of what is to be undone for semaphores.
const CLONE_THREAD_GROUP: u64 = 0x200 | 0x400 | 0x800 | 0x1_0000;
const CLONE_CHILD_CLEARTID: u64 = 0x20_0000;

/// Reads all extents of the plan. Returns when every helper has ended.
pub(crate) fn run(env: &Env) {
    let plan = env.plan();
    if plan.fills.len == 0 {
        return;
    }
    let helpers = plan.helpers.iter().take(plan.helper_count as usize);
    for (helper, word) in helpers.clone().zip(&env.slot().helper_tid) {
        word.store(helper.tid as u32, Ordering::Release);
        start(env, helper, word.as_ptr() as u64);
    }
    work(env);
    for (_, word) in helpers.zip(&env.slot().helper_tid) {
        loop {
            let tid = word.load(Ordering::Acquire);
            if tid == 0 {
                break;
            }
            futex_wait(word, tid, false);
        }
    }
}

fn start(env: &Env, helper: &Helper, word: u64) {
    let tid = helper.tid;
    let args = CloneArgs {
        flags: CLONE_VM | CLONE_THREAD_GROUP | CLONE_CHILD_CLEARTID,
        child_tid: word,
        stack: helper.stack,
        stack_size: FILL_STACK_BYTES,
        set_tid: (&raw const tid) as u64,
        set_tid_size: 1,
        ..CloneArgs::default()
    };
    // SAFETY: the stack is the helper's own, in the area; the entry never returns.
    let r = unsafe { spawn(&args, helper_main, env.plan() as *const _ as usize) };
    if r < 0 {
        env.fail(step(Step::Thread), u32::MAX, r);
    }
}

extern "C" fn helper_main(plan: usize) -> ! {
    work(&Env { plan: plan as *const _ });
    loop {
        // SAFETY: ends this thread only.
        unsafe { syscall!(nr::EXIT, 0) };
    }
}

/// Takes extents until none is left.
fn work(env: &Env) {
    // SAFETY: the plan's fill table holds fills.
    let fills = unsafe { env.entries::<Fill>(env.plan().fills) };
    let mut hash = None;
    loop {
        let i = env.slot().next_fill.fetch_add(1, Ordering::Relaxed);
        let Some(fill) = fills.get(i as usize) else {
            return;
        };
        let hash = *hash.get_or_insert_with(PageHash::detect);
        let mut at = 0;
        while at < fill.bytes {
            let bytes = PIECE_BYTES.min(fill.bytes - at);
            read(env, fill, i, at, bytes);
            check(env, hash, fill, i, at, bytes);
            at += bytes;
        }
    }
}

/// Compares the pages just read with their checksums.
fn check(env: &Env, hash: PageHash, fill: &Fill, i: u32, at: u64, bytes: u64) {
    // SAFETY: `read` has just filled the range, which is mapped and which nothing else uses yet.
    let data = unsafe { core::slice::from_raw_parts((fill.vaddr + at) as *const u8, bytes as usize) };
    // SAFETY: the plan has a checksum for each page of the extent.
    let sums = unsafe { core::slice::from_raw_parts((fill.sums as *const u64).add((at / PAGE) as usize), (bytes / PAGE) as usize) };
    let pages = data.as_chunks::<{ PAGE as usize }>().0;
    let dropped = |page: &[u8; PAGE as usize]| fill.droppable != 0 && page.iter().all(|b| *b == 0);
    if pages
        .iter()
        .zip(sums)
        .any(|(page, sum)| hash.checksum(page) != *sum && !dropped(page))
    {
        env.fail(step(Step::Checksum), i, 0);
    }
}

/// Reads `bytes` bytes at `at` of the extent.
fn read(env: &Env, fill: &Fill, i: u32, at: u64, bytes: u64) {
    let mut done = 0;
    while done < bytes {
        let skip = at + done;
        // SAFETY: the plan's mappings cover the extent and are writable now; nothing else uses them yet.
        let r = unsafe { syscall!(nr::PREAD64, fill.fd, fill.vaddr + skip, bytes - done, fill.offset + skip) };
        match r {
            EINTR => {}
            0 => env.fail(step(Step::Short), i, 0),
            e if e < 0 => env.fail(step(Step::Fill), i, e),
            n => done += n as u64,
        }
    }
}
