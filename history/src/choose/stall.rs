//! Our rule: the set with the least expected stall of the application.
//!
//! ```text
//! J = wait + refetch + λ · traffic
//! wait      the longest of the waits: they pass at the same time
//! refetch   seconds for which reads will be late, because a victim cannot be brought back in time
//! traffic   seconds of the upward link that bringing back takes; λ is how busy that link is, 0 to 1
//! ```
//! Paged room can be taken from anywhere ([`paged`]); contiguous room only from a window of neighbours ([`window`]).

use std::ops::RangeInclusive;

/// An instance that could make room.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Bytes.
    pub size: u64,
    /// Seconds until it may go.
    pub wait: f64,
    /// When it will be read; infinite if never, as far as is known.
    pub read: f64,
    /// Seconds to bring it back.
    pub fetch: f64,
    /// When the upward link is done with all that is planned before it.
    pub link: f64,
}

impl Candidate {
    /// Free already.
    pub fn gap(size: u64) -> Self {
        Self {
            size,
            wait: 0.0,
            read: f64::INFINITY,
            fetch: 0.0,
            link: 0.0,
        }
    }

    fn refetch(&self) -> f64 {
        if self.read == f64::INFINITY {
            return 0.0;
        }
        (self.fetch - (self.read - self.link)).max(0.0)
    }

    fn traffic(&self) -> f64 {
        if self.read == f64::INFINITY {
            return 0.0;
        }
        self.fetch
    }
}

/// Expected stall of evicting a set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stall {
    wait: f64,
    refetch: f64,
    traffic: f64,
    /// The soonest read in the set.
    pub read: f64,
}

impl Stall {
    /// Of nothing.
    pub const NONE: Stall = Stall {
        wait: 0.0,
        refetch: 0.0,
        traffic: 0.0,
        read: f64::INFINITY,
    };

    fn and(self, c: &Candidate) -> Self {
        Self {
            wait: self.wait.max(c.wait),
            refetch: self.refetch + c.refetch(),
            traffic: self.traffic + c.traffic(),
            read: self.read.min(c.read),
        }
    }

    /// J, in seconds.
    pub fn seconds(self, lambda: f64) -> f64 {
        self.wait + self.refetch + lambda * self.traffic
    }

    fn is_better_than(self, other: Stall, lambda: f64) -> bool {
        let (a, b) = (self.seconds(lambda), other.seconds(lambda));
        a < b || a == b && self.read > other.read
    }
}

/// Takes `candidates`, which come with the farthest read first, until `need` bytes are free: what is taken and what
/// that costs. Nothing if they do not suffice.
pub fn paged<T>(need: u64, candidates: impl IntoIterator<Item = (T, Candidate)>) -> Option<(Vec<T>, Stall)> {
    let (mut taken, mut sum, mut stall) = (Vec::new(), 0, Stall::NONE);
    let mut candidates = candidates.into_iter();
    while sum < need {
        let (who, c) = candidates.next()?;
        taken.push(who);
        sum += c.size;
        stall = stall.and(&c);
    }
    Some((taken, stall))
}

/// The window of neighbours with the least J; of equals the one whose soonest read is latest, then the lowest. `None`
/// in `fragments` is one that cannot go at all.
pub fn window(need: u64, fragments: &[Option<Candidate>], lambda: f64) -> Option<(RangeInclusive<usize>, Stall)> {
    let mut best: Option<(RangeInclusive<usize>, Stall)> = None;
    let (mut left, mut size) = (0, 0);
    for (right, f) in fragments.iter().enumerate() {
        let Some(f) = f else {
            (left, size) = (right + 1, 0);
            continue;
        };
        size += f.size;
        let length = |at: usize| fragments[at].map_or(0, |f| f.size);
        while left < right && size - length(left) >= need {
            size -= length(left);
            left += 1;
        }
        if size < need {
            continue;
        }
        let of = fragments[left..=right].iter().flatten();
        let stall = of.fold(Stall::NONE, |s, f| s.and(f));
        if best.as_ref().is_none_or(|b| stall.is_better_than(b.1, lambda)) {
            best = Some((left..=right, stall));
        }
    }
    best
}

/// What to do when something needs room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Make room in this tier by the set that was looked at.
    Here,
    /// Use the tier below, or the application's memory.
    Past,
    /// Wait for the next flush.
    Wait,
}

/// The least of: the expected stall of making room `here`, of going `past` the tier, and of waiting, in seconds; `None`
/// where that is not possible.
pub fn verdict(here: Option<f64>, past: Option<f64>, wait: Option<f64>) -> Verdict {
    let at = |s: Option<f64>| s.unwrap_or(f64::INFINITY);
    if here.is_some() && at(here) <= at(past).min(at(wait)) {
        Verdict::Here
    } else if past.is_some() && at(past) <= at(wait) {
        Verdict::Past
    } else {
        Verdict::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn c(size: u64, wait: f64, read: f64) -> Candidate {
        let fetch = size as f64;
        Candidate {
            size,
            wait,
            read,
            fetch,
            link: 0.0,
        }
    }

    #[test]
    fn four_small_versions_needed_soon_do_not_beat_one_that_is_needed_late() {
        // The paper's sum of distances takes 0..=3.
        let all = [c(1, 0.0, 1.0), c(1, 0.0, 2.0), c(1, 0.0, 3.0), c(1, 0.0, 4.0), c(4, 0.0, 9.0)];
        let some = all.map(Some);
        assert_eq!(window(4, &some, 1.0).unwrap().0, 4..=4);
    }

    #[test]
    fn waits_that_pass_together_are_not_added() {
        let all = [c(4, 3.0, f64::INFINITY), c(2, 2.0, f64::INFINITY), c(2, 2.0, f64::INFINITY)].map(Some);
        let (w, stall) = window(4, &all, 0.0).unwrap();
        assert_eq!((w, stall.seconds(0.0)), (1..=2, 2.0));
    }

    #[test]
    fn what_can_be_brought_back_in_time_costs_nothing_while_the_link_is_idle() {
        let (_, stall) = paged(4, [(0, c(4, 0.0, 10.0))]).unwrap();
        assert_eq!(stall.seconds(0.0), 0.0);
        assert_eq!(stall.seconds(0.5), 2.0);
        let (_, late) = paged(4, [(0, c(4, 0.0, 1.0))]).unwrap();
        assert_eq!(late.seconds(0.0), 3.0);
    }

    #[test]
    fn going_past_a_tier_is_taken_where_it_is_faster_than_waiting() {
        assert_eq!(verdict(Some(0.0), Some(0.1), None), Verdict::Here);
        assert_eq!(verdict(None, Some(0.1), Some(0.2)), Verdict::Past);
        assert_eq!(verdict(None, Some(0.3), Some(0.2)), Verdict::Wait);
        assert_eq!(verdict(None, None, None), Verdict::Wait);
        assert_eq!(verdict(Some(0.5), Some(0.1), Some(0.2)), Verdict::Past);
    }

    proptest! {
        /// No window that is long enough costs less, and nothing that cannot go is in it.
        #[test]
        fn no_window_costs_less(
            all in prop::collection::vec(prop::option::weighted(0.8, (1u64..9, 0u32..3, 1u32..40)), 1..20),
            need in 1u64..40,
        ) {
            let all: Vec<Option<Candidate>> =
                all.into_iter().map(|o| o.map(|(s, w, r)| c(s, f64::from(w), f64::from(r)))).collect();
            let cost = |l: usize, r: usize| {
                let of: Option<Vec<Candidate>> = all[l..=r].iter().copied().collect();
                of.filter(|of| of.iter().map(|f| f.size).sum::<u64>() >= need)
                    .map(|of| of.iter().fold(Stall::NONE, |s, f| s.and(f)).seconds(0.5))
            };
            let windows = (0..all.len()).flat_map(|l| (l..all.len()).map(move |r| (l, r)));
            let best = windows.filter_map(|(l, r)| cost(l, r)).min_by(f64::total_cmp);
            let found = window(need, &all, 0.5).map(|w| w.1.seconds(0.5));
            prop_assert_eq!(found, best);
        }
    }
}
