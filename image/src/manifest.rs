//! The manifest: the list of a generation's files, written last. A generation without a valid manifest does not exist.

use crate::name::Name;
use crate::{checksum, files, ImageError, FORMAT_VERSION};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the manifest in a generation's directory.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Generations have numbers below this one: there must always be a next one.
pub const MAX_NUMBER: u64 = 1 << 48;

/// A manifest longer than this is refused: it would list millions of chunks.
pub const MAX_BYTES: u64 = 256 << 20;

/// What `manifest.json` holds: the body and its checksum.
#[derive(Debug, Serialize, Deserialize)]
struct Envelope {
    format: u32,
    xxh3: String,
    body: String,
}

/// How the memory was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// `copy_on_write`, `copy_on_write_capped` or `write_before_resume`.
    pub mode: String,
    /// Why so.
    pub reason: String,
    /// How often the program was stopped while it was written.
    pub stops: u32,
}

/// What programs have declared of their loops (`docs/access.md`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declared {
    /// Bytes of the datasets.
    pub bytes: u64,
    /// What is alive of them where each process is stopped at its best site.
    pub at_best: u64,
    /// How many sites there are.
    pub sites: u32,
    /// Those at which least is alive, the best first.
    pub best: Vec<DeclaredSite>,
}

/// A place of loops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredSite {
    /// As the program calls it.
    pub name: Name,
    /// How often processes have come there lately.
    pub visits: u64,
    /// Bytes of datasets that were alive then, on average.
    pub alive: u64,
    /// Processes that were asked to wait there for the checkpoint.
    pub chosen: u32,
}

/// Of the memory of each process, the share that no generation before holds: the least, the median and the greatest of
/// all processes. One process that changes all rules the time of the job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Dirty {
    /// The least.
    pub min: f64,
    /// The median.
    pub median: f64,
    /// The greatest.
    pub max: f64,
}

/// A committed generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Number of the generation.
    pub generation: u64,
    /// Time of the commit, seconds since the epoch.
    pub time_unix_s: u64,
    /// The host on which it was made; earlier versions did not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// Processor architecture.
    pub arch: String,
    /// Time the processes were blocked, milliseconds.
    pub blocked_ms: f64,
    /// Time of each phase in order: (phase, milliseconds).
    pub phases_ms: Vec<(String, f64)>,
    /// Number of processes (zombies not counted) and of threads.
    pub processes: u32,
    /// Number of threads.
    pub threads: u32,
    /// How the memory was taken; earlier versions did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken: Option<Taken>,
    /// Bytes that were not stored, because the programs have declared that they overwrite them before they read them
    /// (`docs/access.md`); none where all is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<u64>,
    /// What programs had declared of their loops when it was taken, on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Declared>,
    /// What of each process was new, on this host; earlier versions did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Dirty>,
    /// Why only a sample of the pages was looked for by their contents, where that did not pay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_hashes: Option<String>,
    /// Bytes of the files and of the stored memory they refer to: what a restart reads.
    pub bytes: u64,
    /// Bytes that were written for this generation: its files and the chunks that are new with it.
    pub new_bytes: u64,
    /// The files.
    pub files: Vec<FileEntry>,
    /// The chunks that hold the memory, by number.
    pub chunks: Vec<ChunkEntry>,
    /// A number that no chunk had when this generation was committed, and none with a smaller one has been made since:
    /// numbers are never used again, because copies of a chunk may be elsewhere when it is gone here.
    #[serde(default)]
    pub next_chunk: u32,
}

/// A chunk that a generation refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkEntry {
    /// Its number in the store.
    pub id: u32,
    /// Pages in it.
    pub pages: u32,
    /// Checksum of its table of page checksums, so that a chunk cannot be taken for another.
    pub xxh3: u64,
}

/// One file of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the generation's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// XXH3-64 of the file; `None` for the blob file, whose references carry their own checksums.
    pub xxh3: Option<u64>,
}

impl Manifest {
    /// The manifest's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, ImageError> {
        let fail = |e: serde_json::Error| ImageError::Damaged {
            path: MANIFEST_FILE.into(),
            reason: format!("encode: {e}"),
        };
        let body = serde_json::to_string(self).map_err(fail)?;
        let envelope = Envelope {
            format: FORMAT_VERSION,
            xxh3: format!("{:016x}", checksum(body.as_bytes())),
            body,
        };
        serde_json::to_vec_pretty(&envelope).map_err(fail)
    }

    /// Reads and verifies the manifest of the generation in `dir` (not the files it lists).
    pub fn read(dir: &Path) -> Result<Self, ImageError> {
        let path = dir.join(MANIFEST_FILE);
        Self::decode(&path, &files::read(&path, MAX_BYTES)?)
    }

    /// Decodes and verifies the bytes of a manifest, naming `path` in errors.
    pub fn decode(path: &Path, bytes: &[u8]) -> Result<Self, ImageError> {
        let envelope: Envelope = serde_json::from_slice(bytes).map_err(|e| ImageError::damaged(path, e.to_string()))?;
        if envelope.format != FORMAT_VERSION {
            return Err(ImageError::Version {
                path: path.display().to_string(),
                found: envelope.format,
                expected: FORMAT_VERSION,
            });
        }
        if envelope.xxh3 != format!("{:016x}", checksum(envelope.body.as_bytes())) {
            return Err(ImageError::damaged(path, "checksum does not match"));
        }
        let m: Manifest = serde_json::from_str(&envelope.body).map_err(|e| ImageError::damaged(path, e.to_string()))?;
        if m.arch != std::env::consts::ARCH {
            return Err(ImageError::Architecture {
                path: path.display().to_string(),
                found: m.arch,
                expected: std::env::consts::ARCH.into(),
            });
        }
        if m.generation >= MAX_NUMBER {
            return Err(ImageError::damaged(
                path,
                format!("{} is the number of no generation", m.generation),
            ));
        }
        if !m.chunks.is_sorted_by(|a, b| a.id < b.id) {
            return Err(ImageError::damaged(path, "its chunks are out of order"));
        }
        if m.files
            .iter()
            .any(|f| f.name.is_empty() || f.name.contains(['/', '\0']) || f.name.starts_with('.'))
        {
            return Err(ImageError::damaged(path, "a file name leaves the generation's directory"));
        }
        Ok(m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        Manifest {
            taken: None,
            left_out: None,
            declared: None,
            dirty: None,
            without_hashes: None,
            generation: 3,
            time_unix_s: 1,
            host: String::new(),
            arch: std::env::consts::ARCH.into(),
            blocked_ms: 1.0,
            phases_ms: vec![("suspend".into(), 0.5)],
            processes: 1,
            threads: 1,
            bytes: 5,
            new_bytes: 5,
            files: vec![FileEntry {
                name: "job.bimg".into(),
                bytes: 5,
                xxh3: Some(7),
            }],
            chunks: vec![ChunkEntry {
                id: 1,
                pages: 2,
                xxh3: 9,
            }],
            next_chunk: 2,
        }
    }

    #[test]
    fn names_that_lead_out_of_the_generation_are_refused() {
        let path = Path::new("x");
        let good = sample();
        assert_eq!(Manifest::decode(path, &good.encode().unwrap()).unwrap(), good);
        for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", ".tmp", "a\0b"] {
            let mut bad = sample();
            bad.files[0].name = name.into();
            assert!(Manifest::decode(path, &bad.encode().unwrap()).is_err(), "{name:?}");
        }
        let last = Manifest {
            generation: u64::MAX,
            ..sample()
        };
        assert!(Manifest::decode(path, &last.encode().unwrap()).is_err());
        let mut twice = sample();
        twice.chunks.push(twice.chunks[0]);
        assert!(Manifest::decode(path, &twice.encode().unwrap()).is_err());
    }
}
