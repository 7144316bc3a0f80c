//! Where to stop: the loop before which least is alive, unless it is long in coming.

use crate::live::{alive, alive_but_next, alive_inside, Datasets};
use crate::shape::Shape;
use crate::trace::Loop;
use std::collections::BTreeMap;

/// What a stop costs.
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// Bytes written in a second.
    pub bytes_per_s: f64,
    /// Seconds of work lost by a failure for each second that the checkpoint comes later, times how likely the failure
    /// is: the checkpoint's interval over the mean time to an interrupt.
    pub loss_per_s: f64,
    /// Ticks of the time stamp counter in a second.
    pub ticks_per_s: f64,
    /// Longest wait, ticks.
    pub delay: u64,
}

/// A place to stop, as it has been so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Site {
    /// Its number.
    pub site: u32,
    /// Declared bytes that are alive there, on average.
    pub alive: u64,
    /// How often it was reached.
    pub visits: u64,
    /// Mean wait for it from any moment, ticks.
    pub wait: u64,
    /// Longest time between two visits, ticks.
    pub gap: u64,
}

/// Which loops decide what is dead at a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// All that come after it.
    All,
    /// The one before which the program waits.
    Next,
}

/// The sites of a trace. What is alive in its last quarter is not looked at: its future is not known.
pub fn sites(datasets: &Datasets, trace: &[Loop], reach: Reach) -> Vec<Site> {
    let known = trace.len() - trace.len() / 4;
    let alive = match reach {
        Reach::All => alive(datasets, trace),
        Reach::Next => alive_but_next(datasets, trace),
    };
    let mut all: BTreeMap<u32, (Vec<u64>, Vec<u64>)> = BTreeMap::new();
    for (at, (one, alive)) in trace.iter().zip(alive).enumerate() {
        let (times, bytes) = all.entry(one.site).or_default();
        times.push(one.ticks);
        if at < known {
            bytes.push(alive);
        }
    }
    let site = |(site, (times, bytes)): (u32, (Vec<u64>, Vec<u64>))| {
        let gaps = || times.windows(2).map(|w| w[1].saturating_sub(w[0]));
        let (sum, squares) = gaps().fold((0u64, 0f64), |(sum, squares), gap| {
            (sum.saturating_add(gap), squares + gap as f64 * gap as f64)
        });
        let longest = gaps().max()?;
        Some(Site {
            site,
            alive: bytes.iter().sum::<u64>() / (bytes.len() as u64).max(1),
            visits: times.len() as u64,
            // A moment falls into a gap the likelier, the longer it is.
            wait: if sum == 0 { 0 } else { (squares / (2.0 * sum as f64)) as u64 },
            gap: longest,
        })
        .filter(|_| !bytes.is_empty())
    };
    all.into_iter().filter_map(site).collect()
}

/// Declared bytes that are alive where a program is stopped at any moment, on average: inside of its loops, as long as
/// each takes.
pub fn anywhere(datasets: &Datasets, trace: &[Loop]) -> u64 {
    let known = trace.len() - trace.len() / 4;
    let inside = alive_inside(datasets, trace);
    let took = trace.windows(2).map(|w| w[1].ticks.saturating_sub(w[0].ticks));
    let (sum, ticks) = took
        .zip(inside)
        .take(known)
        .fold((0f64, 0f64), |(sum, ticks), (took, inside)| {
            (sum + inside as f64 * took as f64, ticks + took as f64)
        });
    if ticks > 0.0 {
        (sum / ticks) as u64
    } else {
        datasets.values().map(Shape::bytes).fold(0, u64::saturating_add)
    }
}

/// The cheapest of `sites`: visited more than twice, and never longer in coming than is allowed.
pub fn cheapest(sites: &[Site], costs: &Costs) -> Option<Site> {
    let cost = |s: &Site| s.alive as f64 / costs.bytes_per_s + costs.loss_per_s * s.wait as f64 / costs.ticks_per_s;
    let may = sites.iter().filter(|s| s.visits > 2 && s.gap <= costs.delay);
    may.min_by(|a, b| cost(a).total_cmp(&cost(b))).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Mode, Use};

    const COSTS: Costs = Costs {
        bytes_per_s: 1e9,
        loss_per_s: 0.01,
        ticks_per_s: 1e9,
        delay: 2_000_000_000,
    };
    const MIB: u64 = 1 << 20;

    fn used(datasets: &Datasets, dataset: u32, mode: Mode) -> Use {
        let block = Some(datasets[&dataset].whole());
        Use { dataset, mode, block }
    }

    /// A solver: a field that lives, and `temporaries` arrays that each step fills and uses up, one after the other.
    fn solver(temporaries: u32, steps: u64) -> (Datasets, Vec<Loop>) {
        let one = |id: u32| (id, Shape::dense(u64::from(id) << 32, 8, &[MIB]).unwrap());
        let datasets: Datasets = (0..=temporaries).map(one).collect();
        let mut trace = Vec::new();
        let mut ticks = 0;
        let mut add = |site: u32, uses: Vec<Use>| {
            ticks += 1_000_000;
            trace.push(Loop { site, ticks, uses });
        };
        for _ in 0..steps {
            for t in 1..=temporaries {
                add(t, vec![used(&datasets, 0, Mode::Read), used(&datasets, t, Mode::Write)]);
            }
            let mut last = vec![used(&datasets, 0, Mode::Both)];
            last.extend((1..=temporaries).map(|t| used(&datasets, t, Mode::Read)));
            add(1000, last);
        }
        (datasets, trace)
    }

    #[test]
    fn the_cheapest_site_is_where_all_temporaries_are_dead() {
        let (datasets, trace) = solver(10, 40);
        let sites = sites(&datasets, &trace, Reach::All);
        let best = cheapest(&sites, &COSTS).unwrap();
        assert_eq!((best.site, best.alive), (1, 8 * MIB));
        assert_eq!((best.visits, best.gap), (40, 11_000_000));
        let worst = sites.iter().map(|s| s.alive).max().unwrap();
        assert_eq!(worst, 11 * 8 * MIB);
        let limit = *alive(&datasets, &trace[..trace.len() / 2]).iter().min().unwrap();
        assert!(best.alive as f64 <= 1.05 * limit as f64);
    }

    #[test]
    fn a_stop_anywhere_is_one_inside_of_a_loop() {
        // Two arrays, each computed from the other: before a loop one of them is dead, and inside none.
        let datasets: Datasets = (0..2)
            .map(|id| (id, Shape::dense(u64::from(id) << 32, 8, &[MIB]).unwrap()))
            .collect();
        let between = |at: u64| Loop {
            site: at as u32 % 2,
            ticks: at * 100,
            uses: vec![
                used(&datasets, at as u32 % 2, Mode::Read),
                used(&datasets, 1 - at as u32 % 2, Mode::Write),
            ],
        };
        let trace: Vec<Loop> = (0..40).map(between).collect();
        assert_eq!(
            cheapest(&sites(&datasets, &trace, Reach::All), &COSTS).unwrap().alive,
            8 * MIB
        );
        assert_eq!(anywhere(&datasets, &trace), 2 * 8 * MIB);
        // Weighed by how long each loop takes: the last of the solver, in which all is alive, is one of eleven.
        let (datasets, trace) = solver(10, 40);
        let mean = anywhere(&datasets, &trace) as f64 / (8.0 * MIB as f64);
        assert!((6.9..7.3).contains(&mean), "{mean}");
        assert_eq!(anywhere(&datasets, &trace[..1]), 11 * 8 * MIB);
    }

    #[test]
    fn where_only_the_next_loop_counts_it_is_the_one_that_overwrites_most() {
        let (datasets, mut trace) = solver(10, 40);
        // The fifth overwrites two of them; what it reads itself before is alive.
        for one in trace.iter_mut().filter(|one| one.site == 5) {
            one.uses.push(used(&datasets, 6, Mode::Write));
            one.uses.push(used(&datasets, 7, Mode::Write));
            one.uses.push(used(&datasets, 7, Mode::Read));
        }
        let best = cheapest(&sites(&datasets, &trace, Reach::Next), &COSTS).unwrap();
        assert_eq!((best.site, best.alive), (5, 9 * 8 * MIB));
        let before = sites(&datasets, &trace, Reach::Next);
        assert_eq!(before.iter().find(|s| s.site == 1000).map(|s| s.alive), Some(11 * 8 * MIB));
    }

    #[test]
    fn a_site_that_is_long_in_coming_is_not_waited_for() {
        let (datasets, mut trace) = solver(10, 40);
        // The first temporary takes longer than may be waited.
        for (at, one) in trace.iter_mut().enumerate() {
            one.ticks = at as u64 / 11 * 3_000_000_000 + at as u64 % 11;
        }
        assert_eq!(cheapest(&sites(&datasets, &trace, Reach::All), &COSTS), None);
        // One that comes soon is taken instead, where waiting costs more than it saves.
        let (near, far) = (
            Site {
                site: 1,
                alive: 90,
                visits: 9,
                wait: 1,
                gap: 1,
            },
            1_000_000_000,
        );
        let late = Site {
            site: 2,
            alive: 80,
            wait: far,
            ..near
        };
        let costs = |loss_per_s| Costs {
            bytes_per_s: 10.0,
            loss_per_s,
            ..COSTS
        };
        assert_eq!(cheapest(&[near, late], &costs(0.5)), Some(late));
        assert_eq!(cheapest(&[near, late], &costs(2.0)), Some(near));
    }

    #[test]
    fn the_end_of_the_trace_says_nothing() {
        let (datasets, trace) = solver(4, 3);
        assert!(sites(&datasets, &trace[..2], Reach::All).is_empty());
        assert!(sites(&datasets, &[], Reach::All).is_empty());
    }
}
