//! What a host has of a generation: the manifest, the files it lists, the chunks it lists, which lie in one stream of
//! bytes.

use super::parity::parity_file;
use crate::{generations, verify, Failure};
use belay_image::files;
use belay_image::manifest::{ChunkEntry, Manifest, MANIFEST_FILE};
use belay_image::{is_bad_sector, ImageError};
use belay_redundancy::index::FOOTER;
use belay_redundancy::stream::{self, Geometry, Order};
use belay_redundancy::{checksum, Index, Part, Piece, Place};
use belay_storage::chunk::file_bytes;
use belay_storage::store::Store;
use belay_storage::PAGE;
use belay_wire::Exit;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// The files of generation `number` in `dir`, without their places in a stream.
pub(crate) fn parts(dir: &Path, number: u64) -> Result<Vec<Part>, Failure> {
    let path = dir.join("gen").join(generations::name(number));
    let manifest = Manifest::read(&path)?;
    let (_, length) = files::open(&path.join(MANIFEST_FILE))?;
    let own = |name: &str, bytes| Part {
        place: Place::Generation,
        name: name.into(),
        bytes,
        at: 0,
    };
    let store = Store::of_job(dir);
    let mut out = vec![own(MANIFEST_FILE, length)];
    out.extend(manifest.files.iter().map(|f| own(&f.name, f.bytes)));
    out.extend(manifest.chunks.iter().map(|c| {
        Part {
            place: Place::Chunks,
            name: store
                .path(c.id)
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            bytes: file_bytes(c.pages),
            at: 0,
        }
    }));
    Ok(out)
}

/// The file of a part; that of a chunk may be moved from a local tier at any moment.
pub(crate) fn path_of(dir: &Path, number: u64, (place, name): (Place, &str)) -> PathBuf {
    match place {
        Place::Generation => dir.join("gen").join(generations::name(number)).join(name),
        Place::Chunks => Store::of_job(dir).path_of_file(name),
    }
}

fn open(dir: &Path, number: u64, file: (Place, &str)) -> io::Result<File> {
    match File::open(path_of(dir, number, file)) {
        // Moved meanwhile, perhaps: then it stays where it is now.
        Err(e) if e.kind() == io::ErrorKind::NotFound => File::open(path_of(dir, number, file)),
        other => other,
    }
}

/// Reads `bytes` bytes of a stream, of which these pieces lie in files.
pub(crate) fn read_pieces(dir: &Path, number: u64, pieces: &[Piece], bytes: usize) -> io::Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    for piece in pieces {
        let end = piece.to.saturating_add(piece.bytes);
        let into = out.get_mut(piece.to..end).ok_or(io::ErrorKind::InvalidInput)?;
        open(dir, number, (piece.place, &piece.name))?.read_exact_at(into, piece.from)?;
    }
    Ok(out)
}

/// Reads the stream of these files from `at` on.
pub(crate) fn read(dir: &Path, number: u64, parts: &[Part], at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    read_pieces(dir, number, &stream::pieces(parts, at, bytes), bytes)
}

/// What `sum` says of each block, given as offset and length; it is asked in the order of the stream, and the answers
/// are in that of the segments.
fn each_block<E>(geometry: Geometry, mut sum: impl FnMut(u64, usize) -> Result<u64, E>) -> Result<Vec<u64>, E> {
    let mut sums = Vec::new();
    for (segment, block) in geometry.all() {
        let (at, bytes) = geometry.range(segment, block);
        sums.push(sum(at, bytes)?);
    }
    Ok(match geometry.order {
        Order::Segments => sums,
        Order::Rows => {
            let of = |segment| sums.iter().skip(segment).step_by(geometry.data).copied();
            (0..geometry.data).flat_map(of).collect()
        }
    })
}

/// Checksums of the blocks of the stream of these files.
pub(crate) fn sums(dir: &Path, number: u64, parts: &[Part], geometry: Geometry) -> io::Result<Vec<u64>> {
    let end = stream::end(parts);
    // Most of the room may be of a host that has more: it is not read, and zeros are added up once for each length.
    let mut of_zeros = HashMap::new();
    each_block(geometry, |at, bytes| {
        if at >= end {
            return Ok(*of_zeros.entry(bytes).or_insert_with(|| checksum(&vec![0; bytes])));
        }
        read(dir, number, parts, at, bytes).map(|data| checksum(&data))
    })
}

/// Why a generation has no checksums.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// What was read is not what was written, or the device cannot read it: nothing new may refer to it.
    Rotten(Failure),
    /// It could not be read, this time: what lies there may be good.
    Unread(Failure),
}

impl From<ImageError> for Unfit {
    fn from(e: ImageError) -> Self {
        match &e {
            ImageError::Damaged { .. } => Self::Rotten(e.into()),
            ImageError::Io { source, .. } if is_bad_sector(source) => Self::Rotten(e.into()),
            _ => Self::Unread(e.into()),
        }
    }
}

/// The same, of generation `number` in `dir`, whose files and pages must be what was written: a file that is damaged is
/// named. `parts` must be all of its files.
pub(crate) fn checked_sums(dir: &Path, number: u64, parts: &[Part], geometry: Geometry) -> Result<Vec<u64>, Unfit> {
    let mut check = Check::new(dir, number, parts)?;
    // Their file has no checksum in the manifest.
    verify::byte_strings(&dir.join("gen").join(generations::name(number)))?;
    each_block(geometry, |at, bytes| {
        let data = read(dir, number, parts, at, bytes).map_err(|e| check.unread(&e))?;
        check.feed(&data)?;
        Ok(checksum(&data))
    })
}

/// That a generation is not what it was a moment ago.
pub(crate) fn changes(number: u64) -> Failure {
    Failure::new(Exit::Damaged, format!("generation {number} changes while it is read"))
}

/// Compares the stream, as it is read, with the checksums of the manifest's files and of the chunks' pages.
struct Check<'a> {
    dir: &'a Path,
    number: u64,
    /// What is read next, and from there on.
    parts: std::iter::Peekable<std::vec::IntoIter<(&'a Part, Source)>>,
    /// Up to where the stream is known.
    end: u64,
    /// The file whose pieces are read.
    path: PathBuf,
    /// Pages of the chunk that are still to come, and bytes behind them.
    pages: std::vec::IntoIter<u128>,
    rest: u64,
    /// What is left of a piece, its sum so far, and its sum.
    left: u64,
    sum: Xxh3,
    expected: Expected,
}

/// What tells whether a file is what was written.
enum Source {
    File(Option<u64>),
    Chunk(ChunkEntry),
}

/// The sum of a piece of the stream.
enum Expected {
    /// The manifest has been checked when it was read, a chunk's table of hashes too; pieces of the blob file are
    /// checked by who refers to them.
    Nothing,
    File(u64),
    Page(u128),
}

impl<'a> Check<'a> {
    fn new(dir: &'a Path, number: u64, parts: &'a [Part]) -> Result<Self, Unfit> {
        let manifest = Manifest::read(&dir.join("gen").join(generations::name(number)))?;
        let here = self::parts(dir, number).map_err(Unfit::Unread)?;
        let files = manifest.files.into_iter().map(|f| Source::File(f.xxh3));
        let chunks = manifest.chunks.into_iter().map(Source::Chunk);
        let sources = std::iter::once(Source::File(None)).chain(files).chain(chunks);
        let of = |(part, source): (Part, Source)| ((part.place, part.name), (part.bytes, source));
        let mut known: BTreeMap<_, _> = here.into_iter().zip(sources).map(of).collect();
        let all = known.len();
        let with = |part: &'a Part| {
            let (bytes, source) = known.remove(&(part.place, part.name.clone()))?;
            (bytes == part.bytes).then_some((part, source))
        };
        let with_sources: Option<Vec<_>> = parts.iter().map(with).collect();
        let with_sources = with_sources.filter(|w| w.len() == all);
        Ok(Self {
            dir,
            number,
            parts: with_sources
                .ok_or_else(|| Unfit::Unread(changes(number)))?
                .into_iter()
                .peekable(),
            end: 0,
            path: dir.to_owned(),
            pages: Vec::new().into_iter(),
            rest: 0,
            left: 0,
            sum: Xxh3::new(),
            expected: Expected::Nothing,
        })
    }

    /// The part that is read now could not be read. One that is shorter than it was has lost something.
    fn unread(&self, e: &io::Error) -> Unfit {
        let failure = Failure::io(format!("read {}", self.path.display()), e);
        if e.kind() == io::ErrorKind::UnexpectedEof || is_bad_sector(e) {
            return Unfit::Rotten(Failure::new(Exit::Damaged, failure.message));
        }
        Unfit::Unread(failure)
    }

    /// Goes on to the next piece; none behind the end.
    fn advance(&mut self) -> Result<bool, Unfit> {
        (self.left, self.expected) = if let Some(hash) = self.pages.next() {
            (PAGE, Expected::Page(hash))
        } else if self.rest > 0 {
            (std::mem::take(&mut self.rest), Expected::Nothing)
        } else if let Some(gap) = self
            .parts
            .peek()
            .and_then(|(next, _)| next.at.checked_sub(self.end))
            .filter(|n| *n > 0)
        {
            self.end += gap;
            (gap, Expected::Nothing)
        } else {
            let Some((part, source)) = self.parts.next() else {
                return Ok(false);
            };
            self.path = path_of(self.dir, self.number, (part.place, &part.name));
            self.end = part.at + part.bytes;
            match source {
                Source::Chunk(entry) => {
                    let chunk = Store::of_job(self.dir).open(&entry)?;
                    self.rest = part.bytes - chunk.hashes.len() as u64 * PAGE;
                    self.pages = chunk.hashes.into_iter();
                    (0, Expected::Nothing)
                }
                Source::File(sum) => (part.bytes, sum.map_or(Expected::Nothing, Expected::File)),
            }
        };
        self.sum.reset();
        Ok(true)
    }

    /// The next bytes of the stream.
    fn feed(&mut self, mut data: &[u8]) -> Result<(), Unfit> {
        while !data.is_empty() {
            if self.left == 0 && !self.advance()? {
                return Ok(());
            }
            let now = data.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
            self.sum.update(&data[..now]);
            (self.left, data) = (self.left - now as u64, &data[now..]);
            if self.left > 0 {
                break;
            }
            let right = match self.expected {
                Expected::File(sum) => self.sum.digest() == sum,
                Expected::Page(hash) => self.sum.digest() == hash as u64,
                Expected::Nothing => true,
            };
            if !right {
                let why = format!(
                    "{}: damaged: it is not what was written for this generation",
                    self.path.display()
                );
                return Err(Unfit::Rotten(Failure::new(Exit::Damaged, why)));
            }
        }
        Ok(())
    }
}

/// What follows the parity in the file of generation `number` in `dir`.
pub(crate) fn read_tail(dir: &Path, number: u64) -> Result<Vec<u8>, Failure> {
    let path = parity_file(dir, number);
    let (tail, index) = read_file(&path)?;
    if index.generation != number {
        let why = format!("{}: damaged: it is of generation {}", path.display(), index.generation);
        return Err(Failure::new(Exit::Damaged, why));
    }
    Ok(tail)
}

/// The index in the file `path`.
pub(crate) fn index_in(path: &Path) -> Result<Index, Failure> {
    read_file(path).map(|(_, index)| index)
}

/// What follows the parity in the file `path`, and the index in it.
fn read_file(path: &Path) -> Result<(Vec<u8>, Index), Failure> {
    let fail = |e: &io::Error| Failure::io(format!("read {}", path.display()), e);
    let damaged = |e: belay_redundancy::RedundancyError| Failure::new(Exit::Damaged, format!("{}: {e}", path.display()));
    let (file, bytes) = files::open(path)?;
    let mut footer = [0; FOOTER];
    file.read_exact_at(&mut footer, bytes.saturating_sub(FOOTER as u64))
        .map_err(|e| fail(&e))?;
    let length = Index::length(&footer, bytes).map_err(damaged)? + FOOTER as u64;
    let mut tail = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact_at(&mut tail, bytes - length).map_err(|e| fail(&e))?;
    let index = Index::decode(&tail).map_err(damaged)?;
    if index.parity_bytes() + length != bytes {
        return Err(Failure::new(
            Exit::Damaged,
            format!("{}: damaged: {bytes} bytes do not fit its index", path.display()),
        ));
    }
    Ok((tail, index))
}

/// The index of generation `number` in `dir`.
pub(crate) fn read_index(dir: &Path, number: u64) -> Result<Index, Failure> {
    Ok(Index::decode(&read_tail(dir, number)?)?)
}

/// Reads parity.
pub(crate) fn read_parity(dir: &Path, number: u64, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    File::open(parity_file(dir, number))?.read_exact_at(&mut out, at)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::blobs::BlobWriter;
    use belay_image::manifest::FileEntry;
    use belay_image::sections::{Kind, SectionFile};
    use belay_image::{TableId, BLOB_FILE, JOB_FILE};
    use belay_storage::engine::{Engine, Options};

    /// Generation 1 of a job with a file, a blob file, an empty file and a chunk.
    fn generation(dir: &Path) {
        let own = dir.join("gen/000001");
        std::fs::create_dir_all(&own).unwrap();
        let mut engine = Engine::new(Store::of_job(dir), Options::default()).unwrap();
        let mut session = engine.begin(0).unwrap();
        let memory: Vec<u8> = (0..600 * PAGE).map(|i| (i * 7 + i / PAGE) as u8).collect();
        let mut table = Vec::new();
        session.store_pages(0x10000, &memory, &mut table).unwrap();
        session.set_table(TableId::Process(1), table).unwrap();
        session.seal().unwrap();
        session.publish().unwrap();
        let mut blobs = BlobWriter::create(&own.join(BLOB_FILE)).unwrap();
        let strings = [[7; 60], [8; 60]].map(|data| blobs.put(&data).unwrap());
        let mut job = SectionFile::new();
        job.push_json(Kind::Job, &strings).unwrap();
        job.push(Kind::Extents, vec![7; 5000]);
        job.write(&own.join(JOB_FILE)).unwrap();
        std::fs::write(own.join("none"), []).unwrap();
        let files = [JOB_FILE, "none", BLOB_FILE].map(|name| {
            let data = std::fs::read(own.join(name)).unwrap();
            FileEntry {
                name: name.into(),
                bytes: data.len() as u64,
                xxh3: (name != BLOB_FILE).then(|| belay_image::checksum(&data)),
            }
        });
        let manifest = Manifest {
            taken: None,
            left_out: None,
            declared: None,
            dirty: None,
            without_hashes: None,
            generation: 1,
            time_unix_s: 1,
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
        std::fs::write(own.join(MANIFEST_FILE), manifest.encode().unwrap()).unwrap();
    }

    #[test]
    fn what_the_device_cannot_read_has_rotted() {
        let dir = std::env::temp_dir().join(format!("belay-unread-{}", std::process::id()));
        generation(&dir);
        let parts = stream::place(parts(&dir, 1).unwrap(), &[], |_| false);
        let check = Check::new(&dir, 1, &parts).unwrap();
        for (errno, rotten) in [(libc::EIO, true), (libc::EACCES, false), (libc::EMFILE, false)] {
            let e = || io::Error::from_raw_os_error(errno);
            let found = [check.unread(&e()), ImageError::io("read", &dir, e()).into()];
            assert!(found.iter().all(|f| matches!(f, Unfit::Rotten(_)) == rotten), "{found:?}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_has_rotted_is_named() {
        let dir = std::env::temp_dir().join(format!("belay-content-{}", std::process::id()));
        generation(&dir);
        let mut parts = stream::place(parts(&dir, 1).unwrap(), &[], |_| false);
        // With a gap.
        parts.last_mut().unwrap().at += 5000;
        let bytes = stream::end(&parts);
        // One segment, and some with blocks that end within pages and files.
        let segments = [(bytes.next_multiple_of(64), 1), ((bytes / 3 + 64).next_multiple_of(64), 3)];
        let orders = [Order::Segments, Order::Rows];
        for (order, (segment, data)) in orders.into_iter().flat_map(|o| segments.map(|s| (o, s))) {
            let geometry = Geometry { order, segment, data };
            let sums = sums(&dir, 1, &parts, geometry).unwrap();
            assert_eq!(checked_sums(&dir, 1, &parts, geometry).unwrap(), sums);
            for (n, sum) in sums.iter().enumerate() {
                let in_segment = sums.len() / data;
                let (at, bytes) = geometry.range(n / in_segment, (n % in_segment) as u64);
                assert_eq!(
                    checksum(&read(&dir, 1, &parts, at, bytes).unwrap()),
                    *sum,
                    "{geometry:?}: {n}"
                );
            }
            // Not all of its files.
            assert!(matches!(checked_sums(&dir, 1, &parts[1..], geometry), Err(Unfit::Unread(_))));
            let [chunk, job, blobs] = [".bpg", JOB_FILE, BLOB_FILE].map(|name| {
                let found = parts.iter().find(|p| p.name.ends_with(name));
                found.unwrap_or_else(|| panic!("{name}: {parts:?}"))
            });
            let places = [
                (job, 0),
                (job, job.bytes - 1),
                (blobs, 0),
                (blobs, blobs.bytes - 1),
                (chunk, 0),
                (chunk, 300 * PAGE),
                (chunk, 600 * PAGE - 1),
                (chunk, chunk.bytes - 1),
            ];
            for (part, at) in places {
                let path = path_of(&dir, 1, (part.place, &part.name));
                let good = std::fs::read(&path).unwrap();
                let mut bad = good.clone();
                bad[at as usize] ^= 1;
                std::fs::write(&path, bad).unwrap();
                let Unfit::Rotten(failure) = checked_sums(&dir, 1, &parts, geometry).unwrap_err() else {
                    panic!("{}: a flipped bit is taken for a failure of the moment", path.display());
                };
                assert!(
                    failure.exit == Exit::Damaged && failure.message.contains(&path.display().to_string()),
                    "{failure}"
                );
                std::fs::write(&path, &good[..good.len() - 1]).unwrap();
                assert!(
                    matches!(checked_sums(&dir, 1, &parts, geometry), Err(Unfit::Rotten(_))),
                    "cut short"
                );
                // Out of reach for a moment: nothing is known of what lies there.
                std::fs::remove_file(&path).unwrap();
                assert!(
                    matches!(checked_sums(&dir, 1, &parts, geometry), Err(Unfit::Unread(_))),
                    "missing"
                );
                std::os::unix::fs::symlink(&path, &path).unwrap();
                assert!(
                    matches!(checked_sums(&dir, 1, &parts, geometry), Err(Unfit::Unread(_))),
                    "unreadable"
                );
                std::fs::remove_file(&path).unwrap();
                std::fs::write(&path, good).unwrap();
            }
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
