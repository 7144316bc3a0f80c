//! Tiers of known speeds: files in memory behind token buckets. The slow one's is shared by those who write and read it,
//! as a device's is. Which chunk goes where is decided by the code that decides it in the agent
//! (`belay_storage::place`), with the model that a calibration of these tiers gives.

use belay_storage::place::desk::{Desk, Place, Spec};
use belay_storage::place::model::Model;
use belay_storage::place::rule::Policy;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a chunk.
pub(crate) const CHUNK: u64 = 2 << 20;
const PIECE: u64 = 256 << 10;
/// Moves at a time, as in the agent.
const FLUSHERS: usize = 2;

/// Who comes late by less than this finds the time that the device has had meanwhile.
const BURST: Duration = Duration::from_millis(10);

/// A device that moves so many bytes a second, for all who use it.
#[derive(Debug)]
struct Bucket {
    rate: f64,
    next: Mutex<Instant>,
}

impl Bucket {
    fn new(rate: f64) -> Self {
        Self {
            rate,
            next: Mutex::new(Instant::now()),
        }
    }

    /// When the device will have moved `bytes` more.
    fn due(&self, bytes: u64) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        *next = (*next).max(Instant::now() - BURST) + Duration::from_secs_f64(bytes as f64 / self.rate);
        *next
    }
}

fn wait_until(due: Instant) {
    if let Some(left) = due.checked_duration_since(Instant::now()) {
        std::thread::sleep(left);
    }
}

/// The tiers of a cell: memory has no bucket.
struct Tiers<'a> {
    dir: &'a Path,
    slow: Bucket,
    external: Bucket,
}

impl<'a> Tiers<'a> {
    fn new(dir: &'a Path, s: Setting) -> Self {
        Self {
            dir,
            slow: Bucket::new(s.slow),
            external: Bucket::new(s.external),
        }
    }

    fn path(&self, place: &str, id: u64) -> PathBuf {
        self.dir.join(format!("{place}-{id}"))
    }

    fn write(&self, place: Place, id: u64, data: &[u8]) -> std::io::Result<()> {
        let (name, bucket) = match place {
            Place::Tier(0) => ("memory", None),
            Place::Tier(_) => ("slow", Some(&self.slow)),
            Place::Home => ("external", Some(&self.external)),
        };
        let file = File::create(self.path(name, id))?;
        for at in (0..CHUNK).step_by(PIECE as usize) {
            let due = bucket.map(|b| b.due(PIECE));
            file.write_all_at(&data[at as usize..(at + PIECE) as usize], at)?;
            if let Some(due) = due {
                wait_until(due);
            }
        }
        Ok(())
    }

    fn flush(&self, tier: usize, id: u64) -> std::io::Result<()> {
        let from = self.path(if tier == 0 { "memory" } else { "slow" }, id);
        let (source, target) = (File::open(&from)?, File::create(self.path("external", id))?);
        let mut buf = vec![0; PIECE as usize];
        for at in (0..CHUNK).step_by(PIECE as usize) {
            let read = (tier > 0).then(|| self.slow.due(PIECE));
            let due = self.external.due(PIECE);
            source.read_exact_at(&mut buf, at)?;
            target.write_all_at(&buf, at)?;
            wait_until(read.map_or(due, |r| r.max(due)));
        }
        std::fs::remove_file(from)
    }
}

/// What each of `writers` gets of a tier, bytes per second.
fn sample(tiers: &Tiers<'_>, tier: usize, writers: u64) -> Result<f64, String> {
    let data = vec![7; CHUNK as usize];
    let write = |n: u64| {
        let begin = Instant::now();
        tiers.write(Place::Tier(tier), 1_000_000 + n, &data)?;
        Ok(CHUNK as f64 / begin.elapsed().as_secs_f64())
    };
    let write = &write;
    let rates: Vec<std::io::Result<f64>> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..writers).map(|n| s.spawn(move || write(n))).collect();
        threads.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    for n in 0..writers {
        let name = if tier == 0 { "memory" } else { "slow" };
        std::fs::remove_file(tiers.path(name, 1_000_000 + n)).map_err(|e| format!("calibrate: {e}"))?;
    }
    let rates = rates.into_iter().collect::<std::io::Result<Vec<f64>>>();
    rates
        .map(|r| r.iter().sum::<f64>() / r.len() as f64)
        .map_err(|e| format!("calibrate: {e}"))
}

/// What a calibration finds of the tier in memory and of the slow one.
pub(crate) fn models(dir: &Path, s: Setting) -> Result<[Model; 2], String> {
    let tiers = Tiers::new(dir, s);
    Ok([model(&tiers, 0)?, model(&tiers, 1)?])
}

fn model(tiers: &Tiers<'_>, tier: usize) -> Result<Model, String> {
    let step = 3;
    let samples = (0..3).map(|i| sample(tiers, tier, 1 + i * step)).collect::<Result<_, _>>()?;
    Model::new(step as u32, samples).ok_or_else(|| "calibrate: no time passed".into())
}

/// What is written, and where to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) writers: u64,
    /// Chunks of all writers together.
    pub(crate) chunks: u64,
    /// Bytes that the tier in memory holds.
    pub(crate) memory: u64,
    /// Bytes per second of the slow tier and of the external one.
    pub(crate) slow: f64,
    pub(crate) external: f64,
}

/// What a run has shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    /// Seconds until all is written,
    pub(crate) local: f64,
    /// and until all is on the external tier.
    pub(crate) all: f64,
    /// Chunks written to the slow one.
    pub(crate) slow: u64,
    /// Bytes per second of the moves, as the desk has observed them.
    pub(crate) moves: Option<f64>,
}

/// One run.
pub(crate) fn run(dir: &Path, policy: Policy, s: Setting, models: &[Model; 2]) -> Result<Outcome, String> {
    let tiers = Tiers::new(dir, s);
    let spec = |tier: usize, capacity| Spec {
        capacity,
        memory: tier == 0,
        model: models[tier].clone(),
        shared: None,
    };
    let desk = Desk::new(policy, vec![spec(0, s.memory), spec(1, u64::MAX)]);
    let (slow, failure) = (AtomicU64::new(0), Mutex::new(None));
    let fail = |e: std::io::Error| {
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
    };
    let begin = Instant::now();
    let local = std::thread::scope(|scope| {
        for _ in 0..FLUSHERS {
            scope.spawn(|| {
                while let Some((tier, id, bytes)) = desk.take() {
                    let since = Instant::now();
                    let done = tiers.flush(tier, id);
                    desk.observe(bytes, since.elapsed());
                    desk.flushed(tier, bytes, done.is_ok());
                    done.unwrap_or_else(fail);
                }
            });
        }
        let writers: Vec<_> = (0..s.writers)
            .map(|w| {
                let (desk, tiers, slow, fail) = (&desk, &tiers, &slow, &fail);
                scope.spawn(move || {
                    let data = vec![w as u8; CHUNK as usize];
                    for n in (w..s.chunks).step_by(s.writers as usize) {
                        let place = desk.wait(&desk.ask(CHUNK));
                        tiers.write(place, n, &data).unwrap_or_else(fail);
                        if let Place::Tier(tier) = place {
                            slow.fetch_add(tier as u64, Ordering::Relaxed);
                            desk.written(tier, n, CHUNK, CHUNK);
                        }
                    }
                })
            })
            .collect();
        for w in writers {
            drop(w.join());
        }
        let local = begin.elapsed();
        desk.drain();
        desk.close();
        local
    });
    let all = begin.elapsed();
    let there = std::fs::read_dir(dir).map_err(|e| e.to_string())?.count() as u64;
    for e in std::fs::read_dir(dir).map_err(|e| e.to_string())?.flatten() {
        std::fs::remove_file(e.path()).map_err(|e| e.to_string())?;
    }
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(format!("{}: {e}", policy.name())),
        None if there != s.chunks => Err(format!("{}: {there} chunks on the external tier", policy.name())),
        None => Ok(Outcome {
            local: local.as_secs_f64(),
            all: all.as_secs_f64(),
            slow: slow.into_inner(),
            moves: desk.observed(),
        }),
    }
}
