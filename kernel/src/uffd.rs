//! userfaultfd in the one mode that is used here: write protection that the kernel takes away by itself at the first write (`WP_ASYNC`), so that a later scan of the page
//! table tells which pages have been written. Nobody ever waits for a fault, and a write by the kernel itself counts like one by the program.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const MODE_WP: u64 = 2;

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// Lets writes to `start..end` of the address space behind `uffd` be tracked. The range must not have holes.
pub fn register(uffd: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
    let mut arg = Register {
        start,
        len: end - start,
        mode: MODE_WP,
        ioctls: 0,
    };
    // SAFETY: `arg` lives across the call and has the layout of `struct uffdio_register`.
    crate::check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut arg) }.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::Pagemap;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    const PAGE: u64 = 4096;

    /// A userfaultfd of this process, `None` where the kernel has none with asynchronous write protection.
    fn make() -> Option<OwnedFd> {
        // SAFETY: takes a number; a descriptor returned is ours.
        let fd = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1);
            if fd < 0 {
                return None;
            }
            OwnedFd::from_raw_fd(fd as i32)
        };
        let mut api = [0xaau64, 1 << 15, 0];
        // SAFETY: `api` has the layout of `struct uffdio_api`.
        let r = unsafe { libc::ioctl(fd.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()) };
        (r == 0).then_some(fd)
    }

    #[test]
    fn thousands_of_ranges_are_told_apart() {
        let Some(uffd) = make() else { return };
        let (pages, prot) = (8192usize, libc::PROT_READ | libc::PROT_WRITE);
        let bytes = pages * PAGE as usize;
        // SAFETY: a new mapping.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                prot,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(p, libc::MAP_FAILED);
        // SAFETY: the mapping is ours and this long.
        let write = |page: usize| unsafe { p.cast::<u8>().add(page * PAGE as usize).write_volatile(1) };
        (0..pages).for_each(write);
        let (start, end) = (p as u64, p as u64 + bytes as u64);
        register(uffd.as_fd(), start, end).unwrap();
        let mut map = Pagemap::open(std::process::id().cast_signed()).unwrap();
        map.protect(start, end, &mut Vec::new()).unwrap();
        for step in [2, 3, 5, 8, 40] {
            (0..pages).step_by(step).for_each(write);
            let mut out = Vec::new();
            map.protect(start, end, &mut out).unwrap();
            let found: Vec<bool> = out.iter().flat_map(|r| vec![r.2; ((r.1 - r.0) / PAGE) as usize]).collect();
            let expected: Vec<bool> = (0..pages).map(|i| i % step == 0).collect();
            assert!(
                found == expected,
                "every {step}th page written, {} of {pages} pages reported",
                found.len()
            );
        }
        // SAFETY: our own mapping, not used again.
        unsafe { libc::munmap(p, bytes) };
    }

    #[test]
    fn written_given_back_and_new_pages_are_told_from_clean_ones() {
        let Some(uffd) = make() else { return };
        let bytes = 16 * PAGE as usize;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let p = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
        assert_ne!(p, libc::MAP_FAILED);
        let start = p as u64;
        // SAFETY: the mapping is ours and this long.
        let write = |page: usize| unsafe { p.cast::<u8>().add(page * PAGE as usize).write_volatile(page as u8) };
        (0..10).for_each(write);
        let mut map = Pagemap::open(std::process::id().cast_signed()).unwrap();
        let mut scan = || {
            let mut out = Vec::new();
            map.protect(start, start + bytes as u64, &mut out).map(|()| {
                let page = |at: u64| (at - start) / PAGE;
                out.iter().map(|r| (page(r.0), page(r.1), r.2)).collect::<Vec<_>>()
            })
        };
        assert_eq!(scan().unwrap_err().raw_os_error(), Some(libc::EPERM), "not registered");
        register(uffd.as_fd(), start, start + bytes as u64).unwrap();
        assert_eq!(scan().unwrap(), [(0, 10, true)]);
        assert_eq!(scan().unwrap(), [(0, 10, false)]);
        write(3);
        write(12);
        // SAFETY: the page is in our mapping.
        unsafe {
            libc::madvise(
                p.cast::<u8>().add(5 * PAGE as usize).cast(),
                PAGE as usize,
                libc::MADV_DONTNEED,
            )
        };
        write(6);
        assert_eq!(
            scan().unwrap(),
            [
                (0, 3, false),
                (3, 4, true),
                (4, 5, false),
                (6, 7, true),
                (7, 10, false),
                (12, 13, true)
            ]
        );
        write(5);
        assert_eq!(
            scan().unwrap(),
            [(0, 5, false), (5, 6, true), (6, 10, false), (12, 13, false)]
        );
        // SAFETY: replaces the first half of our mapping.
        unsafe { libc::mmap(p, bytes / 2, prot, flags | libc::MAP_FIXED, -1, 0) };
        assert_eq!(scan().unwrap_err().raw_os_error(), Some(libc::EPERM), "mapped anew");
        // SAFETY: our own mapping, not used again.
        unsafe { libc::munmap(p, bytes) };
    }
}
