//! What a job is, and the choices that hold for it: the contents of `job.json`. One validation for all who read it,
//! wherever it lies.

use crate::config::{Config, SavedFiles};
use crate::history::History;
use crate::interval::{Interval, MIN_GAP, SPANS};
use crate::{sys, Failure};
use belay_image::name::Name;
use belay_storage::page_key::PageKey;
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Version of `job.json`.
const FORMAT: u32 = 1;

/// Longest id, and longest name of a job.
const MAX_ID: usize = 64;
const MAX_NAME: usize = 4096;
/// Latest time: the end of the year 9999.
const MAX_TIME: u64 = 253_402_300_799;

/// How a checkpoint finds out what the ones before have stored already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Differential {
    /// By the pages' contents.
    #[default]
    Hash,
    /// By the kernel's record of written pages, where it has one, and by the pages' contents.
    Written,
    /// Not at all.
    Off,
}

/// Contents of `job.json`: what the job is, and the choices that hold for it until they are changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Version of this file.
    pub format: u32,
    /// Name of the job.
    pub name: String,
    /// Tells the job from all others, wherever its checkpoints are copied.
    #[serde(default)]
    pub id: String,
    /// The job directory.
    #[serde(default)]
    pub dir: Name,
    /// Folder of its own on a tier, where that is not the job's: see [`Description::folder`].
    #[serde(skip)]
    pub folder: Option<String>,
    /// It may get parts on other hosts.
    #[serde(default)]
    pub across_hosts: bool,
    /// The command.
    pub command: Vec<Name>,
    /// Directory in which it was launched.
    pub cwd: Name,
    /// Host on which it was launched.
    pub host: String,
    /// When it was launched.
    pub created_unix_s: u64,
    /// The fraction of that second, nanoseconds: files as young as the job are told from older ones by it.
    #[serde(default)]
    pub created_ns: u32,
    /// Checkpoint interval.
    pub interval: Interval,
    /// Mean time to interrupt, where the user has named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtti_s: Option<f64>,
    /// Shortest time between two automatic checkpoints.
    #[serde(default = "min_gap_s")]
    pub min_gap_s: f64,
    /// How long it has run, and how often it was interrupted.
    #[serde(default)]
    pub history: History,
    /// Whole generations to keep.
    pub keep: u32,
    /// Most bytes that the checkpoints may take, where there is a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// What the site allows instead, where that is less: until the next restart, which asks again.
    #[serde(skip)]
    pub allowed_bytes: Option<u64>,
    /// With what pages are hashed that need not be stored again: not to be known to who could give the programs data.
    #[serde(default)]
    pub page_key: PageKey,
    /// How to find what need not be stored again.
    #[serde(default)]
    pub differential: Differential,
    /// Which open files have their contents saved.
    pub save_open_files: SavedFiles,
    /// Save the programs and libraries that its processes map.
    #[serde(default = "yes")]
    pub save_code: bool,
    /// What its programs declare that they overwrite is not stored.
    #[serde(default = "yes")]
    pub leave_out: bool,
    /// Only where no instruction of a program lies between the stop and the loop that overwrites it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub certain: bool,
    /// It is stored, but what could be left out is told.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub report: bool,
    /// The arrays that its programs start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<Name>,
    /// The last restart was to go on whatever instructions the processor lacks; for the parts on other hosts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub any_cpu: bool,
    /// Log level.
    pub log_level: String,
    /// Where the job's numbers are to be had, see [`crate::exporter::Place`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<String>,
    /// Tiers besides the job directory.
    #[serde(default)]
    pub config: Config,
    /// Hosts whose parts were lost during the last run, where it was ended for that, and when that was noticed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<(String, u64)>,
    /// It has ended as programs do that touch memory which a checkpoint has left out: the next restart is from one in
    /// which nothing was.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub astray: bool,
    /// How the last run of the command ended: the status word as `wait` reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_status: Option<i32>,
}

pub(crate) fn yes() -> bool {
    true
}

fn min_gap_s() -> f64 {
    MIN_GAP.as_secs_f64()
}

/// What stands before and behind the checksum at the end of `job.json`.
const SEAL: (&[u8], &[u8]) = (b",\n  \"xxh3\": \"", b"\"\n}");

/// What the checksum at the end of `text` is of, and itself, in hexadecimal digits. There is none where an older belay or
/// an editor has written it.
fn unseal(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (body, digits) = text.strip_suffix(SEAL.1)?.split_last_chunk::<16>()?;
    Some((body.strip_suffix(SEAL.0)?, digits))
}

impl Description {
    /// The contents of `job.json`.
    pub fn encode(&self) -> Result<Vec<u8>, Failure> {
        let text = serde_json::to_vec_pretty(self).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
        let body = text.strip_suffix(b"\n}").unwrap_or(&text);
        let digits = format!("{:016x}", belay_image::checksum(body));
        Ok([body, SEAL.0, digits.as_bytes(), SEAL.1].concat())
    }

    /// Decodes the contents of `job.json`, naming it `path` in errors.
    pub fn decode(path: &Path, text: &[u8]) -> Result<Self, Failure> {
        let at = path.display();
        if unseal(text).is_some_and(|(body, digits)| format!("{:016x}", belay_image::checksum(body)).as_bytes() != digits) {
            return Err(Failure::new(
                Exit::Damaged,
                format!("{at}: damaged: its checksum does not match"),
            ));
        }
        let d: Self = serde_json::from_slice(text).map_err(|e| Failure::new(Exit::Damaged, format!("{at}: damaged: {e}")))?;
        if d.format != FORMAT {
            return Err(Failure::new(
                Exit::ImageVersion,
                format!("{at}: format {}, this belay reads format {FORMAT}", d.format),
            ));
        }
        d.check()
            .map_err(|why| Failure::new(Exit::Damaged, format!("{at}: damaged: {why}")))?;
        Ok(d)
    }

    /// What no belay has written, and no other code is to meet: ids and names that lead elsewhere as parts of paths,
    /// times that are none.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.id.len() > MAX_ID || !self.id.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(format!("id: no number of at most {MAX_ID} hexadecimal digits"));
        }
        if self.name.len() > MAX_NAME {
            return Err(format!("name: longer than {MAX_NAME} bytes"));
        }
        let spans = [("min_gap_s", Some(self.min_gap_s)), ("mtti_s", self.mtti_s)];
        for (key, seconds) in spans.into_iter().filter_map(|(key, s)| Some((key, s?))) {
            if !SPANS.contains(&seconds) {
                return Err(format!(
                    "{key}: from {} to {} seconds are allowed",
                    SPANS.start(),
                    SPANS.end()
                ));
            }
        }
        let since = self.history.since_unix_s.unwrap_or(0);
        let times = [
            ("created_unix_s", self.created_unix_s),
            ("history", since),
            ("history", self.history.run_s),
        ];
        let lost = self.lost.iter().map(|(_, noticed)| ("lost", *noticed));
        if let Some((key, _)) = times.into_iter().chain(lost).find(|(_, time)| *time > MAX_TIME) {
            return Err(format!("{key}: later than {MAX_TIME} s after 1970"));
        }
        if self.created_ns >= 1_000_000_000 {
            return Err("created_ns: not less than a second".into());
        }
        if self.keep == 0 {
            return Err("keep: at least 1".into());
        }
        self.config.check().map_err(|why| format!("config: {why}"))
    }

    /// When it was launched.
    pub(crate) fn created(&self) -> SystemTime {
        UNIX_EPOCH + Duration::new(self.created_unix_s, self.created_ns)
    }

    /// A new job.
    pub fn new(name: Option<String>, command: Vec<Name>) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = name.unwrap_or_else(|| {
            let program = command.first().cloned().unwrap_or_default();
            program
                .as_path()
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        });
        Self {
            format: FORMAT,
            name,
            id: random_id(),
            dir: Name::default(),
            folder: None,
            across_hosts: false,
            command,
            cwd: std::env::current_dir().unwrap_or_default().into(),
            host: sys::host(),
            created_unix_s: now.as_secs(),
            created_ns: now.subsec_nanos(),
            interval: Interval::Never,
            mtti_s: None,
            min_gap_s: min_gap_s(),
            history: History::default(),
            keep: 2,
            max_bytes: None,
            allowed_bytes: None,
            page_key: PageKey::random(),
            differential: Differential::Hash,
            save_open_files: SavedFiles::default(),
            save_code: true,
            leave_out: true,
            certain: false,
            report: false,
            from: None,
            any_cpu: false,
            log_level: "info".into(),
            metrics: None,
            config: Config::default(),
            lost: Vec::new(),
            astray: false,
            wait_status: None,
        }
    }

    /// Whether programs are asked what their loops do.
    pub(crate) fn hears(&self) -> bool {
        self.leave_out || self.report
    }

    /// Most bytes that the checkpoints may take now, where there is a limit.
    pub fn limit(&self) -> Option<u64> {
        self.allowed_bytes.or(self.max_bytes)
    }

    /// Whether the id is one that belay has made: it becomes a part of paths.
    pub fn has_good_id(&self) -> bool {
        !self.id.is_empty() && self.id.chars().all(|c| c.is_ascii_hexdigit())
    }

    /// Name of the job's folder on a tier.
    pub fn folder(&self) -> String {
        if let Some(folder) = &self.folder {
            return folder.clone();
        }
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let name: String = self.name.chars().map(|c| if good(c) { c } else { '_' }).take(40).collect();
        format!("{name}-{}", self.id)
    }
}

/// 64 random bits.
fn random_id() -> String {
    let mut bytes = [0u8; 8];
    // It cannot fail for so few bytes once the system has started.
    let _ = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    format!("{:016x}", u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobdir::JobDir;

    #[test]
    fn what_is_described_is_read_again_and_what_cannot_be_is_neither() {
        let path = std::env::temp_dir().join(format!("belay-jobdir-{}", std::process::id()));
        let dir = JobDir::create(&path).unwrap();
        let good = Description::new(Some("a name".into()), vec!["x".into()]);
        dir.describe(&good).unwrap();
        assert_eq!(dir.description().unwrap(), good);
        let bad: [fn(&mut Description); 7] = [
            |d| d.id = "../x".into(),
            |d| d.name = "x".repeat(MAX_NAME + 1),
            |d| d.min_gap_s = f64::INFINITY,
            |d| d.mtti_s = Some(-5.0),
            |d| d.created_unix_s = u64::MAX,
            |d| d.created_ns = 1_000_000_000,
            |d| d.keep = 0,
        ];
        for (n, change) in bad.iter().enumerate() {
            let mut d = good.clone();
            change(&mut d);
            assert!(dir.describe(&d).is_err(), "{n}");
            let text = serde_json::to_vec(&d).unwrap();
            assert_eq!(Description::decode(&path, &text).unwrap_err().exit, Exit::Damaged, "{n}");
        }
        assert_eq!(dir.description().unwrap(), good);
        std::fs::remove_dir_all(path).unwrap();
    }
}
