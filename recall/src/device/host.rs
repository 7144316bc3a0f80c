//! Memory of the host: the tier above the files, and a device where there is none.

use super::{Device, Lane};
use crate::span::copy;
use belay_kernel::pages::Pages;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Private memory of this process; pages are taken when they are used for the first time.
///
/// The planner sees to it that no two copies want the same bytes at once, unless both only read. That is looked at
/// before each copy, and a copy that wants what another has fails.
pub struct Host {
    memory: Pages,
    lent: Mutex<Lent>,
}

/// What the copies that are under way have: few.
#[derive(Default)]
struct Lent {
    loans: Vec<(u64, Loan)>,
    last: u64,
}

/// The ranges of one copy, in their order.
struct Loan {
    writes: bool,
    ranges: Vec<Range<u64>>,
}

impl Loan {
    /// Both have a byte that one of them writes.
    fn is_at_odds(&self, other: &Loan) -> bool {
        if !self.writes && !other.writes {
            return false;
        }
        let (mut a, mut b) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            if x.start < y.end && y.start < x.end {
                return true;
            }
            if x.end <= y.start {
                a.next();
            } else {
                b.next();
            }
        }
        false
    }
}

/// Gives a loan back, however the copy ends.
struct Back<'a>(&'a Host, u64);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        self.0.lent().loans.retain(|(n, _)| *n != self.1);
    }
}

impl Host {
    /// Reserves so many bytes, at least one.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes.max(1)).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let memory = Pages::unreserved(len)?;
        memory.huge(true);
        Ok(Self {
            memory,
            lent: Mutex::default(),
        })
    }

    fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ranges are inside, and no other copy has any of their bytes until this is dropped, unless both only read.
    fn lend(&self, ranges: &[Range<u64>], writes: bool) -> io::Result<Back<'_>> {
        let mut ranges: Vec<Range<u64>> = ranges.iter().filter(|r| !r.is_empty()).cloned().collect();
        ranges.sort_unstable_by_key(|r| r.start);
        let is_in = ranges.iter().all(|r| r.end <= self.memory.len() as u64);
        // To read from one place twice would be harmless, and means that something is wrong.
        if !is_in || ranges.windows(2).any(|w| w[1].start < w[0].end) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (loan, mut lent) = (Loan { writes, ranges }, self.lent());
        if lent.loans.iter().any(|(_, other)| loan.is_at_odds(other)) {
            return Err(io::Error::other("another copy is at the same memory"));
        }
        lent.last += 1;
        let n = lent.last;
        lent.loans.push((n, loan));
        Ok(Back(self, n))
    }

    /// Lends the memory of some ranges, to be read.
    pub(crate) fn read<R>(&self, ranges: &[Range<u64>], copy: impl FnOnce(&[&[u8]]) -> R) -> io::Result<R> {
        let _back = self.lend(ranges, false)?;
        let span = |r: &Range<u64>| match r.is_empty() {
            true => &[][..],
            // SAFETY: the range is inside the mapping, which lives as long as `self`; nobody writes there before the loan
            // is given back, and `copy` cannot keep it.
            false => unsafe {
                std::slice::from_raw_parts(self.memory.base().as_ptr().add(r.start as usize), (r.end - r.start) as usize)
            },
        };
        Ok(copy(&ranges.iter().map(span).collect::<Vec<_>>()))
    }

    /// Lends the memory of some ranges, to be written.
    pub(crate) fn write<R>(&self, ranges: &[Range<u64>], copy: impl FnOnce(&mut [&mut [u8]]) -> R) -> io::Result<R> {
        let _back = self.lend(ranges, true)?;
        let span = |r: &Range<u64>| match r.is_empty() {
            true => &mut [][..],
            // SAFETY: as above; nobody else is there at all, and no two of the ranges have a byte in common.
            false => unsafe {
                std::slice::from_raw_parts_mut(self.memory.base().as_ptr().add(r.start as usize), (r.end - r.start) as usize)
            },
        };
        Ok(copy(&mut ranges.iter().map(span).collect::<Vec<_>>()))
    }
}

impl Device for Host {
    fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    fn store(&self, _: Lane, from: &[&[u8]], to: &[Range<u64>]) -> io::Result<()> {
        self.write(to, |to| copy(from, to))
    }

    fn load(&self, _: Lane, from: &[Range<u64>], to: &mut [&mut [u8]]) -> io::Result<()> {
        self.read(from, |from| copy(from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_lent_to_one_who_writes_or_to_many_who_read() {
        let host = Host::new(1 << 20).unwrap();
        let read = |range: Range<u64>| host.read(std::slice::from_ref(&range), |_| ());
        let write = |ranges: &[Range<u64>]| host.write(ranges, |_| ());
        let write_one = |range: Range<u64>| write(std::slice::from_ref(&range));
        host.write(&[0..10, 30..40], |to| {
            to[1].fill(7);
            assert!(read(10..30).is_ok() && read(5..6).is_err() && read(39..50).is_err());
            assert!(write(&[50..60, 10..30]).is_ok() && write(&[50..60, 9..11]).is_err());
        })
        .unwrap();
        host.read(&[20..40, 0..5, 6..6], |from| {
            assert_eq!((from[0][9], from[0][10], from[1].len(), from[2].len()), (0, 7, 5, 0));
            assert!(read(0..40).is_ok() && write_one(39..40).is_err() && write_one(5..20).is_ok());
        })
        .unwrap();
        assert!(write_one(0..1 << 20).is_ok() && write_one(0..(1 << 20) + 1).is_err() && write(&[0..2, 1..3]).is_err());
        assert!(write_one(Range { start: 9, end: 3 }).is_ok());
    }
}
