//! Which chunks are given up, and what that does to the extents. Pure.
//!
//! No chunk is ever changed: what a new generation still needs of a chunk that is mostly dead is copied into its own
//! chunks. Older generations go on using the old chunk, which is removed with the last of them.

use belay_image::extents::{self, Extent, PAGE};
use std::collections::{BTreeMap, BTreeSet};

/// How much of a chunk the new generation needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// The chunk.
    pub id: u32,
    /// Pages needed.
    pub needed: u32,
    /// Pages in it.
    pub total: u32,
}

/// Chunks more than twice as many as the data would fill are too many, and this many more are always allowed.
const SPARE_CHUNKS: u64 = 16;

/// The chunks to give up: the smallest while there are too many for the amount of data, then those less than half
/// needed, the deadest first, while all together hold more than twice what is needed: a chunk that is left alone dies
/// further, and costs less later. The copies come to at most `budget` pages.
pub fn choose(usage: &[Usage], chunk_pages: u32, budget: u64) -> Vec<u32> {
    let mut by_need: Vec<&Usage> = usage.iter().collect();
    by_need.sort_unstable_by_key(|u| (u.needed, u.id));
    let data: u64 = usage.iter().map(|u| u64::from(u.needed)).sum();
    let mut stored: u64 = usage.iter().map(|u| u64::from(u.total)).sum();
    let limit = data.div_ceil(u64::from(chunk_pages.max(1))) * 2 + SPARE_CHUNKS;
    let too_many = usage.len() as u64 > limit;
    // Once there are too many, half of the allowance is made free at a time, or every checkpoint would copy a little.
    let surplus = if too_many {
        (usage.len() as u64 - limit / 2) as usize
    } else {
        0
    };
    let mut mostly_dead = by_need.split_off(surplus);
    mostly_dead.retain(|u| u64::from(u.needed) * 2 < u64::from(u.total));
    let share = |u: &Usage, of: &Usage| u64::from(u.needed) * u64::from(of.total);
    mostly_dead.sort_by(|a, b| share(a, b).cmp(&share(b, a)));
    let mut left = budget;
    let mut out = Vec::new();
    for (u, must) in by_need
        .iter()
        .map(|u| (u, true))
        .chain(mostly_dead.iter().map(|u| (u, false)))
    {
        if (must || stored > 2 * data) && u64::from(u.needed) <= left {
            left -= u64::from(u.needed);
            stored -= u64::from(u.total.saturating_sub(u.needed));
            out.push(u.id);
        }
    }
    out
}

/// Pages between two that are needed, from which on they are not read together.
const GAP: u32 = 8;

/// Cuts `pages` into parts that lie in `span` consecutive pages each, without large gaps, so that a part can be read at
/// once, with what lies between.
pub fn windows(pages: &BTreeSet<u32>, span: u32) -> impl Iterator<Item = Vec<u32>> + '_ {
    let mut rest = pages.iter().copied().peekable();
    std::iter::from_fn(move || {
        let first = rest.next()?;
        let mut part = vec![first];
        let mut last = first;
        while let Some(page) = rest.next_if(|page| page - first < span && page - last <= GAP) {
            part.push(page);
            last = page;
        }
        Some(part)
    })
}

/// Rewrites `table` so that pages in `moved`, (chunk, page) to (chunk, page), are found at their new places.
pub fn relocate(table: &mut Vec<Extent>, moved: &BTreeMap<(u32, u32), (u32, u32)>) {
    let touched = |e: &Extent| {
        let last = e.page + (e.pages() - 1) as u32;
        moved.range((e.chunk, e.page)..=(e.chunk, last)).next().is_some()
    };
    if !table.iter().any(touched) {
        return;
    }
    let mut out = Vec::with_capacity(table.len());
    for e in table.iter() {
        if !touched(e) {
            out.push(*e);
            continue;
        }
        for i in 0..e.pages() {
            let from = (e.chunk, e.page + i as u32);
            let (chunk, page) = moved.get(&from).copied().unwrap_or(from);
            out.push(Extent {
                vaddr: e.vaddr + i * PAGE,
                bytes: PAGE,
                chunk,
                page,
            });
        }
    }
    extents::normalise(&mut out);
    *table = out;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn usage(id: u32, needed: u32, total: u32) -> Usage {
        Usage { id, needed, total }
    }

    #[test]
    fn the_deadest_chunks_go_within_the_budget_while_there_is_too_much() {
        // 400 pages, 150 of them needed: without the third and the first there are 241.
        let mut all = vec![usage(1, 40, 100), usage(2, 60, 100), usage(3, 1, 100), usage(4, 49, 100)];
        assert_eq!(choose(&all, 100, 1000), [3, 1]);
        assert_eq!(choose(&all, 100, 40), [3]);
        assert_eq!(choose(&all, 100, 0), [] as [u32; 0]);
        // Small, but not as dead.
        all.push(usage(5, 3, 8));
        assert_eq!(choose(&all, 100, 1000), [3, 5]);
        let half = [usage(1, 49, 100), usage(2, 51, 100)];
        assert_eq!(choose(&half, 100, 1000), [] as [u32; 0]);
    }

    #[test]
    fn many_small_chunks_are_gathered() {
        let all: Vec<Usage> = (1..=18).map(|id| usage(id, 2, 2)).collect();
        assert_eq!(choose(&all, 1000, 1000), [] as [u32; 0]);
        let all: Vec<Usage> = (1..=19).map(|id| usage(id, 2, 2)).collect();
        assert_eq!(choose(&all, 1000, 1000).len(), 10);
    }

    #[test]
    fn windows_hold_all_pages_and_span_no_more_than_they_may() {
        let pages = BTreeSet::from([0, 1, 9, 10, 11, 30, u32::MAX]);
        let parts: Vec<Vec<u32>> = windows(&pages, 10).collect();
        assert_eq!(parts, [vec![0, 1, 9], vec![10, 11], vec![30], vec![u32::MAX]]);
        let parts: Vec<Vec<u32>> = windows(&BTreeSet::from([0, GAP, 2 * GAP + 1]), 1000).collect();
        assert_eq!(parts, [vec![0, GAP], vec![2 * GAP + 1]], "gaps are not read");
        assert_eq!(windows(&BTreeSet::new(), 10).count(), 0);
    }

    proptest! {
        #[test]
        fn relocation_moves_exactly_what_it_should(
            starts in prop::collection::btree_set(0u64..60, 1..10),
            moved in prop::collection::btree_map((1u32..3, 0u32..40), (7u32..9, 0u32..1000), 0..20),
        ) {
            let starts: Vec<u64> = starts.into_iter().collect();
            let mut table: Vec<Extent> = starts.windows(2).enumerate().map(|(i, w)| Extent {
                vaddr: w[0] * PAGE, bytes: (w[1] - w[0]) * PAGE, chunk: 1 + (i as u32) % 2, page: (w[0] % 7) as u32,
            }).collect();
            let pages = |t: &[Extent]| -> Vec<(u64, u32, u32)> {
                t.iter().flat_map(|e| (0..e.pages()).map(move |i| (e.vaddr + i * PAGE, e.chunk, e.page + i as u32))).collect()
            };
            let expected: Vec<_> = pages(&table).into_iter().map(|(v, c, p)| {
                let (c, p) = moved.get(&(c, p)).copied().unwrap_or((c, p));
                (v, c, p)
            }).collect();
            relocate(&mut table, &moved);
            prop_assert_eq!(pages(&table), expected);
        }
    }
}
