//! Schedules of binomial checkpointing (revolve): steps are gone through backwards with room for a few states, from
//! which the others are computed again.

use super::node::Step;
use belay_history::life::After;
use belay_history::Version;
use std::collections::BTreeSet;

struct Revolve {
    interval: f64,
    size: u64,
    calls: Vec<Step>,
    /// Steps since the last call.
    work: u64,
    versions: u64,
}

/// Binomial coefficient, at most 2^40.
fn choose(n: u64, k: u64) -> u64 {
    (1..=k).fold(1, |c, i| (c * (n - k + i) / i).min(1 << 40))
}

impl Revolve {
    fn put(&mut self) -> Version {
        let version = Version(self.versions);
        self.versions += 1;
        let work = self.worked();
        self.calls.push(Step::Put(work, version, self.size));
        version
    }

    fn get(&mut self, version: Version) {
        let work = self.worked();
        self.calls.push(Step::Get(work, version, After::Keep));
    }

    fn worked(&mut self) -> f64 {
        std::mem::take(&mut self.work) as f64 * self.interval
    }

    /// Backwards through so many steps; the program is at the first of them, which `here` holds, and may hold `slots` more states.
    fn back(&mut self, here: Version, steps: u64, slots: u64) {
        if steps == 1 {
            self.work += 1;
        } else if slots == 0 {
            for step in (0..steps).rev() {
                self.work += step + 1;
                if step > 0 {
                    self.get(here);
                }
            }
        } else {
            let repeats = (1..).find(|t| choose(slots + 1 + t, *t) >= steps).unwrap_or(1);
            let ahead = choose(slots + repeats, repeats - 1).clamp(1, steps - 1);
            self.work += ahead;
            let there = self.put();
            self.back(there, steps - ahead, slots - 1);
            self.get(here);
            self.back(here, ahead, slots);
        }
    }
}

/// The calls of a program that goes backwards through `steps` with `slots` states; it tells at the beginning what it will read.
pub(super) fn revolve(steps: u64, slots: u64, size: u64, interval: f64) -> Vec<Step> {
    let mut r = Revolve {
        interval,
        size,
        calls: Vec::new(),
        work: 1,
        versions: 0,
    };
    let first = r.put();
    r.back(first, steps, slots - 1);
    // From the end: the last read of a version discards it, and one that is not read is not written; the work before it
    // comes before the next call.
    let (mut seen, mut calls) = (BTreeSet::new(), Vec::new());
    for call in r.calls.into_iter().rev() {
        match call {
            Step::Get(work, version, _) if seen.insert(version) => calls.push(Step::Get(work, version, After::Discard)),
            Step::Put(work, version, _) if !seen.contains(&version) => {
                if let Some(Step::Put(w, ..) | Step::Get(w, ..)) = calls.last_mut() {
                    *w += work;
                }
            }
            call => calls.push(call),
        }
    }
    let read = |call: &Step| match call {
        Step::Get(_, version, _) => Some((*version, None)),
        _ => None,
    };
    let hints = calls.iter().rev().filter_map(read).collect();
    calls.push(Step::Hint(hints));
    calls.reverse();
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_states_than_slots_are_held_and_each_is_discarded() {
        for slots in [1, 2, 3, 32] {
            let (mut held, mut most) = (0, 0);
            for call in revolve(100, slots, 1, 1.0) {
                match call {
                    Step::Put(..) => held += 1,
                    Step::Get(_, _, After::Discard) => held -= 1,
                    _ => {}
                }
                most = most.max(held);
            }
            assert_eq!(held, 0);
            assert!(most <= slots && (slots > 3 || most == slots), "{most} of {slots}");
        }
    }
}
