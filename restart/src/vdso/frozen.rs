//! The data of an old vDSO, for code that was interrupted in the middle of it. Pure.
//!
//! A thread that stood in the old code at the checkpoint, or whose signal handler returns into it, carries it on with
//! the old data, which is now memory that nobody changes. The time stamp counter of this machine is another than that
//! which the data was made for: nothing may be computed from both. So
//!
//! * the clocks are marked as not readable by code: it asks the kernel, which is what it does on machines without such a counter;
//! * their sequence number is another: what was being computed is thrown away and begun anew, as at every tick.
//!
//! What needs no counter (the coarse clocks, `time`, `clock_getres`) finds the values of the checkpoint, as a thread
//! does that has read them and is held up before it can return.

const PAGE: usize = 4096;
/// Sequence number, mode, counter at the last tick: `seq`, `clock_mode`, `cycle_last` of the kernel's `struct
/// vdso_clock` (`vdso_data` before Linux 6.15).
const HEAD: usize = 16;
/// Modes in which code reads a counter; 0 is none, and `i32::MAX` says that the page holds the offsets of a time namespace.
const COUNTERS: std::ops::RangeInclusive<u32> = 1..=3;

/// Makes `data`, the bytes of `[vvar]`, usable without a kernel that keeps them. Where the clocks lie has changed from
/// version to version, what they look like has not: there are several, and their heads are equal. Returns how many were
/// found: none where code has read no counter before either.
pub(crate) fn freeze(data: &mut [u8]) -> usize {
    data.chunks_mut(PAGE).map(freeze_page).sum()
}

fn freeze_page(page: &mut [u8]) -> usize {
    let places = || (0..page.len().saturating_sub(HEAD - 1)).step_by(8);
    let heads = || places().filter(|at| is_clock(&page[*at..at + HEAD]));
    let clocks: Vec<usize> = heads()
        .filter(|a| heads().any(|b| *a != b && page[*a..a + HEAD] == page[b..b + HEAD]))
        .collect();
    for at in &clocks {
        let seq = word(&page[*at..]).wrapping_add(2);
        page[*at..at + 4].copy_from_slice(&seq.to_le_bytes());
        page[at + 4..at + 8].fill(0);
    }
    clocks.len()
}

fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |b| u32::from_le_bytes(*b))
}

fn is_clock(head: &[u8]) -> bool {
    let (seq, mode) = (word(head), word(&head[4..]));
    seq != 0 && seq & 1 == 0 && COUNTERS.contains(&mode) && head[8..] != [0; 8]
}
