//! Where the elements of a dataset lie.

use crate::block::{Block, MAX_DIMS};
use std::convert::Infallible;
use thiserror::Error;

/// Highest address that a program can have.
const MOST: u64 = 1 << 47;

/// A dataset: elements of one size in up to five dimensions, of which the first changes fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Address of the first element.
    pub address: u64,
    /// Bytes of an element.
    pub elem: u64,
    /// Elements in each dimension; 1 in those that it does not have.
    pub extent: [u64; MAX_DIMS],
    /// Bytes from one element to the next in each dimension.
    pub stride: [u64; MAX_DIMS],
}

/// What is wrong with a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// It has no elements, or those have no bytes.
    #[error("has no bytes")]
    Empty,
    /// Elements overlap.
    #[error("has elements that overlap: a stride is less than what lies between")]
    Overlaps,
    /// It does not fit into memory.
    #[error("reaches beyond the memory of a program")]
    TooLarge,
}

impl Shape {
    /// Checks what a program has told.
    pub fn new(address: u64, elem: u64, extent: [u64; MAX_DIMS], stride: [u64; MAX_DIMS]) -> Result<Self, ShapeError> {
        if elem == 0 || extent.contains(&0) {
            return Err(ShapeError::Empty);
        }
        let mut inner = elem;
        for d in 0..MAX_DIMS {
            if extent[d] > 1 {
                if stride[d] < inner {
                    return Err(ShapeError::Overlaps);
                }
                let more = (extent[d] - 1).checked_mul(stride[d]).filter(|more| *more < MOST);
                inner += more.ok_or(ShapeError::TooLarge)?;
            }
        }
        if inner > MOST || address.checked_add(inner).is_none_or(|end| end > MOST) {
            return Err(ShapeError::TooLarge);
        }
        Ok(Self {
            address,
            elem,
            extent,
            stride,
        })
    }

    /// One with all elements side by side.
    pub fn dense(address: u64, elem: u64, extent: &[u64]) -> Result<Self, ShapeError> {
        let (mut sides, mut stride) = ([1; MAX_DIMS], [0; MAX_DIMS]);
        let mut inner = elem;
        for d in 0..MAX_DIMS {
            sides[d] = extent.get(d).copied().unwrap_or(1);
            stride[d] = inner;
            inner = inner.saturating_mul(sides[d]);
        }
        Self::new(address, elem, sides, stride)
    }

    /// All its elements.
    pub fn whole(&self) -> Block {
        let mut block = Block::new(&[], &[]);
        for d in 0..MAX_DIMS {
            block.hi[d] = i64::try_from(self.extent[d]).unwrap_or(i64::MAX);
        }
        block
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.whole().elements().saturating_mul(self.elem)
    }

    /// The addresses that it reaches over.
    pub fn range(&self) -> (u64, u64) {
        let last: u64 = (0..MAX_DIMS).map(|d| (self.extent[d] - 1) * self.stride[d]).sum();
        (self.address, self.address + last + self.elem)
    }

    /// How many address ranges the elements of `block` are.
    pub fn rows(&self, block: &Block) -> u64 {
        let Some(block) = block.common(&self.whole()) else { return 0 };
        let (_, d) = self.run(&block);
        let sides = (d..MAX_DIMS).map(|d| u64::try_from(block.hi[d] - block.lo[d]).unwrap_or(0));
        sides.fold(1, u64::saturating_mul)
    }

    /// Bytes that lie side by side in `block`, and how many dimensions they are.
    fn run(&self, block: &Block) -> (u64, usize) {
        let side = |d: usize| u64::try_from(block.hi[d] - block.lo[d]).unwrap_or(0);
        let (mut run, mut d) = (self.elem, 0);
        while d < MAX_DIMS && (side(d) == 1 || self.stride[d] == run) {
            run *= side(d);
            d += 1;
        }
        (run, d)
    }

    /// Appends to `out` the address ranges of the elements of `block`, in ascending order, neighbours joined.
    pub fn spans(&self, block: &Block, out: &mut Vec<(u64, u64)>) {
        self.visit(block, &mut |start, end| match out.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => out.push((start, end)),
        });
    }

    /// Calls `what` with each run of `block`, in ascending order.
    pub fn visit(&self, block: &Block, what: &mut impl FnMut(u64, u64)) {
        let Ok(()) = self.try_visit::<Infallible>(block, &mut |start, end| {
            what(start, end);
            Ok(())
        });
    }

    /// The same up to the first error.
    pub fn try_visit<E>(&self, block: &Block, what: &mut impl FnMut(u64, u64) -> Result<(), E>) -> Result<(), E> {
        let Some(block) = block.common(&self.whole()) else {
            return Ok(());
        };
        let first: u64 = (0..MAX_DIMS).map(|d| block.lo[d].unsigned_abs() * self.stride[d]).sum();
        let (run, d) = self.run(&block);
        self.runs((&block, d), self.address + first, run, MAX_DIMS, what)
    }

    /// The runs of the dimensions from `from` up to `below`.
    fn runs<E>(
        &self,
        of: (&Block, usize),
        at: u64,
        run: u64,
        below: usize,
        what: &mut impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let (block, from) = of;
        if below == from {
            return what(at, at + run);
        }
        let d = below - 1;
        for i in 0..u64::try_from(block.hi[d] - block.lo[d]).unwrap_or(0) {
            self.runs(of, at + i * self.stride[d], run, d, what)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(shape: &Shape, lo: &[i64], hi: &[i64]) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        shape.spans(&Block::new(lo, hi), &mut out);
        out
    }

    #[test]
    fn what_lies_side_by_side_is_one_span() {
        let shape = Shape::dense(1000, 8, &[4, 3, 2]).unwrap();
        assert_eq!((shape.bytes(), shape.range()), (192, (1000, 1192)));
        assert_eq!(spans(&shape, &[0, 0, 0], &[4, 3, 2]), [(1000, 1192)]);
        assert_eq!(spans(&shape, &[0, 1, 0], &[4, 3, 2]), [(1032, 1096), (1128, 1192)]);
        assert_eq!(spans(&shape, &[1, 0, 1], &[3, 2, 2]), [(1104, 1120), (1136, 1152)]);
        assert_eq!(spans(&shape, &[0, 2, 0], &[4, 3, 1]), [(1064, 1096)]);
        // What lies outside is not there.
        assert_eq!(spans(&shape, &[-5, -1, 1], &[1, 1, 9]), [(1096, 1104)]);
    }

    #[test]
    fn rows_are_counted_as_they_are() {
        let shape = Shape::new(0, 4, [3, 2, 5, 1, 1], [4, 12, 100, 0, 0]).unwrap();
        for (lo, hi) in [
            ([0, 0, 0], [3, 2, 5]),
            ([1, 0, 0], [3, 2, 5]),
            ([0, 1, 2], [3, 2, 3]),
            ([9, 0, 0], [10, 2, 5]),
        ] {
            let mut out = Vec::new();
            shape.spans(&Block::new(&lo, &hi), &mut out);
            assert_eq!(shape.rows(&Block::new(&lo, &hi)), out.len() as u64);
        }
        let every_second = Shape::new(0, 1, [1 << 40, 1, 1, 1, 1], [2, 0, 0, 0, 0]).unwrap();
        assert_eq!(every_second.rows(&every_second.whole()), 1 << 40);
    }

    #[test]
    fn rows_can_be_padded() {
        let shape = Shape::new(0, 4, [3, 2, 1, 1, 1], [4, 16, 0, 0, 0]).unwrap();
        assert_eq!((shape.bytes(), shape.range()), (24, (0, 28)));
        assert_eq!(spans(&shape, &[0, 0], &[3, 2]), [(0, 12), (16, 28)]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(Shape::dense(0, 0, &[3]), Err(ShapeError::Empty));
        assert_eq!(Shape::dense(0, 8, &[3, 0]), Err(ShapeError::Empty));
        assert_eq!(Shape::new(0, 8, [3, 2, 1, 1, 1], [8, 16, 0, 0, 0]), Err(ShapeError::Overlaps));
        assert_eq!(Shape::dense(MOST, 8, &[3]), Err(ShapeError::TooLarge));
        assert_eq!(Shape::dense(0, 8, &[1 << 40, 1 << 40]), Err(ShapeError::TooLarge));
        assert_eq!(Shape::dense(u64::MAX - 8, u64::MAX, &[1]), Err(ShapeError::TooLarge));
    }
}
