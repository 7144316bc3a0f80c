//! `belay export`: the arrays that programs have declared (`belay_access.h`), out of a generation and into files.

use crate::inspect::{generation_of, look_as_owner};
use belay_access::shape::Shape;
use belay_coordinator::{plain, Failure};
use belay_image::extents::{self, Extent, PAGE};
use belay_image::manifest::Manifest;
use belay_image::model::{Dataset, Job, Process, VmaKind};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{ImageError, TableId, JOB_FILE};
use belay_kernel::direct::Buffer;
use belay_storage::chunk::Chunk;
use belay_storage::store::Store;
use belay_wire::Exit;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What is read at once.
const WINDOW: u64 = 1 << 20;
/// The file that says what the others are.
const INDEX: &str = "datasets.json";

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

/// Writes the arrays of `image`, a job (its newest generation) or the directory of a generation, into the new directory
/// `to`: a file each, with its elements side by side, and an index.
pub(crate) fn export(image: &Path, to: &Path) -> Result<Exported, Failure> {
    look_as_owner(image)?;
    let root = generation_of(image)?;
    let (mut done, mut names) = (Exported::default(), BTreeSet::new());
    let manifest = Manifest::read(&root)?;
    let mut index = Index {
        generation: manifest.generation,
        time_unix_s: manifest.time_unix_s,
        datasets: Vec::new(),
    };
    let parts = parts(&root)?
        .into_iter()
        .map(|(part, dir)| Ok((part, Generation::open(&dir)?)));
    let parts = parts.collect::<Result<Vec<_>, Failure>>()?;
    let has_some = |p: &Process| !p.datasets.is_empty();
    if !parts.iter().any(|(_, g)| g.job.processes.iter().any(has_some)) {
        return Ok(done);
    }
    make(to)?;
    for (part, generation) in parts {
        for p in generation.job.processes.iter().filter(|p| has_some(p)) {
            let mut memory = generation.memory(p)?;
            for d in &p.datasets {
                let shown = plain(&d.name.to_string());
                let shape = match whole((p, d), generation.lacks) {
                    Ok(shape) => shape,
                    Err(why) => {
                        done.left.push(format!("{shown} of process {}: {why}", p.pid));
                        continue;
                    }
                };
                let file = unused(&shown, (part, p.pid), &mut names);
                write(&to.join(&file), &shape, &mut memory)?;
                done.arrays += 1;
                done.bytes += shape.bytes();
                index.datasets.push(Entry {
                    file,
                    name: shown,
                    part,
                    host: generation.job.host.clone(),
                    pid: p.pid,
                    elem: d.elem,
                    extent: d.extent.clone(),
                });
            }
        }
    }
    let text = serde_json::to_vec_pretty(&index);
    let text = text.map_err(|e| Failure::new(Exit::Internal, format!("encode {INDEX}: {e}")))?;
    let path = to.join(INDEX);
    let written = create(&path)?.write_all(&text);
    written.map_err(|e| Failure::io(format!("write {}", path.display()), &e))?;
    Ok(done)
}

/// A directory that was not there.
fn make(to: &Path) -> Result<(), Failure> {
    let made = DirBuilder::new().mode(0o700).create(to);
    made.map_err(|e| Failure::io(format!("make {}", to.display()), &e))
}

fn create(path: &Path) -> Result<File, Failure> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    made.map_err(|e| Failure::io(format!("make {}", path.display()), &e))
}

/// What each part of the job has of generation `root`, as far as it lies in the job directory.
fn parts(root: &Path) -> Result<Vec<(u64, PathBuf)>, Failure> {
    let mut all = vec![(0, root.to_owned())];
    let job = root.parent().and_then(Path::parent);
    let (Some(job), Some(name)) = (job, root.file_name()) else {
        return Ok(all);
    };
    let nodes = job.join("nodes");
    let listed = match std::fs::read_dir(&nodes) {
        Ok(listed) => listed,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(all),
        Err(e) => return Err(Failure::io(format!("list {}", nodes.display()), &e)),
    };
    for entry in listed {
        let entry = entry.map_err(|e| Failure::io(format!("list {}", nodes.display()), &e))?;
        let part = entry.file_name().to_str().and_then(|n| n.parse().ok());
        let dir = entry.path().join("gen").join(name);
        all.extend(part.filter(|_| dir.exists()).map(|part| (part, dir)));
    }
    all.sort_unstable();
    Ok(all)
}

/// A name of a file that is none of `names` yet.
fn unused(name: &str, (part, pid): (u64, i32), names: &mut BTreeSet<String>) -> String {
    let harmless = |c: char| {
        if c.is_ascii_alphanumeric() || "_-".contains(c) {
            c
        } else {
            '_'
        }
    };
    let base: String = name.chars().map(harmless).collect();
    let name = |n: usize| match n {
        0 => format!("{base}.{part}.{pid}.raw"),
        n => format!("{base}.{part}.{pid}.{n}.raw"),
    };
    let found = (0..).map(name).find(|name| !names.contains(name)).unwrap_or_default();
    names.insert(found.clone());
    found
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
    while at < end {
        let found = p.vmas.iter().find(|v| (v.start..v.end).contains(&at));
        at = found
            .filter(|v| is_own(&v.kind))
            .map(|v| v.end)
            .ok_or("it lies in memory of files, or that is shared")?;
    }
    Ok(shape)
}

/// Writes the elements of `shape`, the first dimension changing fastest.
fn write(path: &Path, shape: &Shape, memory: &mut Memory<'_>) -> Result<(), Failure> {
    let fail = |e: std::io::Error| Failure::io(format!("write {}", path.display()), &e);
    let mut file = BufWriter::new(create(path)?);
    let mut failure = None;
    shape.visit(&shape.whole(), &mut |start, end| {
        let mut at = start;
        while at < end && failure.is_none() {
            match memory.at(at, end) {
                Ok(bytes) => {
                    at += bytes.len() as u64;
                    failure = file.write_all(bytes).map_err(fail).err();
                }
                Err(e) => failure = Some(e.into()),
            }
        }
    });
    failure.map_or(Ok(()), Err)?;
    file.flush().map_err(fail)
}

/// What one part has of a generation.
struct Generation {
    dir: PathBuf,
    /// Something was left out, or had not come back since a restart from one in which something was.
    lacks: bool,
    job: Job,
    chunks: HashMap<u32, Chunk>,
}

impl Generation {
    fn open(dir: &Path) -> Result<Self, Failure> {
        let manifest = Manifest::read(dir)?;
        let store = Store::of_generation(dir);
        let open = |c| store.open(c).map(|chunk| (c.id, chunk));
        Ok(Self {
            job: SectionFile::read(&dir.join(JOB_FILE))?.get_json(Kind::Job)?,
            chunks: manifest.chunks.iter().map(open).collect::<Result<_, ImageError>>()?,
            lacks: manifest.left_out.is_some(),
            dir: dir.to_owned(),
        })
    }

    /// The memory of a process, or of the one whose memory it has.
    fn memory(&self, p: &Process) -> Result<Memory<'_>, ImageError> {
        let owner = if p.shares_mm_with == 0 { p.pid } else { p.shares_mm_with };
        let path = self.dir.join(TableId::Process(owner).file_name());
        let table = extents::decode(&path, SectionFile::read(&path)?.get(Kind::Extents)?)?;
        Ok(Memory {
            table,
            chunks: &self.chunks,
            window: Vec::new(),
            from: 0,
        })
    }
}

/// The memory of a process, of which a piece is at hand.
struct Memory<'a> {
    table: Vec<Extent>,
    chunks: &'a HashMap<u32, Chunk>,
    window: Vec<u8>,
    from: u64,
}

impl Memory<'_> {
    /// The bytes from `at` on, at least one, and none from `end` on. What is not stored is zero.
    fn at(&mut self, at: u64, end: u64) -> Result<&[u8], ImageError> {
        let has = |m: &Self| m.from <= at && at < m.from + m.window.len() as u64;
        if !has(self) {
            self.load(at / WINDOW * WINDOW)?;
        }
        let place = |address: u64| usize::try_from(address - self.from).unwrap_or(usize::MAX);
        Ok(&self.window[place(at)..place(end).min(self.window.len())])
    }

    fn load(&mut self, from: u64) -> Result<(), ImageError> {
        self.from = from;
        self.window.clear();
        self.window.resize(WINDOW as usize, 0);
        let (mut found, mut buf) = (Vec::new(), Buffer::default());
        extents::within(&self.table, from, from + WINDOW, &mut found);
        for e in found {
            let none = || ImageError::Damaged {
                path: format!("chunk {}", e.chunk),
                reason: "it is not in the manifest".into(),
            };
            let pages = u32::try_from(e.bytes / PAGE).unwrap_or(u32::MAX);
            self.chunks.get(&e.chunk).ok_or_else(none)?.read(e.page, pages, &mut buf)?;
            let at = usize::try_from(e.vaddr - from).unwrap_or(usize::MAX);
            self.window[at..at + buf.len()].copy_from_slice(&buf);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_harmless_and_each_is_used_once() {
        let mut names = BTreeSet::new();
        let mut of = |name| unused(name, (0, 7), &mut names);
        assert_eq!(of("density0"), "density0.0.7.raw");
        assert_eq!(of("../x/é"), "___x__.0.7.raw");
        assert_eq!([of("a.b"), of("a/b")], ["a_b.0.7.raw", "a_b.0.7.1.raw"]);
    }
}
