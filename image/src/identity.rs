//! Identity of a file that is mapped: its build id, else a hash, else length and time.

use crate::model::FileIdentity;
use crate::name::Name;
use object::elf::{FileHeader64, ProgramHeader64, ELF_NOTE_GNU, NT_GNU_BUILD_ID, PT_NOTE};
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader};
use object::{pod, LittleEndian};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// Files without a build id are hashed up to this length; of longer ones length and time must do.
const HASH_LIMIT: u64 = 16 << 20;
/// Longer note segments than this are not searched,
const NOTE_LIMIT: u64 = 64 << 10;
/// nor more segments.
const SEGMENTS: usize = 256;

type Header = FileHeader64<LittleEndian>;
type Segment = ProgramHeader64<LittleEndian>;

/// Opens the file at `path` to look at it.
pub fn open(path: &Path) -> io::Result<File> {
    // What has taken the file's place may be a FIFO, which would keep us waiting for a writer.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let open = |flags| OpenOptions::new().read(true).custom_flags(flags).open(path);
    // Its time of last access stays as it is, where that may be asked for: by its owner, and by root.
    open(flags | libc::O_NOATIME).or_else(|_| open(flags))
}

/// A file that no path leads to, or to another one: the agent has it open.
#[derive(Debug, Clone)]
pub struct Nameless {
    /// Its device,
    pub dev: u64,
    /// and its number there.
    pub ino: u64,
    /// The path that it had.
    pub path: Name,
    /// What it is.
    pub identity: FileIdentity,
    /// Its permission bits.
    pub mode: u32,
    /// The file.
    pub file: Arc<File>,
}

impl FileIdentity {
    /// The identity of the file at `path`.
    pub fn of(path: &Path) -> io::Result<Self> {
        Self::of_open(&open(path)?)
    }

    /// The identity of `file`, whose offset stays where it is.
    pub fn of_open(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        let build_id = meta.is_file().then(|| build_id(file)).flatten();
        let xxh3 = if build_id.is_none() && meta.is_file() && meta.len() <= HASH_LIMIT {
            Some(crate::checksum(&start(file)?))
        } else {
            None
        };
        let mtime_ns = meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec());
        Ok(Self {
            bytes: meta.len(),
            mtime_ns,
            build_id,
            xxh3,
        })
    }

    /// Whether a file of identity `now` can stand in for the one that was mapped: by build id where there was one, else
    /// by hash, else by length and modification time.
    pub fn accepts(&self, now: &FileIdentity) -> bool {
        match (&self.build_id, self.xxh3) {
            (Some(id), _) => now.build_id.as_ref() == Some(id) && now.bytes == self.bytes,
            (None, Some(sum)) => now.xxh3 == Some(sum),
            (None, None) => now.bytes == self.bytes && now.mtime_ns == self.mtime_ns,
        }
    }
}

/// What `file` begins with: all of it, unless it is longer than what is hashed.
fn start(file: &File) -> io::Result<Vec<u8>> {
    let mut data = Vec::new();
    let mut piece = vec![0u8; 1 << 20];
    while data.len() as u64 <= HASH_LIMIT {
        match file.read_at(&mut piece, data.len() as u64) {
            Ok(0) => break,
            Ok(n) => data.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(data)
}

/// Whether `file` is a program or a library.
pub fn is_elf(file: &File) -> bool {
    let mut magic = [0u8; 4];
    file.read_exact_at(&mut magic, 0).is_ok() && magic == *b"\x7fELF"
}

/// The GNU build id of a 64-bit ELF file. Nothing is read by the file's offset, which may be a program's.
fn build_id(file: &File) -> Option<String> {
    let mut bytes = [0u8; size_of::<Header>()];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let head = Header::parse(&bytes[..]).ok()?;
    let e = head.endian().ok()?;
    let count = usize::from(head.e_phnum(e)).min(SEGMENTS);
    let mut bytes = vec![0u8; count * size_of::<Segment>()];
    file.read_exact_at(&mut bytes, head.e_phoff(e)).ok()?;
    let segments: &[Segment] = pod::slice_from_all_bytes(&bytes).ok()?;
    segments.iter().filter(|p| p.p_type(e) == PT_NOTE).find_map(|p| {
        let mut notes = vec![0u8; usize::try_from(p.p_filesz(e).min(NOTE_LIMIT)).ok()?];
        file.read_exact_at(&mut notes, p.p_offset(e)).ok()?;
        find_build_id(&notes, p.p_align(e))
    })
}

fn find_build_id(notes: &[u8], align: u64) -> Option<String> {
    let mut notes = NoteIterator::<Header>::new(LittleEndian, align, notes).ok()?;
    while let Ok(Some(note)) = notes.next() {
        if note.name() == ELF_NOTE_GNU && note.n_type(LittleEndian) == NT_GNU_BUILD_ID {
            return Some(note.desc().iter().map(|b| format!("{b:02x}")).collect());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libc_has_a_build_id_and_a_text_file_a_hash() {
        let libc = FileIdentity::of(Path::new("/lib/x86_64-linux-gnu/libc.so.6")).unwrap();
        assert_eq!(libc.build_id.as_ref().map(String::len), Some(40));
        let text = FileIdentity::of(Path::new("/etc/passwd")).unwrap();
        assert!(text.build_id.is_none() && text.xxh3.is_some());
        assert!(libc.accepts(&libc.clone()) && text.accepts(&text.clone()) && !libc.accepts(&text) && !text.accepts(&libc));
    }

    #[test]
    fn hostile_notes_are_not_followed() {
        let mut n = vec![0xffu8; 64];
        assert_eq!(find_build_id(&n, 4), None);
        n[..4].copy_from_slice(&4u32.to_le_bytes());
        n[4..8].copy_from_slice(&1000u32.to_le_bytes());
        n[8..12].copy_from_slice(&3u32.to_le_bytes());
        n[12..16].copy_from_slice(b"GNU\0");
        assert_eq!(find_build_id(&n, 4), None);
    }
}
