//! A generation that is being made, until it is committed.

use super::{mark, name, sync_dir, Generation};
use crate::{sys, Failure};
use belay_abi::histories::TEMPORARY;
use belay_image::manifest::{Declared, Dirty, FileEntry, Manifest, Taken, MANIFEST_FILE};
use belay_image::sections;
use belay_storage::session::Session;
use belay_wire::{GenerationStatus, Phase};
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A generation being made. Dropped before [`Draft::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    /// Its number.
    pub number: u64,
    /// Where its files go until it is committed.
    pub path: PathBuf,
    dir: PathBuf,
}

/// What the manifest of a draft says besides its files.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Time the processes were blocked.
    pub blocked: Duration,
    /// Time of each phase.
    pub phases: Vec<(Phase, Duration)>,
    /// Live processes.
    pub processes: u32,
    /// Threads.
    pub threads: u32,
    /// How the memory was taken.
    pub taken: Taken,
    /// Bytes that were not stored, where programs have declared that they are not needed.
    pub left_out: Option<u64>,
    /// What programs have declared of their loops.
    pub declared: Option<Declared>,
    /// What of each process was new.
    pub dirty: Option<Dirty>,
}

/// A duration in milliseconds.
pub fn ms(d: Duration) -> f64 {
    (d.as_secs_f64() * 1e6).round() / 1e3
}

impl Draft {
    /// Begins generation `number` in `dir`.
    pub fn create(dir: &Path, number: u64) -> Result<Self, Failure> {
        // What another one of that number was is nothing to it.
        mark::forget(dir, &[number]);
        let path = dir.join(format!("{TEMPORARY}{}", name(number)));
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|e| Failure::io(format!("make {}", path.display()), &e))?;
        Ok(Self {
            number,
            path,
            dir: dir.to_owned(),
        })
    }

    /// Its directory once it is committed.
    pub fn target(&self) -> PathBuf {
        self.dir.join(name(self.number))
    }

    /// Makes the draft a generation: names of its chunks, manifest, fsync, rename, fsync. `files` and the chunks of
    /// `session` are synced already.
    pub fn commit(self, files: Vec<FileEntry>, session: &mut Session, facts: &Facts) -> Result<GenerationStatus, Failure> {
        session.publish()?;
        let own: u64 = files.iter().map(|f| f.bytes).sum();
        let memory: u64 = session.tables().values().flatten().map(|e| e.bytes).sum();
        let manifest = Manifest {
            generation: self.number,
            time_unix_s: sys::now_unix_s(),
            host: sys::host(),
            arch: std::env::consts::ARCH.into(),
            blocked_ms: ms(facts.blocked),
            phases_ms: facts.phases.iter().map(|(p, d)| (p.name().into(), ms(*d))).collect(),
            processes: facts.processes,
            threads: facts.threads,
            taken: Some(facts.taken.clone()),
            left_out: facts.left_out,
            declared: facts.declared.clone(),
            dirty: facts.dirty,
            without_hashes: session.why_without().map(str::to_owned),
            bytes: own + memory,
            new_bytes: own + session.new_bytes(),
            files,
            chunks: session.entries()?,
            next_chunk: session.next_chunk(),
        };
        let path = self.path.join(MANIFEST_FILE);
        let mut f = sections::create_private(&path)?;
        f.write_all(&manifest.encode()?)
            .and_then(|()| f.sync_all())
            .map_err(|e| Failure::io(format!("write {}", path.display()), &e))?;
        sync_dir(&self.path)?;
        let target = self.target();
        let dir = File::open(&self.dir).map_err(|e| Failure::io(format!("open {}", self.dir.display()), &e))?;
        publish(&self.path, &target, &dir).map_err(|e| Failure::io(format!("commit {}", target.display()), &e))?;
        let number = self.number;
        Ok(Generation::open(number, target).status())
    }
}

/// Gives what is in directory `dir` another name there, for good. Where that fails it has its old one: other nodes are told
/// that there is no such generation.
fn publish(from: &Path, to: &Path, dir: &File) -> io::Result<()> {
    std::fs::rename(from, to)?;
    dir.sync_all().inspect_err(|_| {
        if let Err(e) = std::fs::rename(to, from) {
            tracing::error!(path = %to.display(), error = %e, "a generation that has failed stays");
        }
    })
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After the commit nothing has this name.
        if let Err(e) = std::fs::remove_dir_all(&self.path) {
            if e.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %self.path.display(), error = %e, "dropped generation could not be removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn a_generation_whose_commit_fails_is_none() {
        let dir = std::env::temp_dir().join(format!("belay-publish-{}", std::process::id()));
        let [from, to] = [".tmp-3", "000003"].map(|name| dir.join(name));
        std::fs::create_dir_all(&from).unwrap();
        // By such a descriptor nothing can be synced.
        let only_path = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(&dir)
            .unwrap();
        assert!(publish(&from, &to, &only_path).is_err());
        assert!(from.exists() && !to.exists());
        publish(&from, &to, &File::open(&dir).unwrap()).unwrap();
        assert!(!from.exists() && to.exists());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
