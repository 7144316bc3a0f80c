//! Measures what writers of a local tier get, at equally spaced numbers of writers, and keeps it in the tier.

use super::model::Model;
use crate::StorageError;
use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;

/// Name of the measurements in the tier's directory.
pub const FILE: &str = "belay-calibration.json";
/// Longest file of measurements.
const MAX_FILE: u64 = 1 << 20;
/// Bytes written at a time.
const PIECE: usize = 1 << 20;

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Writers between two samples; the first has one.
    pub step: u32,
    /// Number of samples.
    pub samples: u32,
    /// Bytes that each writer writes and syncs.
    pub bytes: u64,
}

impl Plan {
    /// Samples from one to `writers` writers.
    pub fn up_to(writers: u32) -> Self {
        let between = writers.saturating_sub(1).max(1);
        let step = between.div_ceil(8).min(8);
        Self {
            step,
            samples: 1 + between.div_ceil(step),
            // Each of many writes less, and takes as long.
            bytes: ((1 << 30) / u64::from(writers.max(1))).clamp(4 << 20, 64 << 20),
        }
    }
}

/// Measures the tier in directory `dir`; `progress` gets each sample: its number and how many there will be, writers, and
/// bytes per second that each got. What is written is removed.
pub fn measure(dir: &Path, plan: Plan, mut progress: impl FnMut((u32, u32), u32, f64)) -> Result<Model, StorageError> {
    let mut samples = Vec::new();
    let of = plan.samples.max(1);
    for i in 0..of {
        let writers = 1 + i * plan.step;
        let rate = sample(dir, writers, plan.bytes)?;
        progress((i + 1, of), writers, rate);
        samples.push(rate);
    }
    Model::new(plan.step, samples).ok_or_else(|| StorageError::System {
        step: "measure a local tier",
        source: std::io::Error::other("it took no time"),
    })
}

fn sample(dir: &Path, writers: u32, bytes: u64) -> Result<f64, StorageError> {
    let barrier = Barrier::new(writers as usize);
    let path = |n: u32| dir.join(format!(".belay-calibrate-{}-{n}", std::process::id()));
    let write = |n: u32| -> Result<f64, StorageError> {
        let path = path(n);
        let made = create_private(&path);
        barrier.wait();
        let file = made?;
        let begin = Instant::now();
        // Not zeros: some devices and file systems do not store these.
        let mut buf: Vec<u8> = (0..PIECE).map(|i| (i.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect();
        let mut at = 0;
        while at < bytes {
            buf[..8].copy_from_slice(&(at ^ u64::from(n) << 48).to_le_bytes());
            let n = (bytes - at).min(PIECE as u64) as usize;
            file.write_all_at(&buf[..n], at)
                .map_err(|e| ImageError::io("write", &path, e))?;
            at += n as u64;
        }
        file.sync_all().map_err(|e| ImageError::io("fsync", &path, e))?;
        Ok(bytes as f64 / begin.elapsed().as_secs_f64().max(1e-9))
    };
    let rates: Vec<Result<f64, StorageError>> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..writers).map(|n| s.spawn(move || write(n))).collect();
        let failed = || StorageError::System {
            step: "measure a local tier",
            source: std::io::Error::other("a writer has failed"),
        };
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err(failed())))
            .collect()
    });
    for n in 0..writers {
        match std::fs::remove_file(path(n)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(ImageError::io("remove", &path(n), e).into()),
            _ => {}
        }
    }
    let rates = rates.into_iter().collect::<Result<Vec<f64>, _>>()?;
    Ok(rates.iter().sum::<f64>() / rates.len() as f64)
}

/// Keeps `model` in the tier in directory `dir`.
pub fn store(dir: &Path, model: &Model) -> Result<PathBuf, StorageError> {
    let (path, new) = (dir.join(FILE), dir.join(format!(".{FILE}.new")));
    let text = serde_json::to_vec_pretty(model).map_err(|e| ImageError::damaged(&new, e.to_string()))?;
    let mut file = create_private(&new)?;
    file.write_all(&text).map_err(|e| ImageError::io("write", &new, e))?;
    std::fs::rename(&new, &path).map_err(|e| ImageError::io("rename", &new, e))?;
    Ok(path)
}

/// What has been measured of the tier in directory `dir`, by its user or by root.
pub fn load(dir: &Path, user: u32) -> Option<Model> {
    let path = dir.join(FILE);
    let owner = std::fs::symlink_metadata(&path).ok().filter(|m| m.is_file())?.uid();
    if owner != user && owner != 0 {
        tracing::warn!(path = %path.display(), owner, "measurements of another user are not used");
        return None;
    }
    let model: Model = serde_json::from_slice(&files::read(&path, MAX_FILE).ok()?).ok()?;
    model.checked()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn plans_reach_the_number_of_writers_and_measure_no_more_than_needed() {
        for (writers, step, samples, mib) in [(1, 1, 2, 64), (9, 1, 9, 64), (16, 2, 9, 64), (64, 8, 9, 16), (256, 8, 33, 4)] {
            let bytes = mib << 20;
            let plan = Plan { step, samples, bytes };
            assert_eq!(Plan::up_to(writers), plan);
            assert!(1 + step * (samples - 1) >= writers);
        }
    }

    #[test]
    fn a_measured_tier_is_known_again_and_nothing_else_is_left() {
        let s = Scratch::new("calibrate");
        let dir = s.job();
        let plan = Plan {
            step: 1,
            samples: 3,
            bytes: 3 << 20,
        };
        // Links that somebody else has left under the names that are used.
        let theirs = s.0.join("theirs");
        std::fs::write(&theirs, "theirs").unwrap();
        for name in [format!(".belay-calibrate-{}-1", std::process::id()), format!(".{FILE}.new")] {
            std::os::unix::fs::symlink(&theirs, dir.join(name)).unwrap();
        }
        let mut seen = Vec::new();
        let model = measure(&dir, plan, |_, n, rate| seen.push((n, rate))).unwrap();
        assert_eq!(seen.iter().map(|s| s.0).collect::<Vec<_>>(), [1, 2, 3]);
        assert!((model.per_writer(2) / seen[1].1 - 1.0).abs() < 1e-9);
        let user = std::fs::metadata(&dir).unwrap().uid();
        assert_eq!(load(&dir, user), None);
        store(&dir, &model).unwrap();
        assert_eq!(std::fs::read_to_string(&theirs).unwrap(), "theirs");
        // The last digit of a number may change on its way through JSON.
        let known = load(&dir, user).unwrap();
        for writers in 1..6 {
            assert!((known.per_writer(writers) / model.per_writer(writers) - 1.0).abs() < 1e-9);
        }
        let mut left: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.retain(|n| n != "gen");
        assert_eq!(left, [FILE]);
        std::fs::write(dir.join(FILE), "{\"step\":0,\"samples\":[1.0]}").unwrap();
        assert_eq!(load(&dir, user), None, "what cannot be a measurement is none");
        assert!(measure(&dir.join("nowhere"), plan, |_, _, _| ()).is_err());
    }
}
