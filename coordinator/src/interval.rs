//! When to take checkpoints: durations as the command line writes them, and the automatic interval.
//!
//! The automatic interval is the one that loses the least time to checkpoints and to work done again after
//! interruptions: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22
//! (2006), equation 37, which for cheap checkpoints is J. W. Young's √(2CM) (A first order approximation to the optimum
//! checkpoint interval, CACM 17 (1974)).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// Checkpoint interval of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Interval {
    /// Only on request.
    #[default]
    Never,
    /// Every so often.
    Every(Duration),
    /// As often as loses the least time, see [`optimum`].
    Auto,
}

/// Seconds that a duration may have: from a millisecond to a year.
pub(crate) const SPANS: RangeInclusive<f64> = 0.001..=366.0 * 86400.0;

/// Shortest time between the end of one automatic checkpoint and the begin of the next, unless the user names another.
pub const MIN_GAP: Duration = Duration::from_secs(30);

/// Longest wait for a program to come to a loop before which little is alive: the agent answers nobody meanwhile.
const SITE_WAIT: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(10);

/// Time that the program should run between two checkpoints that cost `cost` each, where it is interrupted after `mtti` on average.
pub fn optimum(cost: Duration, mtti: Duration) -> Duration {
    let (c, m) = (cost.as_secs_f64(), mtti.as_secs_f64());
    if c >= 2.0 * m {
        return mtti;
    }
    let ratio = c / (2.0 * m);
    let t = (2.0 * c * m).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - c;
    Duration::from_secs_f64(t.max(0.0))
}

/// What a checkpoint costs the program: the time that it was blocked, and of the time of writing, which goes on beside
/// it, the share of the processors that the writers take.
pub fn cost(blocked: Duration, write: Duration, writers: u32, processors: u32) -> Duration {
    blocked + write.mul_f64((f64::from(writers) / f64::from(processors.max(1))).min(1.0))
}

impl Interval {
    /// Time from the start to the first checkpoint; `min_gap` is the shortest between two automatic ones.
    pub fn first(self, min_gap: Duration) -> Option<Duration> {
        match self {
            Interval::Never => None,
            Interval::Every(d) => Some(d),
            Interval::Auto => Some(min_gap),
        }
    }

    /// Longest wait for a good place to stop: a fifth of the interval, so that little more work is lost by it.
    pub fn site_wait(self) -> Duration {
        let every = self.first(MIN_GAP).unwrap_or(Duration::ZERO);
        (every / 5).clamp(*SITE_WAIT.start(), *SITE_WAIT.end())
    }
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Interval::Auto),
            "never" => Ok(Interval::Never),
            _ => parse_duration(s).map(Interval::Every),
        }
    }
}

impl TryFrom<String> for Interval {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

impl From<Interval> for String {
    fn from(i: Interval) -> String {
        i.to_string()
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interval::Never => f.write_str("never"),
            Interval::Auto => f.write_str("auto"),
            Interval::Every(d) if d.subsec_millis() == 0 => write!(f, "{}s", d.as_secs()),
            Interval::Every(d) => write!(f, "{}ms", d.as_millis()),
        }
    }
}

/// Parses `2`, `2s`, `1.5s`, `500ms`, `5m`, `1h`. Not shorter than a millisecond, not longer than a year.
pub fn parse_duration(s: &str) -> Result<Duration, String> {
    let split = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (number, unit) = s.split_at(split);
    let factor = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("unknown unit `{unit}` in `{s}`; use ms, s, m or h")),
    };
    let seconds = number
        .parse::<f64>()
        .map_err(|_| format!("`{s}` is not a duration; write for example 2s, 500ms, 5m, 1h"))?
        * factor;
    if !SPANS.contains(&seconds) {
        return Err(format!("`{s}` is out of range; from 1ms to a year"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, ms) in [
            ("2", 2000),
            ("2s", 2000),
            ("500ms", 500),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("0.5", 500),
            ("1.5s", 1500),
        ] {
            assert_eq!(parse_duration(text).unwrap().as_millis(), ms, "{text}");
        }
        for bad in [
            "",
            "s",
            "2x",
            "-1",
            "0",
            "1e9h",
            "nan",
            "inf",
            "1..2",
            "2 s",
            "99999999h",
            "0.0001ms",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_good_place_is_waited_for_the_longer_the_seldomer_checkpoints_are() {
        let s = Duration::from_secs;
        let every = |n| Interval::Every(s(n)).site_wait();
        assert_eq!([every(1), every(10), every(50), every(3600)], [s(2), s(2), s(10), s(10)]);
        assert_eq!([Interval::Never, Interval::Auto].map(Interval::site_wait), [s(2), s(6)]);
    }

    #[test]
    fn intervals_survive_being_stored() {
        for text in ["auto", "never", "2s", "500ms", "3600s"] {
            assert_eq!(text.parse::<Interval>().unwrap().to_string(), text);
        }
        assert!("sometimes".parse::<Interval>().is_err());
    }

    #[test]
    fn the_optimum_is_the_published_one() {
        let t = |c: f64, m: f64| optimum(Duration::from_secs_f64(c), Duration::from_secs_f64(m)).as_secs_f64();
        let near = |a: f64, b: f64| (a - b).abs() <= b * 0.005;
        // Young's first order, for a cost that is small against the mean time to interrupt: √(2·1·10⁶) = 1414.2 s.
        assert!(near(t(1.0, 1e6), 1414.2), "{}", t(1.0, 1e6));
        // Daly's series, worked out by hand for 5 minutes and 24 hours (7200·(1 + 1/72 + 1/5184) − 300) and for 5
        // minutes and 6 hours (3600·(1 + 1/36 + 1/1296) − 300).
        assert!(near(t(300.0, 86_400.0), 7001.4), "{}", t(300.0, 86_400.0));
        assert!(near(t(300.0, 21_600.0), 3402.8), "{}", t(300.0, 21_600.0));
        // Checkpoints that cost more than twice the mean time to interrupt: nothing better than that time.
        assert_eq!(t(100.0, 50.0), 50.0);
        assert!(
            near(t(99.9999, 50.0), 44.444),
            "the series ends at 2M·(1 + 1/3 + 1/9) − 2M: {}",
            t(99.9999, 50.0)
        );
    }

    /// Daly's exact model of the run time, equation 20: M·e^(R/M)·(e^((T + C)/M) − 1)·Ts/T with R = 0 and Ts = 1.
    fn overhead(t: f64, c: f64, m: f64) -> f64 {
        m * (((t + c) / m).exp() - 1.0) / t
    }

    #[test]
    fn no_other_interval_is_noticeably_better() {
        for (c, m) in [
            (0.01, 3600.0),
            (1.0, 3600.0),
            (60.0, 3600.0),
            (600.0, 7200.0),
            (300.0, 86_400.0),
        ] {
            let chosen = optimum(Duration::from_secs_f64(c), Duration::from_secs_f64(m)).as_secs_f64();
            let best = (1..20_000)
                .map(|k| overhead(chosen * f64::from(k) / 1000.0, c, m))
                .fold(f64::MAX, f64::min);
            assert!(overhead(chosen, c, m) <= best * 1.001, "cost {c}, mtti {m}: {chosen}");
        }
    }

    #[test]
    fn the_cost_counts_what_the_writers_take() {
        let s = Duration::from_secs;
        assert_eq!(cost(s(1), s(8), 2, 16), s(2));
        assert_eq!(cost(s(1), s(8), 2, 1), s(9));
    }
}
