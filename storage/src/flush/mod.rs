//! The flush: copies a committed generation from the job directory to a durable tier.
//!
//! ```text
//! read what the tier holds ──> threads: chunks and files it lacks, into packs, fsync, read back ──> record ──> older generations go
//!                         └──> other hosts: the same for their parts ───────────────────────────┘
//! ```
//! What is copied is compared with its checksums on the way, so damage does not spread. A kill at any byte leaves
//! unfinished objects, which the next flush removes, and finished packs, of which it uses what it needs; it removes the
//! others first. Where the tier has no room, nothing of the attempt stays: the program may write to the same file system.
//! Runs beside the application: idle I/O priority, low CPU priority, rate limit.

pub mod compress;
pub mod elastic;
pub(crate) mod rate;
mod room;

use crate::catalogue::{self, Catalogue, Listed, Part};
pub use crate::control::Control;
use crate::pack::{self, Index, PackRef, Writer, PIECE};
use crate::store::Store;
use crate::tier::{self, Tier};
use crate::{chunk, StorageError, PAGE};
use belay_image::manifest::{ChunkEntry, FileEntry, Manifest, MANIFEST_FILE, MAX_BYTES};
use belay_image::{checksum, files, ImageError};
use belay_kernel::direct::Buffer;
use compress::{Chooser, Compression};
use elastic::Elastic;
use rate::Rate;
pub use room::check_here;
use rustix::process::{getpriority_process, setpriority_process};
use rustix::rand::{getrandom, GetRandomFlags};
use std::collections::{BTreeSet, VecDeque};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A pack is completed when it has grown to this: what a kill can cost.
const PACK_BYTES: u64 = 1 << 30;
/// Shortest window in which the rate is measured.
const WINDOW: Duration = Duration::from_millis(300);

/// Choices for flushes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Most threads.
    pub threads: u32,
    /// Most bytes per second.
    pub rate: Option<u64>,
    /// Compression.
    pub zstd: Compression,
    /// Read everything back from the tier before the generation counts.
    pub verify: bool,
    /// Whole generations to keep on the tier.
    pub keep: u32,
    /// Most bytes that the job may use on the tier.
    pub capacity: Option<u64>,
}

/// What a flush has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Items copied; the others were there.
    pub items: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Bytes written for them.
    pub stored: u64,
    /// Packs written.
    pub packs: u64,
}

impl std::ops::AddAssign for Flushed {
    fn add_assign(&mut self, more: Self) {
        self.items += more.items;
        self.bytes += more.bytes;
        self.stored += more.stored;
        self.packs += more.packs;
    }
}

/// What other hosts have of the generation. They copy it themselves, beside what is copied here.
pub trait Parts {
    /// What was left unfinished has been removed, and there is room: they may begin.
    fn begin(&mut self) -> Result<(), StorageError>;
    /// Waits until all of it is there.
    fn finish(&mut self) -> Result<Vec<Part>, StorageError>;
}

/// Parts that are there already, if any.
impl Parts for &[Part] {
    fn begin(&mut self) -> Result<(), StorageError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<Vec<Part>, StorageError> {
        Ok(self.to_vec())
    }
}

/// Something to be copied.
#[derive(Debug)]
enum Task {
    Chunk(ChunkEntry),
    File(FileEntry),
}

/// What the threads share.
struct Work<'a> {
    generation: &'a Path,
    manifest: &'a Manifest,
    manifest_sum: u64,
    store: Store,
    tier: &'a dyn Tier,
    options: &'a Options,
    control: &'a Control,
    rate: Rate,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    tasks: VecDeque<Task>,
    elastic: Elastic,
    window: (Instant, u64),
    done: Vec<(PackRef, Index)>,
    failed: Option<StorageError>,
}

/// Bytes of the generation in directory `generation` that a tier with this catalogue lacks.
pub fn lacking(generation: &Path, catalogue: &Catalogue) -> Result<u64, StorageError> {
    let path = generation.join(MANIFEST_FILE);
    let text = files::read(&path, MAX_BYTES)?;
    let manifest = Manifest::decode(&path, &text)?;
    let tasks = missing(&manifest, checksum(&text), catalogue);
    Ok(tasks.iter().map(task_bytes).sum())
}

/// Makes ready for a flush of the generation in directory `generation`: see [`flush`], which does it too.
pub fn tidy(generation: &Path, tier: &dyn Tier, catalogue: &mut Catalogue) -> Result<(), StorageError> {
    Source::read(generation)?.tidy(tier, catalogue);
    Ok(())
}

/// Copies the generation in directory `generation` to `tier`, of which `catalogue` is what was known; it is brought up
/// to date. The record names `parts`, and is written when they are there.
pub fn flush(
    generation: &Path,
    tier: &dyn Tier,
    options: &Options,
    catalogue: &mut Catalogue,
    parts: &mut dyn Parts,
    control: &Control,
) -> Result<Flushed, StorageError> {
    let source = Source::read(generation)?;
    tier.clear()?;
    *catalogue = Catalogue::read(tier, catalogue)?;
    catalogue.check_open(tier)?;
    let mut done = Flushed::default();
    if !catalogue.holds(source.text.as_bytes()) {
        source.check_is_newest(tier, catalogue)?;
        source.tidy(tier, catalogue);
        if let Some(capacity) = options.capacity {
            let own = (generation, &source.manifest, source.sum);
            room::make(tier, capacity, catalogue, own, control)?;
        }
        parts.begin()?;
        let copied = source.copy_all(tier, options, catalogue, parts, control);
        done = copied.inspect_err(|e| {
            if e.is_for_want_of_room() {
                control.found_no_room();
                give_back(tier, catalogue);
            }
        })?;
    }
    retain(tier, options.keep, source.manifest.generation, catalogue);
    Ok(done)
}

/// Removes what no record names, after a flush for which the tier had no room: the program may want that, and the next
/// flush all that there is.
fn give_back(tier: &dyn Tier, catalogue: &mut Catalogue) {
    // Perhaps the record is there all the same.
    let collected = Catalogue::read(tier, catalogue).and_then(|now| {
        *catalogue = now;
        catalogue.collect(tier)
    });
    if let Err(e) = collected {
        tracing::warn!(tier = tier.name(), error = %e, "packs of a flush that found no room stay");
    }
}

/// The generation that is flushed.
struct Source<'a> {
    dir: &'a Path,
    manifest: Manifest,
    /// The manifest as it lies there, and its checksum.
    text: String,
    sum: u64,
}

impl<'a> Source<'a> {
    fn read(dir: &'a Path) -> Result<Self, StorageError> {
        let path = dir.join(MANIFEST_FILE);
        let text = files::read(&path, MAX_BYTES)?;
        let manifest = Manifest::decode(&path, &text)?;
        let sum = checksum(&text);
        let text = String::from_utf8(text).map_err(|e| ImageError::damaged(&path, e.to_string()))?;
        Ok(Self {
            dir,
            manifest,
            text,
            sum,
        })
    }

    /// Refuses to flush beside the generations of another copy of the job directory that has gone on.
    fn check_is_newest(&self, tier: &dyn Tier, catalogue: &Catalogue) -> Result<(), StorageError> {
        let newest = catalogue.whole().last().map_or(0, |g| g.manifest.generation);
        let key = catalogue::record_key(self.manifest.generation, self.text.as_bytes());
        // Its own record is written once more.
        let unread = catalogue.unread_generations().filter(|n| *n > self.manifest.generation).max();
        let newest = unread.map_or(newest, |n| n.max(newest));
        if newest < self.manifest.generation {
            return Ok(());
        }
        let why = format!("the tier holds generation {newest} of this job, which another job directory made");
        Err(tier::failed(tier.name(), "flush beside", &key, std::io::Error::other(why)))
    }

    /// The packs that have something for it, which its record will name.
    fn packs(&self, catalogue: &Catalogue) -> BTreeSet<PackRef> {
        let (needed, names) = (catalogue::items(&self.manifest, self.sum), catalogue.names());
        let of_item = |n: &String| names.get(n.as_str()).copied().cloned();
        needed.keys().filter_map(of_item).collect()
    }

    /// Removes what interrupted flushes have left, but for what this one will use. Where that fails there is less room,
    /// and the next flush tries again.
    fn tidy(&self, tier: &dyn Tier, catalogue: &mut Catalogue) {
        let used = self.packs(catalogue);
        if let Err(e) = catalogue.collect_but(tier, &used) {
            tracing::warn!(tier = tier.name(), error = %e, "what interrupted flushes have left stays");
        }
    }

    /// Copies what the tier lacks and, when the parts are there, writes the record.
    fn copy_all(
        &self,
        tier: &dyn Tier,
        options: &Options,
        catalogue: &mut Catalogue,
        parts: &mut dyn Parts,
        control: &Control,
    ) -> Result<Flushed, StorageError> {
        let done = self.copy(tier, options, catalogue, control)?;
        control.check()?;
        self.commit(tier, catalogue, parts.finish()?)?;
        Ok(done)
    }

    /// Copies what the tier lacks, in packs, by several threads.
    fn copy(
        &self,
        tier: &dyn Tier,
        options: &Options,
        catalogue: &mut Catalogue,
        control: &Control,
    ) -> Result<Flushed, StorageError> {
        let tasks = missing(&self.manifest, self.sum, catalogue);
        let bytes: u64 = tasks.iter().map(task_bytes).sum();
        control.bytes.store(0, Ordering::Relaxed);
        control.expected.store(bytes, Ordering::Relaxed);
        let items = tasks.len() as u64;
        let work = Work {
            generation: self.dir,
            manifest: &self.manifest,
            manifest_sum: self.sum,
            store: Store::of_generation(self.dir),
            tier,
            options,
            control,
            rate: Rate::new(options.rate),
            state: Mutex::new(State {
                tasks: tasks.into(),
                elastic: Elastic::new(options.threads),
                window: (Instant::now(), 0),
                done: Vec::new(),
                failed: None,
            }),
            changed: Condvar::new(),
        };
        work.run_all(options.threads.max(1).min(items.max(1) as u32));
        let state = work.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(failure) = state.failed {
            return Err(failure);
        }
        let done = Flushed {
            items,
            bytes,
            stored: state.done.iter().map(|(p, _)| p.bytes).sum(),
            packs: state.done.len() as u64,
        };
        catalogue.bytes += done.stored;
        state.done.iter().for_each(|(p, _)| catalogue.is_new(&p.key));
        catalogue.packs.extend(state.done);
        Ok(done)
    }

    /// Everything is there: writes the record that says so, and enters it in the catalogue.
    fn commit(&self, tier: &dyn Tier, catalogue: &mut Catalogue, parts: Vec<Part>) -> Result<(), StorageError> {
        let packs = self.packs(catalogue);
        let text = self.text.clone();
        let listed: Listed = Catalogue::commit(tier, text, packs.into_iter().collect(), parts)?;
        for p in &listed.record.packs {
            let bytes = tier.length(&p.key)?;
            if bytes != Some(p.bytes) {
                return Err(StorageError::TierDamaged {
                    tier: tier.name().to_owned(),
                    key: p.key.clone(),
                    reason: format!("it had {} bytes, and now {bytes:?}", p.bytes),
                });
            }
        }
        catalogue.is_new(&listed.key);
        catalogue.generations.retain(|g| g.key != listed.key);
        catalogue.generations.push(listed);
        catalogue
            .generations
            .sort_by_key(|g| (g.manifest.generation, g.manifest.time_unix_s));
        Ok(())
    }
}

/// Removes what is not to be kept. The generation is durable whether that succeeds or not; the next flush tries again.
pub fn retain(tier: &dyn Tier, keep: u32, newest: u64, catalogue: &mut Catalogue) {
    if let Err(e) = catalogue.retain(tier, keep, newest) {
        tracing::warn!(tier = tier.name(), error = %e, "older generations stay");
    }
}

fn task_bytes(task: &Task) -> u64 {
    match task {
        Task::Chunk(c) => chunk::file_bytes(c.pages),
        Task::File(f) => f.bytes,
    }
}

/// What the tier lacks of a generation.
fn missing(manifest: &Manifest, sum: u64, catalogue: &Catalogue) -> Vec<Task> {
    let names = catalogue.names();
    let chunks = manifest.chunks.iter().filter(|c| !names.contains_key(&*pack::chunk_name(c)));
    let file = |f: &&FileEntry| !names.contains_key(&*pack::file_name(manifest.generation, sum, &f.name));
    let files = manifest.files.iter().filter(file);
    chunks
        .map(|c| Task::Chunk(*c))
        .chain(files.cloned().map(Task::File))
        .collect()
}

/// Gives the calling thread what nobody else wants of disks, and little of processors that others want.
pub fn step_back() {
    // Where it is refused, the flush is merely less polite.
    let _ = belay_kernel::sched::leave_disks_to_others();
    yield_processors();
}

/// Lets everybody else go first where the calling thread wants a processor. Not the lowest priority: programs that wait
/// actively, as the ranks of MPI do, would stop it.
pub fn yield_processors() {
    const NICE: i32 = 10;
    // None is the calling thread.
    if getpriority_process(None).is_ok_and(|now| now < NICE) {
        // Where it is refused, the thread is merely less polite.
        let _ = setpriority_process(None, NICE);
    }
}

/// A name that no other pack of the job has.
fn pack_key(generation: u64) -> Result<String, StorageError> {
    let mut random = [0u8; 8];
    // Requests of up to 256 bytes are never cut short.
    getrandom(&mut random[..], GetRandomFlags::empty()).map_err(|e| StorageError::System {
        step: "name a pack",
        source: e.into(),
    })?;
    Ok(format!("packs/{generation:06}-{:016x}.bpk", u64::from_le_bytes(random)))
}

impl Work<'_> {
    /// Does everything by `threads` threads.
    fn run_all(&self, threads: u32) {
        std::thread::scope(|s| {
            for n in 0..threads {
                let started = std::thread::Builder::new()
                    .name(format!("belay-flush-{n}"))
                    .spawn_scoped(s, move || self.run(n));
                if let Err(source) = started {
                    let step = "start a flush thread";
                    self.fail(StorageError::System { step, source });
                }
            }
        });
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, failure: StorageError) {
        let mut state = self.state();
        state.tasks.clear();
        state.failed.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// A thread: takes tasks while it is one of those that should work.
    fn run(&self, n: u32) {
        step_back();
        if let Err(failure) = self.copy_all(n) {
            self.fail(failure);
        }
    }

    fn next(&self, n: u32) -> Option<Task> {
        let mut state = self.state();
        while !state.tasks.is_empty() && n >= state.elastic.threads() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.tasks.pop_front()
    }

    fn copy_all(&self, n: u32) -> Result<(), StorageError> {
        let mut copier = Copier {
            work: self,
            chooser: Chooser::new(self.options.zstd),
            buf: Buffer::default(),
        };
        let mut open: Option<Writer<'_>> = None;
        while let Some(task) = self.next(n) {
            let mut pack = match open.take() {
                Some(pack) => pack,
                None => Writer::begin(self.tier, pack_key(self.manifest.generation)?)?,
            };
            let copied = match &task {
                Task::Chunk(c) => copier.chunk(c, &mut pack),
                Task::File(f) => copier.file(f, &mut pack),
            };
            copied.inspect_err(|e| self.control.note(e))?;
            if pack.bytes() >= PACK_BYTES {
                self.complete(pack)?;
            } else {
                open = Some(pack);
            }
        }
        // Waiting threads must see that nothing is left.
        self.changed.notify_all();
        if self.state().failed.is_none() {
            open.map_or(Ok(()), |pack| self.complete(pack))?;
        }
        Ok(())
    }

    fn complete(&self, pack: Writer<'_>) -> Result<(), StorageError> {
        let done = pack.finish(self.options.verify)?;
        self.state().done.push(done);
        Ok(())
    }

    /// Counts `bytes` read, and decides anew how many threads should work.
    fn count(&self, bytes: u64) {
        let total = self.control.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let mut state = self.state();
        let (since, before) = state.window;
        let elapsed = since.elapsed();
        if elapsed >= WINDOW {
            let rate = total.saturating_sub(before) as f64 / elapsed.as_secs_f64();
            state.elastic.observe(rate, elastic::pressure());
            state.window = (Instant::now(), total);
            self.changed.notify_all();
        }
    }
}

/// What one thread needs to copy.
struct Copier<'a> {
    work: &'a Work<'a>,
    chooser: Chooser,
    buf: Buffer,
}

impl Copier<'_> {
    /// Appends what is in the buffer to `pack`.
    fn put(&mut self, pack: &mut Writer<'_>) -> Result<(), StorageError> {
        let level = self.chooser.level();
        let begin = Instant::now();
        let small = match level {
            0 => None,
            level => zstd::bulk::compress(&self.buf, level)
                .ok()
                .filter(|s| s.len() < self.buf.len()),
        };
        let compress = begin.elapsed();
        let stored = small.as_deref().unwrap_or(&self.buf);
        self.work.rate.take(stored.len() as u64, self.work.control)?;
        let begin = Instant::now();
        pack.piece(stored, self.buf.len(), small.is_some())?;
        let sizes = (self.buf.len(), stored.len());
        self.chooser
            .observe(level, sizes, compress.as_secs_f64(), begin.elapsed().as_secs_f64());
        self.work.count(self.buf.len() as u64);
        Ok(())
    }

    /// A chunk, each page of which is compared with its hash on the way.
    fn chunk(&mut self, entry: &ChunkEntry, pack: &mut Writer<'_>) -> Result<(), StorageError> {
        let from = self.work.store.open(entry)?;
        pack.item(pack::chunk_name(entry));
        let step = (PIECE as u64 / PAGE) as u32;
        for first in (0..entry.pages).step_by(step as usize) {
            from.read(first, step.min(entry.pages - first), &mut self.buf)?;
            self.put(pack)?;
        }
        let (tail, _) = chunk::encode_trailer(&from.hashes);
        for part in tail.chunks(PIECE) {
            self.buf.clear();
            self.buf.extend_from_slice(part);
            self.put(pack)?;
        }
        Ok(())
    }

    fn file(&mut self, entry: &FileEntry, pack: &mut Writer<'_>) -> Result<(), StorageError> {
        let work = self.work;
        pack.item(pack::file_name(work.manifest.generation, work.manifest_sum, &entry.name));
        let path = work.generation.join(&entry.name);
        let (file, _) = files::open(&path)?;
        let mut sum = xxhash_rust::xxh3::Xxh3::new();
        let mut at = 0;
        while at < entry.bytes {
            self.buf.resize((entry.bytes - at).min(PIECE as u64) as usize);
            file.read_exact_at(&mut self.buf, at)
                .map_err(|e| ImageError::io("read", &path, e))?;
            sum.update(&self.buf);
            at += self.buf.len() as u64;
            self.put(pack)?;
        }
        match entry.xxh3 {
            Some(expected) if sum.digest() != expected => {
                Err(ImageError::damaged(&path, "checksum does not match the manifest").into())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod full;
#[cfg(test)]
mod sealing;
#[cfg(test)]
mod suspect;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod unread;
