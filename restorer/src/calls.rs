//! Carries out a list of system calls.

use crate::Env;
use belay_abi::restore::{
    Call, Table, CALL_COMPARE, CALL_EXPECT_ARG0, CALL_EXPECT_ARG5, CALL_KEEP, CALL_MAY_FAIL, CALL_USE_KEPT_ARG0, CALL_USE_KEPT_ARG4,
};
use belay_abi::syscall::raw6;

const EIO: isize = -5;

/// Runs every call of `table` in order; the first failure ends the process.
pub(crate) fn run(env: &Env, table: Table) {
    // SAFETY: the plan's call tables hold calls.
    let calls = unsafe { env.entries::<Call>(table) };
    let mut kept = 0;
    for call in calls {
        let r = one(call, &mut kept);
        let failed = (-4095..0).contains(&r);
        if failed && call.flags & CALL_MAY_FAIL == 0 {
            env.fail(call.step, call.index, r);
        }
        let expected = match call.flags & (CALL_EXPECT_ARG0 | CALL_EXPECT_ARG5) {
            CALL_EXPECT_ARG0 => call.args[0],
            CALL_EXPECT_ARG5 => call.args[5],
            _ => continue,
        };
        if !failed && r as u64 != expected {
            env.fail(call.step, call.index, EIO);
        }
    }
}

fn one(call: &Call, kept: &mut u64) -> isize {
    let mut a = call.args;
    if call.flags & CALL_COMPARE != 0 {
        // SAFETY: the plan names a word in the area.
        let word = unsafe { core::ptr::read_volatile(a[0] as *const u32) };
        return if u64::from(word) == a[1] { 0 } else { EIO };
    }
    if call.flags & CALL_USE_KEPT_ARG0 != 0 {
        a[0] = *kept;
    }
    if call.flags & CALL_USE_KEPT_ARG4 != 0 {
        a[4] = *kept;
    }
    // SAFETY: the agent made the list for exactly this address space; the restorer itself touches only the area, which
    // no call of the list unmaps or changes.
    let r = unsafe {
        raw6(
            call.nr as usize,
            a[0] as usize,
            a[1] as usize,
            a[2] as usize,
            a[3] as usize,
            a[4] as usize,
            a[5] as usize,
        )
    };
    if call.flags & CALL_KEEP != 0 {
        *kept = r as u64;
    }
    r
}
