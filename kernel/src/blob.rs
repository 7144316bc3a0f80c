//! Loading of the two position-independent programs that run inside the application (`belay-inject`, `belay-restorer`).
//!
//! They are static-pie ELF files without imports: a few segments and RELATIVE relocations. The loader lays them out as
//! one flat image that can be copied to any page-aligned address. Only this project's own programs are loaded, but the
//! file is still checked, not trusted.

use object::elf::{Dyn64, FileHeader64, Rela64, DT_RELA, DT_RELASZ, EM_X86_64, PT_DYNAMIC, PT_LOAD, R_X86_64_RELATIVE};
use object::pod::{self, Pod};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Rela};
use object::LittleEndian;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PAGE: u64 = 4096;
/// No such program is larger.
const MAX_BYTES: u64 = 4 << 20;

/// A program ready to be placed.
#[derive(Debug, Clone)]
pub struct Blob {
    image: Vec<u8>,
    entry: u64,
    relocations: Vec<(u64, u64)>,
}

/// Finds program `name`: beside the running executable, else in `../libexec/belay` from there.
pub fn find(name: &str) -> io::Result<PathBuf> {
    let exe = crate::proc::own_program()?;
    let dir = exe.parent().unwrap_or(Path::new("/"));
    let candidates = [dir.join(name), dir.join("../libexec/belay").join(name)];
    let found = candidates.iter().find(|p| p.is_file()).cloned().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("{name} is neither beside {} nor in ../libexec/belay", exe.display()),
        )
    })?;
    // SAFETY: takes a number only.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
        // The file of this program gives capabilities. A link to it in a directory of the caller's must not lend them
        // to a program of the caller's.
        let (own, other) = (std::fs::metadata(&exe)?, std::fs::metadata(&found)?);
        check_trusted((own.uid(), other.uid()), other.mode()).map_err(|why| {
            let text = format!("{} {why}; install belay completely", found.display());
            io::Error::new(io::ErrorKind::PermissionDenied, text)
        })?;
    }
    Ok(found)
}

/// Whether a program that belongs to `other` and has mode `mode` is as trustworthy as this one, which belongs to `own`.
fn check_trusted((own, other): (u32, u32), mode: u32) -> Result<(), String> {
    if other != own && other != 0 {
        return Err(format!("belongs to user {other}, belay to user {own}"));
    }
    if mode & 0o022 != 0 {
        return Err("can be written by others than its owner".into());
    }
    Ok(())
}

impl Blob {
    /// Loads the program in file `path`.
    pub fn load(path: &Path) -> io::Result<Self> {
        Self::parse(&std::fs::read(path)?).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: not a program that can be injected", path.display()),
            )
        })
    }

    fn parse(elf: &[u8]) -> Option<Self> {
        let head = FileHeader64::<LittleEndian>::parse(elf).ok()?;
        let e = head.endian().ok()?;
        if head.e_machine(e) != EM_X86_64 {
            return None;
        }
        let mut image = Vec::new();
        let mut dynamic = None;
        for segment in head.program_headers(e, elf).ok()? {
            let (from, bytes) = (segment.p_vaddr(e), segment.p_memsz(e));
            let end = from.checked_add(bytes).filter(|end| *end <= MAX_BYTES);
            if segment.p_type(e) == PT_LOAD {
                let data = segment.data(e, elf).ok().filter(|data| data.len() as u64 <= bytes)?;
                let end = usize::try_from(end?).ok()?;
                if image.len() < end {
                    image.resize(end, 0);
                }
                image
                    .get_mut(usize::try_from(from).ok()?..)?
                    .get_mut(..data.len())?
                    .copy_from_slice(data);
            } else if segment.p_type(e) == PT_DYNAMIC {
                dynamic = Some(from..end?);
            }
        }
        image.resize(image.len().next_multiple_of(PAGE as usize), 0);
        let relocations = match dynamic {
            Some(range) => relocations(&image, range)?,
            None => Vec::new(),
        };
        let entry = head.e_entry(e);
        (entry < image.len() as u64).then_some(Self {
            image,
            entry,
            relocations,
        })
    }

    /// Size of the image, a multiple of the page size.
    pub fn bytes(&self) -> u64 {
        self.image.len() as u64
    }

    /// Offset of the entry point in the image.
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// The word in front of the entry, which tells of what version the program is.
    pub fn mark(&self) -> Option<u64> {
        word(&self.image, usize::try_from(self.entry).ok()?.checked_sub(8)?)
    }

    /// The image as it must look at address `base`.
    pub fn placed_at(&self, base: u64) -> Vec<u8> {
        let mut out = self.image.clone();
        for (at, addend) in &self.relocations {
            let at = *at as usize;
            out[at..at + 8].copy_from_slice(&base.wrapping_add(*addend).to_le_bytes());
        }
        out
    }
}

fn word(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(b.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// The entries of a table in the image.
fn table<T: Pod>(image: &[u8], range: Range<u64>) -> Option<&[T]> {
    let range = usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?;
    pod::slice_from_all_bytes(image.get(range)?).ok()
}

fn relocations(image: &[u8], dynamic: Range<u64>) -> Option<Vec<(u64, u64)>> {
    let e = LittleEndian;
    let dynamic: &[Dyn64<LittleEndian>] = table(image, dynamic)?;
    let value = |tag| dynamic.iter().rfind(|d| d.d_tag(e) == tag).map_or(0, |d| d.d_val(e));
    let from = value(DT_RELA);
    let all: &[Rela64<LittleEndian>] = table(image, from..from.checked_add(value(DT_RELASZ))?)?;
    all.iter()
        .map(|r| {
            let place = r.r_offset(e);
            let fits = place.checked_add(8)? <= image.len() as u64;
            let relative = r.r_type(e, false) == R_X86_64_RELATIVE && r.r_sym(e, false) == 0;
            (relative && fits).then_some((place, r.r_addend(e).cast_unsigned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest such file: one segment that holds everything.
    fn tiny() -> Vec<u8> {
        let mut e = vec![0u8; 0x200];
        e[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        e[18] = 62;
        e[24] = 0x10; // entry
        e[32] = 64; // program headers
        e[54] = 56;
        e[56] = 2;
        for (at, kind, vaddr, bytes) in [(64usize, 1u8, 0u64, 0x200u64), (120, 2, 0x100, 48)] {
            e[at] = kind;
            e[at + 8..at + 16].copy_from_slice(&vaddr.to_le_bytes());
            e[at + 16..at + 24].copy_from_slice(&vaddr.to_le_bytes());
            e[at + 32..at + 40].copy_from_slice(&bytes.to_le_bytes());
            e[at + 40..at + 48].copy_from_slice(&bytes.to_le_bytes());
        }
        for (at, v) in [
            (0x100usize, 7u64),
            (0x108, 0x150),
            (0x110, 8),
            (0x118, 24),
            (0x150, 0x1f0),
            (0x158, 8),
            (0x160, 0x10),
        ] {
            e[at..at + 8].copy_from_slice(&v.to_le_bytes());
        }
        e
    }

    #[test]
    fn a_program_of_the_callers_is_not_lent_capabilities() {
        assert!(check_trusted((0, 0), 0o755).is_ok());
        assert!(check_trusted((7, 0), 0o755).is_ok());
        assert!(check_trusted((0, 1000), 0o755).is_err());
        assert!(check_trusted((0, 0), 0o775).is_err());
    }

    #[test]
    fn relocations_are_applied_for_the_base() {
        let b = Blob::parse(&tiny()).unwrap();
        assert_eq!((b.bytes(), b.entry()), (4096, 0x10));
        assert_eq!(word(&b.placed_at(0x7000_0000), 0x1f0), Some(0x7000_0010));
    }

    #[test]
    fn no_damage_makes_the_loader_panic() {
        let good = tiny();
        for len in 0..good.len() {
            let _ = Blob::parse(&good[..len]);
        }
        for at in 0..good.len() {
            for v in [0, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = v;
                if let Some(b) = Blob::parse(&bad) {
                    let _ = b.placed_at(u64::MAX - 5);
                }
            }
        }
    }
}
