//! What is touched although the access rights do not allow it. The handler of SIGSEGV notes it: who touches may be in the
//! middle of an allocation, or hold any lock, so it allocates nothing and waits for nobody.

use super::guard::{self, PAGE};
use belay_abi::access::MOST;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Most touches that are noted until they are taken.
const MOST_NOTED: usize = 1 << 16;

/// Bit of a note: it was a write. Below it is the place of the dataset, above it the page's address.
const WRITE: u64 = PAGE >> 1;
const _: () = assert!(MOST as u64 <= WRITE);

/// The notes; 0 where there is none.
static NOTED: [AtomicU64; MOST_NOTED] = [const { AtomicU64::new(0) }; MOST_NOTED];
/// How many there would be if there were room.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Pages whose touches are noted, for each dataset.
static WATCHED: [Watched; MOST] = [const { Watched::new() }; MOST];

/// A touch of a dataset's page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Touch {
    pub(super) page: u64,
    pub(super) dataset: u32,
    pub(super) write: bool,
}

/// Pages from `start` up to `end`.
#[derive(Debug)]
struct Watched {
    start: AtomicU64,
    end: AtomicU64,
}

impl Watched {
    const fn new() -> Self {
        Self {
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
        }
    }

    /// None while they are being changed.
    fn get(&self) -> (u64, u64) {
        let (start, end) = (self.start.load(Ordering::Acquire), self.end.load(Ordering::Acquire));
        match self.start.load(Ordering::Relaxed) {
            now if now == start => (start, end),
            _ => (0, 0),
        }
    }

    fn set(&self, (start, end): (u64, u64)) {
        // Others that stay are noted meanwhile.
        if self.get() != (start, end) {
            self.end.store(0, Ordering::Relaxed);
            self.start.store(start, Ordering::Release);
            self.end.store(end, Ordering::Release);
        }
    }
}

/// Says which pages each dataset has, by its number.
pub(super) fn watch(pages: impl Fn(u32) -> (u64, u64)) {
    (1..).zip(&WATCHED).for_each(|(n, watched)| watched.set(pages(n)));
}

/// Notes a touch of address `at` and allows it; whether it is a dataset's. For the handler.
pub(super) fn note(at: u64, write: bool) -> bool {
    let page = at & !(PAGE - 1);
    let mut all = WATCHED.iter().map(Watched::get).enumerate();
    let Some((place, pages)) = all.find(|(_, (start, end))| (*start..*end).contains(&page)) else {
        return false;
    };
    let note = NOTED.get(COUNT.fetch_add(1, Ordering::Relaxed));
    if let Some(note) = note {
        let how = if write { WRITE } else { 0 };
        note.store(page | how | place as u64, Ordering::Release);
    }
    // All of it where more cannot be noted, or there are too many mappings.
    note.is_some() && guard::allow((page, page + PAGE), true, true).is_ok() || guard::allow(pages, true, true).is_ok()
}

/// What has been noted since the last time. A note that is being written just now can come late, or get lost.
pub(super) fn take() -> Vec<Touch> {
    let mut out = Vec::new();
    let mut from = 0;
    loop {
        let count = COUNT.load(Ordering::Acquire);
        for note in NOTED.iter().take(count).skip(from) {
            let note = note.swap(0, Ordering::Acquire);
            if note != 0 {
                out.push(Touch {
                    page: note & !(PAGE - 1),
                    dataset: (note & (WRITE - 1)) as u32 + 1,
                    write: note & WRITE != 0,
                });
            }
        }
        // The memory for these may itself be a dataset's: more are noted then.
        if COUNT.compare_exchange(count, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return out;
        }
        from = count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_is_noted_and_allowed() {
        const PAGES: usize = 3;
        let mut memory = belay_kernel::pages::Pages::new(PAGES * PAGE as usize).unwrap();
        let first = memory.base().as_ptr() as u64;
        let second = first + PAGE;
        guard::allow((first, second + PAGE), false, false).unwrap();
        watch(|n| if n == MOST as u32 { (first, second + PAGE) } else { (0, 0) });
        assert!(note(first + 5, false) && note(second + 7, true) && !note(second + PAGE, true));
        let touch = |page, write| Touch {
            page,
            dataset: MOST as u32,
            write,
        };
        assert_eq!(take(), [touch(first, false), touch(second, true)]);
        assert_eq!(take(), []);
        // What cannot be noted is allowed all the same.
        guard::allow((first, second + PAGE), false, false).unwrap();
        assert!((0..=MOST_NOTED).all(|_| note(first, true)));
        std::hint::black_box(&mut memory)[PAGE as usize] = 1;
        assert_eq!(take().len(), MOST_NOTED);
        watch(|_| (0, 0));
        assert!(!note(first, true));
    }
}
