//! Address ranges: where the restorer can lie while one address space replaces another. Pure.

pub(crate) use belay_abi::TASK_SIZE;

/// The restorer is not placed below this.
const LOWEST: u64 = 0x1000_0000;

/// An address range, end excluded.
pub(crate) type Range = std::ops::Range<u64>;

/// Rounds up to whole pages.
pub(crate) fn pages_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(belay_abi::PAGE)
}

/// Finds `bytes` bytes that overlap none of `taken`, as high as possible below the main thread's stack area but never
/// next to a mapping, so that neither merges with the restorer's area.
pub(crate) fn find_gap(taken: &[Range], bytes: u64) -> Option<u64> {
    const MARGIN: u64 = 2 << 20; // also keeps the area out of the huge page of a neighbour
    let mut taken = taken.to_vec();
    taken.sort_by_key(|r| r.start);
    let need = pages_up(bytes) + 2 * MARGIN;
    let mut best = None;
    let mut free_from = LOWEST;
    for r in taken.iter().chain(std::iter::once(&(TASK_SIZE..TASK_SIZE))) {
        if r.start.min(TASK_SIZE) >= free_from.saturating_add(need) {
            best = Some(free_from + MARGIN);
        }
        free_from = free_from.max(r.end).next_multiple_of(belay_abi::PAGE);
    }
    best.map(|b: u64| b.next_multiple_of(belay_abi::PAGE))
}

/// The parts of `whole` that none of `parts` covers. `parts` are ascending and do not overlap.
pub(crate) fn uncovered(whole: Range, parts: &[Range]) -> Vec<Range> {
    let mut out = Vec::new();
    let mut at = whole.start;
    for p in parts.iter().filter(|p| p.end > whole.start && p.start < whole.end) {
        if p.start > at {
            out.push(at..p.start);
        }
        at = at.max(p.end);
    }
    if at < whole.end {
        out.push(at..whole.end);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_touches_nothing() {
        let taken = [0x1000_0000..0x2000_0000, 0x7f00_0000_0000..0x7fff_ffff_f000];
        let at = find_gap(&taken, 0x1234).unwrap();
        assert!(at >= 0x2000_0000 + 4096 && at + 0x2000 < 0x7f00_0000_0000);
        assert_eq!(at % 4096, 0);
    }

    #[test]
    fn no_gap_is_reported() {
        assert_eq!(find_gap(&[0x1000..0x5000, 0x5000..TASK_SIZE], 4096), None);
        assert_eq!(find_gap(&[], TASK_SIZE), None);
    }

    #[test]
    fn overlapping_and_unsorted_ranges_are_understood() {
        let taken = [0x4000_0000..TASK_SIZE, 0x1000..0x3000_0000, 0x2000..0x1000_1000];
        let at = find_gap(&taken, 4096).unwrap();
        assert!((0x3000_0000..0x4000_0000).contains(&at));
    }

    #[test]
    fn holes_of_an_attachment() {
        assert_eq!(uncovered(0..10, &[2..4, 6..10]), vec![0..2, 4..6]);
        assert_eq!(uncovered(0..10, std::slice::from_ref(&(0..10))), vec![]);
        assert_eq!(uncovered(5..10, &[0..6, 20..30]), vec![6..10]);
    }
}
