//! How often a checkpoint also becomes redundant, and durable: `[levels]` of the configuration.
//!
//! ```toml
//! [levels]
//! redundant = "every 2"       # every second checkpoint
//! durable = "30m"             # the first one half an hour after the one before
//! durable = "auto"            # as often as loses the least time, where
//! durable_mtti = "720h"       # is the mean time between losses that the levels below do not survive
//! ```

use super::Time;
use crate::interval::parse_duration;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Pace {
    /// One of so many checkpoints.
    Each(u32),
    /// When so much time has passed.
    After(Duration),
    /// As often as loses the least time, see `levels`.
    Auto,
}

impl Default for Pace {
    fn default() -> Self {
        Self::Each(1)
    }
}

impl FromStr for Pace {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let value = s.strip_prefix("every ").unwrap_or(s).trim();
        if s == "auto" {
            return Ok(Self::Auto);
        }
        if !value.chars().all(|c| c.is_ascii_digit()) {
            let or = |e| format!("{e}, or a number of checkpoints, or auto");
            return parse_duration(value).map(Self::After).map_err(or);
        }
        match value.parse() {
            Ok(n @ 1..) => Ok(Self::Each(n)),
            _ => Err(format!(
                "`{s}` is neither a number of checkpoints nor a time; write for example 6, 30m or auto"
            )),
        }
    }
}

impl TryFrom<String> for Pace {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

impl From<Pace> for String {
    fn from(p: Pace) -> String {
        p.to_string()
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each(n) => write!(f, "every {n}"),
            Self::After(d) => write!(f, "every {}s", d.as_secs_f64()),
            Self::Auto => f.write_str("auto"),
        }
    }
}

/// `[levels]`; what is not given is every checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Levels {
    /// Encoded across hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redundant: Option<Pace>,
    /// Copied to durable tiers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable: Option<Pace>,
    /// For auto: mean time between losses that local checkpoints do not survive, of a host that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redundant_mtti: Option<Time>,
    /// For auto: mean time between losses that redundancy, where there is any, does not survive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable_mtti: Option<Time>,
}

impl Levels {
    /// Lays what `other` says over this.
    pub fn add(&mut self, other: Self) {
        self.redundant = other.redundant.or(self.redundant);
        self.durable = other.durable.or(self.durable);
        self.redundant_mtti = other.redundant_mtti.or(self.redundant_mtti);
        self.durable_mtti = other.durable_mtti.or(self.durable_mtti);
    }

    /// What cannot be.
    pub fn check(&self) -> Result<(), String> {
        let lacks = |pace: Option<Pace>, mtti: Option<Time>| pace == Some(Pace::Auto) && mtti.is_none();
        for (key, is_lacking) in [
            ("redundant", lacks(self.redundant, self.redundant_mtti)),
            ("durable", lacks(self.durable, self.durable_mtti)),
        ] {
            if is_lacking {
                return Err(format!(
                    "{key} = \"auto\" needs {key}_mtti in [levels], the mean time between losses that only this level survives"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_are_read_and_written() {
        for (text, pace) in [
            ("every 6", Pace::Each(6)),
            ("6", Pace::Each(6)),
            ("30m", Pace::After(Duration::from_secs(1800))),
            ("every 1.5s", Pace::After(Duration::from_millis(1500))),
            ("auto", Pace::Auto),
        ] {
            assert_eq!(text.parse(), Ok(pace), "{text}");
            assert_eq!(pace.to_string().parse(), Ok(pace), "{text}");
        }
        for bad in ["", "every", "every 0", "0", "-1", "sometimes", "99999999999"] {
            assert!(bad.parse::<Pace>().is_err(), "{bad}");
        }
    }
}
