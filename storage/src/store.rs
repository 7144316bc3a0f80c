//! The directory of chunks: names, what is there, removal of what no generation needs.

use crate::chunk;
use belay_image::manifest::ChunkEntry;
use belay_image::ImageError;
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the directory in the job directory.
pub const DIRECTORY: &str = "chunks";
const TEMPORARY: &str = ".tmp-";

/// The store of one job.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
}

/// What a removal removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Chunks.
    pub chunks: u64,
    /// Bytes of their files.
    pub bytes: u64,
}

fn name(id: u32) -> String {
    format!("pages-{id:08x}.bpg")
}

/// The number of the chunk with file name `name`.
fn number(file: &str) -> Option<u32> {
    let digits = file.strip_prefix("pages-")?.strip_suffix(".bpg")?;
    u32::from_str_radix(digits, 16).ok().filter(|id| name(*id) == file)
}

impl Store {
    /// The store in job directory `job`.
    pub fn of_job(job: &Path) -> Self {
        Self {
            dir: job.join(DIRECTORY),
        }
    }

    /// The store that the generation in directory `generation` refers to: `gen` and `chunks` are neighbours.
    pub fn of_generation(generation: &Path) -> Self {
        let job = generation.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        Self::of_job(job)
    }

    /// Makes the directory, where it is not there yet.
    pub fn create(&self) -> Result<(), ImageError> {
        match DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(ImageError::io("make", &self.dir, e)),
            _ => Ok(()),
        }
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// File of chunk `id`.
    pub fn path(&self, id: u32) -> PathBuf {
        self.dir.join(name(id))
    }

    /// File of chunk `id` while it is being written.
    pub fn temporary(&self, id: u32) -> PathBuf {
        self.dir.join(format!("{TEMPORARY}{}", name(id)))
    }

    /// Opens a chunk.
    pub fn open(&self, entry: &ChunkEntry) -> Result<chunk::Chunk, ImageError> {
        chunk::Chunk::open(self.path(entry.id), entry)
    }

    /// Whether a chunk's file is there with its length.
    pub fn check_present(&self, entry: &ChunkEntry) -> Result<(), ImageError> {
        chunk::check_present(&self.path(entry.id), entry)
    }

    fn entries(&self) -> Result<Vec<(String, u64)>, ImageError> {
        let fail = |e| ImageError::io("read", &self.dir, e);
        let list = match std::fs::read_dir(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(fail)?,
        };
        let mut out = Vec::new();
        for entry in list {
            let entry = entry.map_err(fail)?;
            let bytes = match entry.metadata() {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(fail)?.len(),
            };
            out.push((entry.file_name().to_string_lossy().into_owned(), bytes));
        }
        Ok(out)
    }

    /// Bytes of all files in the store.
    pub fn bytes(&self) -> Result<u64, ImageError> {
        Ok(self.entries()?.iter().map(|(_, bytes)| bytes).sum())
    }

    /// A number greater than that of any chunk, finished or not.
    pub fn next_id(&self) -> Result<u32, ImageError> {
        let entries = self.entries()?;
        let ids = entries
            .iter()
            .filter_map(|(n, _)| number(n.strip_prefix(TEMPORARY).unwrap_or(n)));
        Ok(ids.max().map_or(1, |id| id.saturating_add(1)))
    }

    /// Removes every chunk that is not in `needed`, and every unfinished one. Call while no checkpoint is being written.
    pub fn collect(&self, needed: &BTreeSet<u32>) -> Result<Removed, ImageError> {
        let mut removed = Removed::default();
        for (file, bytes) in self.entries()? {
            let unneeded = file.starts_with(TEMPORARY) || number(&file).is_some_and(|id| !needed.contains(&id));
            if unneeded {
                let path = self.dir.join(&file);
                std::fs::remove_file(&path).map_err(|e| ImageError::io("remove", &path, e))?;
                removed.chunks += 1;
                removed.bytes += bytes;
            }
        }
        Ok(removed)
    }

    /// Makes the names in the directory durable.
    pub fn sync(&self) -> Result<(), ImageError> {
        File::open(&self.dir)
            .and_then(|d| d.sync_all())
            .map_err(|e| ImageError::io("sync", &self.dir, e))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A store in a directory of its own, removed at the end.
    pub(crate) struct Scratch(pub(crate) PathBuf);

    impl Scratch {
        pub(crate) fn new(test: &str) -> (Self, Store) {
            let job = std::env::temp_dir().join(format!("belay-store-{test}-{}", std::process::id()));
            std::fs::create_dir(&job).unwrap();
            let store = Store::of_job(&job);
            store.create().unwrap();
            (Self(job), store)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn only_what_is_needed_stays_and_numbers_go_on() {
        let (_s, store) = Scratch::new("collect");
        assert_eq!(store.next_id().unwrap(), 1);
        for id in [1, 2, 0x1f] {
            std::fs::write(store.path(id), [0; 10]).unwrap();
        }
        std::fs::write(store.temporary(0x20), [0; 7]).unwrap();
        std::fs::write(store.dir.join("unrelated"), b"x").unwrap();
        assert_eq!((store.next_id().unwrap(), store.bytes().unwrap()), (0x21, 38));
        let removed = store.collect(&BTreeSet::from([2])).unwrap();
        assert_eq!(removed, Removed { chunks: 3, bytes: 27 });
        assert!(store.path(2).exists() && store.dir.join("unrelated").exists());
        assert_eq!(Store::of_generation(&store.dir.with_file_name("gen/000001")).dir, store.dir);
    }
}
