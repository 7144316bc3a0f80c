//! The experiment of the VELOC paper: writers that have more to write than memory holds, a slow local tier and an
//! external one, each policy in turn.
//!
//! The tiers are files in memory behind token buckets, so that their speeds are known: the slow one's is shared by
//! those who write and read it, as a device's is. Which chunk goes where is decided by the code that decides it in the
//! agent (`belay_storage::place`), with the model that a calibration of these tiers gives. No policy can be faster than
//!
//! ```text
//! local phase   (data - memory) / (external + slow)      what does not fit into memory must go to the slow tier, or leave memory through the external one
//! flush         data / external
//! ```

use crate::measure::Samples;
use crate::Plan;
use belay_storage::place::desk::{Desk, Place, Spec};
use belay_storage::place::model::Model;
use belay_storage::place::rule::Policy;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const WRITERS: u64 = 8;
const CHUNK: u64 = 2 << 20;
const PIECE: u64 = 256 << 10;
/// Of all writers together.
const DATA: u64 = 256 << 20;
const MEMORY: u64 = DATA / 4;
/// Bytes per second of the slow tier.
const SLOW: f64 = (96 << 20) as f64;
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

impl Tiers<'_> {
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

fn model(tiers: &Tiers<'_>, tier: usize) -> Result<Model, String> {
    let step = 3;
    let samples = (0..3).map(|i| sample(tiers, tier, 1 + i * step)).collect::<Result<_, _>>()?;
    Model::new(step as u32, samples).ok_or_else(|| "calibrate: no time passed".into())
}

/// One run: seconds until all is written, seconds until all is on the external tier, chunks written to the slow one.
fn run(dir: &Path, policy: Policy, external: f64, models: &[Model; 2]) -> Result<(f64, f64, u64), String> {
    let tiers = Tiers {
        dir,
        slow: Bucket::new(SLOW),
        external: Bucket::new(external),
    };
    let spec = |tier: usize, capacity| Spec {
        capacity,
        memory: tier == 0,
        model: models[tier].clone(),
        shared: None,
    };
    let desk = Desk::new(policy, vec![spec(0, MEMORY), spec(1, u64::MAX)]);
    let (slow, failure) = (AtomicU64::new(0), Mutex::new(None));
    let fail = |e: std::io::Error| {
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
    };
    let begin = Instant::now();
    let local = std::thread::scope(|s| {
        for _ in 0..FLUSHERS {
            s.spawn(|| {
                while let Some((tier, id, bytes)) = desk.take() {
                    let since = Instant::now();
                    let done = tiers.flush(tier, id);
                    desk.observe(bytes, since.elapsed());
                    desk.flushed(tier, bytes, done.is_ok());
                    done.unwrap_or_else(fail);
                }
            });
        }
        let writers: Vec<_> = (0..WRITERS)
            .map(|w| {
                let (desk, tiers, slow, fail) = (&desk, &tiers, &slow, &fail);
                s.spawn(move || {
                    let data = vec![w as u8; CHUNK as usize];
                    for n in 0..DATA / CHUNK / WRITERS {
                        let id = w << 32 | n;
                        let place = desk.wait(&desk.ask(CHUNK));
                        tiers.write(place, id, &data).unwrap_or_else(fail);
                        if let Place::Tier(tier) = place {
                            slow.fetch_add(tier as u64, Ordering::Relaxed);
                            desk.written(tier, id, CHUNK, CHUNK);
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
        None if there != DATA / CHUNK => Err(format!("{}: {there} chunks on the external tier", policy.name())),
        None => Ok((local.as_secs_f64(), all.as_secs_f64(), slow.into_inner())),
    }
}

/// All policies with the external tier at half, once and twice the speed of the slow one.
pub(crate) fn policies(p: &Plan) -> Result<(), String> {
    let dir = p.dir.join("policies");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let tiers = Tiers {
        dir: &dir,
        slow: Bucket::new(SLOW),
        external: Bucket::new(SLOW),
    };
    let models = [model(&tiers, 0)?, model(&tiers, 1)?];
    println!(
        "{WRITERS} writers, {} MiB, of which memory holds {}; slow tier {} MiB/s; one writer alone gets {:.0} of memory and {:.0} of the slow tier, eight {:.0} and {:.0} each",
        DATA >> 20,
        MEMORY >> 20,
        SLOW as u64 >> 20,
        models[0].per_writer(1) / 1048576.0,
        models[1].per_writer(1) / 1048576.0,
        models[0].per_writer(8) / 1048576.0,
        models[1].per_writer(8) / 1048576.0,
    );
    for factor in [0.5, 1.0, 2.0] {
        let external = SLOW * factor;
        let limit = ((DATA - MEMORY) as f64 / (external + SLOW), DATA as f64 / external);
        println!(
            "external {factor} x slow: no policy can need less than {:.3} s for the local phase and {:.3} s for the flush",
            limit.0, limit.1
        );
        let mut local: [Samples; 4] = Default::default();
        let mut flush: [Samples; 4] = Default::default();
        for _ in 0..p.runs {
            for (i, policy) in Policy::ALL.into_iter().enumerate() {
                let (l, f, slow) = run(&dir, policy, external, &models)?;
                local[i].push(l);
                flush[i].push(f);
                if policy == Policy::LocalOnly && slow != DATA / CHUNK {
                    return Err(format!("local-only has written {slow} chunks to the slow tier"));
                }
            }
        }
        for (i, policy) in Policy::ALL.into_iter().enumerate() {
            local[i].print(&format!("{factor} x, {}: local phase", policy.name()), "s");
            flush[i].print(&format!("{factor} x, {}: flush complete", policy.name()), "s");
        }
        let others = |s: &[Samples; 4]| s[2].median().min(s[3].median());
        for (what, s, limit) in [("local phase", &local, limit.0), ("flush", &flush, limit.1)] {
            let adaptive = s[0].median();
            println!(
                "{factor} x, {what}: adaptive is {:.3} of the better of naive and local-only (goal <= 1.05), {:.3} of the limit (goal <= 1.15), naive is {:.3} of adaptive",
                adaptive / others(s),
                adaptive / limit,
                s[3].median() / adaptive
            );
        }
    }
    Ok(())
}
