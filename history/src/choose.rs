//! Which versions make room for another.
//!
//! `score` is the rule of A. Maurya et al. (*GPU-Enabled Asynchronous Multi-level Checkpoint Caching and Prefetching*,
//! HPDC 2023), for comparison; `stall` is ours, the least expected stall. Least recently used and farthest next read
//! (Belady) need no code of their own: they take candidates in order ([`Choice`]).

pub mod score;
pub mod stall;

/// A rule of choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// The least expected stall.
    Stall,
    /// The rule of the HPDC 2023 paper.
    Score,
    /// The least recently used.
    Lru,
    /// The farthest next read.
    Belady,
}

/// Takes candidates, in their order, until `need` bytes are free; nothing if they do not suffice.
pub fn in_order<T>(need: u64, candidates: impl IntoIterator<Item = (T, u64)>) -> Option<Vec<T>> {
    let (mut taken, mut sum) = (Vec::new(), 0);
    let mut candidates = candidates.into_iter();
    while sum < need {
        let (candidate, size) = candidates.next()?;
        taken.push(candidate);
        sum += size;
    }
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_as_many_as_are_needed_are_taken() {
        let all = [('a', 3), ('b', 1), ('c', 5)];
        assert_eq!(in_order(4, all), Some(vec!['a', 'b']));
        assert_eq!(in_order(0, all), Some(vec![]));
        assert_eq!(in_order(10, all), None);
    }
}
