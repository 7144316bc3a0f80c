//! Files that are read and written past the page cache (`O_DIRECT`, open(2)), in whole pages.
//!
//! What a checkpoint writes is read again by a restart or a flush at most. In the page cache it would cost a copy, and
//! memory that the application needs: on a disk that takes 1.6 GB/s the way through the cache ends at 0.4 GB/s and
//! takes forty times the processor time (docs/benchmarks.md).

use std::alloc::{handle_alloc_error, Layout};
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

const PAGE: usize = 4096;
/// From this size on a buffer that is filled at once asks for huge pages. One that was reserved, to be filled little by
/// little while a program stands still, does not: the first byte would cost 2 MiB of zeros.
const HUGE: usize = 2 << 20;

/// Bytes that begin with a page of memory, so that files can be written from it and read into it directly. Its memory
/// is a mapping of its own, which goes back to the system with it: pieces of a megabyte that come and go between small
/// objects would leave the heap many times as large as what is in it.
#[derive(Debug)]
pub struct Buffer {
    /// Valid for `room` bytes; dangling while that is zero.
    base: NonNull<u8>,
    room: usize,
    bytes: usize,
}

// SAFETY: the mapping is private, and belongs to this object alone.
unsafe impl Send for Buffer {}
// SAFETY: as above; what is shared can only be read.
unsafe impl Sync for Buffer {}

impl Default for Buffer {
    fn default() -> Self {
        Self {
            base: NonNull::dangling(),
            room: 0,
            bytes: 0,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.room > 0 {
            // SAFETY: the mapping is this object's, and nothing borrows from it any more.
            unsafe {
                if libc::munmap(self.base.as_ptr().cast(), self.room) != 0 {
                    // It would leave more mappings than a process may have (vm.max_map_count): its memory goes back all the same.
                    libc::madvise(self.base.as_ptr().cast(), self.room, libc::MADV_DONTNEED);
                }
            }
        }
    }
}

impl Buffer {
    /// Makes room for `bytes` more, so that it does not move while they are added. Only what is written takes memory.
    pub fn try_reserve(&mut self, bytes: usize) -> io::Result<()> {
        match self
            .bytes
            .checked_add(bytes)
            .and_then(|all| all.checked_next_multiple_of(PAGE))
        {
            Some(room) if room <= self.room => Ok(()),
            Some(room) => self.grow(room),
            None => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Makes the mapping `room` bytes large, which is more than it is and whole pages.
    fn grow(&mut self, room: usize) -> io::Result<()> {
        let base = if self.room == 0 {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping, at an address of the kernel's choice.
            unsafe { libc::mmap(std::ptr::null_mut(), room, prot, flags, -1, 0) }
        } else {
            // SAFETY: the mapping is this object's, which is borrowed mutably: nobody has an address in it.
            unsafe { libc::mremap(self.base.as_ptr().cast(), self.room, room, libc::MREMAP_MAYMOVE) }
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        self.room = room;
        Ok(())
    }

    /// Has `bytes` bytes from now on; those that it did not have are anything.
    pub fn resize(&mut self, bytes: usize) {
        if bytes > self.room {
            // What is added to in small pieces grows in large ones.
            let more = bytes.max(2 * self.room) - self.bytes;
            if self.try_reserve(more).is_err() && self.try_reserve(bytes - self.bytes).is_err() {
                // As any other collection.
                handle_alloc_error(Layout::from_size_align(bytes, PAGE).unwrap_or(Layout::new::<u8>()));
            }
            if bytes >= HUGE {
                // SAFETY: the mapping is this object's, and advice changes no contents. Where it is refused, the kernel
                // does more for each page: faults, and pins for direct transfers.
                unsafe { libc::madvise(self.base.as_ptr().cast(), self.room, libc::MADV_HUGEPAGE) };
            }
        }
        self.bytes = bytes;
    }

    /// Appends `data`.
    pub fn extend_from_slice(&mut self, data: &[u8]) {
        let before = self.bytes;
        self.resize(before + data.len());
        self[before..].copy_from_slice(data);
    }

    /// Has no bytes from now on, and keeps its memory.
    pub fn clear(&mut self) {
        self.bytes = 0;
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is at least `bytes` long, always readable, and the kernel filled it with zeros.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

/// Whether whole pages of `file` can be read and written directly, according to its file system (`STATX_DIOALIGN`,
/// Linux 6.1). Those in memory, and most on other machines, do not say so.
pub fn is_possible(file: &File) -> bool {
    // SAFETY: statx is plain data, for which zero is a valid value.
    let mut s: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is live, the path is empty and zero-terminated, `s` is valid for writing.
    let r = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut s,
        )
    };
    let fits = |align: u32| (1..=PAGE as u32).contains(&align);
    r == 0 && s.stx_mask & libc::STATX_DIOALIGN != 0 && fits(s.stx_dio_mem_align) && fits(s.stx_dio_offset_align)
}

/// From now on `file` is read and written directly, where that is possible; says whether it is.
pub fn enable(file: &File) -> bool {
    is_possible(file) && set(file, true).is_ok()
}

/// From now on `file` is read and written by way of the page cache.
pub fn disable(file: &File) -> io::Result<()> {
    set(file, false)
}

fn set(file: &File, direct: bool) -> io::Result<()> {
    // SAFETY: takes numbers only, and the descriptor is live.
    let flags = crate::check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) }.into())? as libc::c_int;
    let flags = if direct {
        flags | libc::O_DIRECT
    } else {
        flags & !libc::O_DIRECT
    };
    // SAFETY: as above.
    crate::check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) }.into())?;
    Ok(())
}

/// Bytes from which on a piece is worth waiting for the disk.
pub const WORTH: usize = 64 * 1024;

/// The part of `bytes` bytes at `at` of a file that can be moved directly; the rest is less than a page.
fn whole_pages(bytes: &[u8], at: u64) -> usize {
    let aligned = bytes.as_ptr().addr().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64);
    let whole = bytes.len() / PAGE * PAGE;
    if aligned && whole >= WORTH {
        whole
    } else {
        0
    }
}

/// Writes `data` at `at`, as far as that is possible past the page cache: best from a [`Buffer`] to a multiple of the
/// page size. Nobody else may use this description of the file meanwhile.
pub fn write_all_at(file: &File, data: &[u8], at: u64) -> io::Result<()> {
    let whole = whole_pages(data, at);
    let direct = whole > 0 && enable(file) && {
        let written = file.write_all_at(&data[..whole], at);
        disable(file)?;
        // Where it failed, the page cache takes it, or says what is wrong.
        written.is_ok()
    };
    let done = if direct { whole } else { 0 };
    file.write_all_at(&data[done..], at + done as u64)
}

/// Fills `data` from `at` on, as far as that is possible past the page cache. As [`write_all_at`].
pub fn read_exact_at(file: &File, data: &mut [u8], at: u64) -> io::Result<()> {
    let whole = whole_pages(data, at);
    let direct = whole > 0 && enable(file) && {
        let read = file.read_exact_at(&mut data[..whole], at);
        disable(file)?;
        read.is_ok()
    };
    let done = if direct { whole } else { 0 };
    file.read_exact_at(&mut data[done..], at + done as u64)
}

/// Waits until a part of `file` is on its way to the disk (`sync_file_range`). A failure shows at the fsync.
pub fn write_back(file: &File, offset: u64, bytes: u64) {
    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    if let (Ok(from), Ok(len)) = (i64::try_from(offset), i64::try_from(bytes)) {
        // SAFETY: takes numbers only, and the descriptor is live.
        unsafe { libc::sync_file_range(file.as_raw_fd(), from, len, all) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_in(dir: &std::path::Path) -> (std::path::PathBuf, File) {
        let path = dir.join(format!("belay-direct-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        (path, file.unwrap())
    }

    #[test]
    fn what_is_written_directly_is_not_in_the_page_cache() {
        let (path, file) = file_in(&std::env::temp_dir());
        assert!(
            is_possible(&file),
            "this test needs a disk below the directory of temporary files, and Linux 6.1"
        );
        let mut pages = Buffer::default();
        pages.extend_from_slice(&(0..64 * PAGE as u32).map(|i| (i / 7) as u8).collect::<Vec<u8>>());
        write_all_at(&file, &pages, 4096).unwrap();
        assert_eq!(cached(&file, 65 * 4096), 0);
        // The tail of a file is seldom a whole page.
        file.write_all_at(b"tail", 65 * 4096).unwrap();
        assert!(cached(&file, 66 * 4096) > 0, "the page cache is asked wrongly");
        let mut back = Buffer::default();
        back.resize(64 * PAGE + 4);
        read_exact_at(&file, &mut back, 4096).unwrap();
        assert_eq!((&back[..64 * PAGE], &back[64 * PAGE..]), (&*pages, &b"tail"[..]));
        assert_eq!(cached(&file, 65 * 4096), 0);
        // What does not begin with a page goes through the cache.
        read_exact_at(&file, &mut back[1..], 4096).unwrap();
        assert_eq!(back[1..=64 * PAGE], *pages);
        assert!(cached(&file, 65 * 4096) > 0);
        assert!(enable(&file));
        assert!(
            file.read_exact_at(&mut back[1..4097], 4096).is_err(),
            "still through the cache"
        );
        disable(&file).unwrap();
        file.read_exact_at(&mut back[1..4097], 4096).unwrap();
        std::fs::remove_file(path).unwrap();
    }

    /// Pages of the first `bytes` of `file` that are in the page cache.
    fn cached(file: &File, bytes: usize) -> usize {
        let mut there = vec![0u8; bytes / 4096];
        // SAFETY: a new mapping, which ends below; mincore only writes `there`, which has a byte for each page.
        unsafe {
            let p = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            assert!(p != libc::MAP_FAILED);
            assert_eq!(libc::mincore(p, bytes, there.as_mut_ptr()), 0);
            libc::munmap(p, bytes);
        }
        there.iter().filter(|b| **b & 1 != 0).count()
    }

    #[test]
    fn a_buffer_grows_from_a_page_on_and_holds_what_was_added() {
        let mut b = Buffer::default();
        b.try_reserve(3 * PAGE).unwrap();
        let at = b.as_ptr();
        let data: Vec<u8> = (0..3 * PAGE).map(|i| (i % 251) as u8).collect();
        for part in data.chunks(1000) {
            b.extend_from_slice(part);
        }
        assert_eq!(*b, *data);
        assert_eq!((b.as_ptr(), at as usize % PAGE), (at, 0));
        // Beyond what was reserved it moves, with all that is in it.
        for _ in 0..9 {
            b.extend_from_slice(&data);
        }
        assert!(b.chunks(data.len()).all(|part| part == data));
        assert_eq!((b.len(), b.as_ptr() as usize % PAGE), (30 * PAGE, 0));
        assert!(b.try_reserve(usize::MAX - 30 * PAGE).is_err() && b.try_reserve(usize::MAX).is_err());
        b.clear();
        assert!(b.is_empty());
        b.resize(5);
        assert_eq!(b.len(), 5);
    }

    #[test]
    fn files_in_memory_are_written_as_ever() {
        let (path, file) = file_in(std::path::Path::new("/dev/shm"));
        assert!(!is_possible(&file) && !enable(&file));
        write_all_at(&file, &[7; 4096], 0).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
