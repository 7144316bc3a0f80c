//! Who holds what: `data` segments of each member, spread over as many stripes as there are members, so that everybody
//! holds as much parity.
//!
//! Stripe `s` has its parity on members `s`, `s + 1`, … and its data on those that follow; all modulo the number of members.

use crate::{RedundancyError, ALIGN, BLOCK};
use serde::{Deserialize, Serialize};

/// Most members of a group.
pub const MAX_MEMBERS: usize = 128;

/// How a group survives the loss of members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// Each member's data also lies on as many others as parity says.
    Partner,
    /// One block of parity for all other members: any one may be lost.
    Xor,
    /// Any `parity` members may be lost.
    ReedSolomon,
}

impl Scheme {
    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Partner => "partner",
            Scheme::Xor => "xor",
            Scheme::ReedSolomon => "reed-solomon",
        }
    }

    /// Fewest members of a group with this parity.
    pub fn fewest(self, parity: usize) -> usize {
        parity + 1
    }
}

/// The layout of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Members of the group.
    pub members: usize,
    /// Data blocks in a stripe, which is also the number of segments of each member.
    pub data: usize,
    /// Parity blocks in a stripe: as many members may be lost.
    pub parity: usize,
}

impl Layout {
    /// The layout of a group of `members` under `scheme`.
    pub fn new(scheme: Scheme, members: usize, parity: usize) -> Result<Self, RedundancyError> {
        let data = match scheme {
            Scheme::Partner => 1,
            Scheme::Xor | Scheme::ReedSolomon => members.saturating_sub(parity),
        };
        let layout = Self { members, data, parity };
        if scheme == Scheme::Xor && parity != 1 {
            return Err(RedundancyError::Layout("xor has a parity of 1".into()));
        }
        layout.check().map(|()| layout)
    }

    /// Refuses what cannot be.
    pub fn check(&self) -> Result<(), RedundancyError> {
        let Self { members, data, parity } = *self;
        let fits = data.checked_add(parity).is_some_and(|n| n <= members);
        if members > MAX_MEMBERS || data == 0 || parity == 0 || !fits {
            let why = format!("a group of {members} hosts cannot hold {data} data and {parity} parity blocks in a stripe");
            return Err(RedundancyError::Layout(why));
        }
        Ok(())
    }

    fn member(&self, n: usize) -> usize {
        n % self.members
    }

    /// Data of stripe `stripe`: member and segment, in the order of the code.
    pub fn data_of(&self, stripe: usize) -> Vec<(usize, usize)> {
        (0..self.data).map(|i| (self.member(stripe + self.parity + i), i)).collect()
    }

    /// The members that hold parity of stripe `stripe`, in the order of the code.
    pub fn parity_of(&self, stripe: usize) -> Vec<usize> {
        (0..self.parity).map(|j| self.member(stripe + j)).collect()
    }

    /// The stripe that segment `segment` of `member` belongs to.
    pub fn stripe_of(&self, member: usize, segment: usize) -> usize {
        self.member(member + 2 * self.members - self.parity - segment)
    }

    /// The stripe of which `member` holds parity block `slot`.
    pub fn parity_stripe(&self, member: usize, slot: usize) -> usize {
        self.member(member + self.members - slot)
    }

    /// Length of a segment when the longest stream has `longest` bytes.
    pub fn segment_bytes(&self, longest: u64) -> u64 {
        longest.div_ceil(self.data as u64).next_multiple_of(ALIGN).max(ALIGN)
    }
}

/// Blocks in a segment of this length.
pub fn blocks(segment: u64) -> u64 {
    segment.div_ceil(BLOCK)
}

/// Where block `block` of a segment of `segment` bytes begins in it, and its length.
pub fn block_range(segment: u64, block: u64) -> (u64, usize) {
    let at = block * BLOCK;
    (at, usize::try_from(segment.saturating_sub(at).min(BLOCK)).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_segment_and_every_parity_block_has_one_place() {
        for members in 2..10 {
            for parity in 1..members {
                let all = [Scheme::Partner, Scheme::Xor, Scheme::ReedSolomon];
                for layout in all.iter().filter_map(|s| Layout::new(*s, members, parity).ok()) {
                    let mut seen = BTreeSet::new();
                    for stripe in 0..members {
                        let holders: Vec<usize> = layout.data_of(stripe).iter().map(|(m, _)| *m).collect();
                        let all: BTreeSet<usize> = holders.into_iter().chain(layout.parity_of(stripe)).collect();
                        assert_eq!(all.len(), layout.data + layout.parity, "two blocks of a stripe on one member");
                        for (member, segment) in layout.data_of(stripe) {
                            assert_eq!(layout.stripe_of(member, segment), stripe);
                            assert!(seen.insert((member, segment)));
                        }
                        for (slot, member) in layout.parity_of(stripe).into_iter().enumerate() {
                            assert_eq!(layout.parity_stripe(member, slot), stripe);
                        }
                    }
                    assert_eq!(seen.len(), members * layout.data);
                }
            }
        }
    }

    #[test]
    fn groups_that_are_too_small_are_refused() {
        assert!(Layout::new(Scheme::Partner, 1, 1).is_err());
        assert!(Layout::new(Scheme::Xor, 1, 1).is_err());
        assert!(Layout::new(Scheme::Xor, 3, 2).is_err());
        assert!(Layout::new(Scheme::ReedSolomon, 3, 3).is_err());
        assert!(Layout::new(Scheme::ReedSolomon, 3, 0).is_err());
        assert!(Layout::new(Scheme::ReedSolomon, MAX_MEMBERS + 1, 1).is_err());
    }

    #[test]
    fn blocks_cover_a_segment() {
        for segment in [64, BLOCK - 64, BLOCK, BLOCK + 64, 5 * BLOCK] {
            let total: u64 = (0..blocks(segment)).map(|b| block_range(segment, b).1 as u64).sum();
            assert_eq!(total, segment);
        }
        assert_eq!(block_range(BLOCK, 1).1, 0);
        let layout = Layout::new(Scheme::Xor, 4, 1).unwrap();
        assert_eq!((layout.segment_bytes(0), layout.segment_bytes(1000)), (64, 384));
    }
}
