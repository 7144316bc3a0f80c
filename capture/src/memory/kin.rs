//! Memory that a process and those that it has forked still have in common: the copy of the maker stores it, and what
//! its page table says of these pages goes for the others too, which neither read nor hash them.
//!
//! Two copies have the same page where the kernel says that both have it in the same place of the machine's memory. It
//! says so to root of the machine only; in an ordinary user's job each copy reads what it has. (That a page is
//! *exclusive*, which everybody is told, says nothing here: pages that are not can be two, each of which some processes
//! of the family share.)

use crate::memory::tracking::without;
use belay_abi::inject::{Range, RANGE_KEEP_ZEROS};
use belay_image::extents;
use belay_image::extents::Extent;
use belay_image::TableId;
use belay_storage::session::Session;

const PAGE: u64 = 4096;
/// What a process has in common with the one that has made it.
#[derive(Debug, Default)]
pub(crate) struct Kin {
    pub(crate) maker: i32,
    /// In ascending order.
    pub(crate) ranges: Vec<(u64, u64)>,
}

impl Kin {
    pub(crate) fn pages(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| (end - start) / PAGE).sum()
    }

    /// Takes what is stored with the maker's pages out of `found`; where it lies goes to `table`.
    pub(crate) fn without(&self, found: Vec<Range>, session: &mut Session, table: &mut Vec<Extent>) -> Vec<Range> {
        let makers = session.tables().get(&TableId::Process(self.maker));
        let Some(makers) = makers.filter(|_| !self.ranges.is_empty()) else {
            return found;
        };
        let mut out = Vec::with_capacity(found.len());
        let (mut left, mut rest) = (Vec::new(), Vec::new());
        let mut pages = 0;
        for r in found {
            // Behind these pages a file could show.
            if r.flags & RANGE_KEEP_ZEROS != 0 {
                out.push(r);
                continue;
            }
            left.clear();
            without((r.start, r.end), &self.ranges, &mut left);
            out.extend(left.iter().map(|(start, end)| Range {
                start: *start,
                end: *end,
                ..r
            }));
            rest.clear();
            without((r.start, r.end), &left, &mut rest);
            for (start, end) in &rest {
                extents::within(makers, *start, *end, table);
                pages += (end - start) / PAGE;
            }
        }
        session.stats.common += pages;
        out
    }
}
