//! The order in which the program says that it will read: a queue of hints. A hint is advice, so the program may read
//! something else; what is passed over several times is taken to be wrong.

use crate::Version;
use std::collections::{BTreeMap, VecDeque};

/// Bytes that hints may tell together. A size beyond is no size: who says -1 does not know it.
const MOST_TOLD: u64 = 1 << 60;
/// Reads that pass a hint over until it is dropped.
const PASSES: u8 = 3;
/// Hints that are done and first in the list are taken out together, when there are so many at least.
const BLOCK: usize = if cfg!(test) { 4 } else { 256 };

/// Sums over a list of numbers that change, in logarithmic time.
#[derive(Debug, Clone, Default)]
struct Sums {
    tree: Vec<u64>,
}

impl Sums {
    /// Of the numbers from `from` on.
    fn rest(&self, from: usize) -> Self {
        let mut rest = Self::default();
        let value = |at| self.before(at + 1) - self.before(at);
        (from..self.tree.len()).for_each(|at| rest.push(value(at)));
        rest
    }

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
    /// From position `base` on: none before that is left.
    entries: Vec<Entry>,
    base: usize,
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
        let end = self.end();
        self.of.entry(version).or_default().push_back(end);
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
        let live: Vec<usize> = self.from(from).map(|(at, ..)| at).collect();
        live.into_iter().map(|at| self.remove(at)).collect()
    }

    /// The version has been put with this size.
    pub fn put(&mut self, version: Version, size: u64) {
        for at in self.of.get(&version).into_iter().flatten().copied() {
            let at = at - self.base;
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

    fn remove(&mut self, position: usize) -> Version {
        let at = position - self.base;
        let entry = &mut self.entries[at];
        entry.gone = true;
        let Entry { version, size, put, .. } = *entry;
        self.reads.change(at, 1, 0);
        self.bytes.change(at, size.unwrap_or(0), 0);
        self.unput.change(at, u64::from(!put), 0);
        self.unknown.change(at, u64::from(size.is_none()), 0);
        self.told -= size.filter(|_| !put).unwrap_or(0);
        if let Some(positions) = self.of.get_mut(&version) {
            positions.retain(|p| *p != position);
            if positions.is_empty() {
                self.of.remove(&version);
            }
        }
        let rest = &self.entries[self.head - self.base..];
        self.head += rest.iter().take_while(|e| e.gone).count();
        self.shrink();
        version
    }

    /// Takes what is done out of the list, so seldom that this costs each hint little.
    fn shrink(&mut self) {
        let done = self.head - self.base;
        if done < BLOCK || done < self.entries.len() / 2 {
            return;
        }
        self.entries = self.entries.split_off(done);
        for sums in [&mut self.reads, &mut self.bytes, &mut self.unput, &mut self.unknown] {
            *sums = sums.rest(done);
        }
        self.base = self.head;
    }

    /// The program reads `version`: the hint for that is done, and those that have been passed over too often are
    /// dropped. Returns the versions of the latter.
    pub fn got(&mut self, version: Version) -> Vec<Version> {
        let at = self.next(version);
        let before = at.unwrap_or(self.end().min(self.head + 1));
        let mut done = Vec::new();
        for i in self.head..before {
            let entry = &mut self.entries[i - self.base];
            entry.passed += u8::from(!entry.gone);
            if !entry.gone && entry.passed >= PASSES {
                done.push(i);
            }
        }
        let dropped = done.into_iter().map(|i| self.remove(i)).collect();
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
        let at = at.saturating_sub(self.base);
        Before {
            reads: self.reads.before(at),
            bytes: self.bytes.before(at),
            unput: self.unput.before(at),
            unknown: self.unknown.before(at),
        }
    }

    /// All hints that are left.
    pub fn left(&self) -> Before {
        self.before(self.end())
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
        self.base + self.entries.len()
    }

    /// Hints from position `from` on: where, which version, and its size if it is known.
    pub fn from(&self, from: usize) -> impl Iterator<Item = (usize, Version, Option<u64>)> + '_ {
        let from = from.max(self.head).min(self.end());
        let live = self.entries[from - self.base..].iter().enumerate().filter(|(_, e)| !e.gone);
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

    #[test]
    fn hints_that_are_done_take_no_memory() {
        let mut order = Order::default();
        for v in 0..10_000 {
            order.push(Version(v), Some(10), true);
            order.got(Version(v));
        }
        assert!(order.entries.len() < 1000 && order.entries.capacity() < 2000);
        assert_eq!((order.head(), order.end()), (10_000, 10_000));
    }

    proptest! {
        /// Positions and sums count those too that have been forgotten.
        #[test]
        fn it_is_a_list(steps in prop::collection::vec((0u8..5, 0u64..4, 1u64..100), 0..200)) {
            let (mut order, mut list) = (Order::default(), Vec::<Option<(Version, u64)>>::new());
            for (step, v, size) in steps {
                let version = Version(v);
                match step {
                    0 | 1 => {
                        order.push(version, Some(size), true);
                        list.push(Some((version, size)));
                    }
                    2 => {
                        order.forget(version);
                        list.iter_mut().filter(|e| e.is_some_and(|e| e.0 == version)).for_each(|e| *e = None);
                    }
                    3 => {
                        // What was to come first.
                        if let Some((first, _)) = list.iter_mut().find_map(Option::take) {
                            order.got(first);
                        }
                    }
                    _ => {
                        let from = list.len().saturating_sub(size as usize % 8);
                        let cut: Vec<Version> = list[from..].iter_mut().filter_map(|e| Some(e.take()?.0)).collect();
                        prop_assert_eq!(order.cut(from), cut);
                    }
                }
                let left = || list.iter().enumerate().filter_map(|(at, e)| Some((at, (*e)?)));
                prop_assert!(order.from(0).eq(left().map(|(at, (v, s))| (at, v, Some(s)))));
                prop_assert_eq!(order.end(), list.len());
                for at in 0..=list.len() {
                    let before = order.before(at);
                    let sizes: Vec<u64> = left().filter(|(n, _)| *n < at).map(|(_, (_, s))| s).collect();
                    prop_assert_eq!((before.reads, before.bytes), (sizes.len() as u64, sizes.iter().sum()));
                }
                for v in 0..4 {
                    prop_assert_eq!(order.next(Version(v)), left().find(|(_, (of, _))| of.0 == v).map(|(at, _)| at));
                }
            }
        }

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
