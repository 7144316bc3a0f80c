//! `belay export`: the arrays that programs have declared (`belay_access.h`), out of a generation and into files.

mod global;

use crate::format;
use crate::inspect::{generation_of, look_as_owner};
use belay_access::index::{Portable, INDEX};
use belay_access::shape::Shape;
use belay_coordinator::{nodes, plain, Failure};
use belay_image::extents::{self, Extent, PAGE};
use belay_image::manifest::{ChunkEntry, Manifest};
use belay_image::model::{Dataset, Job, Process, VmaKind};
use belay_image::sections::{self, Kind, SectionFile};
use belay_image::{ImageError, TableId, JOB_FILE};
use belay_kernel::direct::Buffer;
use belay_storage::chunk::Chunk;
use belay_storage::store::Store;
use belay_storage::tier::directory::free_bytes;
use belay_wire::Exit;
use serde::Serialize;
use std::collections::{hash_map, HashMap};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What is read at once.
const WINDOW: u64 = 1 << 20;

/// Longest description of processes or of their memory, of images that may be anybody's: it is in memory as a whole.
const MOST_READ: u64 = 512 << 20;

/// What has been written.
#[derive(Debug, Default)]
pub(crate) struct Exported {
    /// How many arrays.
    pub(crate) arrays: usize,
    /// Bytes of their elements.
    pub(crate) bytes: u64,
    /// What could not be, and why.
    pub(crate) left: Vec<String>,
}

/// The contents of [`INDEX`].
#[derive(Debug, Serialize)]
struct Index {
    generation: u64,
    time_unix_s: u64,
    #[serde(flatten)]
    portable: Portable,
    datasets: Vec<Entry>,
}

/// One file.
#[derive(Debug, Serialize)]
struct Entry {
    file: String,
    name: String,
    /// The part of the job: 0 is the root.
    part: u64,
    host: String,
    pid: i32,
    /// Bytes of an element, and elements in each dimension: the first one changes fastest.
    elem: u64,
    extent: Vec<u64>,
}

/// What one part of the job is to write.
struct Part {
    number: u64,
    dir: PathBuf,
    job: Job,
    /// Something was left out, or had not come back since a restart from one in which something was.
    lacks: bool,
    /// Which arrays of which processes.
    arrays: Vec<(usize, usize, Shape)>,
    /// Bytes that they take on a disk, at most.
    bytes: u64,
}

/// Writes the arrays of `image`, a job (its newest generation) or the directory of a generation, into the new directory
/// `to`: a file each, with its elements side by side, and an index. Those of which processes have declared that they are
/// parts of global ones become one file, unless what each process has is wanted. After a failure nothing of that is left.
pub(crate) fn export(image: &Path, to: &Path, by_process: bool) -> Result<Exported, Failure> {
    look_as_owner(image)?;
    belay_kernel::limits::raise_descriptors();
    let root = generation_of(image)?;
    let mut done = Exported::default();
    let manifest = Manifest::read(&root)?;
    let parts = parts(&root)?.into_iter();
    let parts = parts.map(|(number, dir)| Part::look((number, dir), by_process, &mut done.left));
    let parts = parts.collect::<Result<Vec<_>, Failure>>()?;
    let together = if by_process { None } else { global::Plan::of(&parts)? };
    if together.is_none() && parts.iter().all(|part| part.arrays.is_empty()) {
        return Ok(done);
    }
    let mut made = Made::directory(to)?;
    let bytes = together.iter().map(|plan| plan.bytes);
    fits(
        to,
        parts.iter().map(|part| part.bytes).chain(bytes).fold(0, u64::saturating_add),
    )?;
    let mut index = Index {
        generation: manifest.generation,
        time_unix_s: manifest.time_unix_s,
        portable: Portable::default(),
        datasets: Vec::new(),
    };
    let mut names = Names::default();
    if let Some(plan) = &together {
        (done.arrays, done.bytes) = plan.write(&parts, (&mut made, &mut names), &mut index.portable)?;
    }
    for part in &parts {
        part.write(&mut made, &mut names, &mut index.datasets, &mut done)?;
    }
    let text = serde_json::to_string_pretty(&index);
    let text = text.map_err(|e| Failure::new(Exit::Internal, format!("encode {INDEX}: {e}")))?;
    let (path, mut file) = made.file(INDEX)?;
    let written = file.write_all(format::escaped(&text).as_bytes());
    written.map_err(|e| Failure::io(format!("write {}", path.display()), &e))?;
    made.keep();
    Ok(done)
}

/// What is said of the job's processes. What they have open may be many times longer, and is not wanted.
fn described(path: &Path) -> Result<Job, Failure> {
    let mut job = None;
    sections::each(path, &mut |kind, payload| {
        if kind != Kind::Job as u32 {
            return Ok(());
        }
        let mut text = Vec::new();
        let read = payload.take(MOST_READ + 1).read_to_end(&mut text);
        read.map_err(|e| ImageError::io("read", path, e))?;
        if text.len() as u64 > MOST_READ {
            return Err(ImageError::damaged(
                path,
                "the description of its processes is longer than 512 MiB",
            ));
        }
        let decoded = serde_json::from_slice(&text);
        job = Some(decoded.map_err(|e| ImageError::damaged(path, format!("section job: {e}")))?);
        Ok(())
    })?;
    Ok(job.ok_or_else(|| ImageError::damaged(path, "has no section job"))?)
}

impl Part {
    /// Looks what there is to write, and says in `left` what cannot be.
    fn look((number, dir): (u64, PathBuf), by_process: bool, left: &mut Vec<String>) -> Result<Self, Failure> {
        let lacks = Manifest::read(&dir)?.left_out.is_some();
        let job = described(&dir.join(JOB_FILE))?;
        let (mut arrays, mut bytes) = (Vec::new(), 0u64);
        let is_single = |d: &Dataset| by_process || d.share.is_none();
        let has_some = |p: &Process| p.datasets.iter().any(is_single);
        for (process, p) in job.processes.iter().enumerate().filter(|(_, p)| has_some(p)) {
            let table = table(&dir, p)?;
            for (array, d) in p.datasets.iter().enumerate().filter(|(_, d)| is_single(d)) {
                match whole((p, d), lacks) {
                    Ok(shape) => {
                        bytes = bytes.saturating_add(stored(&table, &shape));
                        arrays.push((process, array, shape));
                    }
                    Err(why) => left.push(format!("{} of process {}: {why}", plain(&d.name.to_string()), p.pid)),
                }
            }
        }
        Ok(Self {
            number,
            dir,
            job,
            lacks,
            arrays,
            bytes,
        })
    }

    fn write(&self, made: &mut Made, names: &mut Names, index: &mut Vec<Entry>, done: &mut Exported) -> Result<(), Failure> {
        if self.arrays.is_empty() {
            return Ok(());
        }
        let mut chunks = Chunks::listed(&self.dir)?;
        for of_process in self.arrays.chunk_by(|a, b| a.0 == b.0) {
            let Some(p) = self.job.processes.get(of_process[0].0) else {
                continue;
            };
            let mut memory = Memory::of(table(&self.dir, p)?, &mut chunks);
            for (_, array, shape) in of_process {
                let d = &p.datasets[*array];
                let name = plain(&d.name.to_string());
                let file = names.unused(&name, &format!("{}.{}", self.number, p.pid));
                let (path, new) = made.file(&file)?;
                write(&path, new, shape, &mut memory)?;
                done.arrays += 1;
                done.bytes += shape.bytes();
                index.push(Entry {
                    file,
                    name,
                    part: self.number,
                    host: self.job.host.clone(),
                    pid: p.pid,
                    elem: d.elem,
                    extent: d.extent.clone(),
                });
            }
        }
        Ok(())
    }
}

/// A directory that was not there, and what has been made in it: that goes unless it is kept.
#[derive(Debug)]
struct Made {
    dir: PathBuf,
    files: Vec<PathBuf>,
}

impl Made {
    fn directory(dir: &Path) -> Result<Self, Failure> {
        let made = DirBuilder::new().mode(0o700).create(dir);
        made.map_err(|e| Failure::io(format!("make {}", dir.display()), &e))?;
        Ok(Self {
            dir: dir.to_owned(),
            files: Vec::new(),
        })
    }

    fn file(&mut self, name: &str) -> Result<(PathBuf, File), Failure> {
        let path = self.dir.join(name);
        let file = create(&path)?;
        self.files.push(path.clone());
        Ok((path, file))
    }

    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // What somebody else has put there keeps the directory.
        self.files.iter().for_each(|path| drop(std::fs::remove_file(path)));
        drop(std::fs::remove_dir(&self.dir));
    }
}

/// Whether there is room for `bytes` in directory `to`.
fn fits(to: &Path, bytes: u64) -> Result<(), Failure> {
    let free = free_bytes(to).map_err(|e| Failure::io(format!("look how much is free in {}", to.display()), &e))?;
    if bytes <= free {
        return Ok(());
    }
    let [need, free] = [bytes, free].map(format::bytes);
    let what = format!("{}: the arrays take {need}, of which {free} are free", to.display());
    Err(Failure::new(Exit::DiskFull, what))
}

fn create(path: &Path) -> Result<File, Failure> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    made.map_err(|e| Failure::io(format!("make {}", path.display()), &e))
}

/// What each part of the job has of generation `root`. One of which nothing is here is refused: its arrays would be missing.
fn parts(root: &Path) -> Result<Vec<(u64, PathBuf)>, Failure> {
    let mut all = vec![(0, root.to_owned())];
    let job = root.parent().and_then(Path::parent);
    for (part, host) in nodes::parts_of(root)? {
        let place = job
            .zip(root.file_name())
            .map(|(job, name)| nodes::part_dir(job, part).join("gen").join(name));
        let Some(place) = place.filter(|place| place.exists()) else {
            let on = if host.is_empty() {
                host
            } else {
                format!(", which ran on {host},")
            };
            let why = format!(
                "{}: what part {part}{on} has of it is not here, but on the disk of its host; export a generation that has been \
                 flushed or copied to a place that all hosts share",
                root.display()
            );
            return Err(Failure::new(Exit::Incomplete, why));
        };
        all.push((part, place));
    }
    all.sort_unstable();
    Ok(all)
}

/// How many files have been given each name.
#[derive(Debug, Default)]
struct Names(HashMap<String, u64>);

impl Names {
    /// A name of a file that no other one has.
    fn unused(&mut self, name: &str, whose: &str) -> String {
        let harmless = |c: char| {
            if c.is_ascii_alphanumeric() || "_-".contains(c) {
                c
            } else {
                '_'
            }
        };
        // Without another dot: what is counted has one more.
        let base: String = name.chars().map(harmless).collect();
        let base = format!("{base}.{whose}");
        let count = self.0.entry(base.clone()).or_default();
        *count += 1;
        match *count {
            1 => format!("{base}.raw"),
            n => format!("{base}.{}.raw", n - 1),
        }
    }
}

/// The shape of an array of which all is stored.
fn whole((p, d): (&Process, &Dataset), lacks: bool) -> Result<Shape, String> {
    let mut sides = ([1; belay_access::block::MAX_DIMS], [0; belay_access::block::MAX_DIMS]);
    for (at, (extent, stride)) in d.extent.iter().zip(&d.stride).enumerate().take(sides.0.len()) {
        (sides.0[at], sides.1[at]) = (*extent, *stride);
    }
    let shape = Shape::new(d.address, d.elem, sides.0, sides.1).map_err(|e| e.to_string())?;
    if lacks {
        return Err("this generation lacks what the program has overwritten since: take one that is complete (belay list)".into());
    }
    let (mut at, end) = shape.range();
    let is_own = |kind: &VmaKind| {
        matches!(
            kind,
            VmaKind::Anonymous { .. } | VmaKind::Heap | VmaKind::Stack | VmaKind::HugeTlb { .. }
        )
    };
    let mut vmas = p.vmas[p.vmas.partition_point(|v| v.end <= at)..].iter();
    while at < end {
        at = vmas
            .next()
            .filter(|v| v.start <= at && is_own(&v.kind))
            .map(|v| v.end)
            .ok_or("it lies in memory of files, or that is shared")?;
    }
    Ok(shape)
}

/// The memory of process `p`, or of the one whose memory it has.
fn table(dir: &Path, p: &Process) -> Result<Vec<Extent>, ImageError> {
    let owner = if p.shares_mm_with == 0 { p.pid } else { p.shares_mm_with };
    let path = dir.join(TableId::Process(owner).file_name());
    extents::decode(&path, SectionFile::read_within(&path, MOST_READ)?.get(Kind::Extents)?)
}

/// How many bytes of `shape` are stored, at most.
fn stored(table: &[Extent], shape: &Shape) -> u64 {
    let ((start, end), mut found) = (shape.range(), Vec::new());
    extents::within(table, start, end, &mut found);
    found.iter().map(|e| e.bytes).sum::<u64>().min(shape.bytes())
}

/// Writes the elements of `shape` to the new file at `path`, the first dimension changing fastest.
fn write(path: &Path, file: File, shape: &Shape, memory: &mut Memory<'_>) -> Result<(), Failure> {
    let fail = |e: std::io::Error| Failure::io(format!("write {}", path.display()), &e);
    let mut file = BufWriter::new(file);
    let mut hole = 0;
    shape.try_visit(&shape.whole(), &mut |start, end| {
        let mut at = start;
        while at < end {
            match memory.at(at, end)? {
                Piece::Hole(bytes) => (at, hole) = (at + bytes, hole + bytes),
                Piece::Bytes(bytes) => {
                    skip(&mut file, std::mem::take(&mut hole)).map_err(fail)?;
                    file.write_all(bytes).map_err(fail)?;
                    at += bytes.len() as u64;
                }
            }
        }
        Ok::<_, Failure>(())
    })?;
    file.flush().map_err(fail)?;
    file.get_ref().set_len(shape.bytes()).map_err(fail)
}

/// Leaves out so many bytes, which are zero; a few are written.
fn skip(file: &mut BufWriter<File>, bytes: u64) -> std::io::Result<()> {
    const FEW: u64 = PAGE;
    if bytes < FEW {
        return std::io::copy(&mut std::io::repeat(0).take(bytes), file).map(drop);
    }
    let bytes = i64::try_from(bytes).map_err(std::io::Error::other)?;
    file.seek(SeekFrom::Current(bytes)).map(drop)
}

/// So many chunks are open at a time: each has a descriptor, and the hashes of its pages in memory.
const MOST_OPEN: usize = 16;

/// The chunks that a part has of a generation, opened when they are read.
struct Chunks {
    store: Store,
    listed: HashMap<u32, ChunkEntry>,
    open: HashMap<u32, Chunk>,
}

impl Chunks {
    fn listed(dir: &Path) -> Result<Self, ImageError> {
        Ok(Self {
            store: Store::of_generation(dir),
            listed: Manifest::read(dir)?.chunks.into_iter().map(|c| (c.id, c)).collect(),
            open: HashMap::new(),
        })
    }

    fn get(&mut self, id: u32) -> Result<&Chunk, ImageError> {
        if self.open.len() >= MOST_OPEN && !self.open.contains_key(&id) {
            self.open.clear();
        }
        Ok(match self.open.entry(id) {
            hash_map::Entry::Occupied(known) => known.into_mut(),
            hash_map::Entry::Vacant(place) => {
                let none = || ImageError::Damaged {
                    path: format!("chunk {id}"),
                    reason: "it is not in the manifest".into(),
                };
                place.insert(self.store.open(self.listed.get(&id).ok_or_else(none)?)?)
            }
        })
    }
}

/// The memory of a process, of which a piece is at hand.
struct Memory<'a> {
    table: Vec<Extent>,
    chunks: &'a mut Chunks,
    window: Vec<u8>,
    from: u64,
}

/// A part of it.
enum Piece<'a> {
    /// So many bytes are not stored: they are zero.
    Hole(u64),
    Bytes(&'a [u8]),
}

impl<'a> Memory<'a> {
    fn of(table: Vec<Extent>, chunks: &'a mut Chunks) -> Self {
        Self {
            table,
            chunks,
            window: Vec::new(),
            from: 0,
        }
    }

    /// What is from `at` on, at least one byte, and none from `end` on.
    fn at(&mut self, at: u64, end: u64) -> Result<Piece<'_>, ImageError> {
        let next = self.table.get(self.table.partition_point(|e| e.end() <= at));
        let end = match next {
            Some(e) if e.vaddr <= at => end.min(e.end()),
            next => return Ok(Piece::Hole(next.map_or(end, |e| e.vaddr.min(end)) - at)),
        };
        if at < self.from || at >= self.from + self.window.len() as u64 {
            self.load(at / WINDOW * WINDOW)?;
        }
        let place = |address: u64| usize::try_from(address - self.from).unwrap_or(usize::MAX);
        Ok(Piece::Bytes(&self.window[place(at)..place(end).min(self.window.len())]))
    }

    fn load(&mut self, from: u64) -> Result<(), ImageError> {
        self.from = from;
        self.window.clear();
        self.window.resize(WINDOW as usize, 0);
        let (mut found, mut buf) = (Vec::new(), Buffer::default());
        extents::within(&self.table, from, from + WINDOW, &mut found);
        for e in found {
            let pages = u32::try_from(e.bytes / PAGE).unwrap_or(u32::MAX);
            self.chunks.get(e.chunk)?.read(e.page, pages, &mut buf)?;
            let at = usize::try_from(e.vaddr - from).unwrap_or(usize::MAX);
            self.window[at..at + buf.len()].copy_from_slice(&buf);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn names_are_harmless_and_each_is_used_once() {
        let mut names = Names::default();
        let mut of = |name| names.unused(name, "0.7");
        assert_eq!(of("density0"), "density0.0.7.raw");
        assert_eq!(of("../x/é"), "___x__.0.7.raw");
        assert_eq!([of("a.b"), of("a/b")], ["a_b.0.7.raw", "a_b.0.7.1.raw"]);
    }

    fn place(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("belay-export-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&dir));
        dir
    }

    #[test]
    fn what_is_not_stored_takes_no_room() {
        const BASE: u64 = 1 << 32;
        const STORED: u64 = BASE + (700 << 20);
        let mut made = Made::directory(&place("holes")).unwrap();
        let (path, file) = made.file("chunk").unwrap();
        let page: Vec<u8> = (0..PAGE).map(|i| (i / 8 % 251 + 1) as u8).collect();
        file.write_all_at(&page, 0).unwrap();
        let file = File::open(&path).unwrap();
        let hashes = vec![belay_storage::page_checksum(&page).into()];
        let mut chunks = Chunks {
            store: Store::of_generation(&path),
            listed: HashMap::new(),
            open: HashMap::from([(3, Chunk { path, file, hashes })]),
        };
        let extent = Extent {
            vaddr: STORED,
            bytes: PAGE,
            chunk: 3,
            page: 0,
        };
        let mut memory = Memory::of(vec![extent], &mut chunks);
        let mut write_to = |name: &str, shape: &Shape| {
            let (path, file) = made.file(name).unwrap();
            write(&path, file, shape, &mut memory).unwrap();
            File::open(&path).unwrap()
        };
        let all = Shape::dense(BASE, 8, &[1 << 27]).unwrap();
        let written = write_to("all", &all);
        let meta = written.metadata().unwrap();
        assert_eq!((meta.len(), stored(&[extent], &all)), (1 << 30, PAGE));
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        let mut back = vec![1; 3 * PAGE as usize];
        written.read_exact_at(&mut back, STORED - BASE - PAGE).unwrap();
        assert!(
            back == [&vec![0; PAGE as usize], &page, &vec![0; PAGE as usize]]
                .map(|p| p.as_slice())
                .concat()
        );
        // Every second element, from one before the page on.
        let sides = ([300, 1, 1, 1, 1], [16, 0, 0, 0, 0]);
        let some = write_to("some", &Shape::new(STORED - 16, 8, sides.0, sides.1).unwrap());
        let mut back = vec![0; 300 * 8];
        some.read_exact_at(&mut back, 0).unwrap();
        let seen: Vec<u8> = back.iter().step_by(8).copied().collect();
        let expected = (0..300u32).map(|i| {
            if (1..257).contains(&i) {
                ((i - 1) * 2 % 251 + 1) as u8
            } else {
                0
            }
        });
        assert_eq!(seen, expected.collect::<Vec<u8>>());
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let to = place("failure");
        let mut made = Made::directory(&to).unwrap();
        assert!(Made::directory(&to).is_err() && to.exists());
        made.file("a").unwrap();
        assert!(made.file("a").is_err());
        assert_eq!(fits(&to, u64::MAX).unwrap_err().exit, Exit::DiskFull);
        fits(&to, 0).unwrap();
        drop(made);
        assert!(!to.exists());
        Made::directory(&to).unwrap().keep();
        std::fs::remove_dir(&to).unwrap();
    }
}
