//! Boxes of elements, and sets of them.

/// Most dimensions of a dataset.
pub const MAX_DIMS: usize = 5;

/// Most boxes of a set: what needs more is not followed.
pub const MAX_BLOCKS: usize = 1024;

/// The elements from `lo` up to, but without, `hi` in each dimension. Dimensions that a dataset does not have are 0..1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// First element.
    pub lo: [i64; MAX_DIMS],
    /// One behind the last.
    pub hi: [i64; MAX_DIMS],
}

impl Block {
    /// A box; the dimensions that are not given are 0..1.
    pub fn new(lo: &[i64], hi: &[i64]) -> Self {
        let mut block = Self {
            lo: [0; MAX_DIMS],
            hi: [1; MAX_DIMS],
        };
        for d in 0..MAX_DIMS.min(lo.len()).min(hi.len()) {
            (block.lo[d], block.hi[d]) = (lo[d], hi[d]);
        }
        block
    }

    /// Whether there is no element in it.
    pub fn is_empty(&self) -> bool {
        (0..MAX_DIMS).any(|d| self.lo[d] >= self.hi[d])
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        let sides = (0..MAX_DIMS).map(|d| u64::try_from(self.hi[d].saturating_sub(self.lo[d])).unwrap_or(0));
        sides.fold(1, u64::saturating_mul)
    }

    /// The elements that are in both.
    pub fn common(&self, other: &Block) -> Option<Block> {
        let mut out = *self;
        for d in 0..MAX_DIMS {
            out.lo[d] = out.lo[d].max(other.lo[d]);
            out.hi[d] = out.hi[d].min(other.hi[d]);
        }
        (!out.is_empty()).then_some(out)
    }

    /// Appends to `out` what is left when `hole`, a part of it, is taken out.
    fn around(mut self, hole: &Block, out: &mut Vec<Block>) {
        // The slowest dimension first: rows stay whole.
        for d in (0..MAX_DIMS).rev() {
            if self.lo[d] < hole.lo[d] {
                let mut below = self;
                below.hi[d] = hole.lo[d];
                out.push(below);
            }
            if hole.hi[d] < self.hi[d] {
                let mut above = self;
                above.lo[d] = hole.hi[d];
                out.push(above);
            }
            (self.lo[d], self.hi[d]) = (hole.lo[d], hole.hi[d]);
        }
    }

    /// Joins two boxes that are one.
    fn joined(&self, other: &Block) -> Option<Block> {
        let mut differ = (0..MAX_DIMS).filter(|d| (self.lo[*d], self.hi[*d]) != (other.lo[*d], other.hi[*d]));
        let (Some(d), None) = (differ.next(), differ.next()) else {
            return None;
        };
        let mut out = *self;
        if self.hi[d] == other.lo[d] {
            out.hi[d] = other.hi[d];
        } else if other.hi[d] == self.lo[d] {
            out.lo[d] = other.lo[d];
        } else {
            return None;
        }
        Some(out)
    }
}

/// A set of elements: boxes that do not overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Region {
    blocks: Vec<Block>,
}

impl Region {
    /// The elements of one box.
    pub fn of(block: Block) -> Self {
        let mut region = Self::default();
        region.add(&block);
        region
    }

    /// Its boxes.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.blocks.iter().map(Block::elements).fold(0, u64::saturating_add)
    }

    /// Takes the elements of `block` out; those that were in it.
    pub fn take(&mut self, block: &Block) -> Region {
        let mut taken = Region::default();
        if !self.blocks.iter().any(|b| b.common(block).is_some()) {
            return taken;
        }
        for old in std::mem::take(&mut self.blocks) {
            match old.common(block) {
                Some(part) => {
                    old.around(&part, &mut self.blocks);
                    taken.blocks.push(part);
                }
                None => self.blocks.push(old),
            }
        }
        taken
    }

    /// Adds the elements of `block`.
    pub fn add(&mut self, block: &Block) {
        if block.is_empty() {
            return;
        }
        self.take(block);
        self.push(*block);
    }

    /// Adds those of a set that has none in common with this one.
    pub fn append(&mut self, other: Region) {
        other.blocks.into_iter().for_each(|b| self.push(b));
    }

    /// Whether it has become too fine to be followed.
    pub fn is_too_fine(&self) -> bool {
        self.blocks.len() > MAX_BLOCKS
    }

    /// Adds a box of which it has no element, as a part of one that it has where the two are one.
    fn push(&mut self, mut block: Block) {
        while let Some((at, joined)) = self
            .blocks
            .iter()
            .enumerate()
            .find_map(|(at, b)| Some((at, b.joined(&block)?)))
        {
            self.blocks.swap_remove(at);
            block = joined;
        }
        self.blocks.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const SIDE: i64 = 6;

    fn elements(region: &Region) -> BTreeSet<[i64; 3]> {
        let mut out = BTreeSet::new();
        for b in region.blocks() {
            for x in b.lo[0]..b.hi[0] {
                for y in b.lo[1]..b.hi[1] {
                    for z in b.lo[2]..b.hi[2] {
                        assert!(out.insert([x, y, z]), "an element lies in two boxes");
                    }
                }
            }
        }
        out
    }

    fn block() -> impl Strategy<Value = Block> {
        let side = || (0..SIDE, 0..=SIDE);
        (side(), side(), side()).prop_map(|(x, y, z)| Block::new(&[x.0, y.0, z.0], &[x.1, y.1, z.1]))
    }

    proptest! {
        #[test]
        fn a_set_is_what_was_added_less_what_was_taken(steps in prop::collection::vec((any::<bool>(), block()), 0..24)) {
            let (mut region, mut model) = (Region::default(), BTreeSet::new());
            for (add, block) in steps {
                let its = elements(&Region::of(block));
                if add {
                    region.add(&block);
                    model.extend(its);
                } else {
                    let taken = elements(&region.take(&block));
                    prop_assert_eq!(&taken, &model.intersection(&its).copied().collect::<BTreeSet<_>>());
                    model = model.difference(&its).copied().collect();
                }
                prop_assert_eq!(&elements(&region), &model);
                prop_assert_eq!(region.elements(), model.len() as u64);
            }
        }
    }

    #[test]
    fn a_box_that_was_taken_apart_is_one_again() {
        let whole = Block::new(&[0, 0], &[8, 8]);
        let mut region = Region::of(whole);
        let inside = region.take(&Block::new(&[2, 2], &[6, 6]));
        assert_eq!((inside.elements(), region.blocks().len()), (16, 4));
        for rim in [([0, 0], [8, 2]), ([0, 6], [8, 8]), ([0, 2], [2, 6]), ([6, 2], [8, 6])] {
            assert!(!region.take(&Block::new(&rim.0, &rim.1)).is_empty());
        }
        assert!(region.is_empty());
        let mut rebuilt = inside;
        for rim in [([0, 2], [2, 6]), ([6, 2], [8, 6]), ([0, 0], [8, 2]), ([0, 6], [8, 8])] {
            rebuilt.add(&Block::new(&rim.0, &rim.1));
        }
        assert_eq!(rebuilt.blocks(), [whole]);
    }
}
