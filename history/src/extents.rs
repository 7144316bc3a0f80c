//! Room in a tier, in two layouts. Paged: extents of one size, of which a version takes any; contiguous: fragments in
//! address order, of which a version takes neighbours (the layout of the HPDC 2023 paper, for comparison).
//!
//! Invariant (I1): what is used and what is free make up the arena, and nothing is in two versions.

use crate::Version;

/// Extents of one size.
#[derive(Debug, Clone)]
pub struct Paged {
    /// Numbers of those that have been given back; the last is given away first.
    given: Vec<u32>,
    /// From this number on none has ever been taken.
    fresh: u32,
    count: u32,
}

impl Paged {
    /// An arena of `count` extents.
    pub fn new(count: u32) -> Self {
        Self {
            given: Vec::new(),
            fresh: 0,
            count,
        }
    }

    /// All extents.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Those that are free.
    pub fn free(&self) -> u32 {
        self.given.len() as u32 + (self.count - self.fresh)
    }

    /// `n` extents, or nothing if there are fewer.
    pub fn take(&mut self, n: u32) -> Option<Vec<u32>> {
        if n > self.free() {
            return None;
        }
        let again = self.given.len().min(n as usize);
        let mut taken = self.given.split_off(self.given.len() - again);
        taken.reverse();
        let fresh = self.fresh + (n - again as u32);
        taken.extend(self.fresh..fresh);
        self.fresh = fresh;
        Some(taken)
    }

    /// Gives extents back.
    pub fn give(&mut self, extents: Vec<u32>) {
        debug_assert!(extents.iter().all(|e| *e < self.fresh));
        self.given.extend(extents.into_iter().rev());
        debug_assert!(self.given.len() <= self.fresh as usize);
    }
}

/// A part of a contiguous arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// Its length in bytes.
    pub size: u64,
    /// Who has it; a gap if nobody.
    pub owner: Option<Version>,
}

/// One piece of memory, cut into fragments in address order.
#[derive(Debug, Clone)]
pub struct Contiguous {
    fragments: Vec<Fragment>,
}

impl Contiguous {
    /// An arena of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self {
            fragments: vec![Fragment { size, owner: None }],
        }
    }

    /// All fragments, in address order. No two gaps are neighbours.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// Frees what `owner` has, and merges the gap with gaps beside it.
    pub fn give(&mut self, owner: Version) {
        let Some(at) = self.fragments.iter().position(|f| f.owner == Some(owner)) else {
            return;
        };
        self.fragments[at].owner = None;
        self.merge(at);
    }

    /// Merges the gap at `at` with those beside it.
    fn merge(&mut self, at: usize) {
        let is_gap = |f: &Fragment| f.owner.is_none();
        if self.fragments.get(at + 1).is_some_and(is_gap) {
            self.fragments[at].size += self.fragments.remove(at + 1).size;
        }
        if at > 0 && is_gap(&self.fragments[at - 1]) {
            self.fragments[at - 1].size += self.fragments.remove(at).size;
        }
    }

    /// Puts `owner` at the beginning of the gap at `at`, if it is long enough; what is left of it stays a gap.
    pub fn place(&mut self, at: usize, owner: Version, size: u64) -> bool {
        let Some(gap) = self.fragments.get(at).filter(|f| f.owner.is_none() && f.size >= size) else {
            return false;
        };
        let left = gap.size - size;
        self.fragments[at] = Fragment {
            size,
            owner: Some(owner),
        };
        if left > 0 {
            self.fragments.insert(at + 1, Fragment { size: left, owner: None });
        }
        true
    }

    /// The first gap of at least `size` bytes.
    pub fn gap(&self, size: u64) -> Option<usize> {
        self.fragments.iter().position(|f| f.owner.is_none() && f.size >= size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn extents_that_were_never_taken_cost_no_memory() {
        let mut arena = Paged::new(u32::MAX);
        assert_eq!(arena.take(3), Some(vec![0, 1, 2]));
        arena.give(vec![0, 1]);
        assert_eq!(arena.take(3), Some(vec![0, 1, 3]));
        assert_eq!(arena.free(), u32::MAX - 4);
        assert!(arena.given.capacity() < 100);
    }

    proptest! {
        /// I1, paged.
        #[test]
        fn no_extent_is_in_two_versions(steps in prop::collection::vec((0u64..12, 0u32..40), 0..200)) {
            let mut arena = Paged::new(100);
            let mut held: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            for (who, n) in steps {
                if let Some(extents) = held.remove(&who) {
                    arena.give(extents);
                } else {
                    let before = arena.free();
                    match arena.take(n) {
                        Some(extents) => {
                            prop_assert_eq!(extents.len() as u32, n);
                            held.insert(who, extents);
                        }
                        None => prop_assert!(n > before),
                    }
                }
                let mut all: Vec<u32> = held.values().flatten().copied().collect();
                prop_assert_eq!(all.len() as u32 + arena.free(), arena.count());
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len() as u32 + arena.free(), arena.count());
            }
        }

        /// I1, contiguous: lengths add up, and gaps are merged.
        #[test]
        fn fragments_fill_the_arena(steps in prop::collection::vec((0u64..12, 1u64..400), 0..200)) {
            let mut arena = Contiguous::new(1000);
            let mut held: BTreeMap<u64, u64> = BTreeMap::new();
            for (who, size) in steps {
                if held.remove(&who).is_some() {
                    arena.give(Version(who));
                } else if let Some(at) = arena.gap(size) {
                    prop_assert!(arena.place(at, Version(who), size));
                    held.insert(who, size);
                }
                let f = arena.fragments();
                prop_assert_eq!(f.iter().map(|f| f.size).sum::<u64>(), 1000);
                prop_assert!(f.windows(2).all(|w| w[0].owner.is_some() || w[1].owner.is_some()));
                let there: BTreeMap<u64, u64> = f.iter().filter_map(|f| Some((f.owner?.0, f.size))).collect();
                prop_assert_eq!(&there, &held);
            }
        }
    }
}
