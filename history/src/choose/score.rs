//! The paper's rule: of all windows of neighbouring fragments that are long enough, the one with the least sum of
//! waits, then with the largest sum of distances to the next reads.
//!
//! The published loop stops when its right end has reached the last fragment, so that the smaller windows at the tail
//! are never looked at; this one goes on. Otherwise its weaknesses are kept, because it is here to be compared with: it
//! adds waits that pass at the same time, and many small versions that are read soon can outweigh one that is read
//! late.

use std::ops::RangeInclusive;

/// A fragment as the rule sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fragment {
    /// Bytes.
    pub size: u64,
    /// Estimated seconds until it may be evicted: 0 for gaps and what may go at once.
    pub wait: f64,
    /// Entries of the hint queue before its own. Without a hint it is farther than any; a gap is the farthest.
    pub distance: f64,
}

/// The window to make room for `need` bytes in: minimal ones only, the first of equals; nothing if all together are too short.
pub fn window(fragments: &[Fragment], need: u64) -> Option<RangeInclusive<usize>> {
    let mut best: Option<(f64, f64, RangeInclusive<usize>)> = None;
    let (mut left, mut size) = (0, 0);
    // Exact sums, so that windows with equal waits are equal whatever the way to them was.
    let sums = |w: RangeInclusive<usize>| {
        let of = &fragments[w];
        (
            of.iter().map(|f| f.wait).sum::<f64>(),
            of.iter().map(|f| f.distance).sum::<f64>(),
        )
    };
    for (right, f) in fragments.iter().enumerate() {
        size += f.size;
        while left < right && size - fragments[left].size >= need {
            size -= fragments[left].size;
            left += 1;
        }
        // Without its last one it would do, or it does not do.
        if size < need || size - f.size >= need {
            continue;
        }
        let (wait, distance) = sums(left..=right);
        let is_better = |b: &(f64, f64, _)| wait < b.0 || wait == b.0 && distance > b.1;
        if best.as_ref().is_none_or(is_better) {
            best = Some((wait, distance, left..=right));
        }
    }
    best.map(|b| b.2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn f(size: u64, wait: f64, distance: f64) -> Fragment {
        Fragment { size, wait, distance }
    }

    #[test]
    fn waits_come_first_and_distances_decide_ties() {
        let all = [f(4, 0.0, 3.0), f(4, 0.0, 9.0), f(4, 2.0, 99.0)];
        assert_eq!(window(&all, 4), Some(1..=1));
        assert_eq!(window(&all, 5), Some(0..=1));
        assert_eq!(window(&all, 12), Some(0..=2));
        assert_eq!(window(&all, 13), None);
    }

    #[test]
    fn smaller_windows_at_the_tail_are_looked_at() {
        // The first window that ends at the last fragment is 1..=2; the published loop stops there.
        let all = [f(1, 5.0, 1.0), f(2, 5.0, 1.0), f(8, 0.0, 1.0)];
        assert_eq!(window(&all, 8), Some(2..=2));
    }

    proptest! {
        /// The same as by looking at every window.
        #[test]
        fn it_is_the_best_of_all_minimal_windows(
            all in prop::collection::vec((1u64..9, 0u32..3, 0u32..5), 1..20),
            need in 1u64..60,
        ) {
            let all: Vec<Fragment> = all.into_iter().map(|(s, w, d)| f(s, f64::from(w), f64::from(d))).collect();
            let size = |l: usize, r: usize| all[l..=r].iter().map(|f| f.size).sum::<u64>();
            let score = |l: usize, r: usize| {
                let of = &all[l..=r];
                (of.iter().map(|f| f.wait).sum::<f64>(), -of.iter().map(|f| f.distance).sum::<f64>())
            };
            let is_minimal = |l: usize, r: usize| {
                size(l, r) >= need && (l == r || size(l + 1, r) < need && size(l, r - 1) < need)
            };
            let windows = (0..all.len()).flat_map(|l| (l..all.len()).map(move |r| (l, r)));
            let best = windows.filter(|(l, r)| is_minimal(*l, *r)).map(|(l, r)| score(l, r));
            let best = best.min_by(|a, b| a.partial_cmp(b).unwrap());
            let found = window(&all, need).map(|w| score(*w.start(), *w.end()));
            prop_assert_eq!(found, best);
        }
    }
}
