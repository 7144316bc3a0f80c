//! What has been posted and is not known to be done: a ring of requests with all that it takes to post them again.
//!
//! Its memory is taken when the queue is made. An entry is followed by room for its segments and its inline data.

use belay_ibv::{Sge, SEND_INLINE};
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::mem::size_of;

/// One request.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) wr_id: u64,
    /// Of UD, the address handle, valid until the request is posted.
    pub(crate) remote: u64,
    pub(crate) compare: u64,
    pub(crate) swap: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    /// The remote key, or the number of the queue pair.
    pub(crate) key: u32,
    pub(crate) qkey: u32,
    pub(crate) sges: u32,
    /// Length of the data that follow the segments.
    pub(crate) inline: u32,
    /// Posted by this library: its completion is nobody's.
    pub(crate) marker: bool,
}

pub(crate) struct Log {
    memory: *mut u8,
    layout: Layout,
    stride: usize,
    mask: u64,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
}

impl Log {
    /// Room for at least so many requests, where there is so much memory.
    pub(crate) fn new(room: u32, max_sge: u32, max_inline: u32) -> Option<Self> {
        let slots = (room.max(1) as usize).next_power_of_two();
        let stride = (size_of::<Entry>() + max_sge as usize * size_of::<Sge>() + max_inline as usize).next_multiple_of(16);
        let layout = Layout::from_size_align(stride.checked_mul(slots)?, 16).ok()?;
        // SAFETY: not empty.
        let memory = unsafe { alloc_zeroed(layout) };
        (!memory.is_null()).then_some(Log {
            memory,
            layout,
            stride,
            mask: slots as u64 - 1,
            max_sge,
            max_inline,
        })
    }

    pub(crate) fn room(&self) -> u32 {
        self.mask as u32 + 1
    }

    #[inline]
    fn at(&self, index: u64) -> *mut u8 {
        // SAFETY: within the memory.
        unsafe { self.memory.add((index & self.mask) as usize * self.stride) }
    }

    #[inline]
    pub(crate) fn entry(&self, index: u64) -> &Entry {
        // SAFETY: every place holds an entry: zeroes are one.
        unsafe { &*self.at(index).cast() }
    }

    #[inline]
    pub(crate) fn entry_mut(&mut self, index: u64) -> &mut Entry {
        // SAFETY: as above.
        unsafe { &mut *self.at(index).cast() }
    }

    #[inline]
    pub(crate) fn sges_at(&self, index: u64) -> *mut Sge {
        // SAFETY: the segments follow the entry.
        unsafe { self.at(index).add(size_of::<Entry>()).cast() }
    }

    #[inline]
    pub(crate) fn inline_at(&self, index: u64) -> *mut u8 {
        // SAFETY: the data follow the segments.
        unsafe {
            self.at(index)
                .add(size_of::<Entry>() + self.max_sge as usize * size_of::<Sge>())
        }
    }

    /// Keeps the segments of a request, or the data themselves where they go inline. False when there are more than
    /// the queue takes: the provider says so too.
    ///
    /// # Safety
    /// `list` has `count` segments, where that is not 0; inline, their memory can be read.
    #[inline]
    pub(crate) unsafe fn keep(&mut self, index: u64, list: *const Sge, count: i32, flags: u32) -> bool {
        let count = count.max(0) as usize;
        let e = self.entry_mut(index);
        (e.sges, e.inline) = (0, 0);
        // Where there are no segments the list may be no pointer at all.
        if flags & SEND_INLINE != 0 {
            return self.keep_inline(index, list, count);
        }
        if count > self.max_sge as usize {
            return false;
        }
        let to = self.sges_at(index);
        // Nearly always one, for which a loop and a call are much.
        match count {
            0 => {}
            1 => *to = *list,
            _ => std::ptr::copy_nonoverlapping(list, to, count),
        }
        self.entry_mut(index).sges = count as u32;
        true
    }

    #[inline(never)]
    unsafe fn keep_inline(&mut self, index: u64, list: *const Sge, count: usize) -> bool {
        (0..count).all(|i| self.add_inline(index, (*list.add(i)).addr as *const u8, (*list.add(i)).length as usize))
    }

    /// Adds to the data of a request, as long as there is room.
    ///
    /// # Safety
    /// So many bytes can be read.
    pub(crate) unsafe fn add_inline(&mut self, index: u64, from: *const u8, bytes: usize) -> bool {
        let at = self.entry(index).inline as usize;
        if bytes > self.max_inline as usize - at {
            return false;
        }
        std::ptr::copy_nonoverlapping(from, self.inline_at(index).add(at), bytes);
        self.entry_mut(index).inline += bytes as u32;
        true
    }

    /// Takes an entry from a log with the same segments.
    pub(crate) fn copy(&mut self, index: u64, from: &Log) {
        // SAFETY: both strides are the same.
        unsafe { std::ptr::copy_nonoverlapping(from.at(index), self.at(index), self.stride) };
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // SAFETY: what `new` has taken.
        unsafe { dealloc(self.memory, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_memory_can_hold_is_not_made() {
        assert!(Log::new(u32::MAX, u32::MAX, u32::MAX).is_none());
        assert_eq!(Log::new(9, 2, 3).unwrap().room(), 16);
    }
}
