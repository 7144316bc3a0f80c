//! Where the next chunk goes. Pure.
//!
//! The adaptive rule is that of B. Nicolae et al. (*VeloC: Towards High Performance Adaptive Asynchronous Checkpointing
//! at Large Scale*, IPDPS 2019): the fastest local tier that has room, if a further writer there is faster than the
//! flush; else wait, because the flush will make room in a faster one. Who waits behind others has only a share of the
//! flush to wait for, so the flush counts less for them: a slow tier is used by as many writers as gain by it, and by
//! no more than it can use: with further ones all together would write no more, or less, and each would be done later.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// How local tiers are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// By prediction and observation.
    #[default]
    Adaptive,
    /// The fastest tier alone.
    FastestOnly,
    /// Tiers that are not in memory alone.
    LocalOnly,
    /// The fastest tier that has room, whatever that costs.
    Naive,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 4] = [Policy::Adaptive, Policy::FastestOnly, Policy::LocalOnly, Policy::Naive];

    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Adaptive => "adaptive",
            Policy::FastestOnly => "fastest-only",
            Policy::LocalOnly => "local-only",
            Policy::Naive => "naive",
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let names = || Policy::ALL.map(Policy::name).join(", ");
        let found = Policy::ALL.into_iter().find(|p| p.name() == s);
        found.ok_or_else(|| format!("{s} is no policy; there are {}", names()))
    }
}

/// A local tier as the rule sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    /// What one writer alone gets, bytes per second.
    pub alone: f64,
    /// What one writer more would get.
    pub next: f64,
    /// What its writers get together, where one more would not make that more.
    pub crowd: Option<f64>,
    /// The chunk fits.
    pub room: bool,
    /// It lies in memory.
    pub memory: bool,
}

/// The tier for a chunk, or `None`: wait for a flush, or for a writer to be done. `flush` is the observed bandwidth of
/// the flush, `ahead` the number of writers that wait for it already.
pub fn choose(policy: Policy, tiers: &[View], flush: f64, ahead: u32) -> Option<usize> {
    let all = || tiers.iter().enumerate();
    let best = |by: fn(&View) -> f64, of: &dyn Fn(&View) -> bool| {
        let candidates = all().filter(|(_, t)| of(t));
        // Of equals the first, as the configuration has them.
        candidates.rev().max_by(|a, b| by(a.1).total_cmp(&by(b.1))).map(|(i, _)| i)
    };
    match policy {
        Policy::Adaptive => {
            // Who waits is served by the flush, and by the tiers that have all the writers they can use.
            let crowds = tiers.iter().filter(|t| t.room).filter_map(|t| t.crowd);
            let served = crowds.sum::<f64>() + flush;
            best(|t| t.next, &|t| t.room && t.crowd.is_none()).filter(|i| tiers[*i].next > served / f64::from(ahead + 1))
        }
        Policy::FastestOnly => best(|t| t.alone, &|_| true).filter(|i| tiers[*i].room),
        Policy::LocalOnly => best(|t| t.next, &|t| t.room && !t.memory),
        Policy::Naive => best(|t| t.alone, &|t| t.room),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiers(memory_room: bool, disk_next: f64) -> [View; 2] {
        let view = |alone, next, room, memory| View {
            alone,
            next,
            crowd: None,
            room,
            memory,
        };
        [view(100.0, disk_next, true, false), view(1000.0, 500.0, memory_room, true)]
    }

    #[test]
    fn the_adaptive_rule_takes_a_slow_tier_only_where_it_beats_the_flush() {
        let adaptive = |room, next, flush, ahead| choose(Policy::Adaptive, &tiers(room, next), flush, ahead);
        assert_eq!(adaptive(true, 100.0, 5.0, 0), Some(1));
        assert_eq!(adaptive(false, 100.0, 50.0, 0), Some(0));
        assert_eq!(adaptive(false, 40.0, 50.0, 0), None, "waiting is faster");
        assert_eq!(adaptive(false, 40.0, 50.0, 1), Some(0), "half of the flush is not");
        assert_eq!(adaptive(true, 5.0, 5000.0, 0), None, "even memory is slower than the flush");
        assert_eq!(choose(Policy::Adaptive, &[], 0.0, 0), None);
    }

    #[test]
    fn a_tier_that_has_all_the_writers_it_can_use_gets_no_more_of_them() {
        let adaptive = |crowds: [Option<f64>; 2], room, ahead| {
            let mut tiers = tiers(room, 100.0);
            tiers[0].crowd = crowds[0];
            tiers[1].crowd = crowds[1];
            choose(Policy::Adaptive, &tiers, 50.0, ahead)
        };
        assert_eq!(adaptive([None, None], false, 9), Some(0));
        assert_eq!(adaptive([Some(400.0), None], false, 9), None);
        assert_eq!(adaptive([Some(400.0), None], true, 0), Some(1));
        // The writers of a crowded tier are soon done: who waits there is served before the slow tier would be.
        assert_eq!(adaptive([None, Some(2000.0)], true, 0), None);
        assert_eq!(adaptive([None, Some(2000.0)], true, 20), Some(0));
        assert_eq!(
            adaptive([None, Some(2000.0)], false, 0),
            Some(0),
            "it has no room: nobody waits for it"
        );
        let mut crowded = tiers(false, 100.0);
        crowded[0].crowd = Some(400.0);
        assert_eq!(choose(Policy::Naive, &crowded, 50.0, 0), Some(0));
    }

    #[test]
    fn the_others_do_not_look_at_the_flush() {
        for (policy, expected) in [
            (Policy::FastestOnly, None),
            (Policy::LocalOnly, Some(0)),
            (Policy::Naive, Some(0)),
        ] {
            assert_eq!(choose(policy, &tiers(false, 1.0), 1e9, 0), expected, "{policy:?}");
        }
        for (policy, expected) in [(Policy::FastestOnly, 1), (Policy::LocalOnly, 0), (Policy::Naive, 1)] {
            assert_eq!(choose(policy, &tiers(true, 1.0), 1e9, 0), Some(expected), "{policy:?}");
        }
        for p in Policy::ALL {
            assert_eq!(p.name().parse(), Ok(p));
            assert_eq!(serde_json::to_string(&p).unwrap(), format!("\"{}\"", p.name()));
        }
        assert!("fast".parse::<Policy>().unwrap_err().contains("fastest-only"));
    }
}
