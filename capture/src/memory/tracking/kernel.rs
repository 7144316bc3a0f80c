//! How the kernel is asked which pages were written: by asynchronous write protection, or by soft-dirty bits
//! (`Documentation/admin-guide/mm/pagemap.rst`, `soft-dirty.rst`).

use super::{Clean, PAGE};
use crate::memory::mappings::{self, Pages};
use belay_kernel::pagemap::Pagemap;
use belay_kernel::proc::{self, Map};
use belay_kernel::vm::Memory;
use belay_kernel::{softdirty, uffd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Mappings in which pages are clean that the snapshot child shows without a soft-dirty bit.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    pub(super) ranges: Vec<(u64, u64)>,
    /// The canary of the last snapshot.
    pub(super) canary: u64,
}

impl Candidates {
    /// Those of the pages that are clean in snapshot child `child`; `None` where somebody else has taken soft-dirty bits away.
    pub(super) fn clean_in(self, child: i32) -> io::Result<Option<Vec<(u64, u64)>>> {
        let pagemap = Pagemap::open(child)?;
        if !pagemap.is_soft_dirty(self.canary)? {
            return Ok(None);
        }
        // Pages of mappings marked as mergeable are replaced by others without a trace.
        let mappings = proc::smaps(child)?;
        let mergeable: Vec<_> = mappings.iter().filter(|m| m.flags.iter().any(|f| f == "mg")).collect();
        let mut found = Vec::new();
        for (start, end) in self.ranges {
            if !mergeable.iter().any(|m| m.start < end && start < m.end) {
                pagemap.not_soft_dirty(start, end, &mut found)?;
            }
        }
        softdirty::with_memory(child, &found).map(Some)
    }
}

/// Takes away the soft-dirty bits of a stopped process, thread `task`, which its snapshot child has inherited; `canary`
/// is that of the last snapshot, if there was one. Returns where pages may be clean, and the new canary.
pub(super) fn begin_anew<'a>(
    uffd: &OwnedFd,
    task: i32,
    maps: impl DoubleEndedIterator<Item = &'a Map> + Clone,
    canary: Option<u64>,
) -> io::Result<(Option<Candidates>, u64)> {
    let pagemap = Pagemap::open(task)?;
    if let Some(canary) = canary {
        if !maps.clone().any(|m| m.start <= canary && canary < m.end) {
            return Err(io::Error::other("the page that was marked is not there any more"));
        }
        // After an exec the userfaultfd may be one of an address space that lives on in another process. Nobody runs
        // who could write to the canary now.
        let same = uffd::protect(uffd.as_fd(), canary, true)? && pagemap.is_protected(canary)?;
        uffd::protect(uffd.as_fd(), canary, false)?;
        if !same {
            return Err(io::Error::other("the address space is another"));
        }
    }
    let mut candidates = Candidates {
        ranges: Vec::new(),
        canary: canary.unwrap_or_default(),
    };
    for map in maps.clone().filter(|m| mappings::pages(m) == Pages::Own) {
        if canary.is_some() && uffd::protect(uffd.as_fd(), map.start, false)? {
            candidates.ranges.push((map.start, map.end));
            continue;
        }
        match uffd::register(uffd.as_fd(), map.start, map.end) {
            // Private memory of files cannot be registered: it always counts as written.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            done => done?,
        }
    }
    softdirty::clear(task)?;
    let marked = mark_one(task, maps, pagemap)?;
    Ok((canary.is_some().then_some(candidates), marked))
}

/// Marks one page of a stopped process, thread `task`, as written, without changing it: the highest one that the
/// program could have written. Returns its address.
fn mark_one<'a>(task: i32, maps: impl DoubleEndedIterator<Item = &'a Map>, mut pagemap: Pagemap) -> io::Result<u64> {
    let mut found = Vec::new();
    for map in maps
        .rev()
        .filter(|m| mappings::pages(m) == Pages::Own && m.ino == 0 && m.prot & 2 != 0)
    {
        pagemap.data_ranges(map.start, map.end, &mut found)?;
        if let Some((_, end)) = found.last() {
            let page = end - PAGE;
            let memory = Memory::open(task)?;
            let mut byte = [0];
            memory.read(page, &mut byte)?;
            memory.write(page, &byte)?;
            return Ok(page);
        }
    }
    Err(io::Error::other("no page that could be marked"))
}

/// Returns the clean pages, none if this is the `first` scan (no earlier one has protected them), and how many pages
/// hold data (0 if it is).
pub(super) fn protect<'a>(uffd: &OwnedFd, task: i32, maps: impl Iterator<Item = &'a Map>, first: bool) -> io::Result<(Clean, u64)> {
    let mut pagemap = Pagemap::open(task)?;
    let mut clean = Clean::default();
    let mut all = 0;
    let mut found = Vec::new();
    for map in maps.filter(|m| mappings::pages(m) == Pages::Own) {
        found.clear();
        let protected = if first {
            pagemap.protect(map.start, map.end, &mut found)
        } else {
            pagemap.protect_again(map.start, map.end, mappings::is_anonymous(map), &mut found)
        };
        match protected {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
                // Not registered: everything in it counts as written, and is protected for the next time.
                found.clear();
                if pagemap.with_data(&[(map.start, map.end)])? == [false] {
                    continue;
                }
                uffd::register(uffd.as_fd(), map.start, map.end)?;
                uffd::unprotect(uffd.as_fd(), map.start, map.end)?;
                pagemap.protect(map.start, map.end, &mut found)?;
                found.iter_mut().for_each(|r| r.2 = true);
            }
            Err(e) => return Err(e),
        }
        if !first {
            all += found.iter().map(|(start, end, _)| (end - start) / PAGE).sum::<u64>();
            clean.ranges.extend(found.iter().filter(|r| !r.2).map(|r| (r.0, r.1)));
        }
    }
    Ok((clean, all))
}
