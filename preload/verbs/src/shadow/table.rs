//! Queue pairs by their real number: read without a lock by whoever polls.

use super::ShadowQp;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

const CHUNK: usize = 1 << 12;
type Chunk = [AtomicPtr<ShadowQp>; CHUNK];

/// Numbers have 24 bits: as many chunks as a chunk has places, each made when it is needed.
pub(crate) struct Table {
    chunks: Box<[AtomicPtr<Chunk>; CHUNK]>,
}

impl Table {
    pub(crate) fn new() -> Self {
        Table {
            chunks: Box::new([const { AtomicPtr::new(null_mut()) }; CHUNK]),
        }
    }

    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&ShadowQp> {
        let number = number as usize;
        let chunk = self.chunks.get(number / CHUNK)?.load(Ordering::Acquire);
        // SAFETY: chunks live as long as the table; a queue pair is struck off before it is freed, and whoever polls
        // its completion queues has left then.
        unsafe { chunk.as_ref()?[number % CHUNK].load(Ordering::Acquire).as_ref() }
    }

    /// Strikes a queue pair off that is gone. Its number may be another's by now.
    pub(crate) fn strike(&self, number: u32, qp: *mut ShadowQp) {
        let number = number as usize;
        let chunk = self.chunks.get(number / CHUNK).map(|c| c.load(Ordering::Acquire));
        // SAFETY: as in `get`.
        if let Some(chunk) = chunk.and_then(|c| unsafe { c.as_ref() }) {
            let _ = chunk[number % CHUNK].compare_exchange(qp, null_mut(), Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Puts a queue pair in.
    pub(crate) fn set(&self, number: u32, qp: *mut ShadowQp) {
        let number = number as usize;
        let Some(place) = self.chunks.get(number / CHUNK) else {
            return;
        };
        if place.load(Ordering::Acquire).is_null() {
            let chunk: Box<Chunk> = Box::new([const { AtomicPtr::new(null_mut()) }; CHUNK]);
            let chunk = Box::into_raw(chunk);
            let first = place.compare_exchange(null_mut(), chunk, Ordering::AcqRel, Ordering::Acquire);
            if first.is_err() {
                // SAFETY: another thread was faster, and nobody has seen this one.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
        // SAFETY: it is there now, for as long as the table.
        let chunk = unsafe { &*place.load(Ordering::Acquire) };
        chunk[number % CHUNK].store(qp, Ordering::Release);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for chunk in self.chunks.iter().map(|c| c.load(Ordering::Acquire)).filter(|c| !c.is_null()) {
            // SAFETY: made by `set`.
            drop(unsafe { Box::from_raw(chunk) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::dangling_mut;

    #[test]
    fn a_number_that_was_given_again_is_not_struck_off() {
        let (table, number) = (Table::new(), 0xab_cdef);
        let place = || table.chunks[number / CHUNK].load(Ordering::Relaxed);
        // SAFETY: chunks live as long as the table.
        let found = || unsafe { (*place())[number % CHUNK].load(Ordering::Relaxed) };
        let (gone, new) = (dangling_mut::<ShadowQp>(), dangling_mut::<ShadowQp>().wrapping_add(1));
        table.set(number as u32, gone);
        // The provider has given the number away before whoever destroyed the first one comes to strike it off.
        table.set(number as u32, new);
        table.strike(number as u32, gone);
        assert_eq!(found(), new);
        table.strike(number as u32, new);
        assert!(found().is_null());
    }
}
