//! Section files: a header, then sections of (kind, version, length, checksum, payload).
//!
//! ```text
//! 0   magic "BELAYIMG"        8 bytes
//! 8   format version          u32
//! 12  architecture            u32 (ELF e_machine)
//! 16  section: kind           u32 ┐
//! 20           version        u32 │ repeated to
//! 24           length         u64 │ the end of
//! 32           XXH3-64        u64 │ the file
//! 40           payload, padded to 8 bytes ┘
//! ```
//! All numbers are little endian.

use crate::{checksum, files, ImageError, FORMAT_VERSION};
use serde::{de::DeserializeOwned, Serialize};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"BELAYIMG";
const HEADER: usize = 16;
const SECTION_HEADER: usize = 24;
/// Version of every section: what changes their meaning changes that of the format.
const SECTION_VERSION: u32 = 1;
/// A section file larger than this is refused before it is read.
const MAX_FILE_BYTES: u64 = 8 << 30;

/// Kinds of section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// [`crate::model::Job`] as JSON.
    Job = 1,
    /// Descriptors and shared objects (`belay-plugins`) as JSON.
    Descriptors = 2,
    /// [`crate::extents::Extents`] in its binary form.
    Extents = 3,
}

/// ELF machine number of this build.
pub const MACHINE: u32 = if cfg!(target_arch = "x86_64") { 62 } else { 0 };

/// One section as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Its kind, see [`Kind`]; unknown kinds are kept.
    pub kind: u32,
    /// Version of its payload.
    pub version: u32,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// A section file in memory.
#[derive(Debug, Clone, Default)]
pub struct SectionFile {
    path: PathBuf,
    sections: Vec<Section>,
}

impl SectionFile {
    /// An empty section file.
    pub fn new() -> Self {
        Self::default()
    }

    /// The sections in file order.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Appends a section with a raw payload.
    pub fn push(&mut self, kind: Kind, payload: Vec<u8>) {
        self.sections.push(Section {
            kind: kind as u32,
            version: SECTION_VERSION,
            payload,
        });
    }

    /// Appends a section with a JSON payload.
    pub fn push_json<T: Serialize>(&mut self, kind: Kind, value: &T) -> Result<(), ImageError> {
        let payload = serde_json::to_vec(value).map_err(|e| ImageError::Damaged {
            path: format!("section {kind:?}"),
            reason: format!("encode: {e}"),
        })?;
        self.push(kind, payload);
        Ok(())
    }

    /// Payload of the first section of `kind`, whose version must be the one that this program understands.
    pub fn get(&self, kind: Kind) -> Result<&[u8], ImageError> {
        let found = self.sections.iter().find(|s| s.kind == kind as u32);
        match found {
            Some(s) if s.version == SECTION_VERSION => Ok(&s.payload),
            Some(s) => {
                let reason = format!(
                    "section {kind:?} has version {}, this belay reads version {SECTION_VERSION}",
                    s.version
                );
                Err(ImageError::damaged(&self.path, reason))
            }
            None => Err(ImageError::damaged(&self.path, format!("no section {kind:?}"))),
        }
    }

    /// Decodes the first section of `kind` from JSON.
    pub fn get_json<T: DeserializeOwned>(&self, kind: Kind) -> Result<T, ImageError> {
        serde_json::from_slice(self.get(kind)?).map_err(|e| ImageError::damaged(&self.path, format!("section {kind:?}: {e}")))
    }

    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(
            HEADER
                + self
                    .sections
                    .iter()
                    .map(|s| SECTION_HEADER + s.payload.len() + 8)
                    .sum::<usize>(),
        );
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        out.extend_from_slice(&MACHINE.to_le_bytes());
        for s in &self.sections {
            out.extend_from_slice(&s.kind.to_le_bytes());
            out.extend_from_slice(&s.version.to_le_bytes());
            out.extend_from_slice(&(s.payload.len() as u64).to_le_bytes());
            out.extend_from_slice(&checksum(&s.payload).to_le_bytes());
            out.extend_from_slice(&s.payload);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        out
    }

    /// Decodes `bytes`, naming `path` in errors.
    pub fn decode(path: &Path, bytes: &[u8]) -> Result<Self, ImageError> {
        let damaged = |reason: &str| ImageError::damaged(path, reason);
        check_header(path, bytes)?;
        let mut sections = Vec::new();
        let mut at = HEADER;
        while at < bytes.len() {
            if bytes.len() - at < SECTION_HEADER {
                return Err(damaged("truncated section header"));
            }
            let (kind, version) = (u32_at(bytes, at), u32_at(bytes, at + 4));
            let length = u64_at(bytes, at + 8);
            let sum = u64_at(bytes, at + 16);
            at += SECTION_HEADER;
            let length = usize::try_from(length).ok().filter(|l| *l <= bytes.len() - at);
            let Some(length) = length else {
                return Err(damaged("section reaches behind the end of the file"));
            };
            let payload = &bytes[at..at + length];
            if checksum(payload) != sum {
                return Err(damaged(&format!("checksum of section {kind} does not match")));
            }
            sections.push(Section {
                kind,
                version,
                payload: payload.to_vec(),
            });
            at = (at + length).next_multiple_of(8).min(bytes.len());
        }
        Ok(Self {
            path: path.to_owned(),
            sections,
        })
    }

    /// Writes the file with mode 0600. It is not yet durable: the caller commits the generation with `fsync`.
    pub fn write(&self, path: &Path) -> Result<(), ImageError> {
        let mut f = create_private(path)?;
        f.write_all(&self.encode()).map_err(|e| ImageError::io("write", path, e))
    }

    /// Reads and verifies the file.
    pub fn read(path: &Path) -> Result<Self, ImageError> {
        Self::read_within(path, MAX_FILE_BYTES)
    }

    /// The same of a file that may be anybody's, of at most `limit` bytes.
    pub fn read_within(path: &Path, limit: u64) -> Result<Self, ImageError> {
        Self::decode(path, &files::read(path, limit)?)
    }
}

/// Whether `bytes` begin like a file of this format, written for this architecture.
fn check_header(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    if bytes.len() < HEADER || &bytes[..8] != MAGIC {
        return Err(ImageError::damaged(path, "not a belay image"));
    }
    let version = u32_at(bytes, 8);
    if version != FORMAT_VERSION {
        return Err(ImageError::Version {
            path: path.display().to_string(),
            found: version,
            expected: FORMAT_VERSION,
        });
    }
    let machine = u32_at(bytes, 12);
    if machine != MACHINE {
        return Err(ImageError::Architecture {
            path: path.display().to_string(),
            found: format!("ELF machine {machine}"),
            expected: format!("ELF machine {MACHINE} ({})", std::env::consts::ARCH),
        });
    }
    Ok(())
}

/// Gives the kind and the payload of each section of the file at `path` to `look`, piece by piece, whatever their
/// length. Their checksums are compared behind that: what `look` has found counts only when all is well.
pub fn each(path: &Path, look: &mut dyn FnMut(u32, &mut dyn Read) -> Result<(), ImageError>) -> Result<(), ImageError> {
    let (file, length) = files::open(path)?;
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => ImageError::damaged(path, "it ends within a section"),
        _ => ImageError::io("read", path, e),
    };
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut head = [0; SECTION_HEADER];
    input.read_exact(&mut head[..HEADER]).map_err(failed)?;
    check_header(path, &head[..HEADER])?;
    let mut left = length - HEADER as u64;
    while left > 0 {
        input.read_exact(&mut head).map_err(failed)?;
        let (kind, payload) = (u32_at(&head, 0), u64_at(&head, 8));
        left = left.saturating_sub(SECTION_HEADER as u64);
        if payload > left {
            return Err(ImageError::damaged(path, "section reaches behind the end of the file"));
        }
        let mut section = Summed {
            input: (&mut input).take(payload),
            sum: Xxh3::new(),
        };
        look(kind, &mut section)?;
        std::io::copy(&mut section, &mut std::io::sink()).map_err(failed)?;
        if section.input.limit() > 0 || section.sum.digest() != u64_at(&head, 16) {
            return Err(ImageError::damaged(
                path,
                format!("checksum of section {kind} does not match"),
            ));
        }
        let padding = (payload.next_multiple_of(8) - payload).min(left - payload);
        left -= payload + padding;
        std::io::copy(&mut (&mut input).take(padding), &mut std::io::sink()).map_err(failed)?;
    }
    Ok(())
}

/// A payload, with the checksum of what has been read of it.
struct Summed<R> {
    input: R,
    sum: Xxh3,
}

impl<R: Read> Read for Summed<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let n = self.input.read(into)?;
        self.sum.update(&into[..n]);
        Ok(n)
    }
}

/// Creates `path` anew with mode 0600. What lies there is removed, never written to: in a directory where others can
/// write it may be a link of theirs, or a file that they have open.
pub fn create_private(path: &Path) -> Result<std::fs::File, ImageError> {
    use std::os::unix::fs::OpenOptionsExt;
    let create = || {
        // A link is not followed with this either.
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600).open(path)
    };
    let made = match create() {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
            std::fs::remove_file(path).map_err(|e| ImageError::io("replace", path, e))?;
            create()
        }
        made => made,
    };
    made.map_err(|e| ImageError::io("create", path, e))
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    let mut v = [0; 4];
    v.copy_from_slice(&b[at..at + 4]);
    u32::from_le_bytes(v)
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    let mut v = [0; 8];
    v.copy_from_slice(&b[at..at + 8]);
    u64::from_le_bytes(v)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> SectionFile {
        let mut f = SectionFile::new();
        f.push(Kind::Job, b"hello".to_vec());
        f.push(Kind::Extents, vec![7; 1000]);
        f
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = sample().encode();
        let back = SectionFile::decode(Path::new("x"), &bytes).unwrap();
        assert_eq!(back.get(Kind::Job).unwrap(), b"hello");
        assert_eq!(back.get(Kind::Extents).unwrap(), &[7; 1000][..]);
        assert!(back.get(Kind::Descriptors).is_err());
    }

    #[test]
    fn what_lies_in_the_way_is_replaced_and_neither_followed_nor_written_to() {
        let dir = std::env::temp_dir().join(format!("belay-sections-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (other, path) = (dir.join("other"), dir.join("new"));
        std::fs::write(&other, "theirs").unwrap();
        for plant in [std::os::unix::fs::symlink::<&Path, &Path>, std::fs::hard_link] {
            plant(&other, &path).unwrap();
            create_private(&path).unwrap().write_all(b"mine").unwrap();
            assert_eq!(std::fs::read_to_string(&other).unwrap(), "theirs");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
            std::fs::remove_file(&path).unwrap();
        }
        std::os::unix::fs::symlink(dir.join("nothing"), &path).unwrap();
        create_private(&path).unwrap();
        assert!(!dir.join("nothing").exists() && path.symlink_metadata().unwrap().is_file());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(create_private(&path).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn every_flipped_bit_of_a_payload_or_header_is_noticed_or_harmless() {
        let bytes = sample().encode();
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            if let Ok(f) = SectionFile::decode(Path::new("x"), &bad) {
                // Only the kind and version words and the padding are outside the checksum; a changed kind hides the section.
                for s in f.sections() {
                    assert!(s.payload == b"hello" || s.payload == vec![7; 1000]);
                }
            }
        }
    }

    #[test]
    fn a_section_of_another_version_is_not_taken_for_ours() {
        let mut f = sample();
        f.sections[0].version = 2;
        let back = SectionFile::decode(Path::new("x"), &f.encode()).unwrap();
        assert!(back.get(Kind::Job).unwrap_err().to_string().contains("version 2"));
        assert!(back.get(Kind::Extents).is_ok());
    }

    #[test]
    fn what_is_read_piece_by_piece_is_the_same() {
        let path = std::env::temp_dir().join(format!("belay-each-{}", std::process::id()));
        let read = |bytes: &[u8], most: u64| {
            std::fs::write(&path, bytes).unwrap();
            let mut found = Vec::new();
            let done = each(&path, &mut |kind, payload| {
                let mut data = Vec::new();
                payload.take(most).read_to_end(&mut data).unwrap();
                found.push((kind, data));
                Ok(())
            });
            done.map(|()| found)
        };
        let whole = sample().encode();
        let all: Vec<_> = sample().sections.into_iter().map(|s| (s.kind, s.payload)).collect();
        assert_eq!(read(&whole, u64::MAX).unwrap(), all);
        assert_eq!(read(&whole, 1).unwrap()[1].1, [7]);
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            assert_eq!(
                read(&bad, u64::MAX).is_err(),
                SectionFile::decode(&path, &bad).is_err(),
                "bit of byte {at}"
            );
            assert_eq!(
                read(&whole[..at], 3).is_err(),
                SectionFile::decode(&path, &whole[..at]).is_err(),
                "{at} bytes"
            );
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = sample().encode();
        for len in 0..bytes.len() {
            if let Ok(f) = SectionFile::decode(Path::new("x"), &bytes[..len]) {
                assert!(f.sections().len() < 2);
            }
        }
    }
}
