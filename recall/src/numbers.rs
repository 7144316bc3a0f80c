//! Numbers of versions that were there once: kept as ranges, because programs count.

use std::collections::BTreeMap;

/// A set of numbers.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// First to last, of ranges that do not touch.
    ranges: BTreeMap<u64, u64>,
}

impl Numbers {
    pub(crate) fn contains(&self, n: u64) -> bool {
        self.around(n).is_some()
    }

    fn around(&self, n: u64) -> Option<(u64, u64)> {
        let (first, last) = self.ranges.range(..=n).next_back()?;
        (*last >= n).then_some((*first, *last))
    }

    pub(crate) fn insert(&mut self, n: u64) {
        if self.contains(n) {
            return;
        }
        let below = n.checked_sub(1).and_then(|m| self.around(m));
        let above = n.checked_add(1).and_then(|m| self.around(m));
        if let Some((first, _)) = above {
            self.ranges.remove(&first);
        }
        let last = above.map_or(n, |a| a.1);
        self.ranges.insert(below.map_or(n, |b| b.0), last);
    }

    pub(crate) fn remove(&mut self, n: u64) {
        let Some((first, last)) = self.around(n) else { return };
        self.ranges.remove(&first);
        if first < n {
            self.ranges.insert(first, n - 1);
        }
        if n < last {
            self.ranges.insert(n + 1, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), prop_oneof![0u64..30, u64::MAX - 5..=u64::MAX]), 0..200)) {
            let (mut numbers, mut set) = (Numbers::default(), BTreeSet::new());
            for (insert, n) in steps {
                if insert {
                    numbers.insert(n);
                    set.insert(n);
                } else {
                    numbers.remove(n);
                    set.remove(&n);
                }
                for n in (0..31).chain(u64::MAX - 6..=u64::MAX) {
                    prop_assert_eq!(numbers.contains(n), set.contains(&n));
                }
                let ranges: Vec<_> = numbers.ranges.iter().collect();
                prop_assert!(ranges.windows(2).all(|w| w[0].1 + 1 < *w[1].0));
            }
        }
    }
}
