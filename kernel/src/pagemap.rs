//! Which pages of a process hold data of its own: `PAGEMAP_SCAN`, or `/proc/PID/pagemap` where the kernel is older than 6.7.

pub(crate) mod scan;

use crate::guards::{self, Guards};
use crate::vm::Memory;
use scan::{
    scan_arg, Region, ScanArg, PAGEMAP_SCAN, PAGE_IS_FILE, PAGE_IS_GUARD, PAGE_IS_PFNZERO, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN,
    PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING,
};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
/// Pages that one look of [`Pagemap::with_data`] goes through at most, once it has found any.
const SOME_PAGES: u64 = 512;
/// Entries of the page table read at once, where there is no scan.
const ENTRIES: u64 = 8192;
/// Bits of an entry of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE: u64 = 1 << 61;
const UFFD_WP: u64 = 1 << 57;
const SOFT_DIRTY: u64 = 1 << 55;
/// Where a page lies in the memory of the machine. Only root is told; for others it is 0.
const FRAME: u64 = (1 << 55) - 1;

/// The page table of a process.
#[derive(Debug)]
pub struct Pagemap {
    pid: i32,
    file: File,
    scan: bool,
    /// What the kernel tells of guard regions.
    guards: Guards,
    /// Room for the answers of a scan.
    regions: Vec<Region>,
}

impl Pagemap {
    /// Opens the page table of `pid`.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self {
            pid,
            file: File::open(format!("/proc/{pid}/pagemap"))?,
            scan: true,
            guards: guards::support(),
            regions: vec![Region::default(); 1024],
        })
    }

    /// Appends to `out` the ranges of `start..end` that hold anonymous data (present or swapped, not the zero page, not
    /// unmodified file pages, not guarded). Neighbouring ranges are merged.
    pub fn data_ranges(&mut self, start: u64, end: u64, out: &mut Vec<(u64, u64)>) -> io::Result<()> {
        self.data_and_guards(start, end, out, &mut Vec::new())
    }

    /// As [`Pagemap::data_ranges`], and appends the guard regions (MADV_GUARD_INSTALL) to `guards`: who reads there gets a signal.
    pub fn data_and_guards(
        &mut self,
        start: u64,
        end: u64,
        out: &mut Vec<(u64, u64)>,
        guards: &mut Vec<(u64, u64)>,
    ) -> io::Result<()> {
        let mut found = Sorted::default();
        let scanned = self.scan && self.scan_sorted(start, end, &mut found)?;
        if !scanned {
            let known = self.guards;
            self.entries(start, end, |at, entry| {
                let list = match known {
                    _ if !is_data(entry) => return,
                    Guards::Silent if entry & PRESENT == 0 => &mut found.swapped,
                    _ => &mut found.data,
                };
                push(list, at, at + PAGE);
            })?;
        }
        found.sort_out(self.pid)?;
        out.append(&mut found.data);
        guards.append(&mut found.guards);
        Ok(())
    }

    /// Finds what `start..end` has by a scan, where the kernel has that.
    fn scan_sorted(&mut self, start: u64, end: u64, found: &mut Sorted) -> io::Result<bool> {
        let mut arg = scan_arg(start, end, &mut self.regions);
        arg.return_mask = match self.guards {
            Guards::None => 0,
            Guards::Told => PAGE_IS_GUARD,
            Guards::Silent => PAGE_IS_SWAPPED,
        };
        let done = self.carry_out(arg, end, &mut |r| {
            let list = match r.categories {
                0 => &mut found.data,
                PAGE_IS_GUARD => &mut found.guards,
                _ => &mut found.swapped,
            };
            push(list, r.start, r.end);
        });
        match done {
            Err(e) if e.raw_os_error() == Some(libc::ENOTTY) => {
                self.scan = false;
                Ok(false)
            }
            done => done.map(|()| true),
        }
    }

    /// Appends the guard regions of `start..end`, of whatever kind of mapping.
    pub fn guards(&mut self, start: u64, end: u64, guards: &mut Vec<(u64, u64)>) -> io::Result<()> {
        match self.guards {
            Guards::None => Ok(()),
            Guards::Told => {
                let mut arg = scan_arg(start, end, &mut self.regions);
                (arg.category_inverted, arg.category_mask, arg.category_anyof_mask) = (0, PAGE_IS_GUARD, 0);
                let mut found = Vec::new();
                self.carry_out(arg, end, &mut |r| push(&mut found, r.start, r.end))?;
                guards.append(&mut found);
                Ok(())
            }
            Guards::Silent => self.data_and_guards(start, end, &mut Vec::new(), guards),
        }
    }

    /// Which of `ranges` hold data, in the sense of [`Pagemap::data_ranges`]: for each whether one of its pages does.
    /// `ranges` are in ascending order and do not overlap. Of one that holds data only the first pages are looked at.
    /// Guards count as data.
    pub fn with_data(&mut self, ranges: &[(u64, u64)]) -> io::Result<Vec<bool>> {
        let mut out = vec![false; ranges.len()];
        let Some((_, end)) = ranges.last().copied() else {
            return Ok(out);
        };
        let (mut next, mut walked) = (0, 0);
        let mut found = Vec::new();
        while next < ranges.len() {
            let at = ranges[next].0.max(walked);
            found.clear();
            walked = self.some(at, end, &mut found)?;
            let mut known = found.iter().peekable();
            while let Some((start, end)) = ranges.get(next).copied() {
                while known.next_if(|f| f.1 <= start).is_some() {}
                out[next] = known.peek().is_some_and(|f| f.0 < end);
                if !out[next] && end > walked {
                    break;
                }
                next += 1;
            }
            if walked <= at {
                return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
            }
        }
        Ok(out)
    }

    /// Appends the first data ranges of `start..end`; returns how far the search came.
    fn some(&mut self, start: u64, end: u64, out: &mut Vec<(u64, u64)>) -> io::Result<u64> {
        if self.scan {
            let mut arg = scan_arg(start, end, &mut self.regions);
            arg.max_pages = SOME_PAGES;
            // SAFETY: `arg` and the vector it points to live across the call and have the sizes it states.
            match crate::check(unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) }.into()) {
                Err(e) if e.raw_os_error() == Some(libc::ENOTTY) => self.scan = false,
                Err(e) => return Err(e),
                Ok(n) => {
                    for r in &self.regions[..usize::try_from(n).unwrap_or(0).min(self.regions.len())] {
                        push(out, r.start, r.end);
                    }
                    return Ok(arg.walk_end);
                }
            }
        }
        let stop = end.min(start + ENTRIES * PAGE);
        self.entries(start, stop, |at, entry| {
            if is_data(entry) {
                push(out, at, at + PAGE);
            }
        })?;
        Ok(stop)
    }

    /// Scans up to `end`.
    fn carry_out(&mut self, mut arg: ScanArg, end: u64, found: &mut dyn FnMut(Region)) -> io::Result<()> {
        while arg.start < end {
            // SAFETY: `arg` and the vector it points to live across the call and have the sizes it states.
            let n = crate::check(unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) }.into())?;
            for r in &self.regions[..usize::try_from(n).unwrap_or(0).min(self.regions.len())] {
                found(*r);
            }
            if arg.walk_end <= arg.start {
                return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
            }
            arg.start = arg.walk_end;
        }
        Ok(())
    }

    /// As [`Pagemap::data_ranges`], but says of each range whether it has been written since it was last protected, and
    /// protects it (again) from that moment on. Fails with EPERM where part of `start..end` is not registered with
    /// [`crate::uffd::register`].
    pub fn protect(&mut self, start: u64, end: u64, out: &mut Vec<(u64, u64, bool)>) -> io::Result<()> {
        self.scan_written((start, end), PM_SCAN_WP_MATCHING, PAGE_IS_FILE, out)
    }

    /// As [`Pagemap::protect`], where nobody writes meanwhile and most of it is protected: this is not done again, which takes
    /// ten times as long as to look. That a page belongs to a file is not looked for in memory which is `anonymous`: it takes
    /// another ten times as long.
    pub fn protect_again(&mut self, start: u64, end: u64, anonymous: bool, out: &mut Vec<(u64, u64, bool)>) -> io::Result<()> {
        let file = if anonymous { 0 } else { PAGE_IS_FILE };
        let mut found = Vec::new();
        self.scan_written((start, end), 0, file, &mut found)?;
        for (start, end, _) in found.iter().filter(|r| r.2) {
            self.scan_written((*start, *end), PM_SCAN_WP_MATCHING, file, &mut Vec::new())?;
        }
        out.append(&mut found);
        Ok(())
    }

    /// Which of the pages that hold data have been written; `file` says by which category those of files are told apart.
    fn scan_written(&mut self, (start, end): (u64, u64), flags: u64, file: u64, out: &mut Vec<(u64, u64, bool)>) -> io::Result<()> {
        let regions = &mut self.regions;
        let mut at = start;
        while at < end {
            let mut arg = scan_arg(at, end, regions);
            arg.flags = flags | PM_SCAN_CHECK_WPASYNC;
            arg.category_mask = PAGE_IS_PFNZERO | file;
            arg.category_inverted = PAGE_IS_PFNZERO | file;
            if self.guards == Guards::Told {
                arg.category_mask |= PAGE_IS_GUARD;
                arg.category_inverted |= PAGE_IS_GUARD;
            }
            arg.return_mask = PAGE_IS_WRITTEN;
            // SAFETY: `arg` and the vector it points to live across the call and have the sizes it states.
            let n = crate::check(unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) }.into())?;
            for r in &regions[..usize::try_from(n).unwrap_or(0).min(regions.len())] {
                let written = r.categories & PAGE_IS_WRITTEN != 0;
                // What the kernel reports again it has protected when it reported it first: that first report holds.
                let from = out.last().map_or(r.start, |last| last.1.max(r.start));
                match out.last_mut() {
                    _ if from >= r.end => {}
                    Some(last) if last.1 == from && last.2 == written => last.1 = r.end,
                    _ => out.push((from, r.end, written)),
                }
            }
            if arg.walk_end <= at {
                return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
            }
            at = arg.walk_end;
        }
        Ok(())
    }

    /// Appends the ranges of `start..end` that hold anonymous data, as of [`Pagemap::data_ranges`], and are not marked
    /// as written ([`crate::softdirty`]). The zero page is one of them.
    pub fn not_soft_dirty(&self, start: u64, end: u64, out: &mut Vec<(u64, u64)>) -> io::Result<()> {
        self.entries(start, end, |at, entry| {
            if is_data(entry) && entry & SOFT_DIRTY == 0 {
                push(out, at, at + PAGE);
            }
        })
    }

    /// Whether the page at `at` is marked as written ([`crate::softdirty`]).
    pub fn is_soft_dirty(&self, at: u64) -> io::Result<bool> {
        self.has(at, SOFT_DIRTY)
    }

    /// Whether the page at `at` is write-protected through a userfaultfd of its address space.
    pub fn is_protected(&self, at: u64) -> io::Result<bool> {
        self.has(at, UFFD_WP)
    }

    fn has(&self, at: u64, bit: u64) -> io::Result<bool> {
        let mut found = false;
        self.entries(at, at + PAGE, |_, entry| found = entry & bit != 0)?;
        Ok(found)
    }

    /// Appends to `out` the ranges of `start..end` in which `other` has the very same pages of anonymous memory; where
    /// this process may not be told, there are none. Neither of the two may write there meanwhile.
    pub fn common(&self, other: &Self, start: u64, end: u64, out: &mut Vec<(u64, u64)>) -> io::Result<()> {
        let mut at = start;
        while at < end {
            let stop = end.min(at + ENTRIES * PAGE);
            let frames = |of: &Self| {
                let mut frames = Vec::with_capacity(ENTRIES as usize);
                of.entries(at, stop, |_, entry| frames.push(frame(entry)))?;
                Ok::<_, io::Error>(frames)
            };
            // The kernel may move a page between two looks: what was in one place before and after has been there.
            let (before, others, after) = (frames(self)?, frames(other)?, frames(self)?);
            let all = before.into_iter().zip(others).zip(after);
            for (page, ((before, other), after)) in (at..).step_by(PAGE as usize).zip(all) {
                if before.is_some() && before == other && before == after {
                    push(out, page, page + PAGE);
                }
            }
            at = stop;
        }
        Ok(())
    }

    /// Calls `each` with every page of `start..end` and its entry.
    fn entries(&self, start: u64, end: u64, mut each: impl FnMut(u64, u64)) -> io::Result<()> {
        let mut buf = vec![0u8; ((end - start) / PAGE).min(ENTRIES) as usize * 8];
        let mut at = start;
        while at < end {
            let pages = ((end - at) / PAGE).min(ENTRIES);
            let bytes = (pages * 8) as usize;
            self.file.read_exact_at(&mut buf[..bytes], at / PAGE * 8)?;
            for raw in buf[..bytes].chunks_exact(8) {
                let mut entry = [0; 8];
                entry.copy_from_slice(raw);
                each(at, u64::from_le_bytes(entry));
                at += PAGE;
            }
        }
        Ok(())
    }
}

/// What a range has, each list in ascending order.
#[derive(Default)]
struct Sorted {
    data: Vec<(u64, u64)>,
    guards: Vec<(u64, u64)>,
    /// Pages that are not in memory: swapped out, or guarded.
    swapped: Vec<(u64, u64)>,
}

impl Sorted {
    /// Tells swapped and guarded pages of process `pid` apart: what cannot be read is guarded.
    fn sort_out(&mut self, pid: i32) -> io::Result<()> {
        if self.swapped.is_empty() {
            return Ok(());
        }
        let memory = Memory::open(pid)?;
        let swapped = std::mem::take(&mut self.swapped);
        for at in swapped.iter().flat_map(|(start, end)| (*start..*end).step_by(PAGE as usize)) {
            match memory.read(at, &mut [0]) {
                Ok(()) => self.data.push((at, at + PAGE)),
                // The process is gone.
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(e),
                Err(_) => push(&mut self.guards, at, at + PAGE),
            }
        }
        self.data.sort_unstable();
        for (start, end) in std::mem::take(&mut self.data) {
            push(&mut self.data, start, end);
        }
        Ok(())
    }
}

/// Whether an entry is one of anonymous data.
fn is_data(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE == 0
}

/// Where the page of an entry of anonymous memory lies, as far as that is told.
fn frame(entry: u64) -> Option<u64> {
    (entry & PRESENT != 0 && entry & FILE == 0 && entry & FRAME != 0).then_some(entry & FRAME)
}

/// Appends a range. The kernel may report ranges again: where its own buffer (512 ranges) was full on the way,
/// `walk_end` tells where that was, not how far the scan came.
pub(crate) fn push(out: &mut Vec<(u64, u64)>, start: u64, end: u64) {
    match out.last_mut() {
        Some(last) if start <= last.1 => last.1 = last.1.max(end),
        _ => out.push((start, end)),
    }
}

#[cfg(test)]
mod tests;
