//! userfaultfd for write protection that the kernel takes away by itself at the first write (`WP_ASYNC`), so that a
//! later scan of the page table tells which pages have been written. Nobody ever waits for a fault, and a write by the
//! kernel itself counts like one by the program.
//!
//! Older kernels have no such protection. There registration alone serves: it says which mappings are still the same
//! and have not been moved.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
const API: u64 = 0xaa;
const WP_ASYNC: u64 = 1 << 15;
const USER_MODE_ONLY: i32 = 1;
const MODE_WP: u64 = 2;
const PAGE: u64 = 4096;

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    start: u64,
    len: u64,
    mode: u64,
}

/// A userfaultfd of this process with these features.
fn make(features: u64) -> io::Result<OwnedFd> {
    // SAFETY: takes a number; a descriptor returned is ours.
    let fd = unsafe {
        let fd = crate::check(libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY))?;
        OwnedFd::from_raw_fd(fd as i32)
    };
    let mut api = [API, features, 0];
    // SAFETY: `api` has the layout of `struct uffdio_api`.
    crate::check(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) }.into())?;
    Ok(fd)
}

/// Whether the kernel has asynchronous write protection (Linux 6.7). Fails where it makes no userfaultfd at all.
pub fn is_asynchronous() -> io::Result<bool> {
    match make(WP_ASYNC) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => make(0).map(|_| false),
        Err(e) => Err(e),
    }
}

/// Protects the page at `at` against writes, or ends that; `false` where its mapping is not registered with `uffd`.
/// Nobody may write to a protected page: without asynchronous protection, who did would wait for ever.
pub fn protect(uffd: BorrowedFd<'_>, at: u64, protected: bool) -> io::Result<bool> {
    match write_protect(uffd, (at, PAGE), protected) {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        done => done.map(|()| true),
    }
}

/// Takes all protection away from the registered range `start..end`. Kernels before 6.12.11, and before 6.10, leave some of an
/// earlier registration where memory is moved, and where a userfaultfd is closed: pages that look protected and can be
/// written without a trace (CVE-2025-21696, CVE-2024-36881).
pub fn unprotect(uffd: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
    write_protect(uffd, (start, end - start), false)
}

fn write_protect(uffd: BorrowedFd<'_>, (start, len): (u64, u64), protected: bool) -> io::Result<()> {
    let mut arg = WriteProtect {
        start,
        len,
        mode: protected.into(),
    };
    // SAFETY: `arg` lives across the call and has the layout of `struct uffdio_writeprotect`.
    crate::check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut arg) }.into()).map(drop)
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
    use std::os::fd::AsFd;

    #[test]
    fn thousands_of_ranges_are_told_apart() {
        let Ok(uffd) = make(WP_ASYNC) else { return };
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
        let Ok(uffd) = make(WP_ASYNC) else { return };
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
