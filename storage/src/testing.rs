//! For tests: a job directory with generations, and tiers beside it.

use crate::engine::{Engine, Options};
use crate::page_key::PageKey;
use crate::store::Store;
use crate::tier::directory::Directory;
use belay_image::checksum;
use belay_image::manifest::{FileEntry, Manifest, MANIFEST_FILE};
use belay_image::TableId;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of its own, removed at the end.
pub(crate) struct Scratch(pub(crate) PathBuf);

/// The key of the jobs of tests: engines of one job have one.
pub(crate) fn key() -> PageKey {
    PageKey::try_from("5a".repeat(32)).unwrap()
}

impl Scratch {
    pub(crate) fn new(test: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        // Where there is one, a file system in memory: these tests are about bytes, not about disks.
        let shm = PathBuf::from("/dev/shm");
        let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let dir = base.join(format!("belay-{test}-{}-{n}", std::process::id()));
        std::fs::create_dir_all(dir.join("job/gen")).unwrap();
        Self(dir)
    }

    pub(crate) fn tier(&self, name: &str) -> Directory {
        Directory::open(name, &self.0.join(name)).unwrap()
    }

    pub(crate) fn job(&self) -> PathBuf {
        self.0.join("job")
    }

    pub(crate) fn generation(&self, number: u64) -> PathBuf {
        self.job().join(format!("gen/{number:06}"))
    }

    /// An engine with small chunks.
    pub(crate) fn engine(&self) -> Engine {
        let options = Options {
            max_bytes: None,
            find_by_hash: true,
            key: key(),
        };
        let mut engine = Engine::new(Store::of_job(&self.job()), options).unwrap();
        engine.chunk_bytes = 64 << 10;
        engine
    }

    /// Commits generation `number`, whose memory is `memory`.
    pub(crate) fn commit(&self, engine: &mut Engine, number: u64, memory: &[u8]) -> Manifest {
        let dir = self.generation(number);
        std::fs::create_dir(&dir).unwrap();
        let mut session = engine.begin(0).unwrap();
        let mut table = Vec::new();
        session.store_pages(0x10000, memory, &mut table).unwrap();
        session.set_table(TableId::Process(1), table).unwrap();
        session.seal().unwrap();
        session.publish().unwrap();
        let files = [("job.bimg", vec![number as u8; 5000]), ("blobs.bin", vec![7; 10])].map(|(name, data)| {
            std::fs::write(dir.join(name), &data).unwrap();
            FileEntry {
                name: name.into(),
                bytes: data.len() as u64,
                xxh3: (name != "blobs.bin").then(|| checksum(&data)),
            }
        });
        let manifest = Manifest {
            taken: None,
            left_out: None,
            declared: None,
            dirty: None,
            without_hashes: None,
            generation: number,
            time_unix_s: 1_000_000 + number,
            host: String::new(),
            arch: std::env::consts::ARCH.into(),
            blocked_ms: 1.0,
            phases_ms: Vec::new(),
            processes: 1,
            threads: 1,
            bytes: memory.len() as u64,
            new_bytes: session.new_bytes(),
            files: files.into(),
            chunks: session.entries().unwrap(),
            next_chunk: session.next_chunk(),
        };
        std::fs::write(dir.join(MANIFEST_FILE), manifest.encode().unwrap()).unwrap();
        engine.keep(session, &dir);
        manifest
    }

    /// Something of generation `number` was left out.
    pub(crate) fn leave_out(&self, number: u64) {
        let dir = self.generation(number);
        let manifest = Manifest {
            left_out: Some(4096),
            ..Manifest::read(&dir).unwrap()
        };
        std::fs::write(dir.join(MANIFEST_FILE), manifest.encode().unwrap()).unwrap();
    }

    /// Memory of `pages` different pages, which begin with `seed`.
    pub(crate) fn memory(pages: usize, seed: u64) -> Vec<u8> {
        let word = |i: usize| (i as u64 ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        (0..pages * 512).flat_map(|i| word(i).to_le_bytes()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}
