//! New memory of the calling process, by its address: for what is no Rust object, as it outlives the program or is
//! another program's.

use crate::check;
use crate::shared::{maps_no_more, Memory};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Maps `bytes` bytes, which stay, exactly at `at` where that is given: it fails when something is mapped there. They
/// are the first of `file`, shared, or private zeros; `flags` are those of `mmap` beside that. Returns where they are.
pub fn map(at: Option<u64>, bytes: u64, prot: i32, flags: i32, file: Option<BorrowedFd<'_>>) -> io::Result<u64> {
    let kind = match file {
        Some(_) => libc::MAP_SHARED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    };
    let exactly = if at.is_some() { libc::MAP_FIXED_NOREPLACE } else { 0 };
    // No other mapping is to be replaced.
    let flags = flags & !libc::MAP_FIXED | kind | exactly;
    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
    let (at, file) = (at.unwrap_or(0) as *mut libc::c_void, file.map_or(-1, |f| f.as_raw_fd()));
    // SAFETY: a new mapping, where there is none.
    let at = unsafe { libc::mmap(at, bytes, prot, flags, file, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(at as u64)
}

/// Private memory of this process by its address, which stays when the value goes, and in which no reference leads.
#[derive(Debug)]
pub struct Area(Memory);

impl Area {
    /// Zeros, exactly at `at` where that is given; `flags` as for [`map`].
    pub fn map(at: Option<u64>, bytes: u64, flags: i32) -> io::Result<Self> {
        let at = map(at, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, None)?;
        let base = NonNull::new(at as *mut u8).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the mapping that has just been made; `unmap` takes the value.
        Ok(Self(unsafe { Memory::at_base(base, bytes as usize) }))
    }

    /// Its first address and the first behind it.
    pub fn range(&self) -> Range<u64> {
        let (base, bytes) = self.0.range();
        base as u64..base as u64 + bytes as u64
    }

    /// Copies `data` to address `at` inside, where it is writable.
    pub fn write(&self, at: u64, data: &[u8]) {
        self.0.write(self.offset(at), data);
    }

    /// Maps the first `bytes` of `file`, shared, in place of what is at page boundary `at`.
    pub fn replace(&self, at: u64, bytes: u64, file: BorrowedFd<'_>) -> io::Result<()> {
        let (read_write, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let to = self.part(at, bytes)?;
        maps_no_more(file, bytes)?;
        // SAFETY: the part lies inside, where no reference leads, and the mapping is no longer.
        let made = unsafe { libc::mmap(to, bytes as usize, read_write, flags, file.as_raw_fd(), 0) };
        check(made as libc::c_long).map(drop)
    }

    /// Changes what may be done with `bytes` from page boundary `at` on.
    pub fn protect(&self, at: u64, bytes: u64, prot: i32) -> io::Result<()> {
        let part = self.part(at, bytes)?;
        // SAFETY: the part lies inside, where no reference leads.
        check(unsafe { libc::mprotect(part, bytes as usize, prot) }.into()).map(drop)
    }

    /// Asks for no large pages.
    pub fn small(&self) -> io::Result<()> {
        let (base, bytes) = self.0.range();
        // SAFETY: advice about this mapping, which changes no contents.
        check(unsafe { libc::madvise(base.cast(), bytes, libc::MADV_NOHUGEPAGE) }.into()).map(drop)
    }

    /// Ends it.
    pub fn unmap(self) {
        let (base, bytes) = self.0.range();
        // SAFETY: the mapping made in `map`; the value is the last that leads there.
        unsafe { libc::munmap(base.cast(), bytes) };
    }

    fn offset(&self, at: u64) -> usize {
        // What is outside is found where the length is looked at.
        at.checked_sub(self.range().start).unwrap_or(u64::MAX) as usize
    }

    fn part(&self, at: u64, bytes: u64) -> io::Result<*mut libc::c_void> {
        let (base, all) = self.0.range();
        let end = self.offset(at).checked_add(bytes as usize);
        // The kernel takes whole pages, of which the mapping is made.
        match end.is_some_and(|end| end <= all.next_multiple_of(4096)) {
            true => Ok(base.wrapping_add(self.offset(at)).cast()),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_is_not_replaced() {
        const PAGE: u64 = 4096;
        let at = map(None, PAGE, libc::PROT_READ, 0, None).unwrap();
        let again = map(Some(at), PAGE, libc::PROT_READ, libc::MAP_FIXED, None);
        assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::EEXIST));
    }

    #[test]
    fn an_area_has_nothing_outside() {
        let area = Area::map(None, 2 << 12, 0).unwrap();
        let Range { start, end } = area.range();
        area.write(end - 3, b"end");
        let mut back = [0; 3];
        area.0.read((2 << 12) - 3, &mut back);
        assert_eq!(&back, b"end");
        area.protect(start, 1 << 12, libc::PROT_READ | libc::PROT_EXEC).unwrap();
        for (at, bytes) in [(start - 4096, 4096), (start, (2 << 12) + 1), (end, 1), (start, u64::MAX)] {
            assert!(area.protect(at, bytes, libc::PROT_NONE).is_err(), "{at:#x} {bytes}");
        }
        area.small().ok();
        area.unmap();
        assert!(!crate::pages::are_mapped(start, 1 << 12));
    }

    #[test]
    fn huge_pages_take_no_place_outside() {
        use rustix::fs::MemfdFlags;
        use std::os::fd::AsFd;
        // Not every kernel has them, and none need be free: they are set aside at a first use.
        let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC;
        let Ok(file) = rustix::fs::memfd_create(c"belay-huge", huge) else {
            return;
        };
        const HUGE: u64 = 2 << 20;
        rustix::fs::ftruncate(&file, HUGE).unwrap();
        let area = Area::map(None, 3 * HUGE, libc::MAP_NORESERVE).unwrap();
        let at = area.range().start.next_multiple_of(HUGE);
        for bytes in [1 << 12, HUGE - 1] {
            let why = area.replace(at, bytes, file.as_fd()).unwrap_err();
            assert_eq!(why.to_string(), "its pages have 2097152 bytes");
        }
        assert!(crate::held::SharedPage::map(file.as_fd()).is_err());
        assert!(crate::shared::Shared::map(file.as_fd(), 1 << 12).is_err());
        area.unmap();
    }

    #[test]
    #[should_panic = "assertion failed"]
    fn nothing_is_written_outside() {
        let area = Area::map(None, 1 << 12, 0).unwrap();
        area.write(area.range().end - 1, b"two");
    }
}
