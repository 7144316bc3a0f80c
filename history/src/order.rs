//! The order in which the program says that it will read: a queue of hints. A hint is advice, so the program may read
//! something else; what is passed over several times is taken to be wrong.

use crate::Version;
use std::collections::{BTreeMap, VecDeque};

/// Bytes that hints may tell together. A size beyond is no size: who says -1 does not know it.
const MOST_TOLD: u64 = 1 << 60;
/// Reads that pass a hint over until it is dropped.
const PASSES: u8 = 3;

/// Sums over a list of numbers that change, in logarithmic time.
#[derive(Debug, Clone, Default)]
struct Sums {
    tree: Vec<u64>,
}

impl Sums {
    fn push(&mut self, value: u64) {
        let i = self.tree.len() + 1;
        let (mut sum, mut j) = (value, i - 1);
        while j > i - (i & i.wrapping_neg()) {
            sum += self.tree[j - 1];
            j -= j & j.wrapping_neg();
        }
        self.tree.push(sum);
    }

    fn change(&mut self, at: usize, old: u64, new: u64) {
        let mut i = at + 1;
        while i <= self.tree.len() {
            self.tree[i - 1] = self.tree[i - 1] - old + new;
            i += i & i.wrapping_neg();
        }
    }

    /// Of all before `at`.
    fn before(&self, at: usize) -> u64 {
        let (mut i, mut sum) = (at.min(self.tree.len()), 0);
        while i > 0 {
            sum += self.tree[i - 1];
            i -= i & i.wrapping_neg();
        }
        sum
    }
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    version: Version,
    /// Known once it has been put, or told with the hint.
    size: Option<u64>,
    put: bool,
    passed: u8,
    gone: bool,
}

/// What is expected to be read before something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Before {
    /// Reads.
    pub reads: u64,
    /// Bytes of those whose size is known.
    pub bytes: u64,
    /// Those that have not been put,
    pub unput: u64,
    /// and of these the ones whose size is not known.
    pub unknown: u64,
}

/// The queue of hints. Positions count all hints that there ever were.
#[derive(Debug, Clone, Default)]
pub struct Order {
    entries: Vec<Entry>,
    head: usize,
    of: BTreeMap<Version, VecDeque<usize>>,
    reads: Sums,
    bytes: Sums,
    unput: Sums,
    unknown: Sums,
    /// Bytes of those that have not been put, where they are known.
    told: u64,
}

impl Order {
    /// Appends a hint; with the size if the version has been put, or if the program knows it.
    pub fn push(&mut self, version: Version, size: Option<u64>, put: bool) {
        let may_be = |size: &u64| put || self.told.checked_add(*size).is_some_and(|told| told <= MOST_TOLD);
        let size = size.filter(may_be);
        self.of.entry(version).or_default().push_back(self.entries.len());
        self.entries.push(Entry {
            version,
            size,
            put,
            passed: 0,
            gone: false,
        });
        self.reads.push(1);
        self.bytes.push(size.unwrap_or(0));
        self.unput.push(u64::from(!put));
        self.unknown.push(u64::from(size.is_none()));
        self.told += size.filter(|_| !put).unwrap_or(0);
    }

    /// Forgets the hints from position `from` on: the versions that were there.
    pub fn cut(&mut self, from: usize) -> Vec<Version> {
        let live: Vec<usize> = (from.max(self.head)..self.entries.len())
            .filter(|at| !self.entries[*at].gone)
            .collect();
        live.into_iter().map(|at| self.remove(at)).collect()
    }

    /// The version has been put with this size.
    pub fn put(&mut self, version: Version, size: u64) {
        for at in self.of.get(&version).into_iter().flatten().copied() {
            let entry = &mut self.entries[at];
            if entry.put {
                continue;
            }
            entry.put = true;
            let told = entry.size.replace(size);
            self.unput.change(at, 1, 0);
            self.unknown.change(at, u64::from(told.is_none()), 0);
            self.bytes.change(at, told.unwrap_or(0), size);
            self.told -= told.unwrap_or(0);
        }
    }

    fn remove(&mut self, at: usize) -> Version {
        let entry = &mut self.entries[at];
        entry.gone = true;
        let Entry { version, size, put, .. } = *entry;
        self.reads.change(at, 1, 0);
        self.bytes.change(at, size.unwrap_or(0), 0);
        self.unput.change(at, u64::from(!put), 0);
        self.unknown.change(at, u64::from(size.is_none()), 0);
        self.told -= size.filter(|_| !put).unwrap_or(0);
        if let Some(positions) = self.of.get_mut(&version) {
            positions.retain(|p| *p != at);
            if positions.is_empty() {
                self.of.remove(&version);
            }
        }
        while self.entries.get(self.head).is_some_and(|e| e.gone) {
            self.head += 1;
        }
        version
    }

    /// The program reads `version`: the hint for that is done, and those that have been passed over too often are
    /// dropped. Returns the versions of the latter.
    pub fn got(&mut self, version: Version) -> Vec<Version> {
        let at = self.next(version);
        let before = at.unwrap_or(self.entries.len().min(self.head + 1));
        let mut dropped = Vec::new();
        for i in self.head..before {
            let entry = &mut self.entries[i];
            entry.passed += u8::from(!entry.gone);
            if !entry.gone && entry.passed >= PASSES {
                dropped.push(self.remove(i));
            }
        }
        if let Some(at) = at {
            self.remove(at);
        }
        dropped
    }

    /// The version is dropped: nobody will read it.
    pub fn forget(&mut self, version: Version) {
        for at in self.of.get(&version).cloned().into_iter().flatten() {
            self.remove(at);
        }
    }

    /// Where its next read stands.
    pub fn next(&self, version: Version) -> Option<usize> {
        self.of.get(&version)?.front().copied()
    }

    /// What is expected before position `at`.
    pub fn before(&self, at: usize) -> Before {
        Before {
            reads: self.reads.before(at),
            bytes: self.bytes.before(at),
            unput: self.unput.before(at),
            unknown: self.unknown.before(at),
        }
    }

    /// All hints that are left.
    pub fn left(&self) -> Before {
        self.before(self.entries.len())
    }

    /// Bytes of versions that have not been put, where the program has told them.
    pub fn told(&self) -> u64 {
        self.told
    }

    /// The first position that may still be expected.
    pub fn head(&self) -> usize {
        self.head
    }

    /// The position of the next hint that will be appended.
    pub fn end(&self) -> usize {
        self.entries.len()
    }

    /// Hints from position `from` on: where, which version, and its size if it is known.
    pub fn from(&self, from: usize) -> impl Iterator<Item = (usize, Version, Option<u64>)> + '_ {
        let from = from.max(self.head).min(self.entries.len());
        let live = self.entries[from..].iter().enumerate().filter(|(_, e)| !e.gone);
        live.map(move |(i, e)| (from + i, e.version, e.size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_hint_that_is_passed_over_three_times_is_dropped() {
        let mut order = Order::default();
        (0..6).for_each(|v| order.push(Version(v), Some(10), true));
        assert!(order.got(Version(1)).is_empty());
        assert!(order.got(Version(2)).is_empty());
        // Something that was never hinted passes over the first one only.
        assert_eq!(order.got(Version(77)), [Version(0)]);
        assert_eq!((order.head(), order.left().reads), (3, 3));
    }

    #[test]
    fn a_size_that_none_has_is_not_known() {
        let mut order = Order::default();
        for (v, size) in [u64::MAX, MOST_TOLD, u64::MAX, 1].into_iter().enumerate() {
            order.push(Version(v as u64), Some(size), false);
        }
        let expected = Before {
            reads: 4,
            bytes: MOST_TOLD,
            unput: 4,
            unknown: 3,
        };
        assert_eq!((order.left(), order.told()), (expected, MOST_TOLD));
        (0..4).for_each(|v| order.put(Version(v), 5));
        assert_eq!((order.left().bytes, order.told()), (20, 0));
    }

    #[test]
    fn hints_can_be_replaced() {
        let mut order = Order::default();
        (0..4).for_each(|v| order.push(Version(v), None, false));
        order.put(Version(1), 7);
        assert_eq!(
            order.left(),
            Before {
                reads: 4,
                bytes: 7,
                unput: 3,
                unknown: 3
            }
        );
        assert_eq!(order.cut(1), [Version(1), Version(2), Version(3)]);
        order.push(Version(3), None, false);
        let left: Vec<u64> = order.from(0).map(|e| e.1 .0).collect();
        assert_eq!(left, [0, 3]);
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_list(steps in prop::collection::vec((any::<bool>(), 0usize..50, 0u64..100), 1..100)) {
            let (mut sums, mut list) = (Sums::default(), Vec::new());
            for (push, at, value) in steps {
                if push || list.is_empty() {
                    sums.push(value);
                    list.push(value);
                } else {
                    let at = at % list.len();
                    sums.change(at, list[at], value);
                    list[at] = value;
                }
                for n in 0..=list.len() {
                    prop_assert_eq!(sums.before(n), list[..n].iter().sum::<u64>());
                }
            }
        }
    }
}
