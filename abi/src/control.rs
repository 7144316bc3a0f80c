//! The control page: how the agent asks a cooperating library inside a process to come to rest before a checkpoint,
//! and to go on after it.
//!
//! The library makes a memfd called [`NAME`], sealed against shrinking, maps its first page shared and fills in a
//! [`Control`]. A thread of the library serves it; the agent finds the page in `/proc/PID/maps` and takes the
//! descriptor named there. Each side holds a word that the other one waits for, in the way of robust futexes
//! (`set_robust_list`): the number of the thread that holds it, with [`WAITERS`]. When that thread dies, for whatever
//! reason, the kernel sets [`DIED`] in it and wakes who waits. Orders are numbered; the word of an order is the one
//! whose place is its number's lowest bit, so that the word on which somebody waits changes with each order and each
//! answer.
//!
//! ```text
//! agent    hold[n] = own thread, order = n CLOSE, wake order ┄┄ waits for serve[n]
//! library  waits for order ── serve[n] = own thread ── comes to rest ── serve[n+1] = own thread, answer = n, serve[n] = 0
//! agent    hold[m] = own thread, order = m REBUILD, hold[n] = 0 ┄┄ or order = m OPEN, hold[n] = 0
//! library  waits for hold[n] ── order m
//! ```
//! An order may be withdrawn by a later one; the library answers the last one. Its thread waits for the word of the order
//! that it has answered, whatever the last one is by then: that of a later one is held until it answers it.
//!
//! An answer of [`MORE`] begins a round: the agent reads what the library has [`told`](Control::told), all hosts meet,
//! the agent writes what the others have told into the library's [`room`](Control::room) and gives the order again. All
//! libraries that have said so get it at the same time; the rounds end when none says so any more. What travels is a
//! row of entries: kind, 0, length of the key (2 bytes), length of the value (4 bytes), key, value.
//!
//! The gate is shut as long as `hold` of the last order is held by a thread that lives: the threads that wait at it
//! wait for that word, and go on when it is 0 or has [`DIED`]. Of those that wait for a word of a dead thread the
//! kernel wakes one: whoever wakes and finds the word changed wakes all the others before it does anything else. So a
//! gate opens with the death of the agent, and without the help of the library's own thread.

use crate::words::{Shared, Words};
use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};
use core::time::Duration;

/// Name of the memfd.
pub const NAME: &CStr = c"belay-control";
/// How `/proc/PID/maps` shows it.
pub const MAPPED: &str = "/memfd:belay-control (deleted)";
/// `Control::magic`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"belayctl");
/// `Control::version`.
pub const VERSION: u32 = 2;

/// In a held word: somebody may wait for it (`FUTEX_WAITERS`).
pub const WAITERS: u32 = 0x8000_0000;
/// In a held word: the thread that held it has died (`FUTEX_OWNER_DIED`).
pub const DIED: u32 = 0x4000_0000;

/// Kind of an order: come to rest, and stay there.
pub const CLOSE: u32 = 1;
/// Go on.
pub const OPEN: u32 = 2;
/// At rest still, in a process that was restarted: make again what the restart has not.
pub const REBUILD: u32 = 3;
/// For belay's own process that asks the driver of GPUs: everything is stopped, but for the driver's threads; take the state
/// off the devices.
pub const LEAVE: u32 = 4;

/// So much longer than it is told to wait for work may the driver of GPUs take to answer an order to come to rest,
pub const DRIVER_LATE: Duration = Duration::from_secs(5);
/// and so long to take states off devices, or to put them back: a second for every few gigabytes.
pub const DRIVER_LIMIT: Duration = Duration::from_secs(300);

/// `Control::outcome`: done.
pub const DONE: u32 = 0;
/// It cannot be done.
pub const REFUSED: u32 = 1;
/// It cannot be done for a reason that passes by itself.
pub const BUSY: u32 = 2;
/// At rest so far: give the order again when all, on all hosts, have told each other what they have to tell.
pub const MORE: u32 = 3;
/// Of belay's own process that asks the driver of GPUs: it can never be done with those processes whose numbers, of 4 bytes
/// each, are in `Control::told`.
pub const UNABLE: u32 = 4;

/// Longest text in `Control::fault`, bytes.
pub const MAX_FAULT: u64 = 500;
/// Longest that one library tells or hears in a round, bytes.
pub const MAX_TOLD: u64 = 8 << 20;
/// Longest key of an entry, bytes.
pub const MAX_KEY: usize = 256;
/// Longest value of an entry, bytes.
pub const MAX_VALUE: usize = 4096;

/// Kind of an entry: the value of this key, made known; in an answer, what somebody has made known.
pub const FACT: u8 = 1;
/// The value of this key is wished; where it ends with `*`, those of all keys that begin with what is before.
pub const WISH: u8 = 2;
/// A number of 8 bytes, which is added up over all libraries of this name; in the answer to who has told it, the sum.
pub const SUM: u8 = 3;
/// Length of an entry without its key and value.
pub const ENTRY: usize = 8;

/// A held word. Its place in the page is a multiple of 8, as is that of its link in the holder's list.
#[repr(C, align(8))]
#[derive(Debug, Default)]
pub struct Word {
    /// 0; or the thread that holds it, with [`WAITERS`]; or [`DIED`], with anything.
    pub value: AtomicU32,
}

/// Memory of the process.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub address: u64,
    /// Length.
    pub bytes: u64,
}

// SAFETY: two integers of 8 bytes.
unsafe impl Words for Span {}

/// The page. All that the library writes is to be checked by who reads it.
#[repr(C)]
#[derive(Debug)]
pub struct Control {
    /// [`MAGIC`], stored last.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The process, which a fork does not change: one with another number has inherited the page, and takes no part
    /// by it.
    pub owner: AtomicI32,
    /// The memfd's descriptor in that process.
    pub descriptor: AtomicI32,
    /// Reserved, 0.
    pub reserved: u32,
    /// Name of the library, ended by a zero byte.
    pub name: Shared<[u8; 40]>,
    /// Held by the agent.
    pub hold: [Word; 2],
    /// Held by the library's thread: that of the order that it is going to answer.
    pub serve: [Word; 2],
    /// The last order: its number, shifted by 8, and its kind.
    pub order: AtomicU32,
    /// How long that may take, milliseconds.
    pub limit_ms: AtomicU32,
    /// The order that was answered last.
    pub answer: AtomicU32,
    /// How.
    pub outcome: AtomicU32,
    /// Why not, in words.
    pub fault: Shared<Span>,
    /// With [`MORE`] and [`UNABLE`]: what the library tells.
    pub told: Shared<Span>,
    /// Where the agent may write what the library has wished for.
    pub room: Shared<Span>,
    /// How many bytes it has written there, before it gives the order again.
    pub heard: AtomicU64,
    /// How often the order has been given again: 0 where all begins.
    pub round: AtomicU32,
}

/// Order `number`, of this kind.
pub const fn order(number: u32, kind: u32) -> u32 {
    number << 8 | kind
}

/// The number of an order.
pub const fn number(order: u32) -> u32 {
    order >> 8
}

/// Its kind.
pub const fn kind(order: u32) -> u32 {
    order & 0xff
}

/// Whether the order has a lower number than `than`, where numbers begin anew after the greatest.
pub const fn is_older(order: u32, than: u32) -> bool {
    let ahead = number(than).wrapping_sub(number(order)) & 0xff_ffff;
    ahead != 0 && ahead < 0x80_0000
}

/// Which of two words is that of an order.
pub const fn place(order: u32) -> usize {
    (number(order) & 1) as usize
}

/// Whether a word with this value is held by a thread that lives.
pub const fn is_held(value: u32) -> bool {
    value != 0 && value & DIED == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn libraries_in_c_rely_on_the_layout() {
        let places = [
            offset_of!(Control, version),
            offset_of!(Control, owner),
            offset_of!(Control, descriptor),
            offset_of!(Control, name),
            offset_of!(Control, hold),
            offset_of!(Control, serve),
            offset_of!(Control, order),
            offset_of!(Control, limit_ms),
            offset_of!(Control, answer),
            offset_of!(Control, outcome),
            offset_of!(Control, fault),
            offset_of!(Control, told),
            offset_of!(Control, room),
            offset_of!(Control, heard),
            offset_of!(Control, round),
        ];
        assert_eq!(places, [8, 12, 16, 24, 64, 80, 96, 100, 104, 108, 112, 128, 144, 160, 168]);
        assert_eq!(
            (size_of::<Control>(), align_of::<Control>(), MAGIC),
            (176, 8, 0x6c74_6379_616c_6562)
        );
        let shown = MAPPED.strip_prefix("/memfd:").and_then(|m| m.strip_suffix(" (deleted)"));
        assert_eq!(shown, NAME.to_str().ok());
    }

    #[test]
    fn numbers_of_orders_begin_anew() {
        let last = order(0xff_ffff, CLOSE);
        assert_eq!((number(last), kind(last), place(last)), (0xff_ffff, CLOSE, 1));
        let next = order(number(last).wrapping_add(1), OPEN);
        assert_eq!((number(next), kind(next), place(next)), (0, OPEN, 0));
        assert!(is_older(last, next) && !is_older(next, last) && !is_older(next, next));
    }

    #[test]
    fn who_has_died_holds_nothing() {
        assert!(is_held(WAITERS | 7) && !is_held(WAITERS | DIED | 7) && !is_held(0));
    }
}
