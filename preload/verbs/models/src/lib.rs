//! Gate, locks and queues of the library for verbs, in every order of their threads (loom).
//!
//! The files are the library's own. What they have of the processor and the kernel comes from [`sync`], which is another
//! here: it lets loom choose what each load sees of the stores of other threads, and which thread goes on. That they are
//! taken by their paths, and not by a condition in the library (`cfg(loom)`), keeps the library as it is, and the models
//! among the tests that always run.
//!
//! What loom does not know is made of what it does: the barrier that the kernel makes for all threads, futexes, the end of
//! a thread, and a fork.

// The tests in these files are the library's.
#![cfg(not(test))]
#![allow(unsafe_op_in_unsafe_fn)]
// The models use a part of what the files have.
#![allow(dead_code)]

#[path = "../../src/bias.rs"]
mod bias;
mod control;
mod futex;
#[path = "../../src/gate.rs"]
mod gate;
#[path = "../../src/lock.rs"]
mod lock;
mod machine;
mod models;
mod shadow;
mod statics;
mod sync;
mod thing;
mod words;

pub use machine::Broken;
pub use models::*;
