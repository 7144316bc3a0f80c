//! What the agent shares with the two programs that run inside the application (`inject` and `restorer`): raw system calls,
//! program start-up without libc, and the `repr(C)` tables the agent prepares for them.
//!
//! `no_std`, no allocator, no thread-local storage: this code runs on a stopped application's thread, where libc's state belongs to
//! somebody else.
#![no_std]

pub mod access;
pub mod affinity;
pub mod aio;
pub mod control;
pub mod hash;
pub mod histories;
pub mod index;
pub mod inject;
pub mod restore;
pub mod syscall;
pub mod task;
pub mod words;

/// Size of a page.
pub const PAGE: u64 = 4096;

/// Behind the highest address of a process that can be restored: of the layout with 47 bits, which a process leaves only
/// by asking for more.
pub const TASK_SIZE: u64 = 0x7fff_ffff_f000;
