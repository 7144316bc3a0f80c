//! Which pages of a process's memory are still to be filled, and from where. Pure.

use belay_image::extents::{Extent, PAGE};
use std::collections::BTreeMap;

/// Pages that are stored and not there yet, by address; no two overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pending(BTreeMap<u64, Extent>);

impl Pending {
    pub(super) fn new(pages: impl IntoIterator<Item = Extent>) -> Self {
        Self(pages.into_iter().map(|e| (e.vaddr, e)).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What holds the page at `at`.
    pub(super) fn at(&self, at: u64) -> Option<Extent> {
        let (_, e) = self.0.range(..=at).next_back()?;
        (at < e.end()).then_some(*e)
    }

    /// The first pages from `at` on, or from the beginning where there are none.
    pub(super) fn from(&self, at: u64) -> Option<Extent> {
        let here = self.at(at).map(|e| e.part(at, e.end()));
        let next = || self.0.range(at..).next().map(|(_, e)| *e);
        here.or_else(next).or_else(|| self.0.values().next().copied())
    }

    /// Takes what is in `start..end` out.
    pub(super) fn take(&mut self, start: u64, end: u64) -> Vec<Extent> {
        let mut out = Vec::new();
        let first = self.at(start).map_or(start, |e| e.vaddr);
        let touched: Vec<u64> = self.0.range(first..end.max(first)).map(|(at, _)| *at).collect();
        for at in touched {
            let Some(e) = self.0.remove(&at) else { continue };
            for (from, to) in [(e.vaddr, start.min(e.end())), (end.max(e.vaddr), e.end())] {
                if from < to {
                    self.0.insert(from, e.part(from, to));
                }
            }
            out.push(e.part(start, end));
        }
        out
    }

    /// Adds those of `pages` in whose places there is nothing.
    pub(super) fn add(&mut self, pages: &[Extent]) {
        for e in pages {
            let mut at = e.vaddr;
            while at < e.end() {
                match self.at(at) {
                    Some(there) => at = there.end(),
                    None => {
                        let next = self.0.range(at..).next().map_or(e.end(), |(next, _)| (*next).min(e.end()));
                        self.0.insert(at, e.part(at, next));
                        at = next;
                    }
                }
            }
        }
    }

    pub(super) fn pages(&self) -> impl Iterator<Item = Extent> + '_ {
        self.0.values().copied()
    }
}

/// The same pages at another place.
pub(super) fn moved(pages: &[Extent], from: u64, to: u64) -> Vec<Extent> {
    let place = |e: &Extent| Extent {
        vaddr: to.wrapping_add(e.vaddr.wrapping_sub(from)),
        ..*e
    };
    pages.iter().map(place).collect()
}

/// `e`, or its first `bytes`.
pub(super) fn first(e: &Extent, bytes: u64) -> Extent {
    e.part(e.vaddr, e.vaddr.saturating_add(bytes.max(PAGE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(page: u64, pages: u64, first: u32) -> Extent {
        Extent {
            vaddr: page * PAGE,
            bytes: pages * PAGE,
            chunk: 1,
            page: first,
        }
    }

    /// What each page holds, by another way.
    fn model(p: &Pending) -> BTreeMap<u64, u32> {
        let page = |e: Extent| (0..e.pages()).map(move |i| (e.vaddr / PAGE + i, e.page + i as u32));
        p.pages().flat_map(page).collect()
    }

    #[test]
    fn pages_are_found_taken_moved_and_added_as_in_a_map_of_single_pages() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..500 {
            let mut pending = Pending::new([extent(0, 10, 0), extent(10, 5, 50), extent(20, 30, 100)]);
            let mut single = model(&pending);
            for _ in 0..20 {
                let (start, pages, to) = (random(60), random(12), random(60));
                let end = start + pages;
                let range = (start * PAGE, end * PAGE);
                let taken = pending.take(range.0, range.1);
                let gone: BTreeMap<u64, u32> = single.range(start..end).map(|(k, v)| (*k, *v)).collect();
                single.retain(|k, _| !(start..end).contains(k));
                assert_eq!(model(&Pending::new(taken.iter().copied())), gone);
                assert_eq!(model(&pending), single);
                pending.add(&moved(&taken, range.0, to * PAGE));
                for (k, v) in gone {
                    single.entry(k - start + to).or_insert(v);
                }
                assert_eq!(model(&pending), single);
                let at = random(80);
                let held = pending.at(at * PAGE).map(|e| e.page + (at - e.vaddr / PAGE) as u32);
                assert_eq!(held, single.get(&at).copied());
                let next = single.range(at..).chain(single.iter()).next().map(|(k, _)| *k);
                assert_eq!(pending.from(at * PAGE).map(|e| e.vaddr / PAGE), next);
            }
        }
    }
}
