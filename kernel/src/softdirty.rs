//! Soft-dirty bits: the kernel marks each page that a process writes, and takes all marks away on request
//! (`/proc/PID/clear_refs`). Mappings that are made later count as marked as a whole. Not so the zero page, nor memory
//! whose page table `mremap` has moved as a whole: the callers must know these otherwise.

use crate::pagemap::Pagemap;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::ptr::null_mut;

const PAGE: usize = 4096;
/// Pages asked about at once.
const BATCH: usize = 16 << 10;

/// Takes away the marks of all pages of process `pid`.
pub fn clear(pid: i32) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/clear_refs"))?
        .write_all(b"4")
}

/// The pages of `ranges` in process `pid` that have memory of their own now: not the zero page, not swapped out.
/// Neighbouring ranges are merged.
pub fn with_memory(pid: i32, ranges: &[(u64, u64)]) -> io::Result<Vec<(u64, u64)>> {
    let mut out: Vec<(u64, u64)> = Vec::new();
    let mut pages = ranges.iter().flat_map(|(start, end)| (*start..*end).step_by(PAGE));
    loop {
        let batch: Vec<u64> = pages.by_ref().take(BATCH).collect();
        if batch.is_empty() {
            return Ok(out);
        }
        let mut nodes = vec![-1i32; batch.len()];
        // Without nodes to move to, the kernel says where each page is, and of the zero page that it is none.
        // SAFETY: both arrays have as many elements as the call is told, and live across it.
        let told = unsafe {
            let to = null_mut::<i32>();
            libc::syscall(
                libc::SYS_move_pages,
                pid,
                batch.len(),
                batch.as_ptr(),
                to,
                nodes.as_mut_ptr(),
                0,
            )
        };
        crate::check(told)?;
        for (page, _) in batch.iter().zip(nodes).filter(|(_, node)| *node >= 0) {
            crate::pagemap::push(&mut out, *page, page + PAGE as u64);
        }
    }
}

/// Tries with pages of this process whether the bits can be relied upon. Fails with what is missing.
pub fn works() -> io::Result<()> {
    // Its merging takes marks away.
    if std::fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|on| on.trim() != "0") {
        return Err(io::Error::other("same-page merging is on (/sys/kernel/mm/ksm/run)"));
    }
    let (read, write) = (libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let p = unsafe { libc::mmap(null_mut(), 3 * PAGE, write, flags, -1, 0) };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let at = |page: usize| p as u64 + (page * PAGE) as u64;
    // SAFETY: within the mapping, which is writable whenever this is called.
    let put = |page: usize| unsafe { (at(page) as *mut u8).write_volatile(1) };
    let tried = (|| {
        let pid = std::process::id().cast_signed();
        let marks = || -> io::Result<_> {
            let map = Pagemap::open(pid)?;
            Ok((map.is_soft_dirty(at(0))?, map.is_soft_dirty(at(1))?))
        };
        (0..2).for_each(put);
        // SAFETY: within the mapping; a read of an untouched page maps the zero page.
        unsafe { (at(2) as *const u8).read_volatile() };
        let new = marks()?;
        clear(pid)?;
        let cleared = marks()?;
        // SAFETY: our own mapping.
        unsafe { libc::mprotect(p, 2 * PAGE, read) };
        // SAFETY: the same.
        unsafe { libc::mprotect(p, 2 * PAGE, write) };
        put(1);
        let written = marks()?;
        if (new, cleared, written) != ((true, true), (false, false), (false, true)) {
            return Err(io::Error::other("not in this kernel (CONFIG_MEM_SOFT_DIRTY)"));
        }
        if with_memory(pid, &[(at(0), at(3))])? != [(at(0), at(2))] {
            return Err(io::Error::other("move_pages does not tell the zero page from others"));
        }
        Ok(())
    })();
    // SAFETY: our own mapping, not used any more.
    unsafe { libc::munmap(p, 3 * PAGE) };
    tried
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_inherits_the_marks_and_keeps_them() {
        if works().is_err() {
            return;
        }
        let (pages, prot) = (600usize, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let p = unsafe { libc::mmap(null_mut(), pages * PAGE, prot, flags, -1, 0) };
        assert_ne!(p, libc::MAP_FAILED);
        // SAFETY: our own mapping; a huge page has one mark.
        unsafe { libc::madvise(p, pages * PAGE, libc::MADV_NOHUGEPAGE) };
        let at = |page: usize| p as u64 + (page * PAGE) as u64;
        // SAFETY: within the mapping.
        let put = |page: usize| unsafe { (at(page) as *mut u8).write_volatile(page as u8 | 1) };
        (0..pages).for_each(put);
        let me = std::process::id().cast_signed();
        clear(me).unwrap();
        (0..pages).step_by(7).for_each(put);
        // SAFETY: the child only waits to be killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no preconditions.
                unsafe { libc::pause() };
            }
        }
        clear(me).unwrap();
        (0..pages).for_each(put);
        let clean = |pid| {
            let mut out = Vec::new();
            Pagemap::open(pid)
                .unwrap()
                .not_soft_dirty(at(0), at(pages), &mut out)
                .unwrap();
            out
        };
        let (of_child, own) = (clean(child), clean(me));
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, null_mut(), 0);
            libc::munmap(p, pages * PAGE);
        }
        let expected: Vec<_> = (0..pages).step_by(7).map(|i| (at(i + 1), at((i + 7).min(pages)))).collect();
        assert!(of_child == expected, "{of_child:x?}");
        assert!(own.is_empty(), "{own:x?}");
    }
}
