//! Guard regions (MADV_GUARD_INSTALL): which mappings can have them, and which of those found belong to one.

use crate::memory::mappings;
use belay_kernel::guards::{self, Guards};
use belay_kernel::proc::Map;
use belay_plugins::infiniband;

/// Whether `map` may have guard regions: not the kernel's own pages, nor memory in explicit huge pages.
pub(crate) fn may_have_guards(map: &Map) -> bool {
    let special = map.name.as_encoded_bytes().starts_with(b"[v")
        || mappings::is_ring(map)
        || infiniband::is_mapping(map)
        || mappings::huge(map).is_some();
    guards::support() != Guards::None && !special
}

/// Those of `guards`, which are in ascending order, that lie in a mapping, cut at its ends and joined where they meet.
pub(crate) fn within(guards: &[(u64, u64)], (start, end): (u64, u64)) -> Vec<(u64, u64)> {
    let first = guards.partition_point(|g| g.1 <= start);
    let mut out: Vec<(u64, u64)> = Vec::new();
    for g in guards[first..].iter().take_while(|g| g.0 < end) {
        let cut = (g.0.max(start), g.1.min(end));
        match out.last_mut() {
            Some(last) if cut.0 <= last.1 => last.1 = last.1.max(cut.1),
            _ => out.push(cut),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_are_cut_where_mappings_end_and_joined_where_pieces_meet() {
        let guards = [(1, 3), (3, 5), (7, 9), (8, 12)];
        assert_eq!(within(&guards, (0, 20)), [(1, 5), (7, 12)]);
        assert_eq!(within(&guards, (2, 8)), [(2, 5), (7, 8)]);
        assert_eq!(within(&guards, (5, 7)), []);
        assert_eq!(within(&guards, (12, 20)), []);
        assert_eq!(within(&[], (0, 20)), []);
    }
}
