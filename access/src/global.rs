//! Global arrays, which processes have in parts: boxes whose place is checked before anything is read or written by it.

use crate::block::{Block, MAX_DIMS};
use crate::shape::Shape;
use thiserror::Error;

/// Most bytes of a global array.
pub const MOST_BYTES: u64 = 1 << 60;

/// What is wrong with a part of a global array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PartError {
    /// It has no elements, or too many.
    #[error("is a part of a global array that has no elements, or more than {MOST_BYTES} bytes")]
    Global,
    /// It lies too far away.
    #[error("begins where no element of its global array can be")]
    Lower,
    /// What is its own is no part of it.
    #[error("has own elements that it does not have")]
    Own,
    /// What is its own lies outside.
    #[error("has own elements outside of the global array")]
    Outside,
}

/// Why boxes do not make up a global array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uncovered {
    /// The boxes of these numbers have elements in common.
    Overlap(usize, usize),
    /// So many elements are in none.
    Gap(u64),
}

/// Which part of a global array a dataset is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    shape: Shape,
    /// Elements of the global array in each dimension, 1 in those that it does not have.
    global: [u64; MAX_DIMS],
    /// Where in it the first element of the dataset lies.
    lower: [i64; MAX_DIMS],
    /// The elements of the dataset that are its own.
    own: Block,
}

/// Elements that lie side by side in the global array, and at equal distances in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address of the first.
    pub address: u64,
    /// Bytes from one to the next in memory.
    pub step: u64,
    /// How many.
    pub count: u64,
    /// Byte of the global array at which the first begins.
    pub offset: u64,
}

/// Bytes of a global array; none where it has no elements, or too many.
pub fn bytes(elem: u64, global: &[u64; MAX_DIMS]) -> Option<u64> {
    let all = global.iter().try_fold(elem, |all, n| all.checked_mul(*n))?;
    (1..=MOST_BYTES).contains(&all).then_some(all)
}

/// The same as a number for each dimension, from a list of 1 to 5.
pub fn sides<T: Copy>(list: &[T], none: T) -> Option<[T; MAX_DIMS]> {
    if list.is_empty() || list.len() > MAX_DIMS {
        return None;
    }
    let mut out = [none; MAX_DIMS];
    out[..list.len()].copy_from_slice(list);
    Some(out)
}

impl Part {
    /// Checks what a program, or an image, says. `own`: the first element of the dataset that is the process's own, and one
    /// behind the last.
    pub fn new(
        shape: Shape,
        global: [u64; MAX_DIMS],
        lower: [i64; MAX_DIMS],
        (lo, hi): ([u64; MAX_DIMS], [u64; MAX_DIMS]),
    ) -> Result<Self, PartError> {
        bytes(shape.elem, &global).ok_or(PartError::Global)?;
        let mut own = Block::new(&[], &[]);
        for d in 0..MAX_DIMS {
            // So no sum overflows: both are less than half of what a number holds.
            if lower[d].unsigned_abs() > MOST_BYTES {
                return Err(PartError::Lower);
            }
            if lo[d] > hi[d] || hi[d] > shape.extent[d] {
                return Err(PartError::Own);
            }
            let [lo, hi] = [lo[d], hi[d]].map(|n| i64::try_from(n).map_err(|_| PartError::Own));
            (own.lo[d], own.hi[d]) = (lo?, hi?);
        }
        let part = Self {
            shape,
            global,
            lower,
            own,
        };
        let is_outside = |block: Block| part.covered().and_then(|all| all.common(&block)) != Some(block);
        if part.own().is_some_and(is_outside) {
            return Err(PartError::Outside);
        }
        Ok(part)
    }

    /// Elements of the global array in each dimension.
    pub fn global(&self) -> [u64; MAX_DIMS] {
        self.global
    }

    /// The elements of the dataset that are its own.
    pub fn own(&self) -> Option<Block> {
        (!self.own.is_empty()).then_some(self.own)
    }

    /// Where in the global array those lie.
    pub fn own_in_global(&self) -> Option<Block> {
        self.own().map(|own| self.moved(&own, 1))
    }

    /// The elements of the dataset, ghosts too, that the global array has.
    pub fn covered(&self) -> Option<Block> {
        let mut all = Block::new(&[], &[]);
        for (hi, n) in all.hi.iter_mut().zip(&self.global) {
            *hi = i64::try_from(*n).unwrap_or(i64::MAX);
        }
        self.moved(&self.shape.whole(), 1)
            .common(&all)
            .map(|all| self.moved(&all, -1))
    }

    fn moved(&self, block: &Block, sign: i64) -> Block {
        let mut out = *block;
        for d in 0..MAX_DIMS {
            out.lo[d] += sign * self.lower[d];
            out.hi[d] += sign * self.lower[d];
        }
        out
    }

    /// Calls `what` with each run of `block`, which lies in [`Part::covered`], up to the first error.
    pub fn try_runs<E>(&self, block: &Block, what: &mut impl FnMut(Run) -> Result<(), E>) -> Result<(), E> {
        let Some(block) = self.covered().and_then(|all| all.common(block)) else {
            return Ok(());
        };
        let side = |d: usize| u64::try_from(block.hi[d] - block.lo[d]).unwrap_or(0);
        // Dimensions of which there is all, in memory and in the global array, side by side, are one.
        let (mut joined, mut count) = (1, side(0));
        while joined < MAX_DIMS {
            let d = joined - 1;
            let is_whole = side(d) == self.global[d] && side(d) == self.shape.extent[d];
            let is_dense = side(joined) == 1 || self.shape.stride[joined] == count * self.shape.elem;
            let is_row = self.shape.stride[0] == self.shape.elem || side(0) == 1;
            if !(is_whole && is_dense && is_row) {
                break;
            }
            count *= side(joined);
            joined += 1;
        }
        let step = if joined > 1 { self.shape.elem } else { self.shape.stride[0] };
        let mut at = block.lo;
        loop {
            let (mut address, mut place, mut inner) = (self.shape.address, 0, 1);
            for (d, at) in at.iter().enumerate() {
                address += at.unsigned_abs() * self.shape.stride[d];
                place += (at + self.lower[d]).unsigned_abs() * inner;
                inner *= self.global[d];
            }
            let offset = place * self.shape.elem;
            what(Run {
                address,
                step,
                count,
                offset,
            })?;
            let Some(d) = (joined..MAX_DIMS).find(|d| at[*d] + 1 < block.hi[*d]) else {
                return Ok(());
            };
            at[d] += 1;
            at[joined..d].copy_from_slice(&block.lo[joined..d]);
        }
    }
}

/// Whether boxes of a global array, of which none is empty or lies outside, are all of it, and each element in one only.
pub fn covers(global: &[u64; MAX_DIMS], boxes: &[Block]) -> Result<(), Uncovered> {
    const LAST: usize = MAX_DIMS - 1;
    // By the slowest dimension that there is: what processes divide first.
    let slow = (0..=LAST).rfind(|d| global[*d] > 1).unwrap_or(0);
    let mut order: Vec<usize> = (0..boxes.len()).collect();
    order.sort_by_key(|at| boxes[*at].lo[slow]);
    for (n, one) in order.iter().enumerate() {
        let near = order[n + 1..]
            .iter()
            .take_while(|other| boxes[**other].lo[slow] < boxes[*one].hi[slow]);
        for other in near {
            if boxes[*one].common(&boxes[*other]).is_some() {
                return Err(Uncovered::Overlap(*one.min(other), *one.max(other)));
            }
        }
    }
    let all: u64 = global.iter().product();
    let covered: u64 = boxes.iter().map(Block::elements).sum();
    match all.saturating_sub(covered) {
        0 => Ok(()),
        missing => Err(Uncovered::Gap(missing)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is said, each element that there is lies where it belongs, and nothing else is touched.
        #[test]
        fn runs_are_the_elements(
            global in [1u64..6, 1u64..6, 1u64..4],
            lower in [-3i64..6, -3i64..6, -2i64..3],
            extent in [1u64..6, 1u64..6, 1u64..4],
            pad in [0u64..2, 0u64..2],
        ) {
            let stride = [8 + 8 * pad[0], (8 + 8 * pad[0]) * (extent[0] + pad[1]), 0, 0, 0];
            let stride = [stride[0], stride[1], stride[1] * extent[1], 0, 0];
            let shape = Shape::new(4096, 8, five(&extent), stride).unwrap();
            let own = ([0; MAX_DIMS], [0; MAX_DIMS]);
            let part = Part::new(shape, five(&global), sides(&lower, 0).unwrap(), own).unwrap();
            let mut found = Vec::new();
            let block = part.covered().unwrap_or(Block::new(&[0], &[0]));
            let done: Result<(), ()> = part.try_runs(&block, &mut |run| {
                found.extend((0..run.count).map(|n| (run.offset + 8 * n, run.address + run.step * n)));
                Ok(())
            });
            done.unwrap();
            let mut expected = Vec::new();
            for z in 0..global[2] {
                for y in 0..global[1] {
                    for x in 0..global[0] {
                        let at = [x, y, z].map(u64::cast_signed);
                        let local: Vec<i64> = (0..3).map(|d| at[d] - lower[d]).collect();
                        if (0..3).all(|d| (0..extent[d].cast_signed()).contains(&local[d])) {
                            let place = (0..3).map(|d| local[d].unsigned_abs() * stride[d]).sum::<u64>();
                            expected.push((((z * global[1] + y) * global[0] + x) * 8, 4096 + place));
                        }
                    }
                }
            }
            prop_assert_eq!(found, expected);
        }

        /// Boxes cover an array if each element is in one of them.
        #[test]
        fn covers_is_as_counted(boxes in proptest::collection::vec(([0i64..3, 0i64..3], [1i64..4, 1i64..4]), 0..5)) {
            let global = five(&[3, 3]);
            let bounded = |(lo, size): ([i64; 2], [i64; 2])| Block::new(&lo, &[0, 1].map(|d| (lo[d] + size[d]).min(3)));
            let boxes: Vec<Block> = boxes.into_iter().map(bounded).collect();
            let count = |x, y| boxes.iter().filter(|b| b.common(&Block::new(&[x, y], &[x + 1, y + 1])).is_some()).count();
            let counts: Vec<usize> = (0..9).map(|n| count(n % 3, n / 3)).collect();
            let is_right = match covers(&global, &boxes) {
                Ok(()) => counts.iter().all(|n| *n == 1),
                Err(Uncovered::Gap(n)) => counts.iter().all(|n| *n <= 1) && counts.iter().filter(|n| **n == 0).count() as u64 == n,
                Err(Uncovered::Overlap(a, b)) => boxes[a].common(&boxes[b]).is_some(),
            };
            prop_assert!(is_right);
        }
    }

    const NONE: [i64; MAX_DIMS] = [0; MAX_DIMS];

    fn five(first: &[u64]) -> [u64; MAX_DIMS] {
        sides(first, 1).unwrap()
    }

    /// A part of 4 by 3 elements with a rim of ghosts, at this place in an array of 8 by 6.
    fn part(lower: [i64; 2]) -> Result<Part, PartError> {
        let shape = Shape::dense(1000, 8, &[6, 5]).unwrap();
        let own = (sides(&[1, 1], 0).unwrap(), five(&[5, 4]));
        Part::new(shape, five(&[8, 6]), sides(&lower, 0).unwrap(), own)
    }

    fn runs(part: &Part, block: &Block) -> Vec<(u64, u64, u64)> {
        let mut out = Vec::new();
        let done: Result<(), ()> = part.try_runs(block, &mut |run| {
            out.push((run.address, run.count, run.offset / 8));
            Ok(())
        });
        done.unwrap();
        out
    }

    #[test]
    fn rows_of_a_part_lie_where_they_belong() {
        let part = part([-1, 2]).unwrap();
        let own = part.own().unwrap();
        // Element (1, 1) is (0, 3) of the array.
        let row = |y: u64| (1000 + ((y + 1) * 6 + 1) * 8, 4, (y + 3) * 8);
        assert_eq!(runs(&part, &own), [row(0), row(1), row(2)]);
        // Ghosts too, but for those to the left of the array, and below: of five rows four are there.
        let covered = part.covered().unwrap();
        assert_eq!((covered.lo[..2].to_vec(), covered.hi[..2].to_vec()), (vec![1, 0], vec![6, 4]));
        let own = part.own_in_global().unwrap();
        assert_eq!((own.lo[..2].to_vec(), own.hi[..2].to_vec()), (vec![0, 3], vec![4, 6]));
    }

    #[test]
    fn whole_rows_are_one_run() {
        let shape = Shape::dense(0, 4, &[8, 5, 2]).unwrap();
        let own = (sides(&[0, 1, 0], 0).unwrap(), five(&[8, 4, 2]));
        let part = Part::new(shape, five(&[8, 9, 2]), sides(&[0, 3, 0], 0).unwrap(), own).unwrap();
        let mut out = Vec::new();
        let done: Result<(), ()> = part.try_runs(&part.own().unwrap(), &mut |run| {
            out.push((run.address, run.step, run.count, run.offset));
            Ok(())
        });
        done.unwrap();
        assert_eq!(out, [(32, 4, 24, 4 * 8 * 4), (4 * 8 * 6, 4, 24, 4 * 8 * 13)]);
        // Padded rows are not.
        let padded = Shape::new(0, 4, five(&[8, 3]), [4, 40, 0, 0, 0]).unwrap();
        let part = Part::new(padded, five(&[8, 3]), NONE, ([0; MAX_DIMS], five(&[8, 3]))).unwrap();
        assert_eq!(runs(&part, &part.own().unwrap()).len(), 3);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let shape = Shape::dense(0, 8, &[4]).unwrap();
        let of = |global: u64, lower, own: (u64, u64)| {
            let own = (sides(&[own.0], 0).unwrap(), five(&[own.1]));
            Part::new(shape, five(&[global]), sides(&[lower], 0).unwrap(), own).map(drop)
        };
        assert_eq!(of(0, 0, (0, 0)), Err(PartError::Global));
        assert_eq!(of(u64::MAX / 4, 0, (0, 4)), Err(PartError::Global));
        assert_eq!(of(8, i64::MIN, (0, 0)), Err(PartError::Lower));
        assert_eq!(of(8, 0, (3, 2)), Err(PartError::Own));
        assert_eq!(of(8, 0, (0, 5)), Err(PartError::Own));
        assert_eq!(of(8, 5, (0, 4)), Err(PartError::Outside));
        assert_eq!(of(8, -1, (0, 1)), Err(PartError::Outside));
        assert_eq!(of(8, 100, (0, 1)), Err(PartError::Outside));
        // Nothing of its own, and nothing in reach.
        assert_eq!([of(8, 100, (2, 2)), of(8, -1, (1, 4)), of(8, 5, (0, 3))], [Ok(()); 3]);
        assert_eq!(part([4, 0]).map(drop), Err(PartError::Outside));
        assert_eq!((bytes(8, &five(&[1 << 40, 1 << 40])), sides::<u64>(&[], 1)), (None, None));
    }

    #[test]
    fn all_is_covered_once() {
        let global = five(&[4, 6]);
        let block = |lo: [i64; 2], hi: [i64; 2]| Block::new(&lo, &hi);
        let (left, right) = (block([0, 0], [4, 2]), block([0, 2], [3, 6]));
        let rest = block([3, 2], [4, 6]);
        assert_eq!(covers(&global, &[right, left, rest]), Ok(()));
        assert_eq!(covers(&global, &[right, left]), Err(Uncovered::Gap(4)));
        let more = block([2, 5], [4, 6]);
        assert_eq!(covers(&global, &[right, left, more]), Err(Uncovered::Overlap(0, 2)));
        assert_eq!(covers(&five(&[1]), &[block([0, 0], [1, 1])]), Ok(()));
        assert_eq!(covers(&five(&[1]), &[]), Err(Uncovered::Gap(1)));
    }
}
