//! How the pages of a copy come into the store: by the copy itself, or read from outside.

use super::{Child, Progress, Written, PAGE};
use crate::memory::control::{self, Work};
use crate::memory::copy::{covers, may_write, SnapshotChild};
use crate::memory::later;
use crate::memory::looks;
use crate::memory::mappings::{self, Identities};
use crate::memory::reader;
use crate::memory::tracking::{self, Clean};
use crate::CaptureError;
use belay_abi::inject::{Range, MAX_WRITERS, RANGE_KEEP_ZEROS};
use belay_access::pages::Spared;
use belay_image::extents::{self, Extent};
use belay_image::model::LeftOut;
use belay_kernel::pidfd;
use belay_kernel::proc::{self, Map};
use belay_kernel::vm::Memory;
use belay_storage::session::Session;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

type LeftOuts = (Option<LeftOut>, Spared);

/// A process of which it is known what is to be stored.
#[derive(Debug)]
pub(crate) struct Prepared {
    child: Child,
    /// Whether its copy writes for itself.
    writes: bool,
    found: Vec<Range>,
    later: Vec<Range>,
    table: Vec<Extent>,
}

/// A process whose copy writes.
#[derive(Debug)]
pub(crate) struct AtWork {
    child: Child,
    copy: SnapshotChild,
    work: Work,
    writers: u32,
    pages: u64,
    ranges: Vec<Range>,
    /// What its writers could not read.
    refused: Vec<Range>,
    settled: bool,
    later: Vec<Range>,
    table: Vec<Extent>,
    /// What the agent has read itself.
    read: Result<LeftOuts, CaptureError>,
}

/// A process all of whose memory is stored.
#[derive(Debug)]
pub(crate) struct Stored {
    child: Child,
    table: Vec<Extent>,
    left_out: LeftOuts,
}

/// What a process has become whose turn has come.
pub(crate) enum Begun {
    AtWork(Box<AtWork>),
    Stored(Box<Stored>),
}

impl Child {
    /// Finds out what is to be stored of the copy, where `found` has been found; nothing where there is no copy.
    pub(crate) fn prepare(mut self, found: Option<looks::Pages>, session: &mut Session) -> Prepared {
        let mut table = Vec::new();
        let (mut writes, mut ranges, mut later) = (true, Vec::new(), Vec::new());
        if let (Some(copy), Some(looks::Pages { data, guards })) = (self.copy(), found) {
            self.guards.extend(guards);
            if let Some(armed) = &mut self.armed {
                let all = data.iter().map(|r| (r.end - r.start) / PAGE).sum();
                self.clean.look(copy, all, armed);
            }
            let data = self.without_clean(data, session, &mut table);
            let data = self.kin.without(data, session, &mut table);
            (ranges, later) = self.for_later(data);
            writes = may_write(copy);
        }
        Prepared {
            child: self,
            writes,
            found: ranges,
            later,
            table,
        }
    }
}

impl Prepared {
    /// Pages that its writers have to store.
    pub(crate) fn pages(&self) -> u64 {
        self.found.iter().map(|r| (r.end - r.start) / PAGE).sum()
    }

    /// Nothing is written beside it: the agent reads some of it, or waits.
    pub(crate) fn is_alone(&self) -> bool {
        !self.writes || !self.child.gone.is_empty() || !self.later.is_empty()
    }

    /// Has the copy write its pages with up to `most` threads, or reads them.
    pub(crate) fn begin(self, session: &mut Session, most: u32, progress: &Progress<'_>) -> Result<Begun, CaptureError> {
        let Self {
            mut child,
            writes,
            found,
            later,
            mut table,
        } = self;
        let pid = child.pid;
        let Some(mut copy) = child.snapshot.take() else {
            let left_out = LeftOuts::default();
            return Ok(Begun::Stored(Box::new(Stored { child, table, left_out })));
        };
        child.store_gone(copy.pid, session)?;
        if !writes {
            child.read_for(copy.pid, session, &found, &mut table, progress)?;
            let left_out = child.store_later(copy.pid, session, &later, &mut table, progress)?;
            child.read_flags(copy.pid)?;
            // Had it been ended meanwhile, what was read might be less than it had.
            let had_memory = proc::maps(copy.pid).is_ok_and(|m| !m.is_empty());
            if !had_memory || copy.is_gone() {
                return Err(control::ended_early(pid));
            }
            return Ok(Begun::Stored(Box::new(Stored { child, table, left_out })));
        }
        let pages = found.iter().map(|r| (r.end - r.start) / PAGE).sum();
        let writers = session.writers(pages, most.min(MAX_WRITERS as u32));
        let ranges = cut(&found, pages, writers);
        let loans = session.lend(pages, writers)?;
        let index = (session.index_share(), session.secret());
        // A place in a local tier is given only to who wants it.
        let ahead = if session.is_tiered() { 0 } else { writers as usize };
        let work = copy
            .control
            .start(&ranges, (&loans, ahead), index, (writers, child.frugal))
            .map_err(|e| CaptureError::system(format!("prepare the snapshot of process {pid}"), e))?;
        Ok(Begun::AtWork(Box::new(AtWork {
            child,
            copy,
            work,
            writers,
            pages,
            ranges,
            refused: Vec::new(),
            settled: false,
            later,
            table,
            read: Ok(LeftOuts::default()),
        })))
    }
}

impl AtWork {
    /// The process.
    pub(crate) fn pid(&self) -> i32 {
        self.child.pid
    }

    /// Number of threads that write.
    pub(crate) fn writers(&self) -> u32 {
        self.writers
    }

    /// Bytes that they have dealt with so far.
    pub(crate) fn written(&self) -> u64 {
        self.copy.control.written(&self.work)
    }

    /// Pages that it has to store, and those of them of which the store does not know yet.
    pub(crate) fn pages(&self) -> (u64, u64) {
        (self.pages, self.pages.saturating_sub(self.work.counted()))
    }

    /// Gives the writers the room that they want.
    pub(crate) fn lend(&mut self, session: &mut Session) -> Result<(), CaptureError> {
        self.copy.control.lend(&mut self.work, self.child.pid, session)
    }

    /// Takes back room that they are done with, as far as it was lent at once; whether there was some.
    pub(crate) fn take_back_one(&mut self, session: &mut Session) -> Result<bool, CaptureError> {
        self.copy.control.take_back_one(&mut self.work, self.child.pid, session)
    }

    /// Takes back all, when the writers are done.
    pub(crate) fn take_back(&mut self, session: &mut Session) -> Result<(), CaptureError> {
        self.copy.control.take_back(&mut self.work, self.child.pid, session)
    }

    /// The agent is to read some of it when its writers are done, or to wait for the program.
    pub(crate) fn needs_agent(&self) -> bool {
        !self.refused.is_empty() || !self.later.is_empty()
    }

    /// See [`control::ControlMemory::done_word`].
    pub(crate) fn done_word(&self) -> &AtomicU32 {
        self.copy.control.done_word()
    }

    /// Whether the writers are done, or gone.
    pub(crate) fn is_done(&self) -> bool {
        self.copy.control.is_written() || self.copy.is_gone()
    }

    /// Whether the copy has ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.copy.is_gone()
    }

    /// Waits until it has, no longer than `limit`.
    pub(crate) fn wait_gone(&self, limit: Duration) {
        pidfd::gone_within(self.copy.pidfd.as_fd(), limit);
    }

    /// The writers are done: what they could not read is known. What one has failed to write is not given back, and others
    /// would wait for it.
    pub(crate) fn written_by_now(&mut self, session: &Session) -> Result<(), CaptureError> {
        self.copy.control.look_for_failures(&self.work, self.child.pid, session)?;
        let refused = self.copy.control.refused(&self.work).into_iter();
        self.refused = refused.filter_map(|i| self.ranges.get(i).copied()).collect();
        Ok(())
    }

    /// Whether [`AtWork::settle`] has been called.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Reads what the writers could not, and what was to wait, and lets the copy end. Where it [`AtWork::needs_agent`],
    /// all room has been taken back from everybody.
    pub(crate) fn settle(&mut self, session: &mut Session, progress: &Progress<'_>) {
        self.settled = true;
        self.read = self.read_rest(session, progress);
        self.copy.control.release();
    }

    fn read_rest(&mut self, session: &mut Session, progress: &Progress<'_>) -> Result<LeftOuts, CaptureError> {
        let (child, copy, table) = (&mut self.child, self.copy.pid, &mut self.table);
        child.read_for(copy, session, &self.refused, table, progress)?;
        let left_out = child.store_later(copy, session, &self.later, table, progress)?;
        child.read_flags(copy)?;
        Ok(left_out)
    }

    /// The copy has ended: takes over what it has left.
    pub(crate) fn collect(mut self, session: &mut Session) -> Result<Stored, CaptureError> {
        let (control, pid) = (&self.copy.control, self.child.pid);
        control.collect(&mut self.work, pid, session, &mut self.table)?;
        Ok(Stored {
            child: self.child,
            table: self.table,
            left_out: self.read?,
        })
    }
}

impl Stored {
    /// What becomes of it in the image; and the process, and its resident bytes.
    pub(crate) fn finish(self, session: &mut Session, identities: &mut Identities) -> Result<(i32, u64, Written), CaptureError> {
        let (pid, resident) = (self.child.pid, self.child.resident_bytes);
        let written = self.child.finish(self.table, self.left_out, session, identities)?;
        Ok((pid, resident, written))
    }
}

impl Child {
    /// Reads the `VmFlags` and the keys of the child's mappings. The kernel goes through all of its page table for that: when the
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
    ) -> Result<LeftOuts, CaptureError> {
        let Some(later) = self.later.as_mut().filter(|_| !ranges.is_empty()) else {
            return Ok((None, Spared::default()));
        };
        let task = self.task;
        let spared = later.wait(ranges, &|| proc::born(task).is_some());
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
        if ranges.is_empty() {
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
        // What is stored whole, because its file is gone, is not stored twice.
        for (start, end) in ranges.iter().filter(|r| !covers(&self.gone, r.0)) {
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
