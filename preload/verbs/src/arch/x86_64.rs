//! A word of each thread's own, found by one load.
//!
//! `thread_local!` in a library asks the dynamic linker for the place at each access (`__tls_get_addr`), which may take
//! memory the first time. This word has its place among those of the libraries that a program is started with
//! (the model that the ABI calls initial-exec), where it is from a thread's beginning.

use std::arch::{asm, global_asm};

global_asm!(
    ".pushsection .tbss.belay_verbs_slot, \"awT\", @nobits",
    ".p2align 3",
    ".hidden belay_verbs_slot",
    ".globl belay_verbs_slot",
    ".type belay_verbs_slot, @object",
    ".size belay_verbs_slot, 8",
    "belay_verbs_slot: .zero 8",
    ".popsection",
);

/// What this thread has stored; null before.
#[inline]
pub(crate) fn own_slot<T>() -> *const T {
    let own: *const T;
    // SAFETY: reads eight bytes of the calling thread's own.
    unsafe {
        asm!(
            "mov {own}, qword ptr [rip + belay_verbs_slot@GOTTPOFF]",
            "mov {own}, qword ptr fs:[{own}]",
            own = out(reg) own,
            options(nostack, preserves_flags, readonly),
        );
    }
    own
}

/// Stores it.
pub(crate) fn set_own_slot<T>(own: *const T) {
    // SAFETY: writes eight bytes of the calling thread's own.
    unsafe {
        asm!(
            "mov {place}, qword ptr [rip + belay_verbs_slot@GOTTPOFF]",
            "mov qword ptr fs:[{place}], {own}",
            place = out(reg) _,
            own = in(reg) own,
            options(nostack, preserves_flags),
        );
    }
}
