//! `libbelay_verbs.so`: stands between a program and libibverbs, so that a program of the verbs can be checkpointed and
//! restarted.
//!
//! Programs see *shadows*: objects of this library in the program's memory, which name the provider's object (`real`)
//! that does the work. The image holds the shadows; after a restart they get other real objects.
//!
//! | room | what |
//! |---|---|
//! | `api` | exported functions, which convert, guard and delegate |
//! | `shadow` | the objects, and what is needed to make their real ones again |
//! | `path` | posting and polling: the only code that is hot |
//! | `gate` | which threads are inside the verbs, and how they are kept out |
//! | `bias`, `lock` | locks: of the hot path, and of all else |
//! | `sync` | what these have of the processor and the kernel |
//! | `control`, `rounds` | the page through which the agent asks, the thread that answers, what libraries tell each other |
//! | `drain`, `settled` | coming to rest before a checkpoint |
//! | `names` | how ports and queue pairs are called |
//! | `translate` | from the names that programs have to those of today, and back |
//! | `rebuild`, `made_up` | making everything again after a restart, and completions that no device gives |
//! | `around` | devices that were opened around the library |
//! | `cm` | librdmacm: connections by addresses, over TCP |
//! | `real` | libibverbs' own functions |
//! | `heap` | memory of the library's own: nobody waits at the gate with its lock |
//!
//! The library is found by being loaded first (`LD_PRELOAD`): names without a version satisfy references to any.
//! Neither allocates nor waits what is in `path`, apart from locks of its own that the provider would take as well.
//!
//! What cannot be made again after a restart is not offered: memory windows, XRC, device memory, flows, counters, work
//! queues, imported objects. A program is told that the device does not support it.

// Nearly every function here takes pointers of C; what holds for them is said once, in `api` and in `shadow`.
#![allow(unsafe_op_in_unsafe_fn)]

mod api;
mod arch;
mod around;
mod bias;
mod cm;
mod control;
mod drain;
mod gate;
mod heap;
mod lock;
mod made_up;
mod names;
mod path;
mod real;
mod rebuild;
mod rounds;
mod settled;
mod shadow;
mod sizes;
mod sync;
mod translate;

/// Sets `errno`.
fn set_errno(value: i32) {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() = value };
}

/// The calling thread's `errno`.
fn errno() -> i32 {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() }
}
