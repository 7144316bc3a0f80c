//! Which code an execution has reached: the counters that the compiler adds with `-C passes=sancov-module
//! -C llvm-args=-sanitizer-coverage-inline-8bit-counters`. Without them there are none, and the fuzzer is blind but works.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

/// Parts of the program that have counters of their own.
const PARTS: usize = 64;
static START: [AtomicPtr<u8>; PARTS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PARTS];
static BYTES: [AtomicUsize; PARTS] = [const { AtomicUsize::new(0) }; PARTS];

/// Called before `main` by code that the compiler adds to each part.
///
/// # Safety
/// The counters lie from `start` to `stop` for as long as the program runs.
#[no_mangle]
pub unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let bytes = (stop as usize).saturating_sub(start as usize);
    for (slot, length) in START.iter().zip(&BYTES) {
        let known = slot.load(Relaxed);
        if known == start {
            return;
        }
        if known.is_null() {
            length.store(bytes, Relaxed);
            slot.store(start, Relaxed);
            return;
        }
    }
}

/// Called like the above with a table that is not needed.
#[no_mangle]
pub extern "C" fn __sanitizer_cov_pcs_init(_start: *const usize, _stop: *const usize) {}

fn counters() -> impl Iterator<Item = &'static mut [u8]> {
    START.iter().zip(&BYTES).filter_map(|(start, bytes)| {
        let start = start.load(Relaxed);
        // SAFETY: the part's own counters, see `__sanitizer_cov_8bit_counters_init`. They are plain bytes; the fuzzer
        // looks at them on one thread, between executions.
        (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(start, bytes.load(Relaxed)) })
    })
}

/// What has been reached so far.
#[derive(Debug, Default)]
pub struct Seen {
    /// For each counter the magnitudes that it has had, a bit each.
    magnitudes: Vec<u8>,
}

impl Seen {
    /// Whether the program counts at all.
    pub fn is_possible() -> bool {
        !START[0].load(Relaxed).is_null()
    }

    /// Sets all counters back.
    pub fn begin() {
        counters().for_each(|part| part.fill(0));
    }

    /// Takes the counters into account; whether one has a magnitude that it never had.
    pub fn take(&mut self) -> bool {
        let mut new = false;
        let mut at = 0;
        for part in counters() {
            self.magnitudes.resize(self.magnitudes.len().max(at + part.len()), 0);
            for (seen, count) in self.magnitudes[at..].iter_mut().zip(part.iter()) {
                // 1, 2, 3, 4-7, 8-15, 16-31, 32-127, more.
                let bit = match count {
                    0 => continue,
                    1..=3 => count - 1,
                    4..=7 => 3,
                    8..=15 => 4,
                    16..=31 => 5,
                    32..=127 => 6,
                    _ => 7,
                };
                new |= *seen & 1 << bit == 0;
                *seen |= 1 << bit;
            }
            at += part.len();
        }
        new
    }

    /// Counters that were ever reached, and all.
    pub fn reached(&self) -> (usize, usize) {
        let reached = self.magnitudes.iter().filter(|m| **m != 0).count();
        (reached, counters().map(|c| c.len()).sum())
    }
}
