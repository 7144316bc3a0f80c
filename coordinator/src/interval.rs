//! When to take checkpoints: durations as the command line writes them, and the automatic interval.

use serde::{Deserialize, Serialize};
use std::fmt;
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
    /// As often as costs next to nothing, see [`Interval::auto_delay`].
    Auto,
}

/// First checkpoint of an automatic interval, and the shortest time between two of them.
const AUTO_SHORTEST: Duration = Duration::from_secs(30);
/// Longest time between two checkpoints of an automatic interval.
const AUTO_LONGEST: Duration = Duration::from_secs(3600);

impl Interval {
    /// Time from the start to the first checkpoint.
    pub fn first(self) -> Option<Duration> {
        match self {
            Interval::Never => None,
            Interval::Every(d) => Some(d),
            Interval::Auto => Some(AUTO_SHORTEST),
        }
    }

    /// Time from a checkpoint that blocked the program for `blocked` and took `write` to write, to the next: the program is blocked for at
    /// most 0.5 % of the time, and the writer runs for at most 5 % of it.
    pub fn auto_delay(blocked: Duration, write: Duration) -> Duration {
        (blocked * 200).max(write * 20).clamp(AUTO_SHORTEST, AUTO_LONGEST)
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
    if !(0.001..=366.0 * 86400.0).contains(&seconds) {
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
    fn intervals_survive_being_stored() {
        for text in ["auto", "never", "2s", "500ms", "3600s"] {
            assert_eq!(text.parse::<Interval>().unwrap().to_string(), text);
        }
        assert!("sometimes".parse::<Interval>().is_err());
    }

    #[test]
    fn the_automatic_interval_follows_the_cost() {
        let ms = Duration::from_millis;
        assert_eq!(Interval::auto_delay(ms(1), ms(1)), ms(30_000));
        assert_eq!(Interval::auto_delay(ms(500), ms(2_000)), ms(100_000));
        assert_eq!(Interval::auto_delay(ms(500), ms(20_000)), ms(400_000));
        assert_eq!(Interval::auto_delay(ms(60_000), ms(1)), ms(3_600_000));
    }
}
