//! Memory of this library's own.
//!
//! The library's thread takes memory while the gate is shut, and threads wait at the gate that may have locks of the C
//! library's allocator, or of one that the program has brought: a program may call the verbs wherever it likes. So
//! everything that this library allocates comes from here, whose lock no thread has at the gate, and which asks the
//! kernel without any function that a program can replace.
//!
//! Blocks are powers of two, which are kept for the next of their size; larger ones are mappings of their own.

use crate::lock::Lock;
use belay_abi::syscall;
use std::alloc::{GlobalAlloc, Layout};
use std::ptr::null_mut;

/// The smallest block, and how many sizes there are.
const SMALLEST: usize = 16;
const SIZES: usize = 12;
const LARGEST: usize = SMALLEST << (SIZES - 1);
/// What is taken from the kernel for blocks at a time.
const CHUNK: usize = 8 * LARGEST;
const PAGE: usize = 4096;

/// A block that nobody has.
struct Free {
    next: *mut Free,
}

/// Blocks that are free, by size, and what is left of the last chunk.
struct Blocks {
    free: [*mut Free; SIZES],
    rest: *mut u8,
    left: usize,
}

const NONE: Blocks = Blocks {
    free: [null_mut(); SIZES],
    rest: null_mut(),
    left: 0,
};
static BLOCKS: Lock<Blocks> = Lock::new(NONE);

pub(crate) struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

/// Which size of block this takes; None where it is a mapping of its own.
fn size_of_block(layout: Layout) -> Option<usize> {
    let bytes = layout.size().max(layout.align()).max(SMALLEST).next_power_of_two();
    (bytes <= LARGEST).then(|| (bytes / SMALLEST).trailing_zeros() as usize)
}

/// Pages of zeroes, aligned as pages are; null where there are none.
fn map(bytes: usize) -> *mut u8 {
    let (how, rw) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new mapping.
    let at = unsafe { syscall!(libc::SYS_mmap as usize, 0, bytes, rw, how, -1isize, 0) };
    if at > 0 || at < -(PAGE as isize) {
        at as *mut u8
    } else {
        null_mut()
    }
}

/// The pages of a mapping need not be kept.
///
/// # Safety
/// Nobody reads what is there before it is written.
pub(crate) unsafe fn forget(at: *mut u8, bytes: usize) {
    syscall!(libc::SYS_madvise as usize, at, bytes, libc::MADV_DONTNEED);
}

impl Blocks {
    /// A block of `bytes`, a power of two.
    fn take(&mut self, size: usize, bytes: usize) -> *mut u8 {
        let first = self.free[size];
        if !first.is_null() {
            // SAFETY: a block that is free.
            self.free[size] = unsafe { (*first).next };
            return first.cast();
        }
        // A chunk consists of blocks of all sizes, each of which begins at a multiple of its own, up to a page.
        let skip = self.rest.align_offset(bytes.min(PAGE));
        if self.left < skip + bytes {
            let chunk = map(CHUNK);
            if chunk.is_null() {
                return chunk;
            }
            (self.rest, self.left) = (chunk, CHUNK);
            return self.take(size, bytes);
        }
        let block = self.rest.wrapping_add(skip);
        (self.rest, self.left) = (block.wrapping_add(bytes), self.left - skip - bytes);
        block
    }
}

// SAFETY: blocks and mappings are as large and aligned as was asked for, and nobody else's until they are given back. No
// alignment here is larger than a page.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        #[cfg(test)]
        tests::count();
        match size_of_block(layout) {
            _ if layout.align() > PAGE => null_mut(),
            Some(size) => BLOCKS.lock().take(size, SMALLEST << size),
            None => map(layout.size()),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let at = self.alloc(layout);
        // A new mapping is zeroes, and costs nothing until it is touched.
        if !at.is_null() && size_of_block(layout).is_some() {
            at.write_bytes(0, layout.size());
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let Some(size) = size_of_block(layout) else {
            syscall!(libc::SYS_munmap as usize, at, layout.size());
            return;
        };
        let mut blocks = BLOCKS.lock();
        let block = at.cast::<Free>();
        block.write(Free { next: blocks.free[size] });
        blocks.free[size] = block;
    }
}

/// In the child of a fork: blocks that were free are left to themselves, because another thread of the parent may have
/// been taking one.
///
/// # Safety
/// No other thread is there.
pub(crate) unsafe fn after_fork() {
    BLOCKS.reset(NONE);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        static TAKEN: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn count() {
        TAKEN.set(TAKEN.get() + 1);
    }

    /// How often this thread has taken memory so far.
    pub(crate) fn taken() -> usize {
        TAKEN.get()
    }

    #[test]
    fn blocks_are_apart_and_come_back() {
        let sizes = [1, 16, 17, 100, 4096, 5000, LARGEST, LARGEST + 1, 1 << 20];
        let layouts: Vec<Layout> = sizes.iter().map(|n| Layout::from_size_align(*n, 8).unwrap()).collect();
        for round in 1..4u8 {
            let fill = |l: &Layout| {
                // SAFETY: as large as was asked for.
                unsafe {
                    let at = HEAP.alloc_zeroed(*l);
                    assert!(at.is_aligned_to_page_or(l) && (0..l.size()).all(|i| *at.add(i) == 0));
                    at.write_bytes(round, l.size());
                    at
                }
            };
            let all: Vec<*mut u8> = layouts.iter().chain(&layouts).map(fill).collect();
            for (at, l) in all.iter().zip(layouts.iter().chain(&layouts)) {
                // SAFETY: taken above.
                unsafe {
                    assert!((0..l.size()).all(|i| *at.add(i) == round));
                    HEAP.dealloc(*at, *l);
                }
            }
        }
    }

    trait Aligned {
        fn is_aligned_to_page_or(&self, layout: &Layout) -> bool;
    }
    impl Aligned for *mut u8 {
        fn is_aligned_to_page_or(&self, layout: &Layout) -> bool {
            self.align_offset(layout.size().next_power_of_two().min(PAGE)) == 0
        }
    }
}
