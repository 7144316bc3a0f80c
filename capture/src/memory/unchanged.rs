//! What the copy of a process need not have: large runs of pages that have not changed since the last checkpoint. A fork copies
//! the page tables of all that there is; so it takes as long as what has changed.
//!
//! ```text
//! mapping   │ p p C C C C C C C C C C C C w w C C C C C C C C C │      C: clean, w: written, p: kept for the copy
//! left out  │     [-------------------]       [---------------] │
//! ```
//! The copy has the beginning of each mapping, which says what the mapping is, and at least one page of its data, by which it
//! is known that the program keeps nothing of it from its children. Whoever keeps it is asked at the last moment, by the
//! injected code (`inject/src/snapshot.rs`).

use crate::inject::Area;
use crate::memory::mappings;
use crate::memory::tracking::Wish;
use crate::state::draft::Draft;
use belay_abi::inject::MAX_UNCHANGED;
use belay_kernel::guards::{self, Guards};
use belay_kernel::proc::Map;
use belay_kernel::spread;
use std::collections::HashSet;

const PAGE: u64 = 4096;
/// What one page table maps: a run that begins and ends there cuts no huge page.
const TABLE: u64 = 2 << 20;
/// To cut a shorter run out of its mapping, and to join it again, takes as long as to copy its page tables.
const WORTH: u64 = 2 * TABLE;

/// Has `wishes` find out what is clean in the stopped processes of `drafts`; what their copies need not have of it.
pub(crate) fn look(drafts: &[Draft], areas: &[Area], wishes: &mut [Wish]) -> Vec<Vec<[u64; 2]>> {
    let makers: HashSet<i32> = drafts.iter().map(|d| d.stat.ppid).collect();
    let most = most_mappings();
    let all = drafts.iter().zip(areas).zip(wishes).collect();
    spread::each(all, |((draft, area), wish)| {
        // The others are never the copy's, and stored at once.
        wish.look(draft.task, beside(draft, area).filter(|m| !mappings::not_for_child(m)));
        // The copies of processes that it has made are compared with its own (see `kin`). What is locked is unlocked in the
        // copy by pieces (see `mlock`). A guard that looks like a clean page must be seen in the copy.
        if makers.contains(&draft.pid) || draft.kib("VmLck") > 0 || guards::support() == Guards::Silent {
            return Vec::new();
        }
        // Each is two mappings more for a moment, of which some are left for the program.
        let room = most.saturating_sub(draft.maps.len() + 16) / 2;
        largest(runs(beside(draft, area), wish.clean()), room.min(MAX_UNCHANGED))
    })
}

/// The mappings of a process but for the injected area.
pub(crate) fn beside<'a>(draft: &'a Draft, area: &Area) -> impl Iterator<Item = &'a Map> + use<'a> {
    let (start, end) = area.range();
    draft.maps.iter().filter(move |m| m.end <= start || m.start >= end)
}

/// The runs of `clean` pages in anonymous mappings that are worth it; both are in ascending order.
fn runs<'a>(maps: impl Iterator<Item = &'a Map>, clean: &[(u64, u64)]) -> Vec<[u64; 2]> {
    let mut out = Vec::new();
    for map in maps.filter(|m| mappings::is_anonymous(m)) {
        let first = clean.partition_point(|r| r.1 <= map.start);
        let within = clean[first..].iter().take_while(|r| r.0 < map.end);
        for (at, (start, end)) in within.enumerate() {
            let kept = if at == 0 { PAGE } else { 0 };
            let run = [(start + kept).next_multiple_of(TABLE), end / TABLE * TABLE];
            if run[0] + WORTH <= run[1] {
                out.push(run);
            }
        }
    }
    out
}

/// How many mappings a process may have.
fn most_mappings() -> usize {
    const USUAL: usize = 65530;
    let told = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    told.and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL)
}

/// The `most` largest of `runs`, in ascending order.
fn largest(mut runs: Vec<[u64; 2]>, most: usize) -> Vec<[u64; 2]> {
    runs.sort_unstable_by_key(|[start, end]| std::cmp::Reverse(end - start));
    runs.truncate(most);
    runs.sort_unstable();
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    #[test]
    fn the_beginning_of_a_mapping_and_its_first_page_of_data_stay() {
        let maps = b"04000000-08000000 rw-p 00000000 00:00 0\n\
            08000000-0c000000 rw-p 00000000 08:01 7 /lib/x.so\n\
            10000000-12c00000 rw-p 00000000 00:00 0 [heap]\n";
        let maps = Map::parse(maps).unwrap();
        let clean = [
            (64 * M, 80 * M),
            (80 * M + PAGE, 84 * M + PAGE),
            (90 * M, 128 * M),
            (128 * M, 192 * M),
            (270 * M + PAGE, 275 * M),
        ];
        let expected = [[66 * M, 80 * M], [90 * M, 128 * M]];
        assert_eq!(runs(maps.iter(), &clean), expected);
        assert_eq!(runs(maps.iter(), &[]), <[[u64; 2]; 0]>::default());
    }

    #[test]
    fn of_many_runs_the_largest_are_left_out() {
        let all: Vec<[u64; 2]> = (1..=300).map(|i| [i * 1000 * M, i * 1000 * M + (4 + i) * M]).collect();
        let some = largest(all.clone(), MAX_UNCHANGED);
        assert_eq!(some, all[300 - MAX_UNCHANGED..]);
    }
}
