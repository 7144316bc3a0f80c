//! The configuration: `/etc/belay/belay.toml`, under `$XDG_CONFIG_HOME/belay/belay.toml`, under the file of `--config`.
//!
//! ```toml
//! [[tier]]
//! name = "scratch"            # unique; the same name in a later file replaces the entry
//! kind = "pfs"                # memory, local, pfs or object
//! path = "/scratch/me"        # pfs: a directory that is there
//! capacity = "2T"             # most bytes for one job
//! timeout = "60s"             # object: how long a request may take, and is tried again
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
//! [encryption]                # what goes to tiers of kind pfs and object is sealed, see `keys`
//! key_file = "/home/me/.config/belay/keys"   # or key_command = ["COMMAND", "ARGUMENT"]
//!
//! [checkpoints]               # of each job, see `limits`
//! keep = 3                    # unless --keep says otherwise
//! save_open_files = "64M"     # contents of open files up to this length, unless --save-open-files says otherwise
//! save_code = true            # with the programs and libraries that processes map, unless --no-save-code says otherwise
//! max_bytes = "500G"          # in the site's file: more is not allowed
//! roots = ["/scratch"]        # directories: checkpoints lie below these and nowhere else; object stores are not asked about
//!
//! [tree]                      # jobs on several hosts
//! fan_out = 16                # agents that are connected to one agent from below
//! listen = ["ib0", "10.0.0.0/8"]   # interfaces, networks or addresses at which they may listen for each other
//!
//! [gate]                      # libraries in the program that come to rest before a checkpoint
//! limit = "5s"                # how long that may take
//! rebuild = "5m"              # how long they may make things again in each step of a restart
//!
//! [verbs]                     # the library for InfiniBand in the programs of the job
//! enable = "auto"             # "off", "auto" where the host has adapters (the default), or "on"
//!
//! [levels]                    # how often a checkpoint also becomes that
//! redundant = "every 1"       # the number of checkpoints, or a time
//! durable = "every 6"         # or "auto", with durable_mtti
//!
//! [redundancy]                # jobs on several hosts, see docs/redundancy.md
//! scheme = "xor"              # partner, xor or reed-solomon
//! group = 4                   # hosts
//! parity = 1                  # how many of them may be lost
//! local = "/local/scratch"    # a directory on every host's own disk
//! domains = [["n1", "n2"], ["n3", "n4"]]   # hosts that fail together
//! ```
//! An error names file, line and key, and what is allowed. What a launch has read is kept in `job.json`, so that a
//! restart finds the tiers again.

mod encryption;
mod levels;
mod limits;
mod values;

use crate::nodes::addresses;
use crate::redundancy::settings::Redundancy;
use crate::sys;
use crate::verbs::Verbs;
use crate::Failure;
use belay_kernel::trust::{self, Untrusted};
use belay_storage::flush::compress::Compression;
use belay_storage::place::rule::Policy;
use belay_storage::tier::{OBJECT_SCHEMES, OBJECT_URLS};
use belay_wire::Exit;
pub use encryption::Encryption;
pub use levels::{Levels, Pace};
use limits::RawCheckpoints;
pub use limits::{Limits, Use};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
pub use values::{SavedFiles, Size, Time};

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
    /// How long the object store may keep a request waiting, and for how long one that fails is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Time>,
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

impl Flush {
    fn check(&self) -> Result<(), String> {
        if self.threads.is_some_and(|n| !(1..=64).contains(&n)) {
            return Err("threads: 1 to 64 are allowed".into());
        }
        match self.zstd {
            Some(Compression::Level(level)) if !(1..=19).contains(&level) => Err("zstd: levels from 1 to 19 are allowed".into()),
            _ => Ok(()),
        }
    }
}

/// `[placement]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// How a local tier is chosen for a chunk.
    #[serde(default)]
    pub policy: Policy,
}

/// Children of an agent in the tree of a job's agents, where the configuration does not say.
const FAN_OUT: u32 = 16;
/// Most of them.
const MAX_FAN_OUT: u32 = 1024;

/// `[tree]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    /// Most agents of other hosts that are connected to one agent from below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fan_out: Option<u32>,
    /// Interfaces, networks and addresses at which the root may listen; elsewhere it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<Vec<String>>,
}

impl Tree {
    /// Children of an agent.
    pub fn fan_out(&self) -> u64 {
        self.fan_out.unwrap_or(FAN_OUT).into()
    }

    fn check(&self) -> Result<(), String> {
        if self.fan_out.is_some_and(|n| !(1..=MAX_FAN_OUT).contains(&n)) {
            return Err(format!("fan_out: 1 to {MAX_FAN_OUT} are allowed"));
        }
        addresses::check(self.listen()).map_err(|why| format!("listen: {why}"))
    }

    /// Where the root may listen; everywhere, where nothing is said.
    pub fn listen(&self) -> &[String] {
        self.listen.as_deref().unwrap_or_default()
    }
}

/// The least and the most time that a library may have to come to rest.
const GATE_LIMITS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(3600));

/// `[gate]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// How long libraries may take to come to rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Time>,
    /// How long they may take, in each of its steps, to make again what a restart does not bring back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild: Option<Time>,
}

impl Gate {
    /// How long they may take to come to rest.
    pub fn limit(&self) -> Duration {
        self.limit.map_or(belay_plugins::gate::LIMIT, |t| t.0)
    }

    /// How long they may take to make things again. What is said of coming to rest was the limit of this too, once.
    pub fn rebuild(&self) -> Duration {
        let usual = || belay_plugins::gate::REBUILD_LIMIT.max(self.limit());
        self.rebuild.map_or_else(usual, |t| t.0)
    }

    fn check(&self) -> Result<(), String> {
        let (least, most) = GATE_LIMITS;
        for (key, time) in [("limit", self.limit()), ("rebuild", self.rebuild())] {
            if !(least..=most).contains(&time) {
                return Err(format!("{key}: 1ms to 1h are allowed"));
            }
        }
        Ok(())
    }
}

/// `[flush]` as people write it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFlush {
    threads: Option<u32>,
    rate: Option<Size>,
    #[serde(default, deserialize_with = "values::compression")]
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
    checkpoints: Option<RawCheckpoints>,
    tree: Option<toml::Spanned<Tree>>,
    gate: Option<toml::Spanned<Gate>>,
    verbs: Option<Verbs>,
    redundancy: Option<toml::Spanned<Redundancy>>,
    levels: Option<Levels>,
    encryption: Option<toml::Spanned<Encryption>>,
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
    /// How the agents of jobs on several hosts are connected.
    #[serde(default)]
    pub tree: Tree,
    /// How long libraries in the program may take to come to rest.
    #[serde(default)]
    pub gate: Gate,
    /// Whether programs have the library for InfiniBand in front of libibverbs.
    #[serde(default)]
    pub verbs: Verbs,
    /// How jobs on several hosts are made redundant.
    #[serde(default)]
    pub redundancy: Redundancy,
    /// How often.
    #[serde(default)]
    pub levels: Levels,
    /// How what goes to durable tiers is sealed.
    #[serde(default)]
    pub encryption: Encryption,
}

impl Config {
    /// Reads the site's file, the user's, and `file`, which alone must be there.
    pub fn load(file: Option<&Path>) -> Result<(Self, Limits), Failure> {
        let (mut config, mut limits) = (Self::default(), Limits::default());
        match std::fs::metadata(SITE) {
            Err(e) if is_absent(&e) => {}
            Err(e) => return Err(Failure::io(format!("read {SITE}"), &e)),
            Ok(_) => config.add_file(&mut limits, Path::new(SITE))?,
        }
        limits.note_site(&config);
        if let Some(path) = user_file() {
            config.add_user_file(&mut limits, &path)?;
        }
        if let Some(path) = file {
            config.add_file(&mut limits, path)?;
        }
        Ok((config, limits))
    }

    /// The same for a job that is made redundant so.
    #[must_use]
    pub fn of_job(self, redundancy: Redundancy) -> Self {
        Self { redundancy, ..self }
    }

    fn add_file(&mut self, limits: &mut Limits, path: &Path) -> Result<(), Failure> {
        let file = open(path).map_err(|e| Failure::io(format!("read {}", path.display()), &e))?;
        self.add_open(limits, path, &file)
    }

    /// The user's file. One that cannot be reached is left out: whoever became another user by `setpriv`, or in a batch
    /// job, may still have the HOME of the one before. One that others can write would decide where the checkpoints go.
    fn add_user_file(&mut self, limits: &mut Limits, path: &Path) -> Result<(), Failure> {
        let fail = |e: &io::Error| Failure::io(format!("read {}", path.display()), e);
        let file = match open(path) {
            Ok(file) => file,
            Err(e) if is_absent(&e) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let at = path.display();
                sys::say(&format!(
                    "{at} is left out: HOME or XDG_CONFIG_HOME names a directory of somebody else; set it to one of your own"
                ));
                return Ok(());
            }
            Err(e) => return Err(fail(&e)),
        };
        let absolute = std::path::absolute(path).map_err(|e| fail(&e))?;
        let found = match trust::file(&absolute, None) {
            Ok(found) => found.metadata().map_err(|e| fail(&e))?,
            Err(Untrusted::Io(e)) => return Err(fail(&e)),
            Err(others) => {
                let at = path.display();
                let why = format!("{at} is not yours alone: {others}; or set HOME or XDG_CONFIG_HOME to a directory of your own");
                return Err(Failure::new(Exit::NotOurs, why));
            }
        };
        let m = file.metadata().map_err(|e| fail(&e))?;
        if (found.dev(), found.ino()) != (m.dev(), m.ino()) {
            return Err(fail(&io::Error::other("another file lies there now")));
        }
        self.add_open(limits, path, &file)
    }

    fn add_open(&mut self, limits: &mut Limits, path: &Path, file: &File) -> Result<(), Failure> {
        let mut text = String::new();
        let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
        read.map_err(|e| Failure::io(format!("read {}", path.display()), &e))?;
        if text.len() as u64 > MAX_FILE {
            let why = format!("{}: more than {MAX_FILE} bytes, as no configuration has", path.display());
            return Err(Failure::new(Exit::Usage, why));
        }
        self.lay(limits, path, &text)
    }

    /// Lays what `text`, the contents of the file at `path`, says over what is known.
    pub fn lay(&mut self, limits: &mut Limits, path: &Path, text: &str) -> Result<(), Failure> {
        let added = self.add(text).map_err(|e| Failure::new(Exit::Usage, e.locate(path, text)))?;
        limits.add((path, text), added);
        Ok(())
    }

    /// The same without what it says in `[checkpoints]`, which is returned.
    fn add(&mut self, text: &str) -> Result<RawCheckpoints, Fault> {
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
            let f = &mut self.flush;
            f.threads = flush.threads.or(f.threads);
            f.rate = flush.rate.or(f.rate);
            f.zstd = flush.zstd.or(f.zstd);
            f.verify = flush.verify.or(f.verify);
            f.check().map_err(|what| Fault { at, what })?;
        }
        if let Some(tree) = raw.tree {
            let (at, tree) = (Some(tree.span()), tree.into_inner());
            tree.check().map_err(|what| Fault { at, what })?;
            self.tree.fan_out = tree.fan_out.or(self.tree.fan_out);
            self.tree.listen = tree.listen.or(self.tree.listen.take());
        }
        if let Some(gate) = raw.gate {
            let (at, gate) = (Some(gate.span()), gate.into_inner());
            gate.check().map_err(|what| Fault { at, what })?;
            self.gate.limit = gate.limit.or(self.gate.limit);
            self.gate.rebuild = gate.rebuild.or(self.gate.rebuild);
        }
        if let Some(verbs) = raw.verbs {
            self.verbs.enable = verbs.enable.or(self.verbs.enable);
        }
        self.levels.add(raw.levels.unwrap_or_default());
        if let Some(redundancy) = raw.redundancy {
            let at = Some(redundancy.span());
            self.redundancy.add(redundancy.into_inner());
            self.redundancy.check().map_err(|what| Fault { at, what })?;
        }
        if let Some(encryption) = raw.encryption {
            let (at, encryption) = (Some(encryption.span()), encryption.into_inner());
            let what = match encryption.is_on() {
                true => encryption.check(),
                false => Err("key_file or key_command is needed".into()),
            };
            what.map_err(|what| Fault { at, what })?;
            self.encryption = encryption;
        }
        let checkpoints = raw.checkpoints.unwrap_or_default();
        checkpoints.check()?;
        Ok(checkpoints)
    }

    /// What cannot be in a configuration that was kept: the same as in a file.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        for tier in &self.tiers {
            check(tier)?;
            if !names.insert(&tier.name) {
                return Err(format!("name: two tiers are called {}", tier.name));
            }
        }
        self.flush.check()?;
        self.tree.check()?;
        self.gate.check()?;
        self.levels.check().map_err(|why| format!("levels: {why}"))?;
        self.encryption.check().map_err(|why| format!("encryption: {why}"))?;
        self.redundancy.check().map_err(|why| format!("redundancy: {why}"))
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

/// Opens a file; a FIFO in its place does not keep the caller waiting.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

fn is_absent(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
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
            .or(says(t.timeout.is_some_and(|t| t.0.as_secs() < 1), "timeout: at least 1 s"))
            .or(says(
                t.region.is_some() && !url.starts_with("s3://"),
                "region: only for s3:// (elsewhere the bucket or account has one)",
            )),
        ],
        Kind::Memory | Kind::Local | Kind::Pfs => [
            says(
                t.url.is_some() || t.endpoint.is_some() || t.region.is_some() || t.timeout.is_some(),
                "url, endpoint, region and timeout are only for kind = \"object\"",
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
mod tests;
