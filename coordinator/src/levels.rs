//! When it is whose turn to become redundant, or durable (`[levels]` of the configuration): the first checkpoint of a job
//! has the turn of every level, and so has the next one where one has failed to reach it.

use crate::config::{Pace, Time};
use crate::interval;
use belay_wire::{AutoLevel, Level};
use std::time::Duration;

/// Whose turn it is to reach a level.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Turn {
    /// How many checkpoints there are since the last one that was to reach it, and when that was, in seconds
    /// since 1970. None where there is none.
    last: Option<(u32, u64)>,
    /// It was somebody's turn in this run.
    asked: bool,
    /// How the automatic pace was chosen.
    pub(crate) chosen: Option<AutoLevel>,
}

impl Turn {
    /// Where the newest one on this level is from `time`, and there are `since` newer ones.
    pub(crate) fn after(since: u32, time: u64) -> Self {
        Self {
            last: Some((since, time)),
            ..Self::default()
        }
    }

    /// A checkpoint that reaches the level whoever's turn it is was committed at `now`.
    pub(crate) fn is_taken(&mut self, now: u64) {
        (self.last, self.asked) = (Some((0, now)), true);
    }

    /// One has reached `level`, which took so much time beside the program, on one of so many processors of each host.
    ///
    /// A loss that needs a checkpoint of this level or a higher one costs on average half the time between two of
    /// these; so for each level the sum of what the checkpoints cost and what is lost is least by itself, at the
    /// optimum of one level for its own cost and rate: to first order √(2CM). The loss of time that is left is Σ√(2C/M)
    /// over the levels: A. Benoit, A. Cavelan, V. Le Fèvre, Y. Robert, H. Sun, Towards Optimal Multi-Level
    /// Checkpointing, IEEE Transactions on Computers 66 (2017).
    pub(crate) fn learns(&mut self, level: Level, (time, processors): (Duration, u32), mtti: Option<Time>) {
        let Some(Time(mtti)) = mtti else { return };
        let cost = interval::cost(Duration::ZERO, time, 1, processors);
        // More often than it can be done it is not anybody's turn.
        let interval = interval::optimum(cost, mtti).max(time);
        let chosen = AutoLevel {
            level,
            interval_s: interval.as_secs_f64(),
            cost_ms: cost.as_secs_f64() * 1e3,
            mtti_s: mtti.as_secs_f64(),
        };
        tracing::info!(?chosen, "automatic pace");
        self.chosen = Some(chosen);
    }

    /// A checkpoint was committed at `now`: whether it is its turn.
    pub(crate) fn comes(&mut self, pace: Pace, now: u64) -> bool {
        let due = match (self.last, pace) {
            (None, _) => true,
            (Some((since, _)), Pace::Each(n)) => since.saturating_add(1) >= n,
            (Some((_, last)), Pace::After(time)) => now.saturating_sub(last) as f64 >= time.as_secs_f64(),
            (Some((_, last)), Pace::Auto) => match &self.chosen {
                Some(chosen) => now.saturating_sub(last) as f64 >= chosen.interval_s,
                // What it costs is to be learnt from one.
                None => !self.asked,
            },
        };
        self.asked |= due;
        self.last = match self.last {
            Some((since, last)) if !due => Some((since.saturating_add(1), last)),
            _ => Some((0, now)),
        };
        due
    }

    /// The one whose turn it was has not reached the level.
    pub(crate) fn fails(&mut self) {
        (self.last, self.asked) = (None, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Levels;

    #[test]
    fn turns_come_as_often_as_asked_for() {
        let count =
            |turn: &mut Turn, pace, times: std::ops::Range<u64>| -> Vec<u64> { times.filter(|t| turn.comes(pace, *t)).collect() };
        let mut turn = Turn::default();
        assert_eq!(count(&mut turn, Pace::Each(3), 0..8), [0, 3, 6]);
        turn.fails();
        assert_eq!(count(&mut turn, Pace::Each(3), 8..12), [8, 11]);
        assert_eq!(count(&mut Turn::default(), Pace::Each(1), 0..3), [0, 1, 2]);
        let time = Pace::After(Duration::from_secs(10));
        assert_eq!(count(&mut Turn::default(), time, 100..125), [100, 110, 120]);
        // After a restart.
        assert_eq!(count(&mut Turn::after(1, 90), Pace::Each(3), 100..102), [101]);
        assert_eq!(count(&mut Turn::after(1, 95), time, 100..110), [105]);
    }

    #[test]
    fn an_automatic_pace_needs_a_cost_and_a_rate() {
        let mut levels = Levels {
            durable: Some(Pace::Auto),
            ..Levels::default()
        };
        assert!(levels.check().unwrap_err().contains("durable_mtti"));
        levels.durable_mtti = Some(Time(Duration::from_secs(5000)));
        levels.check().unwrap();
        let mut turn = Turn::default();
        assert!(turn.comes(Pace::Auto, 0) && !turn.comes(Pace::Auto, 1000));
        // 2 s on one of two processors cost 1 s, and √(2·1·5000) is 100, from which Daly's terms take 1 − 1/3 of the cost.
        turn.learns(Level::Durable, (Duration::from_secs(2), 2), levels.durable_mtti);
        let chosen = turn.chosen.clone().unwrap();
        assert!(
            chosen.cost_ms == 1000.0 && (chosen.interval_s - 99.334).abs() < 0.001,
            "{chosen:?}"
        );
        let mut turn = Turn {
            last: Some((0, 0)),
            ..turn
        };
        assert!(!turn.comes(Pace::Auto, 99) && turn.comes(Pace::Auto, 100));
        // It takes longer than it would be worth.
        turn.learns(Level::Durable, (Duration::from_secs(200), 200), levels.durable_mtti);
        assert_eq!(turn.chosen.unwrap().interval_s, 200.0);
        // After a restart, from one.
        let mut turn = Turn::after(5, 0);
        assert!(turn.comes(Pace::Auto, 1) && !turn.comes(Pace::Auto, 2));
    }

    /// Overhead of a pattern of two levels, to first order: every `t` seconds a checkpoint that costs `c.0`, every
    /// `n`th of them also one that costs `c.1`; losses every `m.0` seconds that any survives, and every `m.1` that only
    /// the latter does.
    fn overhead(t: f64, n: f64, c: (f64, f64), m: (f64, f64)) -> f64 {
        c.0 / t + c.1 / (n * t) + t / (2.0 * m.0) + n * t / (2.0 * m.1)
    }

    #[test]
    fn two_levels_at_their_own_optima_lose_the_least_together() {
        let optimum = |c: f64, m: f64| interval::optimum(Duration::from_secs_f64(c), Duration::from_secs_f64(m)).as_secs_f64();
        // By hand: √(2·1·3600) = 84.853 s and √(2·30·86400) = 2276.84 s, 26.8 of the former in one of the latter; they
        // lose √(2/3600) + √(60/86400) = 0.023570 + 0.026352.
        let (c, m) = ((1.0, 30.0), (3600.0, 86_400.0));
        let (first, second) = (optimum(c.0, m.0), optimum(c.1, m.1));
        assert!(
            (first - 84.853).abs() < 0.01 * 84.853 && (second - 2276.84).abs() < 0.01 * 2276.84,
            "{first} {second}"
        );
        let lost = overhead(first, second / first, c, m);
        assert!((lost - 0.049922).abs() < 0.0001, "{lost}");
        for (t, n) in (1..400).flat_map(|t| (1..100).map(move |n| (f64::from(t), f64::from(n)))) {
            assert!(
                overhead(t, n, c, m) > lost * 0.999,
                "every {t} s and each {n}th: {}",
                overhead(t, n, c, m)
            );
        }
    }
}
