//! Values that people write in more than one way.

use crate::interval::parse_duration;
use belay_storage::flush::compress::Compression;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// A time, written as people write intervals: `30s`, `2m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(pub Duration);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{}s", self.0.as_secs_f64()))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        parse_duration(&text).map(Self).map_err(D::Error::custom)
    }
}

/// A number of bytes, written as a number or with a unit of 1024: `500M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let digits = s.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match s[digits.len()..].to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            unit => return Err(format!("unknown unit {unit}; use K, M, G or T")),
        };
        let n: u64 = digits.parse().map_err(|_| format!("{s} is not a number of bytes"))?;
        let bytes = n.checked_mul(1 << shift).filter(|n| *n > 0);
        bytes.map(Self).ok_or_else(|| format!("{s} is out of range"))
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Reader;
        impl Visitor<'_> for Reader {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, as 1000000 or \"500M\" (K, M, G, T)")
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Size, E> {
                let n = u64::try_from(n).map_err(|_| E::custom(format!("{n} is out of range")))?;
                self.visit_u64(n)
            }
            fn visit_u64<E: Error>(self, n: u64) -> Result<Size, E> {
                if n == 0 {
                    return Err(E::custom("0 is out of range; leave the key out for no limit"));
                }
                Ok(Size(n))
            }
            fn visit_str<E: Error>(self, s: &str) -> Result<Size, E> {
                s.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Reader)
    }
}

/// Which open files have their contents in a checkpoint, beside those that would otherwise be lost: `none`, `all` that
/// the job writes or has made, or those that may differ at a restart, up to a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedFiles(pub u64);

impl SavedFiles {
    /// None.
    pub const NONE: Self = Self(0);
    /// All.
    pub const ALL: Self = Self(u64::MAX);
}

impl Default for SavedFiles {
    fn default() -> Self {
        Self(64 << 20)
    }
}

impl std::str::FromStr for SavedFiles {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "none" => Ok(Self::NONE),
            "all" => Ok(Self::ALL),
            size => match size.parse() {
                Ok(Size(bytes)) => Ok(Self(bytes)),
                Err(e) => Err(format!("{e}; or all, or none")),
            },
        }
    }
}

impl fmt::Display for SavedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NONE => f.write_str("none"),
            Self::ALL => f.write_str("all"),
            Self(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl Serialize for SavedFiles {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SavedFiles {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Reader;
        impl Visitor<'_> for Reader {
            type Value = SavedFiles;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"none\", \"all\" or a number of bytes, as \"64M\" (K, M, G, T)")
            }
            /// As older jobs have it.
            fn visit_bool<E: Error>(self, all: bool) -> Result<SavedFiles, E> {
                Ok(if all { SavedFiles::ALL } else { SavedFiles::NONE })
            }
            fn visit_str<E: Error>(self, s: &str) -> Result<SavedFiles, E> {
                s.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Reader)
    }
}

pub(super) fn compression<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Compression>, D::Error> {
    struct Reader;
    impl Visitor<'_> for Reader {
        type Value = Option<Compression>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("\"off\", \"auto\" or a level from 1 to 19")
        }
        fn visit_i64<E: Error>(self, n: i64) -> Result<Self::Value, E> {
            match i32::try_from(n) {
                Ok(level @ 1..=19) => Ok(Some(Compression::Level(level))),
                _ => Err(E::custom(format!("{n} is not \"off\", \"auto\" or a level from 1 to 19"))),
            }
        }
        fn visit_str<E: Error>(self, s: &str) -> Result<Self::Value, E> {
            match s {
                "off" => Ok(Some(Compression::Off)),
                "auto" => Ok(Some(Compression::Auto)),
                _ => Err(E::custom(format!("{s} is not \"off\", \"auto\" or a level from 1 to 19"))),
            }
        }
    }
    d.deserialize_any(Reader)
}
