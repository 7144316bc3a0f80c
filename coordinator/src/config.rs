//! The configuration: `/etc/belay/belay.toml`, under `$XDG_CONFIG_HOME/belay/belay.toml`, under the file of `--config`.
//!
//! ```toml
//! [[tier]]
//! name = "scratch"            # unique; the same name in a later file replaces the entry
//! kind = "pfs"                # memory, local, pfs or object
//! path = "/scratch/me"        # pfs: a directory that is there
//! capacity = "2T"             # most bytes for one job
//!
//! [placement]
//! policy = "adaptive"         # how a local tier is chosen for a chunk
//!
//! [flush]
//! threads = 4                 # at most
//! rate = "500M"               # bytes per second
//! zstd = "auto"               # "off", "auto" or a level from 1 to 19
//! verify = true               # read everything back
//!
//! [redundancy]                # jobs on several hosts, see docs/redundancy.md
//! scheme = "xor"              # partner, xor or reed-solomon
//! group = 4                   # hosts
//! parity = 1                  # how many of them may be lost
//! local = "/local/scratch"    # a directory on every host's own disk
//! domains = [["n1", "n2"], ["n3", "n4"]]   # hosts that fail together
//! ```
//! An error names file, line and key, and what is allowed. What a launch has read is kept in `job.json`, so that a restart finds the tiers again.

use crate::redundancy::Redundancy;
use crate::Failure;
use belay_storage::flush::compress::Compression;
use belay_storage::place::rule::Policy;
use belay_storage::tier::{OBJECT_SCHEMES, OBJECT_URLS};
use belay_wire::Exit;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The site's file.
const SITE: &str = "/etc/belay/belay.toml";
/// Largest file that is read.
const MAX_FILE: u64 = 1 << 20;

/// Kind of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A directory in memory (tmpfs), in which chunks lie until they have been moved to the job directory.
    Memory,
    /// The same on a disk.
    Local,
    /// A directory on a file system that outlives the node.
    Pfs,
    /// An object store.
    Object,
}

impl Kind {
    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Memory => "memory",
            Kind::Local => "local",
            Kind::Pfs => "pfs",
            Kind::Object => "object",
        }
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

fn compression<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Compression>, D::Error> {
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

/// One `[[tier]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// One of [`OBJECT_URLS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Address of the object store's service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Region of the object store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Whether the object store is talked to without encryption.
    #[serde(default)]
    pub allow_http: bool,
    /// Most bytes that one job may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Size>,
}

/// `[flush]`; what is not given has its default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flush {
    /// Most threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// Most bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<Size>,
    /// Compression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zstd: Option<Compression>,
    /// Whether everything is read back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify: Option<bool>,
}

/// `[placement]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// How a local tier is chosen for a chunk.
    #[serde(default)]
    pub policy: Policy,
}

/// `[flush]` as people write it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFlush {
    threads: Option<u32>,
    rate: Option<Size>,
    #[serde(default, deserialize_with = "compression")]
    zstd: Option<Compression>,
    verify: Option<bool>,
}

/// One file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    tier: Vec<toml::Spanned<Tier>>,
    flush: Option<toml::Spanned<RawFlush>>,
    placement: Option<Placement>,
    redundancy: Option<toml::Spanned<Redundancy>>,
}

/// Everything configured.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Config {
    /// The tiers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<Tier>,
    /// How flushes are done.
    #[serde(default)]
    pub flush: Flush,
    /// How local tiers are chosen.
    #[serde(default)]
    pub placement: Placement,
    /// How jobs on several hosts are made redundant.
    #[serde(default)]
    pub redundancy: Redundancy,
}

impl Config {
    /// Reads the site's file, the user's, and `file`, which alone must be there.
    pub fn load(file: Option<&Path>) -> Result<Self, Failure> {
        let mut config = Self::default();
        for path in [Some(PathBuf::from(SITE)), user_file()].into_iter().flatten() {
            match std::fs::metadata(&path) {
                Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {}
                Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && path != Path::new(SITE) => {
                    let why =
                        "permission denied: HOME or XDG_CONFIG_HOME names a directory of somebody else; set it to one of your own";
                    return Err(Failure::new(Exit::Io, format!("read {}: {why}", path.display())));
                }
                Err(e) => return Err(Failure::io(format!("read {}", path.display()), &e)),
                Ok(_) => config.add_file(&path)?,
            }
        }
        if let Some(path) = file {
            config.add_file(path)?;
        }
        Ok(config)
    }

    fn add_file(&mut self, path: &Path) -> Result<(), Failure> {
        let fail = |e: &std::io::Error| Failure::io(format!("read {}", path.display()), e);
        let bytes = std::fs::metadata(path).map_err(|e| fail(&e))?.len();
        if bytes > MAX_FILE {
            let why = format!("{}: {bytes} bytes, more than any configuration", path.display());
            return Err(Failure::new(Exit::Usage, why));
        }
        let text = std::fs::read_to_string(path).map_err(|e| fail(&e))?;
        self.lay(path, &text)
    }

    /// Lays what `text`, the contents of the file at `path`, says over what is known.
    pub fn lay(&mut self, path: &Path, text: &str) -> Result<(), Failure> {
        self.add(text).map_err(|e| Failure::new(Exit::Usage, e.locate(path, text)))
    }

    fn add(&mut self, text: &str) -> Result<(), Fault> {
        let raw: Raw = toml::from_str(text).map_err(|e| Fault {
            at: e.span(),
            what: e.message().to_owned(),
        })?;
        for tier in raw.tier {
            let at = Some(tier.span());
            let tier = tier.into_inner();
            check(&tier).map_err(|what| Fault { at, what })?;
            match self.tiers.iter_mut().find(|t| t.name == tier.name) {
                Some(known) => *known = tier,
                None => self.tiers.push(tier),
            }
        }
        self.placement = raw.placement.unwrap_or(self.placement);
        if let Some(flush) = raw.flush {
            let (at, flush) = (Some(flush.span()), flush.into_inner());
            if flush.threads.is_some_and(|n| !(1..=64).contains(&n)) {
                let what = "threads: 1 to 64 are allowed".into();
                return Err(Fault { at, what });
            }
            let f = &mut self.flush;
            f.threads = flush.threads.or(f.threads);
            f.rate = flush.rate.or(f.rate);
            f.zstd = flush.zstd.or(f.zstd);
            f.verify = flush.verify.or(f.verify);
        }
        if let Some(redundancy) = raw.redundancy {
            let at = Some(redundancy.span());
            self.redundancy.add(redundancy.into_inner());
            self.redundancy.check().map_err(|what| Fault { at, what })?;
        }
        Ok(())
    }

    /// The tiers that outlive the node.
    pub fn durable(&self) -> impl Iterator<Item = &Tier> {
        self.tiers.iter().filter(|t| matches!(t.kind, Kind::Pfs | Kind::Object))
    }

    /// The tiers in which chunks lie until they have been moved to the job directory.
    pub fn local(&self) -> impl Iterator<Item = &Tier> {
        self.tiers.iter().filter(|t| matches!(t.kind, Kind::Memory | Kind::Local))
    }
}

fn user_file() -> Option<PathBuf> {
    let base = match std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => dir,
        _ => PathBuf::from(std::env::var_os("HOME").filter(|h| !h.is_empty())?).join(".config"),
    };
    Some(base.join("belay/belay.toml"))
}

/// What is wrong, and where.
#[derive(Debug)]
struct Fault {
    at: Option<Range<usize>>,
    what: String,
}

impl Fault {
    fn locate(&self, path: &Path, text: &str) -> String {
        let path = path.display();
        let Some(at) = self.at.as_ref().map(|r| r.start.min(text.len())) else {
            return format!("{path}: {}", self.what);
        };
        let line = text[..at].matches('\n').count();
        let key = text.lines().nth(line).and_then(|l| l.split_once('=')).map(|(k, _)| k.trim());
        let key = key
            .filter(|k| !self.what.contains(k))
            .map_or(String::new(), |k| format!("{k}: "));
        format!("{path}: line {}: {key}{}", line + 1, self.what.replace('\n', " "))
    }
}

fn check(t: &Tier) -> Result<(), String> {
    let name = &t.name;
    if !belay_storage::tier::is_key(name) || name.contains('/') {
        return Err(format!("name: `{name}` is not a name of letters, digits, `.`, `_` and `-`"));
    }
    let says = |b: bool, key: &str| b.then(|| format!("tier {name}: {key}"));
    let absolute = t.path.as_ref().is_some_and(|p| p.is_absolute());
    let url = t.url.as_deref().unwrap_or_default();
    let faults = match t.kind {
        Kind::Object => [
            says(t.path.is_some(), "path: not for kind = \"object\", which has a url"),
            says(
                url.starts_with("file:"),
                "url: a directory is no object store: use kind = \"pfs\" with path = \"/DIRECTORY\"",
            )
            .or(says(
                !OBJECT_SCHEMES.iter().any(|s| url.starts_with(s)),
                &format!("url: {OBJECT_URLS} is needed for kind = \"object\""),
            ))
            .or(says(
                t.region.is_some() && !url.starts_with("s3://"),
                "region: only for s3:// (elsewhere the bucket or account has one)",
            )),
        ],
        Kind::Memory | Kind::Local | Kind::Pfs => [
            says(
                t.url.is_some() || t.endpoint.is_some() || t.region.is_some(),
                "url, endpoint and region are only for kind = \"object\"",
            ),
            says(
                !absolute,
                "path: an absolute path of a directory is needed for every kind but \"object\"",
            )
            .or(says(
                t.kind == Kind::Memory && t.capacity.is_none(),
                "capacity: needed for kind = \"memory\", or checkpoints could take all of it",
            )),
        ],
    };
    faults.into_iter().flatten().next().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[[tier]]
name = "scratch"
kind = "pfs"
path = "/scratch/me"
capacity = "2G"

[[tier]]
name = "cloud"
kind = "object"
url = "s3://bucket/prefix"

[flush]
threads = 2
rate = 1000
zstd = 3
"#;

    fn refused(text: &str) -> String {
        let fault = Config::default().add(text).unwrap_err();
        fault.locate(Path::new("/x/belay.toml"), text)
    }

    #[test]
    fn later_files_lie_over_earlier_ones() {
        let mut c = Config::default();
        c.add(GOOD).unwrap();
        c.add("[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"/other\"\n[flush]\nzstd = \"auto\"")
            .unwrap();
        assert_eq!(c.tiers.len(), 2);
        assert_eq!(c.tiers[0].path.as_deref(), Some(Path::new("/other")));
        assert_eq!(c.tiers[0].capacity, None);
        assert_eq!((c.flush.threads, c.flush.rate), (Some(2), Some(Size(1000))));
        assert_eq!((c.flush.zstd, c.durable().count()), (Some(Compression::Auto), 2));
        let stored = serde_json::to_string(&c).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&stored).unwrap(), c);
    }

    #[test]
    fn every_object_store_can_be_named() {
        for url in ["gs://b/p", "az://c", "abfs://c/p", "abfss://c@a.dfs.core.windows.net/p"] {
            let mut c = Config::default();
            c.add(&GOOD.replacen("s3://bucket/prefix", url, 1)).unwrap();
            assert_eq!(c.tiers[1].url.as_deref(), Some(url));
        }
    }

    #[test]
    fn errors_name_line_key_and_what_is_allowed() {
        for (change, words) in [
            (
                ("kind = \"pfs\"", "kind = \"tape\""),
                &["line 4", "kind", "`memory`, `local`, `pfs`, `object`"][..],
            ),
            (("threads = 2", "threads = \"two\""), &["line 14", "threads", "u32"]),
            (("threads = 2", "threads = 0"), &["threads", "1 to 64"]),
            (
                ("threads = 2", "thread = 2"),
                &["line 14", "thread", "`threads`, `rate`, `zstd`, `verify`"],
            ),
            (("rate = 1000", "rate = \"1X\""), &["line 15", "rate", "K, M, G or T"]),
            (("zstd = 3", "zstd = 20"), &["line 16", "zstd", "1 to 19"]),
            (
                ("path = \"/scratch/me\"", "path = \"scratch\""),
                &["line 2", "scratch", "path", "absolute"],
            ),
            (
                ("url = \"s3://bucket/prefix\"", "url = \"x\""),
                &[
                    "line 8",
                    "cloud",
                    "url",
                    "s3://BUCKET/PREFIX",
                    "gs://BUCKET",
                    "az://CONTAINER",
                ],
            ),
            (
                ("url = \"s3://bucket/prefix\"", "url = \"gs://bucket\"\nregion = \"x\""),
                &["line 8", "cloud", "region", "s3://"],
            ),
            (
                ("url = \"s3://bucket/prefix\"", "url = \"file:///scratch/me\""),
                &["line 8", "cloud", "url", "kind = \"pfs\"", "path"],
            ),
            (("name = \"cloud\"", "name = \"a/b\""), &["line 8", "name", "a/b"]),
            (("[flush]", "[flsh]"), &["line 13", "flsh", "`tier`, `flush`, `placement`"]),
            (("name = \"cloud\"\n", ""), &["line", "`name`"]),
            (("[flush]", "[flush"), &["line 13"]),
            (
                ("[flush]", "[redundancy]\nscheme = \"raid\"\n[flush]"),
                &["line 14", "scheme", "reed-solomon"],
            ),
            (
                ("[flush]", "[redundancy]\nlocal = \"x\"\n[flush]"),
                &["line 13", "local", "absolute"],
            ),
        ] {
            let message = refused(&GOOD.replacen(change.0, change.1, 1));
            for w in words.iter().chain(&["/x/belay.toml"]) {
                assert!(message.contains(w), "{change:?}: {message:?} does not name {w:?}");
            }
        }
    }
}
