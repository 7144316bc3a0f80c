//! How the pages of a copy come into the store: by the copy itself, or read from outside.

use super::{Child, Progress, PAGE};
use crate::memory::control::{self, ControlMemory, Work};
use crate::memory::copy::{end, may_write};
use crate::memory::later;
use crate::memory::looks::{self, Looks};
use crate::memory::mappings;
use crate::memory::reader;
use crate::memory::tracking::{self, Clean};
use crate::CaptureError;
use belay_abi::inject::{Range, RANGE_KEEP_ZEROS};
use belay_access::pages::Spared;
use belay_image::extents::{self, Extent};
use belay_image::model::LeftOut;
use belay_kernel::pidfd;
use belay_kernel::proc::{self, Map};
use belay_kernel::vm::Memory;
use belay_storage::session::Session;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Where memory is short so many write at most: headroom counts with as many.
const FRUGAL_WRITERS: u32 = 2;

impl Child {
    /// Has the copy write its pages; what was left out.
    pub(super) fn run_writers(
        &mut self,
        (child, pidfd, control): &mut (i32, OwnedFd, ControlMemory),
        session: &mut Session,
        (looks, most): (&Looks, u32),
        table: &mut Vec<Extent>,
        progress: &Progress<'_>,
    ) -> Result<(Option<LeftOut>, Spared), CaptureError> {
        let pid = self.pid;
        self.store_gone(*child, session)?;
        let looks::Pages { data: found, guards } = looks.found(pid)?;
        self.guards.extend(guards);
        if let Some(armed) = &mut self.armed {
            let all = found.iter().map(|r| (r.end - r.start) / PAGE).sum();
            self.clean.look(*child, all, armed);
        }
        let found = self.without_clean(found, session, table);
        let found = self.kin.without(found, session, table);
        let (found, later) = self.for_later(found);
        if !may_write(*child) {
            self.read_for(*child, session, &found, table, progress)?;
            let left_out = self.store_later(*child, session, &later, table, progress)?;
            self.read_flags(*child)?;
            // Had it been ended meanwhile, what was read might be less than it had.
            let had_memory = proc::maps(*child).is_ok_and(|m| !m.is_empty());
            if !had_memory || pidfd::gone_within(pidfd.as_fd(), Duration::ZERO) {
                return Err(control::ended_early(pid));
            }
            end(*child, pidfd);
            return Ok(left_out);
        }
        let pages = found.iter().map(|r| (r.end - r.start) / PAGE).sum();
        // Each has buffers of its own.
        let most = if self.frugal { most.min(FRUGAL_WRITERS) } else { most };
        let writers = session.writers(pages, most);
        let ranges = cut(&found, pages, writers);
        let loans = session.lend(pages, writers)?;
        let index = session.index_share();
        let tiered = session.is_tiered();
        let mut work = control
            .start(&ranges, &loans, !tiered, index, (writers, self.frugal))
            .map_err(|e| CaptureError::system(format!("prepare the snapshot of process {pid}"), e))?;
        // Writers that wait for a place must not wait for us.
        let period = Duration::from_millis(if tiered { 1 } else { 100 });
        let tick = |work: &mut Work, session: &mut Session, progress: &Progress<'_>| {
            progress.now(control.written(work));
            let busy = control.serve(work, pid, session)?;
            Ok::<_, CaptureError>(if busy { Duration::ZERO } else { period })
        };
        while !control.wait_written(tick(&mut work, session, progress)?) && !pidfd::gone_within(pidfd.as_fd(), Duration::ZERO) {}
        let refused = control.refused(&work);
        let refused: Vec<Range> = refused.into_iter().filter_map(|i| ranges.get(i).copied()).collect();
        let read = if refused.is_empty() && later.is_empty() {
            Ok(())
        } else {
            let settled = control.take_back(&mut work, pid, session);
            settled.and_then(|()| self.read_for(*child, session, &refused, table, progress))
        };
        let read = read.and_then(|()| self.store_later(*child, session, &later, table, progress));
        let read = read.and_then(|left_out| self.read_flags(*child).map(|()| left_out));
        control.release();
        while !pidfd::gone_within(pidfd.as_fd(), tick(&mut work, session, progress)?) {}
        control.collect(&mut work, pid, session, table)?;
        read
    }

    /// Reads the `VmFlags` of the child's mappings. The kernel goes through all of its page table for that: when the
    /// child has written its pages it has given them back, and little is left but what was clean.
    fn read_flags(&mut self, child: i32) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::system(format!("read the mappings of the snapshot of process {}", self.pid), e);
        self.flags = proc::smaps(child).map_err(fail)?;
        Ok(())
    }

    /// Stores the ranges `found` of the child, which may not do it itself.
    fn read_for(
        &self,
        child: i32,
        session: &mut Session,
        found: &[Range],
        table: &mut Vec<Extent>,
        progress: &Progress<'_>,
    ) -> Result<(), CaptureError> {
        let fail = |e| CaptureError::system(format!("read the memory of the snapshot of process {}", self.pid), e);
        let memory = Memory::open(child).map_err(fail)?;
        let mut read = 0;
        for r in found {
            // When memory is short the kernel takes pages away from a process that it is about to end: none may be missing.
            reader::store_all(session, &memory, (r.start, r.end), r.flags & RANGE_KEEP_ZEROS != 0, table)?;
            read += r.end - r.start;
            progress.now(read);
        }
        Ok(())
    }

    /// Takes what is to be stored later out of `found`.
    fn for_later(&self, found: Vec<Range>) -> (Vec<Range>, Vec<Range>) {
        let Some(later) = &self.later else {
            return (found, Vec::new());
        };
        let has_guards = |m: &Map| self.guards.iter().any(|g| m.start <= g.0 && g.0 < m.end);
        let may = |r: &Range| mappings::at(&self.maps, r.start).is_some_and(|m| r.end <= m.end && !has_guards(m));
        later.split(found, may)
    }

    /// Stores what was to be stored later, as far as the program has not overwritten it; what was left out.
    fn store_later(
        &mut self,
        child: i32,
        session: &mut Session,
        ranges: &[Range],
        table: &mut Vec<Extent>,
        progress: &Progress<'_>,
    ) -> Result<(Option<LeftOut>, Spared), CaptureError> {
        let Some(later) = self.later.as_mut().filter(|_| !ranges.is_empty()) else {
            return Ok((None, Spared::default()));
        };
        let task = self.task;
        let spared = later.wait(ranges, &|| proc::stat(task).is_ok());
        let mut left_out = later.left_out();
        self.read_for(child, session, &later::rest(ranges, &spared), table, progress)?;
        if spared == Spared::default() {
            return Ok((None, spared));
        }
        let fail = |e| CaptureError::system(format!("read the memory of the snapshot of process {}", self.pid), e);
        let memory = Memory::open(child).map_err(fail)?;
        left_out.packed_bytes = later::pack(session, &memory, &spared, table)?;
        Ok((Some(left_out), spared))
    }

    /// Takes clean pages out of `found`; where they lie goes to `table`.
    fn without_clean(&self, found: Vec<Range>, session: &mut Session, table: &mut Vec<Extent>) -> Vec<Range> {
        let Clean { ranges, table: old, .. } = &self.clean;
        // An older chunk that the session does not know any more may be gone.
        if ranges.is_empty() || !old.iter().all(|e| session.knows(e.chunk)) {
            return found;
        }
        let mut out = Vec::with_capacity(found.len());
        let mut left = Vec::new();
        for r in &found {
            left.clear();
            tracking::without((r.start, r.end), ranges, &mut left);
            out.extend(left.iter().map(|(start, end)| Range {
                start: *start,
                end: *end,
                ..*r
            }));
        }
        for (start, end) in ranges {
            extents::within(old, *start, *end, table);
            session.stats.clean += (end - start) / PAGE;
        }
        out
    }

    /// Stores the mappings whose file is gone.
    fn store_gone(&mut self, child: i32, session: &mut Session) -> Result<(), CaptureError> {
        if self.gone.is_empty() {
            return Ok(());
        }
        let fail = |e| CaptureError::system(format!("read the memory of the snapshot of process {}", self.pid), e);
        let memory = Memory::open(child).map_err(fail)?;
        for range in std::mem::take(&mut self.gone) {
            reader::store(session, &memory, range, false, &mut self.early)?;
        }
        Ok(())
    }
}

/// Cuts ranges so that the writers are busy to the end.
fn cut(found: &[Range], pages: u64, writers: u32) -> Vec<Range> {
    let piece = (pages * PAGE / (u64::from(writers) * 16))
        .next_multiple_of(PAGE)
        .clamp(1 << 20, 64 << 20);
    let mut out = Vec::new();
    for r in found {
        let mut start = r.start;
        while start < r.end {
            let end = (start + piece).min(r.end);
            out.push(Range { start, end, ..*r });
            start = end;
        }
    }
    out
}
