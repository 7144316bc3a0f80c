//! `predictions.json` in the job directory: of the newest generations what was predicted and observed. It outlives the
//! generations and the agents; what is lost with it is a few factors, so nothing waits for the disk.

use belay_image::manifest::MAX_NUMBER;
use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use belay_storage::predict::{Work, MOST_S};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;

/// Name of the file.
const FILE: &str = "predictions.json";
const NEW: &str = ".predictions.json.new";
/// Version of it.
const FORMAT: u32 = 1;
/// So many of the newest generations are kept.
pub(super) const MOST: usize = 64;
/// No kernel has more processes, and no node more memory.
const MOST_PROCESSES: u32 = 1 << 22;
const MOST_MEMORY: u64 = 1 << 52;
/// Longest file that is read.
const MAX_BYTES: u64 = 1 << 18;

/// One of the times of a generation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Compared {
    /// What was predicted before.
    pub(super) predicted_s: Option<f64>,
    pub(super) observed_s: Option<f64>,
}

/// What pages and processes cost, seconds, and the share of pages that were written.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Measured {
    pub(super) process_s: Option<f64>,
    pub(super) fork_page_s: Option<f64>,
    pub(super) scan_page_s: Option<f64>,
    pub(super) hash_page_s: Option<f64>,
    pub(super) write_page_s: Option<f64>,
    pub(super) dirty: Option<f64>,
    /// Bytes per second that moves out of local tiers have reached.
    pub(super) moves: Option<f64>,
}

/// A generation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Record {
    pub(super) generation: u64,
    pub(super) processes: u32,
    pub(super) bytes: u64,
    pub(super) new_bytes: u64,
    /// What durable tiers lacked of it.
    pub(super) flushed_bytes: Option<u64>,
    pub(super) stop: Compared,
    pub(super) local: Compared,
    pub(super) durable: Compared,
    pub(super) restart: Compared,
    pub(super) measured: Measured,
}

impl Record {
    /// What it was.
    pub(super) fn work(&self) -> Work {
        Work {
            processes: self.processes,
            bytes: self.bytes,
            new_bytes: self.new_bytes,
            flush_bytes: self.flushed_bytes.unwrap_or(0),
        }
    }

    /// Only what can be a time or a share is believed of a file.
    fn checked(mut self) -> Option<Self> {
        let times = [&mut self.stop, &mut self.local, &mut self.durable, &mut self.restart];
        let times = times.into_iter().flat_map(|c| [&mut c.predicted_s, &mut c.observed_s]);
        let m = &mut self.measured;
        let costs = [
            &mut m.process_s,
            &mut m.fork_page_s,
            &mut m.scan_page_s,
            &mut m.hash_page_s,
            &mut m.write_page_s,
        ];
        for value in times.chain(costs) {
            *value = value.filter(|v| (0.0..=MOST_S).contains(v));
        }
        m.moves = m.moves.filter(|rate| rate.is_finite() && *rate > 0.0);
        m.dirty = m.dirty.filter(|share| (0.0..=1.0).contains(share));
        let amounts = [self.bytes, self.new_bytes, self.flushed_bytes.unwrap_or(0)];
        let can_be = self.generation < MAX_NUMBER && self.processes <= MOST_PROCESSES && amounts.iter().all(|n| *n <= MOST_MEMORY);
        can_be.then_some(self)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    format: u32,
    /// Id of the job: a directory may get another one.
    job: String,
    records: Vec<Record>,
}

/// The records of a job, oldest first.
#[derive(Debug)]
pub(super) struct Records {
    job: String,
    pub(super) list: Vec<Record>,
}

impl Records {
    /// Those of job `job` in `dir`; none where there is no such file, or it is no good.
    pub(super) fn read(dir: &Path, job: &str) -> Self {
        let path = dir.join(FILE);
        let decoded = files::read(&path, MAX_BYTES).and_then(|bytes| Self::decode(&path, &bytes));
        match decoded {
            Ok(records) if records.job == job => return records,
            Err(ImageError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "predictions begin anew"),
            Ok(_) => {}
        }
        Self {
            job: job.to_owned(),
            list: Vec::new(),
        }
    }

    /// What `bytes`, those of the file at `path`, say.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self, ImageError> {
        let document: Document = serde_json::from_slice(bytes).map_err(|e| ImageError::damaged(path, e.to_string()))?;
        if document.format != FORMAT {
            return Err(ImageError::damaged(path, format!("format {}, not {FORMAT}", document.format)));
        }
        let mut records = Self {
            job: document.job,
            list: document.records.into_iter().filter_map(Record::checked).collect(),
        };
        records.settle();
        Ok(records)
    }

    /// In order, each generation once, and not too many.
    fn settle(&mut self) {
        self.list.sort_by_key(|r| r.generation);
        self.list.dedup_by_key(|r| r.generation);
        self.list.drain(..self.list.len().saturating_sub(MOST));
    }

    /// Adds that of a generation. Those with greater numbers were given up: the job went on from an earlier one.
    pub(super) fn add(&mut self, record: Record) {
        self.list.retain(|r| r.generation < record.generation);
        self.list.push(record);
        self.settle();
    }

    pub(super) fn find(&mut self, generation: u64) -> Option<&mut Record> {
        self.list.iter_mut().find(|r| r.generation == generation)
    }

    /// Writes them, so that a reader sees the old ones or the new ones. A full disk is no reason to fail.
    pub(super) fn write(&self, dir: &Path) {
        if let Err(error) = self.try_write(dir) {
            tracing::warn!(%error, "predictions are not kept");
        }
    }

    fn try_write(&self, dir: &Path) -> Result<(), ImageError> {
        let document = Document {
            format: FORMAT,
            job: self.job.clone(),
            records: self.list.clone(),
        };
        let (path, new) = (dir.join(FILE), dir.join(NEW));
        let text = serde_json::to_vec(&document).map_err(|e| ImageError::damaged(&new, e.to_string()))?;
        let mut file = create_private(&new)?;
        file.write_all(&text).map_err(|e| ImageError::io("write", &new, e))?;
        std::fs::rename(&new, &path).map_err(|e| ImageError::io("rename", &new, e))
    }
}
