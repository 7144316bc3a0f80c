//! Dead bytes and pages: a page of which every byte is dead is left out; one that is alive in a small part is packed.

/// Size of a page.
pub const PAGE: u64 = 4096;

/// A page with more bytes alive than this is kept whole.
pub const PACKED_MOST: u64 = PAGE / 4;

/// Dead runs of fewer pages come back as zeros: each run without access rights takes a mapping of its own.
pub const RUN_LEAST: u64 = 16;

/// Most runs without access rights: those behind come back as zeros.
pub const RUNS_MOST: usize = belay_abi::access::MOST_DEAD;

/// What need not be stored of a range of pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spared {
    /// Runs of pages that are dead as a whole, in ascending order.
    pub dead: Vec<(u64, u64)>,
    /// The same, too short or too many to be without access rights after a restart.
    pub blank: Vec<(u64, u64)>,
    /// What is alive of pages that are to be packed: address ranges in ascending order, none over more than a page.
    pub packed: Vec<(u64, u64)>,
}

impl Spared {
    /// Of the pages of `ranges`, which are in ascending order, where the bytes `dead` (in ascending order, neighbours
    /// joined) are not needed.
    pub fn find(ranges: &[(u64, u64)], dead: &[(u64, u64)]) -> Self {
        let mut out = Self::default();
        for (start, end) in ranges {
            let first = dead.partition_point(|d| d.1 <= *start);
            let its = dead[first..].iter().take_while(|d| d.0 < *end);
            its.for_each(|d| out.add(d.0.max(*start), d.1.min(*end), *start));
        }
        let packed = std::mem::take(&mut out.packed);
        out.pack(&packed);
        let mut runs = 0;
        let is_long = |(start, end): &(u64, u64)| {
            runs += usize::from(end - start >= RUN_LEAST * PAGE);
            end - start >= RUN_LEAST * PAGE && runs <= RUNS_MOST
        };
        (out.dead, out.blank) = std::mem::take(&mut out.dead).into_iter().partition(is_long);
        out
    }

    /// Adds dead bytes: the whole pages among them to `dead`, as one run with those before it as far as `range`, those of
    /// other pages to `packed` for now.
    fn add(&mut self, start: u64, end: u64, range: u64) {
        let (whole, behind) = (start.next_multiple_of(PAGE), end & !(PAGE - 1));
        if whole < behind {
            match self.dead.last_mut() {
                Some(last) if last.1 == whole && last.0 >= range => last.1 = behind,
                _ => self.dead.push((whole, behind)),
            }
        }
        let mut at = start;
        while at < end {
            let next = (at + 1).next_multiple_of(PAGE).min(end);
            if next - at < PAGE {
                self.packed.push((at, next));
            }
            at = if at == whole && whole < behind { behind } else { next };
        }
    }

    /// Of pages with these dead bytes, what is alive in those with little that is.
    fn pack(&mut self, dead: &[(u64, u64)]) {
        for page in dead.chunk_by(|a, b| a.0 / PAGE == b.0 / PAGE) {
            let gone: u64 = page.iter().map(|d| d.1 - d.0).sum();
            if PAGE - gone > PACKED_MOST {
                continue;
            }
            let mut at = page[0].0 & !(PAGE - 1);
            let end = at + PAGE;
            for d in page {
                if at < d.0 {
                    self.packed.push((at, d.0));
                }
                at = d.1;
            }
            if at < end {
                self.packed.push((at, end));
            }
        }
    }

    /// All pages that are not stored as such, in ascending order.
    pub fn gone(&self) -> Vec<(u64, u64)> {
        let mut out = [self.dead.as_slice(), &self.blank, &self.packed_pages()].concat();
        out.sort_unstable();
        out
    }

    /// The pages that are packed, as runs in ascending order.
    pub fn packed_pages(&self) -> Vec<(u64, u64)> {
        let mut out: Vec<(u64, u64)> = Vec::new();
        for (start, _) in &self.packed {
            let page = start & !(PAGE - 1);
            match out.last_mut() {
                Some(last) if last.1 > page => {}
                Some(last) if last.1 == page => last.1 += PAGE,
                _ => out.push((page, page + PAGE)),
            }
        }
        out
    }

    /// Bytes that are not stored.
    pub fn bytes(&self) -> u64 {
        self.gone().iter().map(|s| s.1 - s.0).sum::<u64>() - self.packed_bytes()
    }

    /// Bytes alive in packed pages.
    pub fn packed_bytes(&self) -> u64 {
        self.packed.iter().map(|s| s.1 - s.0).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: u64 = 64 * PAGE;
    const PAGES: u64 = 40;

    fn spans() -> impl Strategy<Value = Vec<(u64, u64)>> {
        // Lengths about a page, and long ones.
        let one = (0..600u64, prop_oneof![1..3 * PAGE, 20 * PAGE..24 * PAGE]);
        prop::collection::vec(one, 0..12).prop_map(|steps| {
            let mut at = BASE - PAGE;
            let one = |(gap, bytes): (u64, u64)| {
                let start = at + gap + 1;
                at = start + bytes;
                (start, at)
            };
            steps.into_iter().map(one).collect()
        })
    }

    proptest! {
        #[test]
        fn every_byte_that_is_alive_is_kept(dead in spans(), cut in 0..PAGES) {
            let ranges = [(BASE, BASE + cut * PAGE), (BASE + (cut + 1) * PAGE, BASE + (PAGES + 1) * PAGE)];
            let spared = Spared::find(&ranges, &dead);
            let within = |of: &[(u64, u64)], at: u64| of.iter().any(|s| s.0 <= at && at < s.1);
            let pages = spared.packed_pages();
            for (start, end) in ranges {
                for page in (start..end).step_by(PAGE as usize) {
                    let gone = (page..page + PAGE).filter(|at| within(&dead, *at)).count() as u64;
                    let left_out = within(&spared.dead, page) || within(&spared.blank, page);
                    prop_assert_eq!(left_out, gone == PAGE);
                    match (left_out, within(&pages, page)) {
                        (true, packed) => prop_assert!(!packed),
                        (_, true) => {
                            prop_assert!(gone < PAGE && PAGE - gone <= PACKED_MOST);
                            let differ = (page..page + PAGE).find(|at| within(&spared.packed, *at) == within(&dead, *at));
                            prop_assert_eq!(differ, None);
                        }
                        _ => {}
                    }
                }
            }
            for (start, end) in spared.gone() {
                prop_assert!(ranges.iter().any(|r| r.0 <= start && end <= r.1));
            }
            prop_assert!(spared.dead.iter().all(|d| d.1 - d.0 >= RUN_LEAST * PAGE));
            prop_assert!(spared.dead.windows(2).all(|w| w[0].1 <= w[1].0));
        }
    }

    #[test]
    fn rows_with_halos_leave_packed_pages() {
        // Rows of 196 doubles, the first and last two of which nobody overwrites, in rows from 2 to 98 of 100.
        let row = 196 * 8;
        let dead: Vec<(u64, u64)> = (2..98).map(|y| (BASE + y * row + 16, BASE + (y + 1) * row - 16)).collect();
        let spared = Spared::find(&[(BASE, BASE + 40 * PAGE)], &dead);
        assert!(spared.dead.is_empty());
        let packed: u64 = spared.packed_pages().iter().map(|p| p.1 - p.0).sum();
        assert!(packed >= 35 * PAGE, "{packed}");
        assert!(spared.packed_bytes() * 25 < packed, "{} of {packed}", spared.packed_bytes());
    }
}
